"""Runs on the fake server: an experiment small enough for seconds, and what stands in for `abserve`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
from typer.testing import CliRunner

from loadgen.checks import tokens
from loadgen.client.endpoint import Endpoint
from loadgen.client.generator import GeneratorProcess
from loadgen.client.inputs import write_synthetic
from loadgen.client.messages import Prepare
from loadgen.entry import build
from loadgen.measure import load_runner
from loadgen.measure.machine_watch import read_processors
from loadgen.measure.probes import fairness
from loadgen.records.run import ArmRequest, BlockRecord, Experiment, Workload
from tests import fork_server

FAKE = Path(__file__).parents[2] / "fake_server.py"
FAKE_ABSERVE = (sys.executable, str(FAKE))
DEADLINE_S = 100.0
_FAULTY = """
import sys
sys.argv = sys.argv[:1]
from loadgen.client.http import HttpConnection
from loadgen.client.worker import main
send, sent = HttpConnection.send, []
def fail_at_the_sixth(self, request, *patches):
    sent.append(request)
    if len(sent) == 6:
        raise RuntimeError("ours")
    return send(self, request, *patches)
HttpConnection.send = fail_at_the_sixth
main()
"""
FAULTY_GENERATOR = (sys.executable, "-c", _FAULTY)
"""In place of the generator's command: a fault of its own at its sixth request."""
NO_MACHINE = Path("/no machine"), None
"""Defaults of `read_processors` that cannot be read, for all modules that have imported it."""
UNWATCHED = f"""
from loadgen.measure.machine_watch import read_processors
read_processors.__defaults__ = Path({str(NO_MACHINE[0])!r}), None
"""
UNWATCHED_ABSERVE = (sys.executable, "-P", str(FAKE.with_name("unwatched_abserve.py")))
T = TypeVar("T")


def await_true(condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    """Wait for a condition, not for a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)


def programs_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All that it has started, without the fork server that a fork has as a child."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if str(fork_server.__file__) not in child.cmdline()]


def make_experiment(
    *,
    workloads: tuple[Workload, ...] | None = None,
    b_settings: dict[str, str] | None = None,
    a: ArmRequest | None = None,
    b: ArmRequest | None = None,
    others: Sequence[ArmRequest] = (),
    **changes: object,
) -> Experiment:
    """Two fake servers, and `others`; a single and a concurrent workload, two pairs each."""
    single = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.1, max_seconds=5.0, rounds=2
    )
    concurrent = Workload(
        scenario="concurrent", batch_size=1, concurrency=4, requests=20, seconds=0.1, max_seconds=5.0, rounds=2
    )
    fields: dict[str, object] = {
        "arms": (
            a or ArmRequest(label="a", target="native"),
            b or ArmRequest(label="b", target="triton", settings=b_settings or {}),
            *others,
        ),
        "model": "openclip_vit_b32",
        "weights": "random:0",
        "payload": "fp32",
        "transport": "http",
        "workloads": workloads or (single, concurrent),
        "preset": "quick",
        "seed": 1,
        "equivalence_margin": 0.05,
        "threads": 0,
    }
    return Experiment(**{**fields, **changes})  # type: ignore[arg-type]


def stored(path: Path, kind: type[T]) -> T:
    """A record as it was written."""
    return msgspec.json.decode(path.read_bytes(), type=kind)


def assert_stored(out: Path, experiment: Experiment) -> None:
    """As it was asked for, but for the seconds of blocks, which are more where requests took long in the warm-up."""
    kept = stored(out / "experiment.json", Experiment)
    pairs = list(zip(kept.workloads, experiment.workloads, strict=True))
    assert all(asked.seconds <= own.seconds <= asked.max_seconds for own, asked in pairs)
    workloads = tuple(msgspec.structs.replace(own, seconds=asked.seconds) for own, asked in pairs)
    assert msgspec.structs.replace(kept, workloads=workloads) == experiment


def blocks(out: Path) -> list[BlockRecord]:
    """In the order in which they ran."""
    return [stored(path, BlockRecord) for path in sorted((out / "blocks").glob("*.json"))]


def start_runner(experiment: Experiment, out: Path, patch: str = "") -> subprocess.Popen[bytes]:
    """A whole run on the fake servers in a process of its own, with its temporary folder beside `out`; the code `patch`
    runs first."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("runner.py")), str(out), FAKE_ABSERVE[1], patch],
        stdin=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(out.parent)},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(experiment))
    process.stdin.close()
    return process


def abserve(*arguments: str) -> tuple[int, str]:
    """The exit status of a command and what it said, in one line: in this process."""
    done = CliRunner().invoke(build(), arguments, catch_exceptions=False)
    return done.exit_code, " ".join(done.output.split())


def descendants() -> set[str]:
    """Command lines of everything that this test process has started and that still lives."""
    lines = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and str(fork_server.__file__) not in process.cmdline():
                lines.add(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return lines


def regions_of_load() -> list[str]:
    """Names of the generators' shared memory, without that of another run on this machine that is still alive."""
    ours = {process.pid for process in (psutil.Process(), *psutil.Process().children(recursive=True))}
    others = set(psutil.pids()) - ours
    names = [path.name for path in Path("/dev/shm").glob("abserve-load-*")]
    return [name for name in names if int(name.split("-")[2]) not in others]


@pytest.fixture
def watched_machine() -> None:
    """For a test that is about what else uses the machine."""


@pytest.fixture(autouse=True)
def machine_to_itself(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else the machine of the tests does must decide no other test: a run is told that it cannot be read. What
    comes before the load is short."""
    monkeypatch.setattr(load_runner, "WARM_UP_SECONDS", 0.2)
    monkeypatch.setattr(fairness, "GROUPS", 8)
    if "watched_machine" not in request.fixturenames:
        monkeypatch.setattr(read_processors, "__defaults__", NO_MACHINE)
        monkeypatch.setattr(tokens, "WAITED_LIMIT", 1.0)


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Fails when the test leaves a server or a generator behind."""
    before = descendants()
    yield
    await_true(lambda: descendants() <= before, f"processes left: {descendants() - before}")


@contextmanager
def fake_servers() -> Iterator[Callable[..., str]]:
    """Starts fake servers with options; returns their URL once they listen."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> str:
        process = subprocess.Popen([sys.executable, str(FAKE), *options], stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        port = process.stdout.readline().split()[-1].decode()
        return f"http://127.0.0.1:{port}"

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def fake_url() -> Iterator[Callable[..., str]]:
    """Starts fake servers for one test."""
    with fake_servers() as start:
        yield start


def prepared(generator: GeneratorProcess, folder: Path, url: str) -> str:
    """The URL of a fake server, for which the generator has made bodies of 1 and 4 images."""
    signature = Endpoint(url).signature("openclip_vit_b32")
    write_synthetic(signature, folder / "samples", "fp32", 0)
    generator.prepare(
        Prepare(
            samples_directory=str(folder / "samples"), payload="fp32", signature=signature, batch_sizes=(4,), seed=0
        )
    )
    return url


@pytest.fixture
def unused_url() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of samples, which no test changes."""
    folder = tmp_path_factory.mktemp("samples") / "images"
    subprocess.run([sys.executable, str(FAKE), "samples", "--out", str(folder)], check=True)
    return folder
