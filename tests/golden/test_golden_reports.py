"""What a person reads, letter by letter; `pytest tests/golden --snapshot-update` renews it, after a look at it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from loadgen.analysis.analysis import analyse
from loadgen.report.markdown import render_markdown
from loadgen.report.terminal import print_result
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

PLANS = {
    "decided": Plan(pairs=4),
    "identical": Plan(a=SimulatedArm(), b=SimulatedArm(), seed=5),
    "killed": Plan(pairs=4, state="running", cut_after=50),
    "errors": Plan(pairs=4, failing_block=3),
    "no-parity": Plan(pairs=4, parity_cosine=0.93),
}


@pytest.mark.parametrize("name", PLANS)
def test_terminal(tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    stream = io.StringIO()
    print_result(analyse(write_run(tmp_path, PLANS[name])), Console(file=stream, width=100, color_system=None))
    assert "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) == snapshot


@pytest.mark.parametrize("name", PLANS)
def test_markdown(tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    assert render_markdown(analyse(write_run(tmp_path, PLANS[name]))) == snapshot


def test_the_terminal_fits_eighty_columns(tmp_path: Path) -> None:
    stream = io.StringIO()
    print_result(analyse(write_run(tmp_path, PLANS["decided"])), Console(file=stream, width=80, color_system=None))
    lines = stream.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert not any("…" in line for line in lines)
