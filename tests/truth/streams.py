"""Comparisons of planted streams, over real sockets, from the probes before the load to the verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.checks import Check
from loadgen.records.run import ArmRequest, Experiment, TokenLimits, Workload
from loadgen.verdict.result import Result, analyse
from tests.toy_language_server import toy_process

REFERENCE = (sys.executable, str(Path(__file__).with_name("planted_reference.py")))
PROMPT, TOKENS = 32, 32
CompareStreams = Callable[..., Result]


def users(count: int, requests: int, rounds: int, *, tokens: int = TOKENS) -> Workload:
    """A closed loop."""
    return Workload(
        scenario="single" if count == 1 else "concurrent", batch_size=1, concurrency=count, requests=requests,
        seconds=0.0, max_seconds=30.0, rounds=rounds, prompt_tokens=PROMPT, output_tokens=tokens,
    )  # fmt: skip


def poisson(rate: float, seconds: float, rounds: int, limits: TokenLimits) -> Workload:
    """An open loop."""
    return Workload(
        scenario="open", batch_size=1, concurrency=256, requests=1, seconds=seconds, max_seconds=seconds, rounds=rounds,
        arrivals="poisson", rate_per_s=rate, prompt_tokens=PROMPT, output_tokens=TOKENS, limits=limits,
    )  # fmt: skip


@contextmanager
def planted_streams(arms: Sequence[str]) -> Iterator[list[str]]:
    """Start a toy server per arm with its flags; yields their URLs."""
    with ExitStack() as running:
        yield [running.enter_context(toy_process(f"--luck {luck} {flags}")) for luck, flags in enumerate(arms)]


def compare_streams(out: Path, arms: Sequence[str], *workloads: Workload, **changes: Any) -> Result:
    """One comparison of planted streams; the first is the baseline, a. `changes`: fields of the experiment."""
    with planted_streams(arms) as urls:
        requests = tuple(
            ArmRequest(label=label, target=url, transport="chat" if "--routes chat" in flags else None)
            for label, url, flags in zip("abcdefgh", urls, arms, strict=False)
        )
        run_arms(out, requests, *workloads, **changes)
    return analyse(out)


def run_arms(out: Path, arms: tuple[ArmRequest, ...], *workloads: Workload, **changes: Any) -> None:
    """Run one comparison of planted streams, at URLs or as servers that `planted_reference` starts. `changes`: fields
    of the experiment."""
    fields = {
        "model": "language:planted", "weights": "planted", "payload": "tokens", "transport": "completions",
        "preset": "smoke", "seed": 3, "equivalence_margin": 0.05, "threads": 0, **changes,
    }  # fmt: skip
    run_experiment(Experiment(arms=arms, workloads=workloads, **fields), out, RunProgress(), abserve=REFERENCE)


def value(result: Result, metric: str, label: str, workload: str | None = None) -> float:
    """An arm's figure over all blocks."""
    found = figure(result, metric, label, workload)
    assert found is not None, (metric, label)
    return found


def figure(result: Result, metric: str, label: str, workload: str | None = None) -> float | None:
    """An arm's figure over all blocks; None where it is not measured."""
    from loadgen.metrics.registry import METRICS
    from loadgen.metrics.summaries import figure_of

    (summary, *_) = [s for s in result.summaries if s.label == label and workload in (None, s.workload)]
    return figure_of(summary, METRICS[metric])


def winner_of(result: Result, metric: str, label: str) -> str | None:
    """The winner between an arm and the baseline, if any."""
    return next(c.winner for c in result.comparisons if (c.metric, c.baseline, c.arm) == (metric, "a", label))


def failed(result: Result, check: str) -> Check:
    """The check that must have failed, with its detail."""
    states = {made.detail: made for made in result.checks if made.name == check}
    bad = [made for made in states.values() if made.ok is False]
    assert bad, (check, list(states))
    return bad[0]
