"""What the documents show of the code and of published results is what these are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from loadgen.documents import read_stored

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs/results/2026-11-23-h200/three-arms/result.json"
SCENARIOS = {
    "1 client": "single",
    "batch 8": "batched(8)",
    "batch 32": "batched(32)",
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


def test_no_field_of_a_result_counts_images_where_any_items_are_meant() -> None:
    """A search, a ramp, the parity check and an engine's ceiling are of texts, too."""
    text = (ROOT / "docs/result.schema.json").read_text()
    assert not re.findall(r'"description": "[^"]*[Ii]mages per second[^"]*"', text)


def rounded_like(shown: str, value: float) -> str:
    """``value`` with the decimals of ``shown``, and for whole numbers with its significant digits."""
    digits = shown.replace(",", "")
    if "." in digits:
        return f"{value:.{len(digits.partition('.')[2])}f}"
    zeros = len(digits) - len(digits.rstrip("0"))
    return f"{round(value, -zeros):,.0f}"


def test_the_table_of_the_readme_has_the_published_figures() -> None:
    result = json.loads(read_stored(PUBLISHED))
    comparisons = {
        (one["scenario"], one["baseline"] + one["arm"]): one
        for one in result["comparisons"]
        if one["metric"] == "throughput"
    }
    cell = r"(?:\*\*([ABC]) ([\d.]+)×\*\*|(not separated)) \(([\d.]+)–([\d.]+)\)"
    rows = re.findall(
        r"^\| (\w+ \d+|\d+ \w+) \|" + r" ([\d,]+) \|" * 3 + f" {cell} \\|" * 3 + "$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == list(SCENARIOS)
    for load, *shown in rows:
        scenario = SCENARIOS[load]
        first, second = (comparisons[scenario, pair] for pair in ("ab", "bc"))
        values = [first["baseline_value"], first["arm_value"], second["arm_value"]]
        assert shown[:3] == [rounded_like(text, value) for text, value in zip(shown[:3], values, strict=True)]
        for pair, cells in zip(("ab", "ac", "bc"), (shown[3:8], shown[8:13], shown[13:18]), strict=True):
            winner, factor, open_question, *interval = cells
            one = comparisons[scenario, pair]
            assert bool(open_question) == (one["verdict"] == "inconclusive"), (load, pair)
            ratio, (low, high) = one["ratio"], one["ci95"]
            if winner.lower() == pair[0]:
                ratio, low, high = 1 / ratio, 1 / high, 1 / low
            assert interval == [rounded_like(interval[0], low), rounded_like(interval[1], high)], (load, pair)
            if winner:
                assert one["verdict"] == f"{'baseline' if winner.lower() == pair[0] else 'arm'}_better", (load, pair)
                assert factor == rounded_like(factor, ratio), (load, pair)
