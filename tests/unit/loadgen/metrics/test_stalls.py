"""Stalls of 0.5 s are found in closed loops of one user and of many; latencies that are only broad are not."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.metrics.breakdown import PROMPT_MS, find_stalls
from loadgen.records.run import BlockRecord, Workload
from loadgen.records.samples import SAMPLE_DTYPE
from loadgen.records.store import StoredBlock

WORKLOAD = Workload(
    scenario="concurrent", batch_size=1, concurrency=1, requests=1, seconds=0.0, max_seconds=1.0, rounds=1
)
LENGTHS = np.random.default_rng(3).lognormal(0.0, 0.7, 32)
"""Of 32 texts, each of its own size, relative to the median."""
SIZES = tuple(range(100, 132))
Row = tuple[float, float, int, int]
"""Start and end in ms, user, body."""


def block(rows: Sequence[Row], index: int = 0, sizes: tuple[int, ...] = ()) -> StoredBlock:
    samples = np.zeros(len(rows), dtype=SAMPLE_DTYPE)
    start_ms, end_ms, samples["user"], samples["body"] = np.array(rows, float).reshape(-1, 4).T
    samples["intended_ns"] = samples["send_ns"] = (start_ms * 1e6).astype(int)
    samples["end_ns"] = (end_ms * 1e6).astype(int)
    samples["status"], samples["error"] = 200, -1
    record = BlockRecord(
        index=index, workload="concurrent", round=index, label="a", position=0, started_at="", window_start_ns=0,
        window_end_ns=1, samples="", complete=True, requests=len(rows), items=len(rows), errors=0, error_messages=(),
        generator_cpu_ns=0, server_cpu_ns=None, stages=None, body_payload_bytes=sizes,
    )  # fmt: skip
    return StoredBlock(record, WORKLOAD, samples)


def apart(rng: np.random.Generator, users: int, requests: int, time_ms: Callable[[int], float]) -> list[Row]:
    """Users that do not disturb each other; `time_ms` is that of a body."""
    rows: list[Row] = []
    for user in range(users):
        now_ms = 0.0
        for body in rng.integers(len(SIZES), size=requests // users):
            took_ms = time_ms(int(body))
            rows.append((now_ms, now_ms + took_ms, user, int(body)))
            now_ms += took_ms + 0.3
    return rows


def together(
    rng: np.random.Generator,
    users: int,
    requests: int,
    time_ms: Callable[[np.ndarray], float],
    asleep_ms: Callable[[], float] = lambda: 0.0,
    most: int = 32,
) -> list[Row]:
    """One server that executes what waits, up to `most` requests at once, after it has been asleep."""
    arrivals, rows, free_ms = [(0.0, user) for user in range(users)], list[Row](), 0.0
    while len(rows) < requests:
        start_ms = max(free_ms, arrivals[0][0]) + asleep_ms()
        batch: list[tuple[float, int]] = []
        while arrivals and arrivals[0][0] <= start_ms and len(batch) < most:
            batch.append(heapq.heappop(arrivals))
        bodies = rng.integers(len(SIZES), size=len(batch))
        free_ms = start_ms + time_ms(bodies)
        for (sent_ms, user), body in zip(batch, bodies, strict=True):
            end_ms = free_ms + float(rng.exponential(0.1))
            rows.append((sent_ms, end_ms, user, int(body)))
            heapq.heappush(arrivals, (end_ms + 0.2, user))
    return rows


def alarms(
    make: Callable[[np.random.Generator], list[Row]], trials: int, sizes: tuple[int, ...] = ()
) -> tuple[int, int]:
    """Trials that were judged, and those in which stalls were found; six blocks each."""
    found_stalls = [
        find_stalls([block(make(rng), index, sizes) for index in range(6)])
        for rng in map(np.random.default_rng, range(trials))
    ]
    return sum(stalls is not None for stalls in found_stalls), sum(
        stalls is not None and stalls.stalled > 0 for stalls in found_stalls
    )


BROAD: dict[str, Callable[[np.random.Generator], float]] = {
    "exponential": lambda rng: float(rng.exponential(300.0)),
    "gamma": lambda rng: float(rng.gamma(2.0, 200.0)),
    "log-normal": lambda rng: 150.0 * math.exp(rng.normal(0.0, 0.8)),
    "normal": lambda rng: abs(rng.normal(500.0, 240.0)) + 1.0,
    "heavy tail": lambda rng: 10.0 + 50.0 * rng.pareto(1.2) * (rng.random() < 0.05),
}


@pytest.mark.parametrize("users", [1, 4, 16])
@pytest.mark.parametrize("name", BROAD)
def test_a_broad_latency_is_no_stall(name: str, users: int) -> None:
    judged, alarmed = alarms(lambda rng: apart(rng, users, 160, lambda _: BROAD[name](rng)), 20)
    assert judged > 5
    assert alarmed <= 1


@pytest.mark.parametrize("users", [1, 4])
def test_a_tail_that_does_not_fall_before_its_end_is_the_limit(users: int) -> None:
    """The least favourable case, 5 % by construction: 2 % of the requests take up to 0.6 s more, evenly."""
    _, alarmed = alarms(
        lambda rng: apart(rng, users, 160, lambda _: 10.0 + (rng.random() < 0.02) * rng.uniform(0, 600)), 100
    )
    assert alarmed <= 10


@pytest.mark.parametrize(("users", "scale_ms", "most"), [(1, 250.0, 1), (2, 60.0, 1), (4, 40.0, 4), (8, 20.0, 32)])
def test_long_texts_are_no_stall(users: int, scale_ms: float, most: int) -> None:
    def time_ms(rng: np.random.Generator, bodies: np.ndarray) -> float:
        return scale_ms * float(np.max(LENGTHS[bodies])) * (0.7 + 0.3 * len(bodies)) * math.exp(rng.normal(0.0, 0.1))

    judged, alarmed = alarms(
        lambda rng: together(rng, users, 120, lambda bodies: time_ms(rng, bodies), most=most), 20, SIZES
    )
    assert judged > 15
    assert alarmed <= 2


def test_one_long_text_that_always_takes_half_a_second_is_no_stall() -> None:
    def time_ms(body: int) -> float:
        return 520.0 if body == 0 else 20.0

    make = lambda rng: apart(rng, 1, 160, time_ms)  # noqa: E731
    assert alarms(make, 5, SIZES) == (5, 0)
    assert alarms(make, 5) == (5, 5), "without sizes nothing tells it from a stall"


@pytest.mark.parametrize("users", [1, 2, 4, 6])
@pytest.mark.parametrize("share", [0.06, 0.3, 0.6])
def test_a_sleeping_server_is_found_with_every_number_of_users(users: int, share: float) -> None:
    """All users meet the sleep together, as with a queue policy in Triton."""

    def make(rng: np.random.Generator) -> list[Row]:
        return together(
            rng, users, 120, lambda bodies: 10.0 + 4.0 * len(bodies), lambda: 495.0 * (rng.random() < share)
        )

    judged, alarmed = alarms(make, 20)
    assert alarmed == judged
    assert judged >= 15


def test_one_sleep_of_many_users_is_one_case() -> None:
    """Sixteen users that wait once are no sixteen stalls: any pause of the machine does that."""

    def make(rng: np.random.Generator) -> list[Row]:
        pauses = iter([0.0] * 5 + [500.0])
        return together(rng, 16, 200, lambda _: 20.0, lambda: next(pauses, 0.0))

    blocks = [block(make(np.random.default_rng(index)), index) for index in range(3)]
    for count, stalled in ((1, 0), (2, 0), (3, 48)):
        stalls = find_stalls(blocks[:count])
        assert stalls is not None
        assert stalls.stalled == stalled


@pytest.mark.parametrize(("users", "tolerance"), [(1, 0.02), (4, 0.10)])
def test_the_factor_is_what_the_stalls_cost_in_throughput(users: int, tolerance: float) -> None:
    """Without its sleeps the same server answers that many times as many requests; a sleep also brings the users of
    several batches into one."""

    def run(share: float) -> list[Row]:
        rng = np.random.default_rng(1)
        return together(rng, users, 2000, lambda _: 30.0, lambda: 500.0 * (rng.random() < share))

    asleep, awake = run(0.2), run(0.0)
    stalls = find_stalls([block(asleep)])
    assert stalls is not None
    assert stalls.factor == pytest.approx(asleep[-1][1] / awake[-1][1], rel=tolerance)


def test_a_slow_server_is_not_judged() -> None:
    rows = apart(np.random.default_rng(0), 1, 60, lambda _: PROMPT_MS + 1.0)
    assert find_stalls([block(rows)]) is None
    assert find_stalls([]) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 5_000.0), st.floats(0.01, 2_000.0), st.integers(0, 5), st.integers(0, 40)),
        min_size=1,
        max_size=60,
    ),
    st.lists(st.sampled_from([200, 503, 1014, 500]), min_size=60, max_size=60),
)
def test_any_samples_have_sane_stalls(requests: list[tuple[float, float, int, int]], statuses: list[int]) -> None:
    stored = block([(start, start + took, user, body) for start, took, user, body in requests], sizes=SIZES)
    assert stored.samples is not None
    stored.samples["status"] = statuses[: len(requests)]
    stored.samples["error"] = np.where(stored.samples["status"] == 200, -1, 0)
    stalls = find_stalls([stored])
    if stalls is not None:
        assert 0 <= stalls.refused <= stalls.stalled <= stalls.requests == len(requests)
        assert stalls.factor >= 1.0 or stalls.stalled == 0
        assert math.isfinite(stalls.factor)
        assert stalls.stalled == 0 or stalls.stalled >= 3
