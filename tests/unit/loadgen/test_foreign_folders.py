"""Folders from somebody else: links, pipes, devices and endless files in place of every file that is read.

Nothing waits, nothing outside the folder is read, no more than a limit is read, and there is one sentence or a report.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from loadgen.base.documents import MOST_RECORD_BYTES
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.inputs import InputError, write_given
from loadgen.engines.files import published
from loadgen.engines.store import MatrixStore
from loadgen.entry import build
from loadgen.findings.gpu.records import EvidenceFile
from loadgen.measure.machine import MachineRecordError, read_calibration
from loadgen.records.matrix import Visit
from loadgen.records.samples import SAMPLE_DTYPE, part_path
from loadgen.records.store import is_running, read_run, running, write_record
from loadgen.report.prometheus import RunsCollector
from tests.golden.synthetic_run import Plan, write_run
from tests.synthetic_matrix import cell, configuration
from tests.synthetic_matrix import matrix as synthetic_matrix

SPARE_BYTES = 2**30
"""More than any limit of a record, less than what an unlimited read of /dev/zero takes."""


VISIT = Visit(round=0, configuration=0, started_at="2026-11-24T03:00:00Z", error="out of memory")


class TookTooLongError(Exception):
    """Something waited for a pipe."""


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """No test waits for ever or fills the machine's memory, also with a fault."""

    def stop(*_: object) -> None:
        raise TookTooLongError

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 100)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def linked(path: Path) -> None:
    """A link to a file outside that has what is wanted."""
    outside = path.with_name(f"outside-{path.name}")
    outside = path.parents[2] / outside.name
    shutil.copyfile(path.with_name(f"{path.name}.good"), outside)
    path.symlink_to(outside)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        place = os.open(path.parent, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{place}/{path.name}")  # the path itself may be too long for a socket
        os.close(place)


def folder_of(path: Path) -> None:
    path.mkdir()


KINDS: list[Callable[[Path], None]] = [pipe, device, endless, linked, listener, folder_of]


def name_of(kind: Callable[[Path], None]) -> str:
    return kind.__name__


each_kind = pytest.mark.parametrize("kind", KINDS, ids=name_of)


def replace(path: Path, kind: Callable[[Path], None]) -> None:
    kept = path.with_name(f"{path.name}.good")
    if path.exists():
        path.rename(kept)
    else:
        kept.touch()
    kind(path)
    kept.unlink()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build(), arguments)


def told(done: Result, expected: set[int]) -> None:
    """A documented status, no traceback, and no answer that only a lack of memory or an alarm gave."""
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code in expected, done.output
    assert "MemoryError" not in done.output
    assert "TookTooLong" not in done.output
    if done.exit_code == 2:
        assert len(done.output.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every kind of file."""
    folder = tmp_path_factory.mktemp("good") / "run"
    write_run(folder, Plan(pairs=2, requests=20, batches=(8,)))
    (folder / "gpu").mkdir()
    (folder / "gpu/0000.jsonl").write_text(HEADER)
    (folder / "evidence.json").write_bytes(
        msgspec.json.encode(EvidenceFile(records=(), gaps=(), readings=("gpu/0000.jsonl",)))
    )
    (folder / ".running").touch()
    part_path(folder / "samples/0099.npy").write_bytes((folder / "samples/0000.npy").read_bytes())
    done = invoke("report", str(folder))
    assert done.exit_code == 0, done.output
    return folder


def store_evidence(folder: Path, readings: str) -> None:
    record = EvidenceFile(records=(), gaps=(), readings=(readings,))
    (folder / "evidence.json").write_bytes(msgspec.json.encode(record))


HEADER = json.dumps({"type": "header", "schema": "abserve.gpu-readings/1", "status": "ok", "devices": []}) + "\n"
FILES = [
    "experiment.json", "environment.json", "arms.json", "parity.json", "cold_starts.json", "run.json", "evidence.json",
    "calibration.json", "noise_floors.json", "conditions.json", "gpu/0000.jsonl", "blocks/0000.json",
    "samples/0000.npy", "samples/0099.npy.part", "trials/0000.json", ".running", "result.json",
]  # fmt: skip
READ_IN_TURN = ("experiment.json", "gpu/0000.jsonl", "blocks/0000.json", "samples/0000.npy")
"""One file for each way in which a file is read."""


def by_default(name: str, kind: Callable[[Path], None]) -> bool:
    """Whether a case is in the default run: a pipe in place of each file, and three kinds for each way of reading."""
    return kind is pipe or (kind in (endless, linked) and name in READ_IN_TURN)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "inner" / "run"))


def check(folder: Path, good: Path, *, every: bool = True) -> None:
    """One command, or `every` one: they read a run with the same functions, so that four cases of them are enough."""
    told(invoke("report", str(folder), "--format", "json"), {0, 2})
    if not every:
        return
    told(invoke("diff", str(good), str(folder)), {0, 1, 2, 3})
    told(invoke("rank", str(folder)), {0, 1, 2})
    told(invoke("rank", str(folder.parent)), {0, 1, 2})
    told(invoke("noise-floor", "--from", str(folder)), {1, 2})
    list(RunsCollector(folder.parent).collect())
    told(invoke("report", str(folder)), {0, 1, 2})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, id=f"{name}-{name_of(kind)}", marks=() if by_default(name, kind) else pytest.mark.slow)
        for name in FILES
        for kind in KINDS
    ],
)
def test_a_run_with_something_else_in_place_of_a_file(
    folder: Path, good: Path, name: str, kind: Callable[[Path], None]
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    replace(folder / name, kind)
    check(folder, good, every=name in READ_IN_TURN if kind is pipe else not by_default(name, kind))


@each_kind
@pytest.mark.parametrize("name", ["result.json", "result.json.gz"])
def test_a_published_run_with_something_else_in_place_of_its_result(
    good: Path, tmp_path: Path, name: str, kind: Callable[[Path], None]
) -> None:
    folder = tmp_path / "inner" / "run"
    folder.mkdir(parents=True)
    content = (good / "result.json").read_bytes()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    told(invoke("report", str(folder), "--format", "json"), {0})
    replace(folder / name, kind)
    told(invoke("report", str(folder), "--format", "json"), {2})
    told(invoke("rank", str(folder)), {2})


def test_a_compressed_result_that_unpacks_to_more_than_the_limit(good: Path, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "result.json.gz", "wb", compresslevel=1) as file:
        for _ in range(MOST_RECORD_BYTES // 2**20 + 2):
            file.write(bytes(2**20))
    told(invoke("report", str(tmp_path)), {2})
    assert "unpacks to more than the limit" in invoke("rank", str(tmp_path)).output


@pytest.mark.parametrize("filling", [b"[],", b"0,", b"{},", b'"",', b"[[[1]]],"])
def test_a_small_file_of_many_values_is_refused_before_they_exist(tmp_path: Path, filling: bytes) -> None:
    count = MOST_RECORD_BYTES // len(filling) - 100
    content = b'{"schema": "abserve.result/3", "studies": {"x": [%b0]}}' % (filling * count)
    (tmp_path / "result.json.gz").write_bytes(gzip.compress(content, 1))
    tracemalloc.start()
    told(invoke("report", str(tmp_path)), {2})
    told(invoke("rank", str(tmp_path)), {2})
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 5 * MOST_RECORD_BYTES


FIGURES: dict[str, dict[str, Any]] = {
    "a ratio of -2": {"ratio": -2.0},
    "a ratio of 0": {"ci95": [0.0, 2.0]},
    "outside its interval": {"ratio": 3.0, "ci95": [1.0, 2.0]},
    "a p value of 1.5": {"p_value": 1.5},
    "a negative figure, -1": {"error_log": -1.0},
}


@pytest.mark.parametrize("words", FIGURES)
def test_figures_that_contradict_each_other_are_named(good: Path, tmp_path: Path, words: str) -> None:
    document = json.loads((good / "result.json").read_bytes())
    document["comparisons"][0] |= FIGURES[words]
    (tmp_path / "result.json").write_text(json.dumps(document))
    for command in ("report", "rank"):
        done = invoke(command, str(tmp_path))
        told(done, {2})
        assert words in done.output


@pytest.mark.parametrize("name", ["blocks", "samples", "gpu", "trials"])
def test_a_folder_that_is_a_link_is_not_followed(folder: Path, good: Path, name: str) -> None:
    if (folder / name).exists():
        shutil.rmtree(folder / name)
    (folder / name).symlink_to(good / name)
    done = invoke("report", str(folder), "--format", "json")
    told(done, {0})
    assert "is a link" in done.output
    assert name == "gpu" or not json.loads(done.output)["valid"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/secret", "gpu/../../other/secret", "/dev/zero", ""])
def test_a_record_that_names_a_file_outside_does_not_open_it(folder: Path, good: Path, name: str) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (other / "secret").write_text(HEADER + "the secret\n")
    store_evidence(folder, name)
    done = invoke("report", str(folder))
    told(done, {0})
    assert "leads out of the folder" in " ".join(done.output.split())
    assert "the secret" not in " ".join(done.output.split())

    (folder / "evidence.json").unlink()
    path = folder / "blocks/0000.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"samples": name}))
    assert read_run(folder).blocks[0].samples is None


def test_a_block_reads_no_more_samples_than_it_counted(folder: Path) -> None:
    record = read_run(folder).blocks[0].record
    with (folder / record.samples).open("r+b") as file:
        file.truncate(2**40)
    block = read_run(folder).blocks[0]
    assert block.samples is not None
    assert len(block.samples) == record.requests + 1
    assert block.problem is not None
    path = folder / "blocks/0000.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"requests": 2**62}))
    block = read_run(folder).blocks[0]
    assert block.samples is None
    assert "free memory" in (block.problem or "")


def test_unfinished_samples_are_counted_and_not_read(folder: Path) -> None:
    path = folder / "samples/0099.npy.part"
    header = len(path.read_bytes().partition(b"\n")[0]) + 1
    with path.open("r+b") as file:
        file.truncate(header + 2**34 * SAMPLE_DTYPE.itemsize + 5)
    assert list(read_run(folder).partial_blocks.values()) == [2**34]


@pytest.mark.slow  # each name in each place
def test_a_name_that_no_result_has(good: Path, tmp_path: Path) -> None:
    """Every name of a workload or an arm in a published result may be one that the experiment does not have."""
    document = json.loads((good / "result.json").read_bytes())
    names = {row["scenario"] for row in document["comparisons"]} | {"a", "b", "throughput"}
    ways, seen = list(places(document, names)), set()
    assert len(ways) > 100
    for way in ways:
        kind = tuple(key for key in way if not isinstance(key, int))
        if kind in seen:
            continue
        seen.add(kind)
        *inner, last = way
        place = document
        for key in inner:
            place = place[key]
        kept, place[last] = place[last], "nobody"
        (tmp_path / "result.json").write_text(json.dumps(document))
        place[last] = kept
        told(invoke("report", str(tmp_path), "--format", "junit"), {0, 2})
        told(invoke("report", str(tmp_path), "--format", "markdown"), {0, 2})
        told(invoke("diff", str(good), str(tmp_path)), {0, 1, 2, 3})
        told(invoke("rank", str(tmp_path)), {0, 1, 2})


def places(value: object, names: set[str], way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        if isinstance(child, str) and child in names:
            yield (*way, key)
        yield from places(child, names, (*way, key))


@pytest.mark.parametrize(
    "kind",
    [pipe, linked, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (device, endless, listener, folder_of))],
    ids=name_of,
)
@pytest.mark.parametrize("name", ["matrix.json", "plan.json", "environment.json", "run.json", "visits/0000.json"])
def test_an_engine_matrix_with_something_else_in_place_of_a_file(
    tmp_path: Path, name: str, kind: Callable[[Path], None]
) -> None:
    folder = tmp_path / "inner" / "run"
    store_matrix(folder, visits=name != "matrix.json")
    assert invoke("report", str(folder), "--format", "json").exit_code == 0
    replace(folder / name, kind)
    told(invoke("report", str(folder), "--format", "json"), {2} if name != "run.json" else {0, 2})
    told(invoke("rank", str(folder)), {0, 1, 2})
    told(invoke("engines", "--resume", str(folder)), {1, 2})


def store_matrix(folder: Path, *, visits: bool) -> None:
    measured = synthetic_matrix([configuration()], [cell(0, 10.0)])
    folder.mkdir(parents=True)
    published(measured).write(folder)
    if visits:
        store = MatrixStore(folder)
        (folder / "visits").mkdir()
        for record in (measured.plan, measured.environment, measured.state):
            assert record is not None
            store.write(record)
        (folder / "visits/0000.json").write_bytes(msgspec.json.encode(VISIT))


@each_kind
@pytest.mark.parametrize("command", ["compare", "engines", "noise-floor"])
def test_an_experiment_file_that_is_none(tmp_path: Path, command: str, kind: Callable[[Path], None]) -> None:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner/e.yaml"
    path.write_text("nothing: 1\n")
    replace(path, kind)
    told(invoke(command, str(path)), {2})


@each_kind
def test_a_price_file_that_is_none(good: Path, tmp_path: Path, kind: Callable[[Path], None]) -> None:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner/prices.yaml"
    path.write_text("nothing: 1\n")
    replace(path, kind)
    told(invoke("rank", str(good), "--prices", str(path)), {2})


@each_kind
def test_a_stored_calibration_that_is_none(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner/calibration.json"
    path.write_text("{}")
    replace(path, kind)
    with pytest.raises(MachineRecordError, match=r"calibration\.json"):
        read_calibration(path)


SIGNATURE = Signature("m", (TensorSignature("x", "FP32", (-1, 2)),), ())


@each_kind
@pytest.mark.parametrize("name", ["x.npz", "x.json", "x.jsonl"])
def test_an_input_file_that_is_none(tmp_path: Path, name: str, kind: Callable[[Path], None]) -> None:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / name
    path.write_text("nothing")
    replace(path, kind)
    with pytest.raises(InputError, match=name):
        write_given(path, SIGNATURE, tmp_path / "samples", "native")


@each_kind
def test_a_folder_of_inputs_with_something_else_in_place_of_a_file(
    tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    folder = tmp_path / "inner" / "inputs"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(bytes(8))
    write_given(folder, SIGNATURE, tmp_path / "samples", "native")
    replace(folder / "x", kind)
    with pytest.raises(InputError, match="inputs"):
        write_given(folder, SIGNATURE, tmp_path / "others", "native")


@pytest.mark.parametrize("kind", [pipe, device, linked], ids=name_of)
def test_what_is_written_goes_to_no_other_place(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    folder = tmp_path / "inner" / "run"
    folder.mkdir(parents=True)
    for name in (".running", "run.json"):
        (folder / name).write_text("kept")
        replace(folder / name, kind)
    assert not is_running(folder)
    with running(folder):
        pass
    write_record(folder / "run.json", [])
    assert (folder / "run.json").read_bytes() == b"[]\n"
    assert not (folder / "run.json").is_symlink()
    if kind is linked:
        assert {path.read_text() for path in tmp_path.glob("outside-*")} == {"kept"}
