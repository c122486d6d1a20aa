"""Runs one comparison of two planted servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRequest, Experiment, Workload
from loadgen.verdict.result import Result, analyse
from tests.integration.loadgen.conftest import machine_to_itself

__all__ = ["machine_to_itself"]  # what else the machine does must decide no test of the truth either

SERVER = Path(__file__).with_name("planted_server.py")
Compare = Callable[..., Result]
NO_SAMPLES = (sys.executable, "-c", "raise SystemExit(1)")
"""In place of `abserve`: the model is not one of ours, so its inputs are made up."""


@pytest.fixture
def compare(tmp_path: Path) -> Iterator[Compare]:
    """Starts the servers with their options and runs one comparison."""
    running: list[subprocess.Popen[str]] = []

    def start(label: str, options: str) -> ArmRequest:
        argv = [sys.executable, str(SERVER), "--seed", str(len(running)), *options.split()]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        http, grpc = process.stdout.readline().split()
        return ArmRequest(label=label, target=f"http://127.0.0.1:{http}", grpc=f"127.0.0.1:{grpc}")

    def run(
        a: str,
        b: str,
        *workloads: Workload,
        others: Sequence[str] = (),
        margin: float = 0.05,
        samples: str = "",
        **changes: object,
    ) -> Result:
        arms = tuple(start(label, options) for label, options in zip("abcdefgh", (a, b, *others), strict=False))
        fields: dict[str, object] = {
            "arms": arms, "model": "planted", "weights": "none", "payload": "fp32",
            "transport": "http", "workloads": workloads, "preset": "quick", "seed": 3, "equivalence_margin": margin,
            "threads": 0, "inputs": None if samples else "random",
        }  # fmt: skip
        out = tmp_path / f"run{len(running)}"
        abserve = (sys.executable, str(SERVER.with_name(samples))) if samples else NO_SAMPLES
        run_experiment(Experiment(**(fields | changes)), out, RunProgress(), abserve=abserve)  # type: ignore[arg-type]
        return analyse(out)

    yield run
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def state(result: Result, check: str) -> bool | None:
    states = [c.ok for c in result.checks if c.name == check]
    return False if False in states else None if None in states or not states else True
