"""Count what there is to read in `servers/` and `loadgen/`, in the working tree or in commits.

python .ci/count_code.py [COMMIT …]
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOTS = ("servers", "loadgen", "abserve")
EMPTY_NAMES = ("one", "found", "own")
"""Names that say nothing of what they stand for."""


def tree_sources() -> Iterator[tuple[str, str]]:
    for root in ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def commit_sources(commit: str) -> Iterator[tuple[str, str]]:
    listing = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit, *ROOTS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listing.stdout.splitlines():
        if name.endswith(".py"):
            shown = subprocess.run(
                ["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True
            )
            yield name, shown.stdout


def class_names(nodes: Sequence[ast.AST]) -> list[str]:
    return [node.name for node in nodes if isinstance(node, ast.ClassDef)]


def empty_names(nodes: Sequence[ast.AST]) -> int:
    """How often a variable or an argument is given one of `EMPTY_NAMES`."""
    bound = (
        node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
        for node in nodes
        if isinstance(node, ast.Name | ast.arg)
    )
    return sum(name in EMPTY_NAMES for name in bound)


def count(sources: Iterator[tuple[str, str]]) -> dict[str, int]:
    figures: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    packages = set()
    for name, text in sources:
        nodes = list(ast.walk(ast.parse(text)))
        figures["files"] += 1
        figures["lines"] += len(text.splitlines())
        figures["empty names"] += empty_names(nodes)
        classes.update(class_names(nodes))
        parts = name.split("/")
        if parts[0] == "loadgen" and len(parts) > 2:
            packages.add(parts[1])
    return {
        "files": figures["files"],
        "classes": classes.total(),
        "class names used twice or more": sum(number > 1 for number in classes.values()),
        "variables called one, found or own": figures["empty names"],
        "lines of Python": figures["lines"],
        "packages in loadgen/": len(packages),
    }


def main() -> None:
    columns = {commit: count(commit_sources(commit)) for commit in sys.argv[1:]}
    columns["working tree"] = count(tree_sources())
    print("| |", " | ".join(columns), "|")
    print("|---|", "|".join("---:" for _ in columns), "|", sep="")
    for row in columns["working tree"]:
        print(f"| {row} |", " | ".join(f"{column[row]:,}" for column in columns.values()), "|")


if __name__ == "__main__":
    main()
