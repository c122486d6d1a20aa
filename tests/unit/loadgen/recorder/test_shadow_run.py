"""The verdict of a shadow on pairs whose times are planted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.client.connection import Address
from loadgen.metrics.comparisons import Outcome
from loadgen.recorder.shadow import PairedRequest, Shadow
from loadgen.recorder.shadow_run import ShadowRun, ShadowStanding
from loadgen.records.run import ArmRequest
from loadgen.records.samples import NS_PER_S
from loadgen.records.store import RunStore

BLOCKS, PAIRS = 10, 12
ARMS = ArmRequest(label="a", target="http://127.0.0.1:1"), ArmRequest(label="b", target="http://127.0.0.1:1")


def verdicts(folder: Path, times: float, seed: int) -> set[Outcome]:
    """Those after each block of a candidate that takes so many times the latency. Both servers feel the same load,
    which lasts for blocks, and each its own noise."""
    rng = np.random.default_rng(seed)
    said: list[ShadowStanding] = []
    failures: list[str] = []
    run = ShadowRun(
        RunStore(folder), ARMS, share=1.0, block_s=1.0, margin=0.05,
        say=said.append, failed=failures.append,
    )  # fmt: skip
    shadow = Shadow(Address("127.0.0.1", 1), None, paired=run.take)
    load = 0.0
    for turn in range(BLOCKS + 1):
        load = 0.7 * load + rng.normal(0, 0.2)
        for number in range(PAIRS):
            sent_ns = run.started_ns + int(turn * NS_PER_S) + number * 1_000_000
            primary, copy = (
                PairedRequest(shadow, "http", "/v1/completions", {}, sent_ns, sent_ns=sent_ns, status=200)
                for _ in range(2)
            )
            for request, factor in ((primary, 1.0), (copy, times)):
                latency_ns = int(20e6 * factor * np.exp(load + rng.normal(0, 0.1)))
                request.first_byte_ns = request.end_ns = sent_ns + latency_ns
            run.take(primary, copy)
    assert run.finish(100)
    assert (failures, len(said)) == ([], BLOCKS)
    return {standing.verdict for standing in said}


@pytest.mark.parametrize(("times", "winner"), [(1.3, "baseline_better"), (0.7, "arm_better")])
def test_a_planted_difference_is_found(times: float, winner: Outcome, tmp_path: Path) -> None:
    assert {winner} <= verdicts(tmp_path / "run", times, 1) <= {winner, "inconclusive"}


def test_equal_servers_have_no_winner_in_19_of_20_runs(tmp_path: Path) -> None:
    wins = [{"baseline_better", "arm_better"} & verdicts(tmp_path / f"run{seed}", 1.0, seed) for seed in range(20)]
    assert sum(map(bool, wins)) <= 1
