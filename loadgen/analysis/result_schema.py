"""The JSON Schema of `result.json`, made from the types: `python -m loadgen.analysis.result_schema`.

What a field means stands in one place, under the field.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap

import msgspec

from loadgen.analysis.result import Result
from loadgen.records.run import Record


def result_schema() -> str:
    """JSON Schema 2020-12; descriptions are those of the code."""
    schema = msgspec.json.schema(Result, schema_hook=lambda _: {"description": "Any value."})
    types = {one.__name__: one for one in _records(Record)}
    for name, definition in schema["$defs"].items():
        if name in types:
            for field, meaning in _meanings(types[name]).items():
                definition["properties"][field]["description"] = meaning
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "abserve result", **schema}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _records(base: type[Record]) -> list[type[Record]]:
    return [one for below in base.__subclasses__() for one in (below, *_records(below))]


def _meanings(record: type[Record]) -> dict[str, str]:
    """The text under each field of a record's class."""
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
