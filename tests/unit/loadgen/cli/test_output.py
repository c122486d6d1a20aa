"""`--json FILE`: a file, standard output, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from loadgen.cli.output import write_json


def test_a_file_or_standard_output_or_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    write_json({"answer": 42}, str(target))
    assert json.loads(target.read_bytes()) == {"answer": 42}
    write_json({"answer": 42}, None)
    assert capfd.readouterr().out == ""
    write_json({"answer": 42}, "-")
    assert json.loads(capfd.readouterr().out) == {"answer": 42}


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        write_json({}, str(tmp_path / "nowhere" / "out.json"))
    assert caught.value.exit_code == 2
    assert "nowhere/out.json cannot be written: No such file or directory" in capfd.readouterr().err
