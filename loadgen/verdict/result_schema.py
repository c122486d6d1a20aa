"""The JSON Schema of `result.json`, made from the types: `python -m loadgen.verdict.result_schema`.

The meaning of a field is written once, under the field.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap

import msgspec

from loadgen.findings.registry import finding_types
from loadgen.records.run import Record
from loadgen.verdict.result import Result


def result_schema() -> str:
    """Build the JSON Schema 2020-12; descriptions are those of the code."""
    studies = finding_types()
    (whole, *findings), definitions = msgspec.json.schema_components(
        [Result, *studies.values()], schema_hook=lambda _: {"description": "Any value."}, ref_template="#/$defs/{name}"
    )
    # Records of other files may have the same name.
    types = {(record.__name__, frozenset(record.__struct_encode_fields__)): record for record in _records(Record)}
    for name, definition in definitions.items():
        if "description" in definition:  # Python 3.13 dedents docstrings, older ones do not
            definition["description"] = inspect.cleandoc(definition["description"])
        if (kind := types.get((name, frozenset(definition.get("properties", ()))))) is not None:
            meanings = {field: text for base in reversed(kind.__mro__) for field, text in _meanings(base).items()}
            for field in meanings.keys() & definition["properties"]:
                definition["properties"][field]["description"] = meanings[field]
    definitions["Result"]["properties"]["studies"] |= {
        "properties": dict(zip(studies, findings, strict=True)),
        "additionalProperties": False,
    }
    draft = "https://json-schema.org/draft/2020-12/schema"
    document = {"$schema": draft, "title": "abserve result", **whole, "$defs": definitions}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _records(base: type[Record]) -> list[type[Record]]:
    return [record for below in base.__subclasses__() for record in (below, *_records(below))]


def _meanings(record: type) -> dict[str, str]:
    """The text under each field of a class; those of its bases stand there. Empty for a class of a library."""
    if not record.__module__.startswith("loadgen."):
        return {}
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


if __name__ == "__main__":
    sys.stdout.write(result_schema())
