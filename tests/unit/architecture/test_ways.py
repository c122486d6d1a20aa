"""The two drawings of docs/architecture.md, a latency's way and a request's way, are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.unit.architecture.test_import_graph import MODULES, graph

ROOT = Path(__file__).resolve().parents[3]
ARROW = re.compile(r'^ +(\w+)(?:\["(.+?)"\])? (-->|-\.->)(?:\|(.+?)\|)? (\w+)(?:\["(.+?)"\])?$', re.MULTILINE)


def arrows(heading: str) -> list[tuple[str, str, str]]:
    """From, by and to of every arrow of the drawing below a heading; by is empty without a word at the arrow."""
    text = (ROOT / "docs/architecture.md").read_text().partition(f"## {heading}\n")[2]
    drawing = text.partition("```mermaid\n")[2].partition("```")[0]
    lines = drawing.strip().splitlines()[1:]
    matches = [match for line in lines if (match := ARROW.match(f"    {line.strip()}"))]
    assert len(matches) == len(lines) > 0
    names = {node: name for match in matches for node, name in (match.group(1, 2), match.group(5, 6)) if name}
    return [(names[match[1]], match[4] or "", names[match[5]]) for match in matches]


def sees(module: str, other: str) -> bool:
    return module == other or other in graph()[module]


def test_a_latency_has_six_representations_in_six_packages_at_most() -> None:
    way = arrows("A latency's way")
    nodes = [way[0][0], *(end for _, _, end in way)]
    assert [start for start, _, _ in way] == nodes[:-1], "it is one way"
    for node in nodes:
        module, _, name = node.partition(":")
        assert name in {part.name for part in ast.parse(MODULES[module].read_text()).body if hasattr(part, "name")}, (
            node
        )
    for start, by, end in way:
        for side in (start, end):
            assert sees(by, side.partition(":")[0]), (by, side)
    modules = {part.partition(":")[0] for arrow in way for part in arrow}
    assert len(nodes) <= 6
    assert len({".".join(module.split(".")[:2]) for module in modules}) <= 6


def test_a_request_passes_ten_modules_at_most() -> None:
    way = arrows("A request's way on the GPU")
    for start, by, end in way:
        if by:
            assert sees(start, by), (start, by)
            assert sees(end, by), (end, by)
        else:
            assert sees(start, end) or sees(end, start), (start, end)
    assert len({module for start, _, end in way for module in (start, end)}) <= 10
