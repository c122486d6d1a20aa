"""Each addition needs the files that docs/architecture.md names, and no other: a toy of each is planned, measured or
sent, analysed and in the report once its lines stand in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.architecture.additions import ADDITIONS, ROOT

ROW = re.compile(r"^\| (.+?) \| \d+ \| (\d+) \| (.+) \|$", re.MULTILINE)
EXPECTED = {
    "a metric that a report shows": [True],
    "a check": [["failed"], False, True],
    "a probe": [True, True],
    "a section of a report": [True],
    "a transport": [["fp32 over pigeon"], 7.0, True],
    "a transport of prompts": [["single"], True, "/m/letters", True],
    "a kind of arm": [True, "--b toy serves HTTP only; use --transport http", "m"],
    "a scenario": [["burst"], ["burst"], "in a burst"],
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [sys.executable, "-m", "tests.unit.architecture.additions", str(tmp_path_factory.mktemp("toys"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ADDITIONS)
def test_a_toy_works_in_the_files_of_its_kind(toys: Any, kind: str) -> None:
    assert toys[kind] == EXPECTED[kind]


def test_the_docs_say_which_files_an_addition_needs() -> None:
    text = (ROOT / "docs/architecture.md").read_text().partition("## What an addition costs\n")[2].partition("\n## ")[0]
    rows = {kind: (int(count), re.findall(r"`(.+?)`", files)) for kind, count, files in ROW.findall(text)}
    assert rows == {kind: (len(files), list(files)) for kind, files in ADDITIONS.items()}
    new = [path for _, files in rows.values() for path in files if not Path(ROOT / path).exists()]
    assert new == ["loadgen/measure/probes/toy.py"]
