"""A ramp ends at saturation, and the knee is where the curve bends."""

from __future__ import annotations

import pytest

from loadgen.probes.rate_search_analysis import RampRung, is_saturated, knee, next_concurrency


def rungs_of(*measured: tuple[float, float | None]) -> list[RampRung]:
    """Steps with 1, 2, 4 … users."""
    return [
        RampRung(concurrency=2**step, throughput_per_s=throughput, p50_ms=p50, p99_ms=None)
        for step, (throughput, p50) in enumerate(measured)
    ]


def climb(capacity_per_s: float, service_ms: float, most: int = 256, wobble: float = 0.0) -> list[RampRung]:
    """A server of this capacity that answers one user in `service_ms`: Little's law on both sides."""
    rungs: list[RampRung] = []
    while (users := next_concurrency(rungs, most)) is not None:
        throughput = min(users * 1000.0 / service_ms, capacity_per_s) * (1.0 + (wobble if len(rungs) % 2 else -wobble))
        p50_ms = users * 1000.0 / throughput
        rungs.append(RampRung(concurrency=users, throughput_per_s=throughput, p50_ms=p50_ms, p99_ms=None))
    return rungs


@pytest.mark.parametrize(("capacity", "at"), [(100.0, 1), (800.0, 8), (1000.0, 16), (6400.0, 64)])
def test_the_knee_of_a_known_server(capacity: float, at: int) -> None:
    rungs = climb(capacity, 10.0)
    bend = knee(rungs)
    assert bend is not None
    assert is_saturated(rungs)
    assert bend.concurrency == at
    assert bend.throughput_per_s == pytest.approx(capacity)
    assert rungs[-1].concurrency == 4 * at


def test_noise_below_the_gain_changes_nothing() -> None:
    rungs = climb(800.0, 10.0, wobble=0.02)
    bend = knee(rungs)
    assert bend is not None
    assert (bend.concurrency, rungs[-1].concurrency) == (8, 32)


def test_one_dip_does_not_end_the_climb() -> None:
    assert next_concurrency(rungs_of((100.0, 10.0), (98.0, 20.0), (400.0, 10.0)), 64) == 8


def test_a_ramp_too_short_is_not_saturated() -> None:
    rungs = climb(1e6, 10.0, most=12)
    assert [rung.concurrency for rung in rungs] == [1, 2, 4, 8, 12]
    assert not is_saturated(rungs)


def test_no_gain_without_more_latency_is_no_saturation() -> None:
    """A generator that cannot send faster looks like that: the server's latency stays."""
    assert not is_saturated(rungs_of(*[(100.0, 10.0)] * 7))
    assert is_saturated(rungs_of(*[(100.0, None)] * 3))


def test_no_rungs() -> None:
    assert knee(()) is None
    assert not is_saturated(())
    only = RampRung(concurrency=1, throughput_per_s=5.0, p50_ms=None, p99_ms=None)
    assert knee([only]) == only
