"""docs/gpu-proof.md says what the code does: metrics, codes, thresholds, statuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec

from loadgen.studies.gpu_proof.records import DEFAULT_THRESHOLDS, Code, Finding
from servers.gpu.command import ExporterSettings
from servers.gpu.exporter import DEFINITIONS
from servers.gpu.readings import Status

TEXT = (Path(__file__).parents[3] / "docs/gpu-proof.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading of the first column."""
    lines = TEXT.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_every_metric_is_documented_and_exists() -> None:
    documented = [
        (name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows("Metric")
    ]
    assert documented == [(d.name, d.kind, d.labels) for d in DEFINITIONS]
    assert f"127.0.0.1:{ExporterSettings().port}" in TEXT


def test_every_code_is_documented_and_exists() -> None:
    assert [row[0].strip("`") for row in rows("Code")] == [str(code) for code in Code]


def test_every_threshold_is_documented_with_its_value() -> None:
    documented = {name.strip("`"): float(value) for name, value, _ in rows("Threshold")}
    assert documented == msgspec.structs.asdict(DEFAULT_THRESHOLDS)


def test_findings_and_statuses_are_named() -> None:
    for word in (*Finding, *get_args(Status)):
        assert f"`{word}`" in TEXT
