"""docs/gpu-proof.md and docs/running.md agree with the code: metrics, codes, thresholds, statuses, alerts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec

from loadgen.findings.gpu.records import DEFAULT_THRESHOLDS, GpuFinding, InconclusiveCode
from servers.commands.gpu import ExporterSettings
from servers.gpu.exporter import DEFINITIONS, HOST_DEFINITIONS
from servers.gpu.readings import Status

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/gpu-proof.md").read_text()
RUNNING = (ROOT / "docs/running.md").read_text()


def rows(heading: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the table whose first column has that heading, cell by cell."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_every_metric_is_documented_and_exists() -> None:
    for found, definitions in (
        (rows("Metric"), DEFINITIONS),
        (rows("Host metric of `gpu-exporter`", RUNNING), HOST_DEFINITIONS),
    ):
        documented = [(name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in found]
        assert documented == [(d.name, d.kind, d.labels) for d in definitions]
    assert f"127.0.0.1:{ExporterSettings().port}" in TEXT


def test_every_code_is_documented_and_exists() -> None:
    assert [row[0].strip("`") for row in rows("Code")] == [str(code) for code in InconclusiveCode]


def test_every_threshold_is_documented_with_its_value() -> None:
    documented = {name.strip("`"): float(value) for name, value, _ in rows("Threshold")}
    assert documented == msgspec.structs.asdict(DEFAULT_THRESHOLDS)


def test_findings_and_statuses_are_named() -> None:
    for word in (*GpuFinding, *get_args(Status)):
        assert f"`{word}`" in TEXT


def test_every_alert_is_documented_and_exists() -> None:
    alerts = re.findall(r"^ +- alert: (\w+)$", (ROOT / "docker/prometheus/rules.yml").read_text(), re.MULTILINE)
    assert [row[0].strip("`") for row in rows("Alert", RUNNING)] == alerts
