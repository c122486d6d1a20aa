"""Data flows one way: the import graph has no circle and no forbidden arrow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# The rooms of `servers`, each a folder with those in it that are no room, and what it may import besides itself: rooms
# before it. The commands import every room.
LIBRARY = {"protocol", "options", "models", "gpu", "engines", "language"}
ROOMS: dict[str, set[str]] = {
    "protocol": set(),
    "options": set(),
    "gpu": set(),
    "models": {"protocol", "options"},
    "engines": {"protocol", "options", "models", "gpu"},
    "language": {"protocol", "options", "models", "gpu", "engines"},
    "export": {"protocol", "options", "models", "gpu", "engines"},
    "measuring": {*LIBRARY, "export"},
    "plain": {"protocol", "options", "models", "gpu", "language"},
    "vllm": {"options", "engines", "language"},
    "triton": {"protocol", "options", "models", "engines", "language"},
    "native/shared": {"protocol", "options", "models", "engines", "language"},
    "native/front": {*LIBRARY, "native/shared"},
    "native/http": {"protocol", "gpu", "language", "native/shared", "native/front"},
    "native/grpc": {"protocol", "options", "language", "native/shared", "native/front"},
    "native/engine": {*LIBRARY, "native/shared"},
    "native": {*LIBRARY, *(f"native/{room}" for room in ("shared", "front", "http", "grpc", "engine"))},
}
ROOMS["commands"] = set(ROOMS)

# The rooms of `loadgen`, each a folder that may import those before it. The modules beside them, `entry` and the
# locustfile `scenarios`, start programs: they may import every room, and nothing imports them.
LOADGEN = (
    "base", "stats", "records", "experiment", "client", "launch", "metrics", "findings", "checks", "verdict",
    "measure", "report", "conformance", "locust", "engines", "ranking", "recorder", "tune", "cli",
)  # fmt: skip
MEASURING = ("client", "launch", "measure", "engines.measure", "engines.worker_process")
"""Rooms and modules that drive servers."""

# What only computes, from records and nothing else; and what it can do without, whatever it imports on the way.
PURE = (
    "stats", "records.run", "records.tuning", "experiment.schedule", "experiment.tuning", "metrics", "findings",
    "checks", "verdict", "engines.analyse", "ranking.analyse", "tune.space", "tune.search", "tune.outcome",
)  # fmt: skip
IMPURE = {
    "locust",
    "gevent",
    "tritonclient",
    "subprocess",
    "socket",
    "time",
    "threading",
    *(f"loadgen.{name}" for name in MEASURING),
}


def modules() -> dict[str, Path]:
    found = {}
    for package in ("servers", "loadgen", "abserve"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


MODULES = modules()
PUBLIC = {name for name in MODULES if name.partition(".")[0] == "abserve"}


def imports_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, also inside functions and under TYPE_CHECKING."""
    return frozenset(imports_in(path))


@cache  # not when the tests are collected, which every worker does
def graph() -> dict[str, set[str]]:
    """By module of ours: those that it imports."""
    return {name: {to for to in imports(path) if to in MODULES and to != name} for name, path in MODULES.items()}


def cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """One circle of the graph, or None. A package's `__init__` counts only where it is named itself."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        for target in sorted(edges[name]):
            found = visit(target, [*trail, name])
            if found:
                return found
        done.add(name)
        return None

    for name in sorted(edges):
        found = visit(name, [])
        if found:
            return found
    return None


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 20
    assert sum(map(len, graph().values())) > 20


def test_no_circle() -> None:
    assert cycle(graph()) is None


def test_the_circle_finder_finds_circles() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_the_two_sides_meet_only_on_the_wire() -> None:
    crossing = [(a, b) for a, targets in graph().items() for b in targets if a.split(".")[0] != b.split(".")[0]]
    assert [pair for pair in crossing if pair[0].split(".")[0] != "abserve"] == []


def test_the_public_package_is_imported_at_once_and_by_nothing_of_ours() -> None:
    assert [name for name, targets in graph().items() if targets & PUBLIC and name not in PUBLIC] == []
    program = "import sys, abserve; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = ("loadgen", "servers", "numpy", "pandas", "torch", "msgspec", "pydantic", "asyncio", "IPython")
    assert [name for name in done.stdout.split() if name.partition(".")[0] in heavy] == []


def server_room(module: str) -> str | None:
    """The room of a module of `servers`, by the longest name that fits; None for the package itself."""
    parts = module.split(".")[1:]
    names = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in ROOMS), None)


def server_arrows() -> dict[str, set[str]]:
    """By room of `servers`: the other rooms that it imports."""
    found: dict[str, set[str]] = {}
    for name, targets in graph().items():
        if name.startswith("servers."):
            arrows = found.setdefault(str(server_room(name)), set())
            arrows |= {str(server_room(target)) for target in targets if target != "servers"} - {str(server_room(name))}
    return found


def test_rooms_of_the_servers_import_only_what_they_may() -> None:
    for place, (room, allowed) in enumerate(ROOMS.items()):
        assert allowed <= set(list(ROOMS)[:place]), f"{room} may import a room that is not before it"
    assert {room: ends - ROOMS[room] for room, ends in server_arrows().items() if ends - ROOMS[room]} == {}


@pytest.mark.parametrize("room", ["front", "http", "grpc"])
def test_front_ends_never_import_an_engine_process(room: str) -> None:
    """Not even by way of other modules: the path of a module says in which process its lines run."""
    names = [name for name in MODULES if f"{name}.".startswith(f"servers.native.{room}.")]
    assert names
    reached = {target for name in names for target in reachable(name)}
    assert [target for target in reached if f"{target}.".startswith("servers.native.engine.")] == []


def load_generator_room(module: str) -> str | None:
    """The room of a module of `loadgen`, which is its folder; None for the package itself and what stands beside."""
    side, *rooms = module.split(".")
    return rooms[0] if side == "loadgen" and rooms and (ROOT / "loadgen" / rooms[0]).is_dir() else None


def test_every_folder_of_the_load_generator_is_a_room() -> None:
    rooms = {load_generator_room(name) for name in MODULES}
    assert rooms - {None} == set(LOADGEN)
    beside = {name for name in MODULES if name.startswith("loadgen.") and load_generator_room(name) is None}
    assert beside == {"loadgen.entry", "loadgen.scenarios"}
    assert [name for name, targets in graph().items() if targets & beside] == ["abserve.__main__"]


def test_rooms_of_the_load_generator_import_only_those_before_them() -> None:
    upward = set()
    for name, targets in graph().items():
        own = load_generator_room(name)
        for other in map(load_generator_room, targets) if own else ():
            if other and LOADGEN.index(other) > LOADGEN.index(str(own)):
                upward.add((name, other))
    assert upward == set()


def test_a_probe_never_imports_another() -> None:
    """Neither where it measures nor where its finding is computed; what two need is in a room before both."""
    parts = re.compile(r"loadgen\.(?:measure\.probes|findings)\.(\w+?)(?:_measurement|_plan)?(?:\..+)?")

    def probe(module: str) -> str | None:
        found = parts.fullmatch(module)
        return found[1] if found and found[1] != "registry" else None

    assert len({probe(name) for name in MODULES}) > 10
    crossing = [
        (name, target)
        for name, targets in graph().items()
        for target in targets
        if probe(name) and probe(target) and probe(name) != probe(target)
    ]
    assert crossing == []


def test_reading_and_showing_a_result_loads_no_client() -> None:
    """Reports import all probes; the client's libraries take half a second to import."""
    program = "import sys; import loadgen.findings.registry as r; r.probes(); print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = (
        "tritonclient",
        "grpc",
        "gevent",
        "locust",
        "loadgen.measure.context",
        "loadgen.measure.probes.cold_start_measurement",
    )
    assert [name for name in done.stdout.split() if name.startswith(heavy)] == []


def load_generator_arrows() -> dict[str, set[str]]:
    """By room of `loadgen`: the other rooms that it imports."""
    arrows: dict[str, set[str]] = {}
    for name, targets in graph().items():
        own = load_generator_room(name)
        if own:
            ends = {end for end in map(load_generator_room, targets) if end}
            arrows.setdefault(own, set()).update(ends - {own})
    return arrows


def drawn_arrows(arrows: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The arrows between rooms, without those that a longer way implies."""

    def below(start: str) -> set[str]:
        return arrows.get(start, set()).union(*(below(target) for target in arrows.get(start, set())))

    return {
        (start, end)
        for start, ends in arrows.items()
        for end in ends
        if not any(end in below(other) for other in ends - {end})
    }


@pytest.mark.parametrize(("side", "arrows"), [("servers", server_arrows), ("loadgen", load_generator_arrows)])
def test_the_drawing_in_the_docs_is_that_of_the_code(side: str, arrows: Callable[[], dict[str, set[str]]]) -> None:
    text = (ROOT / "docs/architecture.md").read_text().partition(f"### Of {side}\n")[2]
    drawn = re.findall(r"^ +\w+\[(.+)\] --> \w+\[(.+)\]$", text.partition("\n#")[0], re.MULTILINE)
    right = drawn_arrows(arrows())
    ids = {name: f"{side[0]}{number}" for number, name in enumerate(sorted({name for two in right for name in two}))}
    now = "\n".join(f"    {ids[a]}[{a}] --> {ids[b]}[{b}]" for a, b in sorted(right))
    assert set(drawn) == right, f"draw it anew:\n{now}"


def reachable(name: str) -> set[str]:
    """A module of ours and all that it imports, directly or not."""
    found, waiting = set[str](), [name]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph()[module]
    return found


@pytest.mark.parametrize("room", PURE)
def test_what_computes_asks_no_process_no_clock_and_no_network(room: str) -> None:
    """The analysis is a function of the records: reading them is the one thing that it does besides computing."""
    own = [name for name in MODULES if f"{name}.".startswith(f"loadgen.{room}.")]
    assert own
    found = {
        (module, target)
        for name in own
        for module in reachable(name)
        for target in imports(MODULES[module])
        if any(target == bad or target.startswith(f"{bad}.") for bad in IMPURE)
    }
    assert found == set()


def test_no_analysis_imports_a_measurement() -> None:
    measuring = {name for name in MODULES if f"{name}.".startswith(tuple(f"loadgen.{room}." for room in MEASURING))}
    analysing = tuple(f"loadgen.{room}." for room in ("metrics", "findings", "checks", "verdict"))
    users = {
        (name, target)
        for name in MODULES
        if name.startswith(analysing) or name.endswith(".analyse")
        for target in reachable(name) & measuring
    }
    assert users == set()


def test_the_run_needs_little_of_the_analysis() -> None:
    """What both need is in `records` and `metrics`: besides the probes, a run reads stored noise floors alone, and its
    planning the conditions of `--fail-if`."""
    users = {
        (name, target)
        for name, targets in graph().items()
        for target in targets
        if name.startswith("loadgen.measure.")
        and not name.startswith("loadgen.measure.probes.")
        and load_generator_room(target) in ("checks", "verdict")
    }
    assert {name for name, _ in users} == {"loadgen.measure.noise_floor", "loadgen.measure.planning"}


def test_pynvml_is_imported_in_one_place() -> None:
    users = {
        name for name, path in MODULES.items() if any(target.split(".")[0] == "pynvml" for target in imports(path))
    }
    assert users == {"servers.gpu.nvml"}


def interpreters_without_safe_path(tree: ast.AST) -> list[int]:
    """The lines of command lines that begin with this interpreter and not with -P."""
    return [
        sequence.lineno
        for sequence in ast.walk(tree)
        if isinstance(sequence, ast.List | ast.Tuple)
        for element, after in zip(sequence.elts, [*sequence.elts[1:], None], strict=False)
        if ast.unparse(element) == "sys.executable" and not (isinstance(after, ast.Constant) and after.value == "-P")
    ]


def test_no_child_process_imports_from_the_working_folder() -> None:
    """A user's project may have a folder `servers` or a file `loadgen.py`, `numpy.py`, …"""
    assert interpreters_without_safe_path(ast.parse("argv = (sys.executable, '-m', name)")) == [1]
    starts = {
        name: lines
        for name, path in MODULES.items()
        if "sys.executable" in (text := path.read_text()) and (lines := interpreters_without_safe_path(ast.parse(text)))
    }
    assert starts == {}


def test_modules_that_a_program_in_a_string_imports_exist() -> None:
    """mypy does not see them, and most such programs are in tests that only `make test-slow` runs."""
    imported = re.compile(
        r"^\s*(?:from|import) ((?:servers|loadgen|abserve)\b[\w.]*(?:, (?:servers|loadgen|abserve)\b[\w.]*)*)",
        re.MULTILINE,
    )
    unknown = {
        (path.relative_to(ROOT), module)
        for folder in ("servers", "loadgen", "abserve", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for line in imported.findall(path.read_text(encoding="utf-8"))
        for module in line.split(", ")
        if module not in MODULES and not module.startswith("loadgen.measure.probes.toy")  # a probe of the tests
    }
    assert unknown == set()


# The two drawings of docs/architecture.md, a latency's way and a request's way, are those of the code.
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
