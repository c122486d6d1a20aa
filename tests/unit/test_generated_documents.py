"""What the documents show of the code and of published results is what these are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.base.documents import read_stored

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


@pytest.mark.parametrize(
    ("program", "document"),
    [
        ("command_reference", "docs/commands.md"),
        ("python_options", "abserve/options.py"),
        ("model_catalogue", "servers/models/catalogue.json"),
    ],
)
def test_the_references_are_those_of_the_code(program: str, document: str) -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / f".ci/{program}.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (ROOT / document).read_text() == made, "make reference"


def test_no_field_of_a_result_counts_images_where_any_items_are_meant() -> None:
    """A search, the parity check and an engine's ceiling are of texts, too."""
    text = (ROOT / "docs/result.schema.json").read_text()
    assert not re.findall(r'"description": "[^"]*[Ii]mages per second[^"]*"', text)


def rounded_like(shown: str, value: float) -> str:
    """``value`` with the decimals of ``shown``, and for whole numbers with its significant digits."""
    digits = shown.replace(",", "")
    if "." in digits:
        return f"{value:.{len(digits.partition('.')[2])}f}"
    zeros = len(digits) - len(digits.rstrip("0"))
    return f"{round(value, -zeros):,.0f}"


def test_the_table_of_three_servers_has_the_published_figures() -> None:
    result = json.loads(read_stored(PUBLISHED))
    comparisons = {
        (one["scenario"], one["baseline"] + one["arm"]): one
        for one in result["comparisons"]
        if one["metric"] == "throughput"
    }
    cell = r"(?:\*\*([ABC]) ([\d.]+)×\*\*|(not separated)) \(([\d.]+)–([\d.]+)\)"
    rows = re.findall(
        r"^\| (\w+ \d+|\d+ \w+) \|" + r" ([\d,]+) \|" * 3 + f" {cell} \\|" * 3 + "$",
        (ROOT / "docs/results/README.md").read_text(),
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


def test_the_table_of_the_readme_has_the_figures_of_the_run_that_it_names() -> None:
    """Another run takes its place by another name in the comment above the table, and other figures below."""
    named = r"<!-- The figures of (docs/results/\S+); a test compares them. -->\n((?:\|.*\n)+)"
    ((run, table),) = re.findall(named, (ROOT / "README.md").read_text())
    comparisons = {
        (comparison["scenario"], comparison["arm"]): comparison
        for comparison in json.loads(read_stored(ROOT / run / "result.json"))["comparisons"]
        if comparison["metric"] == "throughput" and comparison["baseline"] == "a"
    }
    _, _, *rows = (line.strip("| \n").split(" | ") for line in table.splitlines())
    arms = sorted({arm for _, arm in comparisons})
    assert len(rows) * len(arms) == len(comparisons)
    for load, baseline, *cells in rows:
        for arm, value, claim in zip(arms, cells[: len(arms)], cells[len(arms) :], strict=True):
            comparison = comparisons[SCENARIOS[load], arm]
            assert baseline == rounded_like(baseline, comparison["baseline_value"]), load
            assert value == rounded_like(value, comparison["arm_value"]), (load, arm)
            ((what, low, high),) = re.findall(r"^(.*) \(([\d.]+)–([\d.]+)\)$", claim)
            ratio, interval = comparison["ratio"], comparison["ci95"]
            if ratio < 1:
                ratio, interval = 1 / ratio, [1 / interval[1], 1 / interval[0]]
            assert [low, high] == [rounded_like(low, interval[0]), rounded_like(high, interval[1])], (load, arm)
            words = {"no_difference": "no meaningful difference", "inconclusive": "inconclusive"}
            winner = {"baseline_better": "A", "arm_better": arm.upper()}.get(comparison["verdict"])
            factor = re.sub(r"[^\d.]", "", what)
            assert what == words.get(comparison["verdict"], f"**{winner} {rounded_like(factor or '0', ratio)}×**"), load
