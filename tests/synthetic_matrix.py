"""Engine matrices that were never measured, for what reads matrix.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.records.matrix import (
    CellResult,
    Configuration,
    ConfigurationResult,
    Matrix,
    MatrixPlan,
    RefusedCombination,
)
from loadgen.records.run import Environment, RunState
from loadgen.stats.estimates import Estimate

CPU: dict[str, Any] = {
    "cpu_model": "Intel Xeon",
    "cpu_count": 4,
    "architecture": "x86_64",
    "kernel": "6.1",
    "python": "3.11",
}


def environment(host: Mapping[str, Any] = {}, gpus: Sequence[str] = (), uuid: str = "GPU-0") -> Environment:
    """A machine; each GPU has a UUID of its own."""
    devices = [{"name": name, "uuid": f"{uuid}-{place}"} for place, name in enumerate(gpus)]
    return Environment(
        started_at="2026-11-24T00:00:00Z",
        command="abserve engines",
        git_commit=None,
        host={**CPU, **host},
        packages={"torch": "2.15.0"},
        gpu={"status": "ok" if gpus else "no_library", "devices": devices, "nvml": {"driver_version": "580"}},
    )


def configuration(engine: str = "torch", **changes: Any) -> Configuration:
    """torch/eager in fp32 on the CPU with 2 threads, unless something is changed."""
    usual = {"model": "torchvision:resnet50", "precision": "fp32", "mode": "eager", "device": "cpu", "threads": 2}
    return Configuration(engine=engine, **{**usual, **changes})


def cell(place: int, rate: float, batch: int = 1, spread: float = 0.05, **changes: Any) -> CellResult:
    """`rate` items per second with an interval of ± `spread`."""
    latency = batch / rate * 1e9
    usual: dict[str, Any] = {
        "configuration": place, "batch": batch, "length": None, "rounds": 5,
        "latency_ns": Estimate(value=latency, low=latency / (1 + spread), high=latency / (1 - spread)),
        "call_ns": Estimate(value=latency), "p99_ns": None,
        "items_per_second": Estimate(value=rate, low=rate * (1 - spread), high=rate * (1 + spread)),
        "speedup": None, "first_call_seconds": 0.1,
    }  # fmt: skip
    return CellResult(**{**usual, **changes})


def matrix(
    configurations: Sequence[Configuration],
    cells: Sequence[CellResult],
    machine: Environment | None = None,
    refused: Sequence[RefusedCombination] = (),
    weights: str = "random weights (seed 0)",
    errors: Mapping[int, tuple[str, ...]] = {},
) -> Matrix:
    """A finished matrix."""
    return Matrix(
        state=RunState(state="finished", phase="done"),
        environment=machine or environment(),
        plan=MatrixPlan(
            settings={"rounds": 5}, sha256="0" * 64, seed=0, rounds=5, configurations=tuple(configurations),
            refused=tuple(refused), batches=tuple(sorted({cell.batch for cell in cells})), lengths={},
            baseline="torch/eager", min_cosine=0.999, min_top1=0.99,
        ),
        configurations=tuple(
            ConfigurationResult(
                configuration=configuration, item="image", description={"version": "2.15.0", "weights": weights},
                load_seconds=Estimate(value=1.0), conversions=(), errors=tuple(errors.get(place, ())),
            )
            for place, configuration in enumerate(configurations)
        ),
        cells=tuple(cells),
    )  # fmt: skip
