"""The result file: strict, whole or absent, and documented field by field."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import jsonschema_rs
import pytest

from loadgen.base.documents import write_atomically
from loadgen.records.store import StoredRunError
from loadgen.verdict.result import analyse, encode_result, read_result
from loadgen.verdict.result_schema import result_schema
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

DOCS = Path(__file__).parents[4] / "docs"
SCHEMA = DOCS / "result.schema.json"
PUBLISHED = sorted((DOCS / "results").glob("**/result.json"))


def test_the_schema_in_the_docs_is_that_of_the_code() -> None:
    assert SCHEMA.read_text() == result_schema(), "write it anew: make reference"


def test_every_result_keeps_to_the_schema_and_a_changed_one_does_not(tmp_path: Path) -> None:
    validator = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text()))
    document = json.loads(encode_result(analyse(write_run(tmp_path, Plan(pairs=2, others=(SimulatedArm(),))))))
    for path in PUBLISHED:
        validator.validate(json.loads(path.read_text()))
    validator.validate(document)
    document["comparisons"][0]["verdict"] = "b_faster"
    assert not validator.is_valid(document)


def test_the_fields_that_others_read_are_there(tmp_path: Path) -> None:
    document = json.loads(encode_result(analyse(write_run(tmp_path, Plan(pairs=2)))))
    assert document["schema"] == "abserve.result/3"
    assert {"environment", "arms", "parity", "checks", "comparisons", "valid"} <= set(document)
    assert document["verdict"]["sentence"]
    assert {"label", "title", "in_effect"} <= set(document["arms"][0])
    assert {"name", "state", "value", "threshold", "remedy"} <= set(document["checks"][0])
    assert {"scenario", "metric", "baseline", "arm", "ratio", "ci95", "verdict"} <= set(document["comparisons"][0])


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=2)))
    write_atomically(tmp_path / "result.json", encode_result(result))
    assert read_result(tmp_path / "result.json") == result


@pytest.mark.parametrize(("old", "new"), [("abserve.result/3", "abserve.result/1"), ('"valid"', '"invalid"')])
def test_another_schema_or_field_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(encode_result(analyse(write_run(tmp_path, Plan(pairs=2)))).decode().replace(old, new))
    with pytest.raises(StoredRunError, match=r"result\.json is not a result of this version"):
        read_result(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomically(path, typing.cast("bytes", "text is not bytes"))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
