"""The climb ends at saturation, and the knee is where the curve bends."""

from __future__ import annotations

import pytest

from loadgen.studies.rate_search.records import RampRung
from loadgen.studies.rate_search.search import ConcurrencyLadder, knee


def climb(capacity_per_s: float, service_ms: float, most: int = 256, wobble: float = 0.0) -> ConcurrencyLadder:
    """A server of so many images a second that answers one user in `service_ms`: Little's law on both sides."""
    ladder = ConcurrencyLadder(most)
    while (users := ladder.next_concurrency) is not None:
        throughput = min(users * 1000.0 / service_ms, capacity_per_s)
        throughput *= 1.0 + (wobble if len(ladder.rungs) % 2 else -wobble)
        ladder.record(throughput, users * 1000.0 / throughput)
    return ladder


@pytest.mark.parametrize(("capacity", "at"), [(100.0, 1), (800.0, 8), (1000.0, 16), (6400.0, 64)])
def test_the_knee_of_a_known_server(capacity: float, at: int) -> None:
    ladder = climb(capacity, 10.0)
    found = knee(ladder.rungs)
    assert found is not None
    assert ladder.saturated
    assert found.concurrency == at
    assert found.throughput_per_s == pytest.approx(capacity)
    assert ladder.rungs[-1].concurrency == 4 * at


def test_noise_below_the_gain_changes_nothing() -> None:
    ladder = climb(800.0, 10.0, wobble=0.02)
    found = knee(ladder.rungs)
    assert found is not None
    assert (found.concurrency, ladder.rungs[-1].concurrency) == (8, 32)


def test_one_dip_does_not_end_the_climb() -> None:
    ladder = ConcurrencyLadder(64)
    for throughput, p50 in ((100.0, 10.0), (98.0, 20.0), (400.0, 10.0)):
        ladder.record(throughput, p50)
    assert ladder.next_concurrency == 8


def test_a_ladder_too_short_is_not_saturated() -> None:
    ladder = climb(1e6, 10.0, most=12)
    assert [rung.concurrency for rung in ladder.rungs] == [1, 2, 4, 8, 12]
    assert not ladder.saturated
    with pytest.raises(ValueError, match="ended"):
        ladder.record(1.0, 1.0)


def test_no_gain_without_more_latency_is_no_saturation() -> None:
    """A generator that cannot send faster looks like that: the server's latency stays."""
    ladder = ConcurrencyLadder(64)
    for _ in range(7):
        ladder.record(100.0, 10.0)
    assert not ladder.saturated


def test_no_rungs() -> None:
    assert knee(()) is None
    only = RampRung(concurrency=1, throughput_per_s=5.0, p50_ms=None, p99_ms=None)
    assert knee([only]) == only
    with pytest.raises(ValueError, match="no rung"):
        ConcurrencyLadder(0)
