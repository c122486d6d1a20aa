"""When a block ends, with a clock that a test moves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from loadgen.client.traffic import FAILURES_IN_A_ROW, Counts, LoadWindow, counts_bytes, shared_counts

SECOND = 1_000_000_000


def window(requests: int = 5, seconds: float = 2.0, max_seconds: float = 10.0) -> LoadWindow:
    made = LoadWindow(requests, seconds, max_seconds)
    made.start(100 * SECOND)
    return made


def answer_all(load: LoadWindow) -> None:
    for _ in range(load.claimed):
        load.answered(good=True, claim="counted")


def test_a_fast_server_is_bound_by_the_seconds() -> None:
    load = window()
    assert all(load.claim(100 * SECOND + i) == "counted" for i in range(1000))
    assert load.claim(102 * SECOND - 1) == "counted"
    answer_all(load)
    assert load.claim(102 * SECOND) is None
    assert load.claimed == 1001


def test_a_slow_server_is_bound_by_the_requests() -> None:
    load = window()
    assert [load.claim((101 + 2 * i) * SECOND) for i in range(5)] == ["counted"] * 5  # the fifth at 9 s
    answer_all(load)
    assert load.claim(int(109.5 * SECOND)) is None


def test_the_most_seconds_bind_in_any_case() -> None:
    load = window()
    assert load.claim(101 * SECOND) == "counted"
    answer_all(load)
    assert load.claim(110 * SECOND) is None
    assert load.cut_reason is None


def test_users_go_on_until_every_counted_request_is_answered() -> None:
    """Two users; one has its last counted request under way when the time is up."""
    load = window(requests=1)
    assert [load.claim(100 * SECOND), load.claim(int(101.9 * SECOND))] == ["counted"] * 2
    load.answered(good=True, claim="counted")
    assert [load.claim(102 * SECOND), load.claim(int(102.5 * SECOND))] == ["cool-down"] * 2
    load.answered(good=True, claim="cool-down")
    assert load.claim(103 * SECOND) == "cool-down"
    load.answered(good=True, claim="counted")
    assert load.claim(int(103.1 * SECOND)) is None
    assert load.claimed == 2


def test_a_request_that_is_never_answered_does_not_keep_the_load_up_for_ever() -> None:
    load = window(requests=1)
    assert load.claim(100 * SECOND) == "counted"
    assert load.claim(102 * SECOND) == "cool-down"
    assert load.claim(104 * SECOND) is None


def test_a_cut_ends_it_with_the_first_reason() -> None:
    load = window()
    load.cut("the first")
    load.cut("the second")
    assert not load.claim(100 * SECOND)
    assert load.cut_reason == "the first"


def test_only_failures_without_a_good_answer_between_them_cut_it() -> None:
    load = window()
    for i in range(3 * FAILURES_IN_A_ROW):
        load.answered(good=i % 50 == 0)
    assert load.cut_reason is None
    for _ in range(FAILURES_IN_A_ROW):
        load.answered(good=False)
    assert load.cut_reason == f"{FAILURES_IN_A_ROW} requests in a row failed"


def test_a_latency_bound_ends_it_when_too_many_were_late() -> None:
    window = LoadWindow(100, 0.0, 60.0, latency_bound_ns=50, late_allowed=2)
    window.start(0)
    for good, latency_ns in ((True, 50), (True, 51), (False, 1), (True, 10)):
        window.answered(good, latency_ns)
    assert (window.late, window.cut_reason) == (2, None)
    window.answered(True, 51)
    assert (window.late, window.cut_reason) == (3, "more than 2 requests were late")


def test_without_a_bound_nothing_is_late() -> None:
    window = LoadWindow(100, 0.0, 60.0)
    window.start(0)
    window.answered(False, 10**12)
    assert (window.late, window.cut_reason) == (0, None)


@pytest.fixture
def counts() -> Iterator[tuple[Counts, Counts]]:
    """The same memory as two processes map it."""
    descriptor = os.memfd_create("counts")
    os.ftruncate(descriptor, counts_bytes(2))
    yield shared_counts(descriptor), shared_counts(descriptor)
    os.close(descriptor)


def windows(
    counts: tuple[Counts, Counts], requests: int = 1, seconds: float = 2.0, **bound: int
) -> tuple[LoadWindow, LoadWindow]:
    first, second = (
        LoadWindow(requests, seconds, 10.0, counts=mapped, part=part, **bound) for part, mapped in enumerate(counts)
    )
    first.start(100 * SECOND)
    second.start(100 * SECOND)
    return first, second


def test_a_process_goes_on_until_the_counted_requests_of_the_others_are_answered(counts: tuple[Counts, Counts]) -> None:
    """One user each: before, the first process stopped as soon as its own request was answered."""
    first, second = windows(counts)
    assert [first.claim(100 * SECOND), second.claim(100 * SECOND)] == ["counted"] * 2
    first.answered(good=True, claim="counted")
    assert first.claim(102 * SECOND) == "cool-down"
    first.answered(good=True, claim="cool-down")
    assert first.claim(int(102.5 * SECOND)) == "cool-down"
    second.answered(good=True, claim="counted")
    assert [first.claim(103 * SECOND), second.claim(103 * SECOND)] == [None, None]
    assert (first.claimed, second.claimed) == (1, 1)


def test_the_longest_cool_down_counts_from_the_same_moment_in_every_process(counts: tuple[Counts, Counts]) -> None:
    first, second = windows(counts)
    assert [first.claim(100 * SECOND), second.claim(100 * SECOND)] == ["counted"] * 2
    first.answered(good=True, claim="counted")
    assert first.claim(102 * SECOND) == "cool-down", "it has begun, and may last until 104 s"
    assert second.claim(int(103.9 * SECOND)) == "cool-down"
    assert [first.claim(104 * SECOND), second.claim(104 * SECOND)] == [None, None]


def test_the_requests_are_those_of_all_processes(counts: tuple[Counts, Counts]) -> None:
    """A process with fast answers sends more of them, as a fast user among the users of one process does."""
    first, second = windows(counts, requests=10, seconds=0.0)
    assert all(first.claim(100 * SECOND) == "counted" for _ in range(7))
    assert all(second.claim(100 * SECOND) == "counted" for _ in range(3))
    answer_all(first)
    answer_all(second)
    assert [first.claim(100 * SECOND + 1), second.claim(100 * SECOND + 1)] == [None, None]


def test_late_requests_are_those_of_all_processes(counts: tuple[Counts, Counts]) -> None:
    first, second = windows(counts, latency_bound_ns=50, late_allowed=1)
    first.answered(True, 51)
    assert first.cut_reason is None
    second.answered(True, 51)
    assert second.cut_reason == "more than 1 requests were late"
    assert (first.late, second.late) == (1, 1)
