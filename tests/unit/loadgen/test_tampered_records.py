"""Records that somebody has changed: the commands say so in one sentence, or show what is there."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from loadgen.entry import build
from loadgen.records.samples import SAMPLE_DTYPE
from loadgen.verdict.result import Result as Analysed
from loadgen.verdict.result import analyse, read_result
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run
from tests.language_runs import LanguagePlan, write_language_run

pytestmark = pytest.mark.usefixtures("as_users_have_it")

VALUES = [
    None, True, -1, 0, 1, 2**31, 2**62, -(2**63), 2**70, 1e308, -1e308, 1e-320, 0.0, "", "x", [], {}, [1], {"a": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    write_run(folder, Plan(pairs=2, requests=20, batches=(4,), others=(SimulatedArm(),)))
    assert invoke("report", str(folder)).exit_code == 0
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build(), arguments)


def told(done: Result, expected: set[int]) -> None:
    """The status is a documented one, and where nothing could be shown there is one sentence."""
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in expected, done.output
    if done.exit_code == 2:
        assert len(done.output.strip().splitlines()) == 1
        assert done.output.strip().isprintable()
        assert len(done.output) < 1500


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:5]) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*path, key)
        yield from places(child, (*path, key))


def spoil(path: Path, chance: random.Random) -> None:
    """Delete a key, repeat an element, or put something else in its place, of the same type more often than not."""
    document = json.loads(path.read_bytes())
    *way, last = chance.choice(list(places(document)))
    place = document
    for step in way:
        place = place[step]
    alike = [value for value in VALUES if type(value) is type(place[last])]
    if isinstance(place, list) and chance.random() < 0.2:
        place.append(place[last])
    elif chance.random() < 0.25:
        del place[last]
    else:
        place[last] = chance.choice(alike if alike and chance.random() < 0.7 else VALUES)
    path.write_text(json.dumps(document))


def check(folder: Path, good: Path) -> None:
    told(invoke("report", str(folder)), {0, 2})
    told(invoke("diff", str(good), str(folder), "--json"), {0, 1, 2, 3})


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 60))])
def test_a_changed_record(folder: Path, good: Path, seed: int) -> None:
    chance = random.Random(seed)
    if seed % 4 == 0:
        (folder / "run.json").unlink()  # then its result.json is what is read
        spoil(folder / "result.json", chance)
    else:
        spoil(chance.choice([path for path in sorted(folder.rglob("*.json")) if path.name != "result.json"]), chance)
    check(folder, good)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("experiment.json", "[" * 100_000),
        ("run.json", '{"state": NaN}'),
        ("arms.json", '{"schema": 1}'),
        ("parity.json", "9" * 5000),
        ("environment.json", '{"host": {"memory_bytes": 1e999}}'),
        ("result.json", "[" * 100_000),
    ],
)
def test_a_record_that_is_none_is_named(folder: Path, good: Path, name: str, text: str) -> None:
    if name == "result.json":
        (folder / "run.json").unlink()
    (folder / name).write_text(text)
    needed = name in ("experiment.json", "result.json")  # without these there is nothing to tell
    told(invoke("report", str(folder)), {2} if needed else {0})
    told(invoke("diff", str(good), str(folder)), {1, 2})
    told(invoke("noise-floor", "--from", str(folder)), {1, 2})
    if needed:
        assert f"{name} " in invoke("report", str(folder)).output
    else:
        assert named_in(folder, f"{name} cannot be read")


def named_in(run: Path | Analysed, words: str) -> bool:
    """Whether the analysis of a run goes on, takes its verdict away and names what is wrong."""
    result = analyse(run) if isinstance(run, Path) else run
    return not result.valid and any(
        words in check.detail for check in result.checks if check.ok is not True and check.severity == "invalidates"
    )


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: 2 * len(content) // 3],
    "noise": lambda content: random.Random(1).randbytes(len(content)),
    "other type": lambda _: other_type(b""),
}


@pytest.fixture(scope="module")
def runs(good: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    plan = LanguagePlan(users=(4,), rates=(20.0,), pairs=2, answers=3)
    tokens = write_language_run(tmp_path_factory.mktemp("language") / "run", plan)
    assert invoke("report", str(tokens)).exit_code == 0
    return {"tensors": good, "tokens": tokens}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("tensors", name) for name in ("samples/0002.npy", "blocks/0002.json", "arms.json", "environment.json")),
        *(("tensors", name) for name in ("answers.json", "cold_starts.json", "parity.json", "run.json")),
        *(("tokens", f"samples/0002{end}") for end in (".npy", ".events.npy", ".answers.npy")),
        *(("tokens", name) for name in ("blocks/0002.json", "arms.json", "token_answers.json", "run.json")),
    ],
)
@pytest.mark.parametrize("way", ["missing", *WAYS])
def test_a_file_costs_itself_only(runs: dict[str, Path], tmp_path: Path, kind: str, name: str, way: str) -> None:
    """And is named."""
    folder = Path(shutil.copytree(runs[kind], tmp_path / "run"))
    (path := folder / name).write_bytes(WAYS.get(way, bytes)(path.read_bytes()))
    if way == "missing":
        path.unlink()
    result, before = analyse(folder), read_result(runs[kind] / "result.json")
    complete = [block for block in result.blocks if block.complete]
    assert len(complete) == len(before.blocks) - (name.startswith(("samples", "blocks")))
    others = {c.workload for c in before.comparisons} - {before.blocks[2].workload}
    kept = [(c.metric, c.ratio) for c in result.comparisons if c.workload in others - {"cold-start"}]
    assert kept == [(c.metric, c.ratio) for c in before.comparisons if c.workload in others - {"cold-start"}]
    if way != "missing" or name.startswith("samples"):
        assert named_in(result, name)
    if way == "cut":
        told(invoke("report", str(folder)), {0})
        told(invoke("rank", str(folder)), {1})


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_run_that_has_lost_arms(folder: Path, good: Path, kept: int) -> None:
    path = folder / "experiment.json"
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(document | {"arms": document["arms"][:kept]}))
    if kept:
        assert named_in(folder, "records of arms that its experiment does not have")
    else:
        assert "contradict each other" in invoke("report", str(folder)).output
    check(folder, good)


def other_type(content: bytes) -> bytes:
    written = io.BytesIO()
    np.save(written, np.zeros(20))
    return written.getvalue()


def huge(content: bytes) -> bytes:
    samples = np.frombuffer(content, SAMPLE_DTYPE, offset=1024).copy()
    samples["end_ns"] = 2**63 - 1
    samples["send_ns"] = samples["intended_ns"] = -(2**63)
    return content[:1024] + samples.tobytes()


def backwards(content: bytes) -> bytes:
    samples = np.frombuffer(content, SAMPLE_DTYPE, offset=1024).copy()
    samples["end_ns"], samples["send_ns"] = samples["send_ns"].copy(), samples["end_ns"].copy()
    samples["batch"], samples["error"] = 0, 32_000
    return content[:1024] + samples.tobytes()


def cut(content: bytes) -> bytes:
    return content[:500]


@pytest.mark.parametrize("change", [other_type, huge, backwards, cut])
def test_changed_samples(folder: Path, good: Path, change: Callable[[bytes], bytes]) -> None:
    for path in sorted((folder / "samples").glob("*.npy"))[:3]:
        path.write_bytes(change(path.read_bytes()))
    check(folder, good)


@pytest.mark.parametrize(
    ("name", "list_name", "key", "value"),
    [
        ("result.json", "comparisons", "metric", "another"),
        ("result.json", "comparisons", "ratio", -1),
        ("result.json", "comparisons", "arm", "nobody"),
        ("cold_starts.json", None, "label", "nobody"),
    ],
)
def test_records_that_contradict_each_other(
    folder: Path, good: Path, name: str, list_name: str | None, key: str, value: object
) -> None:
    """Each of the right type, and each ended in a traceback: what cannot be made of them says so."""
    document = json.loads((folder / name).read_bytes())
    for entry in document if list_name is None else document[list_name]:
        entry[key] = value
    (folder / name).write_text(json.dumps(document))
    if name == "result.json":
        (folder / "run.json").unlink()
    done = invoke("report", str(folder))
    told(done, {0, 2})
    assert "contradict each other" in done.output or "could not be made" in done.output
    check(folder, good)
