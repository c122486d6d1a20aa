"""The result file: strict, whole or absent, and documented field by field."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.analysis import analyse
from loadgen.analysis.result import Result, ResultError, encode_result, read_result, write_atomically
from loadgen.records.run import Record
from tests.golden.synthetic_run import Plan, write_run

DOCUMENT = Path(__file__).parents[4] / "docs" / "result-format.md"


def structs(kind: object, found: dict[str, type[Record]]) -> dict[str, type[Record]]:
    """Every record that a type leads to."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind.__name__ not in found:
            found[kind.__name__] = typing.cast("type[Record]", kind)
            for hint in typing.get_type_hints(kind).values():
                structs(hint, found)
    else:
        for argument in typing.get_args(kind):
            structs(argument, found)
    return found


def test_the_document_lists_every_field_of_every_record_and_no_other() -> None:
    documented: dict[str, set[str]] = {}
    for section in re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0].split()[0].strip("`")
        documented[heading] = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
    actual = {name: set(kind.__struct_fields__) for name, kind in structs(Result, {}).items()}
    assert {name: fields for name, fields in documented.items() if fields} == actual


def test_the_fields_that_others_read_are_there(tmp_path: Path) -> None:
    """The contract of the schema: environment, arms, parity, checks and comparisons."""
    document = json.loads(encode_result(analyse(write_run(tmp_path, Plan(pairs=2)))))
    assert document["schema"] == "abserve.result/1"
    assert {"environment", "arms", "parity", "checks", "comparisons", "valid"} <= set(document)
    assert {"name", "ok", "value", "threshold", "remedy"} <= set(document["checks"][0])
    assert {"scenario", "metric", "a", "b", "ratio_b_over_a", "ci95", "verdict", "pairs",
            "minimal_detectable_effect"} <= set(document["comparisons"][0])  # fmt: skip


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=2)))
    write_atomically(tmp_path / "result.json", encode_result(result))
    assert read_result(tmp_path / "result.json") == result


@pytest.mark.parametrize(("old", "new"), [("abserve.result/1", "abserve.result/2"), ('"valid"', '"invalid"')])
def test_another_schema_or_field_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(encode_result(analyse(write_run(tmp_path, Plan(pairs=2)))).decode().replace(old, new))
    with pytest.raises(ResultError, match=r"result\.json is not a result of this version"):
        read_result(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomically(path, typing.cast("bytes", "text is not bytes"))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
