"""Engine matrices with known latencies: a plan and the visits that measure it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from loadgen.engines.analyse import analyse
from loadgen.records.matrix import Configuration, Conversion, Matrix, MatrixPlan, Measured, RefusedCombination, Visit
from loadgen.records.run import Environment, MachineLoad, RunState

ENVIRONMENT = Environment(
    started_at="2026-11-24T03:00:00Z",
    command="abserve engines --models torchvision:resnet50 --engines torch,onnxruntime",
    git_commit="0" * 40,
    host={"cpu_model": "Example CPU", "cpu_count": 8, "memory_bytes": 2**34},
    packages={"torch": "2.15.0", "onnxruntime": "1.31.0"},
    gpu={"status": "no_driver"},
)
FINISHED = RunState(state="finished", phase="done", finished_at="2026-11-24T04:00:00Z")
RESNET, VIT = "torchvision:resnet50", "torchvision:vit_b_16"
BERT, DISTILBERT = "transformers:bert-base-uncased", "transformers:distilbert-base-uncased"

Latency = Callable[[Configuration, int, int | None], float]
"""Milliseconds of one call."""


def configuration(engine: str = "torch", mode: str = "eager", **given: Any) -> Configuration:
    shared: dict[str, Any] = {"model": RESNET, "precision": "fp32", "device": "cpu", "threads": 1}
    return Configuration(**(shared | given), engine=engine, mode=mode)


TORCH, ONNX = configuration(), configuration("onnxruntime", "session")


def plan(*configurations: Configuration, rounds: int = 5, **given: Any) -> MatrixPlan:
    lengths = {configuration.model: given.get("lengths", (None,)) for configuration in configurations}
    refused = given.get("refused", ())
    return MatrixPlan(
        settings={"models": sorted(lengths)},
        sha256="ab" * 32,
        seed=1,
        rounds=rounds,
        processes=given.get("processes", "fresh"),
        configurations=configurations,
        refused=tuple(RefusedCombination(configuration=refusal, reason=reason) for refusal, reason in refused),
        batches=tuple(given.get("batches", (1, 8))),
        lengths=lengths,
        baseline="torch/eager",
        min_cosine=0.99,
        min_top1=0.98,
    )


def per_item(speeds: dict[str, float]) -> Latency:
    """10 ms per item over the speed of the engine."""
    return lambda configuration, batch, length: (
        10.0 * batch * (length or 64) / 64 / speeds.get(configuration.engine, 1.0)
    )


def visits(
    asked: MatrixPlan,
    latency: Latency,
    *,
    noise: float = 0.02,
    seed: int = 0,
    conversions: dict[str, Sequence[Conversion]] | None = None,
    load_seconds: Callable[[Configuration], float] = lambda _: 1.0,
    first_call_ms: Callable[[Configuration], float] = lambda _: 50.0,
    change: Callable[[Configuration, int, dict[str, Any]], dict[str, Any]] = lambda _one, _round, fields: fields,
) -> list[Visit]:
    """Every configuration in every round. Rounds share a drift of the machine, and cells have noise of their own."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(asked.rounds):
        drift = random.normal(0.0, 0.05)
        for place in random.permutation(len(asked.configurations)):
            configuration = asked.configurations[place]
            cells = []
            for length in asked.lengths[configuration.model]:
                for batch in asked.batches:
                    factor = float(np.exp(drift + random.normal(0.0, noise)))
                    centre = latency(configuration, batch, length) * 1e6 * factor
                    fields: dict[str, Any] = {
                        "batch": batch,
                        "length": length,
                        "first_call_ns": int(first_call_ms(configuration) * 1e6),
                        "calls_ns": tuple(int(centre * scale) for scale in (1.02, 1.0, 0.99)),
                        "cosine_min": 0.999999,
                        "top1": 1.0,
                        "relative_error": 1e-6,
                        "rss_bytes": 2**30,
                    }
                    cells.append(Measured(**change(configuration, number, fields)))
            made.append(
                Visit(
                    round=number,
                    configuration=int(place),
                    started_at="2026-11-24T03:00:00Z",
                    load_seconds=load_seconds(configuration),
                    conversions=tuple((conversions or {}).get(configuration.engine, ())),
                    description={"kind": configuration.engine, "version": "1.0"},
                    item="image",
                    cells=tuple(cells),
                )
            )
    return made


def disturbed(made: Sequence[Visit], shares: Sequence[float]) -> list[Visit]:
    """The visits while others took these shares of two cores, by configuration."""
    return [
        replace(
            visit,
            machine=MachineLoad(
                total_ns=20_000_000_000,
                steal_ns=0,
                busy_ns=10_000_000_000 + round(shares[visit.configuration] * 20_000_000_000),
                known_ns=10_000_000_000,
                others=("PID 812 ffmpeg, 0.97 cores",),
                runnable=1,
                waited_ns=None,
            ),
        )
        for visit in made
    ]


def matrix(asked: MatrixPlan, latency: Latency, state: RunState | None = FINISHED, **given: Any) -> Matrix:
    return analyse(asked, ENVIRONMENT, visits(asked, latency, **given), state)
