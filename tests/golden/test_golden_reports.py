"""What a person reads, letter by letter; `pytest tests/golden --snapshot-update` renews it, after a look at it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

PLANS = {
    "decided": Plan(pairs=4),
    "identical": Plan(a=SimulatedArm(), b=SimulatedArm(), seed=5),
    "killed": Plan(pairs=4, state="running", cut_after=50),
    "errors": Plan(pairs=4, failing_block=3),
    "no-parity": Plan(pairs=4, parity_cosine=0.93),
    "four-arms": Plan(pairs=4, others=(SimulatedArm(4.0, 5.4, 1.0, ready_s=4.2), SimulatedArm())),
}


def shown(directory: Path, width: int) -> list[str]:
    """The lines of a terminal of this width."""
    stream = io.StringIO()
    document = result_document(analyse(directory))
    print_document(document, Console(file=stream, width=width, color_system=None))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("name", PLANS)
def test_terminal(tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(shown(write_run(tmp_path, PLANS[name]), 100)) == snapshot


@pytest.mark.parametrize("name", PLANS)
def test_markdown(tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    assert render_markdown(result_document(analyse(write_run(tmp_path, PLANS[name])))) == snapshot


@pytest.mark.parametrize("name", ["decided", "four-arms"])
def test_the_terminal_fits_eighty_columns(tmp_path: Path, name: str) -> None:
    directory = write_run(tmp_path, PLANS[name])
    lines, wide = shown(directory, 80), shown(directory, 300)
    assert max(len(line) for line in lines) <= 80
    assert not any("…" in line for line in lines)
    words = {word for line in wide for word in line.split() if word.isprintable() and word.strip("╭╰─╯╮")}
    assert words <= {word for line in lines for word in line.split()}, "no word is broken"


@pytest.mark.parametrize("name", ["decided", "four-arms"])
def test_a_tiny_terminal_loses_nothing(tmp_path: Path, name: str) -> None:
    lines = shown(write_run(tmp_path, PLANS[name]), 40)
    assert max(len(line) for line in lines) <= 40
    assert not any("…" in line for line in lines)
