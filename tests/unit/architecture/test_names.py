"""One idea has one name: no class name stands twice, and variables are named after what they hold."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def counting() -> ModuleType:
    """The script that counts, which is in no package."""
    spec = spec_from_file_location("count_code", ROOT / ".ci/count_code.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COUNT = counting()


@cache  # not when the tests are collected, which every worker does
def facts() -> dict[str, tuple[list[str], int, bool]]:
    """By file its classes, empty names and whether it has a `shown`. No tree is kept: collections would search it."""
    files = ((name, list(ast.walk(ast.parse(text)))) for name, text in COUNT.tree_sources())
    return {
        name: (
            COUNT.class_names(nodes),
            COUNT.empty_names(nodes),
            any(isinstance(node, ast.Name) and node.id == "shown" for node in nodes),
        )
        for name, nodes in files
    }


def test_no_class_name_stands_twice() -> None:
    places = defaultdict(list)
    for name, (class_names, *_) in facts().items():
        for class_name in class_names:
            places[class_name].append(name)
    assert {class_name: names for class_name, names in places.items() if len(names) > 1} == {}


def test_few_variables_have_a_name_that_says_nothing() -> None:
    counts = {name: number for name, (_, number, _) in facts().items() if number}
    assert sum(counts.values()) <= 100, sorted(counts.items(), key=lambda count: -count[1])[:20]


def test_what_is_counted() -> None:
    tree = ast.parse(
        "class A:\n    class B: ...\ndef f(one, found=1, *own):\n    x = [one for one in found]\n    own.one = 2"
    )
    nodes = list(ast.walk(tree))
    assert COUNT.class_names(nodes) == ["A", "B"]
    assert COUNT.empty_names(nodes) == 4


def test_sentences_call_arms_by_their_names() -> None:
    """Letters stand in tables, in the legend before a run, and in what tells options apart: rooms of sentences have no
    `shown`."""
    rooms = ("loadgen/checks/", "loadgen/findings/tokens", "loadgen/findings/ceiling", "loadgen/measure/probes/")
    assert [name for name, (*_, has_shown) in facts().items() if has_shown and name.startswith(rooms)] == []
