"""What the documents show of the code and of published results is what these are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs/results/2026-11-22-h200/http-uint8/result.json"
SCENARIOS = {
    "1 client": "single",
    "batch 8": "batched(8)",
    "batch 64": "batched(64)",
    "16 clients": "concurrent(16)",
    "64 clients": "concurrent(64)",
}


def test_the_command_reference_is_that_of_the_code() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / ".ci/command_reference.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (ROOT / "docs/commands.md").read_text() == made, "make reference"


def test_the_table_of_the_readme_has_the_published_figures() -> None:
    comparisons = {
        one["scenario"]: one
        for one in json.loads(PUBLISHED.read_text())["comparisons"]
        if one["metric"] == "throughput"
    }
    rows = re.findall(
        r"^\| (.+?) \| .+? \| .+? \| \*\*A ([\d.]+)×\*\* \| ([\d.]+)–([\d.]+) \|$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == list(SCENARIOS)
    for load, *shown in rows:
        one = comparisons[SCENARIOS[load]]
        low, high = one["ci95"]
        assert shown == [f"{1 / one['ratio']:.2f}", f"{1 / high:.2f}", f"{1 / low:.2f}"]
