"""What a person reads, letter by letter; `pytest tests/golden --snapshot-update` renews it, after a look at it."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from loadgen.report.contents import result_document
from loadgen.report.document import Document
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


@pytest.fixture(scope="module")
def document_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Document]:
    """The document of a plan's run, which is written and analysed once."""

    @cache
    def document_of(name: str) -> Document:
        return result_document(analyse(write_run(tmp_path_factory.mktemp(name), PLANS[name])))

    return document_of


def shown(document: Document, width: int) -> list[str]:
    """The lines of a terminal of this width."""
    stream = io.StringIO()
    print_document(document, Console(file=stream, width=width, color_system=None))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("name", PLANS)
def test_terminal(document_of: Callable[[str], Document], name: str, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(shown(document_of(name), 100)) == snapshot


@pytest.mark.parametrize("name", PLANS)
def test_markdown(document_of: Callable[[str], Document], name: str, snapshot: SnapshotAssertion) -> None:
    assert render_markdown(document_of(name)) == snapshot


@pytest.mark.parametrize("name", ["decided", "four-arms"])
def test_the_terminal_fits_eighty_columns(document_of: Callable[[str], Document], name: str) -> None:
    lines, wide = shown(document_of(name), 80), shown(document_of(name), 300)
    assert max(len(line) for line in lines) <= 80
    assert not any("…" in line for line in lines)
    words = {word for line in wide for word in line.split() if word.isprintable() and word.strip("╭╰─╯╮")}
    assert words <= {word for line in lines for word in line.split()}, "no word is broken"


@pytest.mark.parametrize("name", ["decided", "four-arms"])
def test_a_tiny_terminal_loses_nothing(document_of: Callable[[str], Document], name: str) -> None:
    lines = shown(document_of(name), 40)
    assert max(len(line) for line in lines) <= 40
    assert not any("…" in line for line in lines)
