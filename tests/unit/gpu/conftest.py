"""A stub of NVIDIA's library, and a sampler process that one can talk to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("nvml_stub.c")


def compile_stub(folder: Path, *options: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stub of libnvidia-ml.so.1")
    folder.mkdir(exist_ok=True)
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", *options, "-o", str(target), str(SOURCE)], check=True)
    return folder


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LD_LIBRARY_PATH."""
    return compile_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def stub_without_energy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_stub(tmp_path_factory.mktemp("nvml-old"), "-DNO_ENERGY")


def environment(library: Path | None, **settings: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("STUB_", "CUDA_"))}
    # An empty folder first: a real driver on the machine must not take part either.
    return env | {"LD_LIBRARY_PATH": str(library or "/nonexistent")} | settings


@pytest.fixture(scope="session")
def library_environment() -> Callable[..., dict[str, str]]:
    return environment


@pytest.fixture
def evaluate() -> Callable[..., Any]:
    """Run Python code with a stub library in a process of its own; it prints JSON."""

    def run(code: str, library: Path | None, **settings: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env=environment(library, **settings), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


class Sampler:
    """`python -m servers.gpu.sampler` with pipes."""

    def __init__(self, path: Path, library: Path | None, *options: str, **settings: str) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "servers.gpu.sampler", "--out", str(path), *options],
            env=environment(library, **settings), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.ready = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or "null")

    def command(self, text: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        return self.answer()

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        content = self.path.read_text()
        found = [json.loads(line) for line in content[: content.rfind("\n") + 1].splitlines()]
        return [line for line in found if kind in (None, line["type"])]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Each edge is a round trip, so this waits on the sampler and not on a clock."""
        for _ in range(2000):
            if condition():
                return
            self.command("edge wait")
        raise AssertionError(f"never came: {self.path.read_text()[-2000:]}")

    def stop(self) -> int:
        self.command("stop")
        return self.process.wait(timeout=60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start_sampler(tmp_path: Path) -> Iterator[Callable[..., Sampler]]:
    started: list[Sampler] = []

    def start(library: Path | None, *options: str, **settings: str) -> Sampler:
        started.append(Sampler(tmp_path / f"{len(started)}.jsonl", library, *options, **settings))
        return started[-1]

    yield start
    for sampler in started:
        sampler.close()
