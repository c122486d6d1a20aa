"""What the documents show of the code and of published results is what these are."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from loadgen.base.documents import read_stored
from servers.models.descriptions import Known, catalogue, versions
from servers.models.registry import describe, known_references

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = {
    "1 client": "single",
    "batch 8": "batched(8)",
    "batch 32": "batched(32)",
    "16 clients": "concurrent(16)",
    "64 clients": "concurrent(64)",
}


@pytest.mark.parametrize(
    ("program", "document"),
    [
        ("command_reference", "docs/commands.md"),
        ("python_options", "abserve/options.py"),
        pytest.param("model_catalogue", "servers/models/catalogue.json", marks=pytest.mark.slow),
    ],
)
def test_the_references_are_those_of_the_code(
    program: str, document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # which a program sets
    runpy.run_path(str(ROOT / f".ci/{program}.py"), run_name="__main__")
    assert (ROOT / document).read_text() == capsys.readouterr().out, "make reference"


def test_the_catalogue_is_what_the_libraries_say() -> None:
    """Here of a model of each, among the slow tests above of all."""
    kept = catalogue()
    assert (list(kept.models), kept.versions) == (list(known_references()), versions())
    for reference in {name.partition(":")[0]: name for name in kept.models}.values():
        assert kept.models[reference] == Known.of(describe(reference), measured=True)


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


NAMED = re.compile(r"<!-- The figures of (docs/results/\S+); a test compares them. -->\n((?:\|.*\n)+)")
PAGES = ("README.md", "docs/results/README.md")
TABLES = [(page, *found) for page in PAGES for found in NAMED.findall((ROOT / page).read_text())]


@pytest.mark.parametrize(("page", "run", "table"), TABLES, ids=[run for _, run, _ in TABLES])
def test_a_table_of_figures_has_those_of_the_run_that_it_names(page: str, run: str, table: str) -> None:
    """Another run takes its place by another name in the comment above the table, and other figures below."""
    comparisons = {
        (comparison["scenario"], comparison["arm"]): comparison
        for comparison in json.loads(read_stored(ROOT / run / "result.json"))["comparisons"]
        if comparison["metric"] == "throughput" and comparison["baseline"] == "a"
    }
    _, _, *rows = (line.strip("| \n").split(" | ") for line in table.splitlines())
    assert page != "README.md" or sum(len(row) - 2 for row in rows) == 2 * len(comparisons)
    for load, baseline, *cells in rows:
        arms = sorted(arm for scenario, arm in comparisons if scenario == SCENARIOS[load])
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
            winner = {"baseline_better": "A", "arm_better": arm[0].upper()}.get(comparison["verdict"])
            factor = re.sub(r"[^\d.]", "", what)
            assert what == words.get(comparison["verdict"], f"**{winner} {rounded_like(factor or '0', ratio)}×**"), load


def test_the_tables_of_figures_are_found() -> None:
    assert [page for page, _, _ in TABLES] == ["README.md", "docs/results/README.md", "docs/results/README.md"]
