"""When batches start and how large they are, against a made-up engine: no thread and no clock, so nothing is left to
chance but what a test draws itself."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from servers.native.engine.batcher import BatchFormer

MS = 1_000_000
MOST = 64
MAX_DELAY_NS = 5 * MS


def power_of_two(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


@dataclass
class Batch:
    """What one batch was.

    `idle_ns` is how long its oldest row waited while nothing was executed, `early_ns` how long before the end of the
    batch before it started.
    """

    start_ns: int
    rows: int
    bucket: int
    idle_ns: int
    early_ns: int


@dataclass
class Simulation:
    """Requests of one row before an engine that takes `fixed_ns` and `row_ns` for each row of the bucket."""

    flights: int = 2
    fixed_ns: int = 1 * MS
    row_ns: int = MS // 10
    max_delay_ns: int = MAX_DELAY_NS
    bucket_of: Callable[[int], int] = power_of_two
    turn_ns: int = 1
    """Requests are received only so often."""
    batches: list[Batch] = field(default_factory=list)
    answered: int = 0

    def __post_init__(self) -> None:
        self.former = BatchFormer(MOST, self.max_delay_ns, self.bucket_of)
        self._events: list[tuple[int, int, str, int]] = []
        self._order = itertools.count()
        self._waiting: deque[tuple[int, int]] = deque()  # when it came, and whose it is; -1: nobody asks again
        self._unseen: deque[int] = deque()
        self._flying: deque[list[int]] = deque()
        self._end_ns = 0  # of what has been started

    def execution_ns(self, rows: int) -> int:
        return self.fixed_ns + self.row_ns * self.bucket_of(rows)

    @property
    def best_rows_per_s(self) -> float:
        return MOST / self.execution_ns(MOST) * 1e9

    def add(self, at_ns: int, event: str, value: int = 0) -> None:
        if event == "ask":
            at_ns = -(-at_ns // self.turn_ns) * self.turn_ns
        heapq.heappush(self._events, (at_ns, next(self._order), event, value))

    def closed_loop(self, clients: int, until_ns: int, pause_ns: Callable[[], int], from_ns: int = 0) -> None:
        """So many clients, each of which asks again some time after its answer."""
        for client in range(clients):
            self.add(from_ns + pause_ns(), "ask", client)
        self._run(until_ns, pause_ns)

    def open_loop(self, arrivals_ns: Iterator[int], until_ns: int) -> None:
        for at_ns in itertools.takewhile(lambda at_ns: at_ns < until_ns, arrivals_ns):
            self.add(at_ns, "ask", -1)
        self._run(until_ns, lambda: 0)

    def _run(self, until_ns: int, pause_ns: Callable[[], int]) -> None:
        """As the batcher does: it asks again with every request and after every batch."""
        while self._events and self._events[0][0] < until_ns:
            now_ns, _, event, client = heapq.heappop(self._events)
            if event == "ask":
                self._waiting.append((now_ns, client))
                self._unseen.append(now_ns)
            elif event == "finish":
                self.former.finished(now_ns)
                for client in self._flying.popleft():
                    self.answered += 1
                    if client >= 0:
                        self.add(now_ns + pause_ns(), "ask", client)
            if self.flights > 1 or not self._flying:  # else the batcher's only thread is executing
                while self._unseen:
                    self.former.arrived(self._unseen.popleft(), 1)
            if not self._events or self._events[0][0] > now_ns:
                self._start(now_ns)
        self._events.clear()
        self._waiting.clear()
        while self._flying:
            self._flying.popleft()
            self.former.finished(self._end_ns)

    def _start(self, now_ns: int) -> None:
        while self._waiting and len(self.former._running) < self.flights:
            rows = min(len(self._waiting), MOST)
            wait_ns = self.former.wait_ns(now_ns, rows, self._waiting[0][0])
            if wait_ns:
                self.add(now_ns + wait_ns, "look")
                return
            rows = self.former.rows_to_take(rows)
            taken = [self._waiting.popleft() for _ in range(rows)]
            idle_ns = max(0, now_ns - max(taken[0][0], self._end_ns))
            early_ns = max(0, self._end_ns - now_ns)
            self.batches.append(Batch(now_ns, rows, self.bucket_of(rows), idle_ns, early_ns))
            self._flying.append([client for _, client in taken])
            self.former.started(now_ns, rows)
            self._end_ns = max(self._end_ns, now_ns) + self.execution_ns(rows)
            self.add(self._end_ns, "finish")

    def settled(self) -> list[Batch]:
        """The batches after the first half of the time."""
        middle_ns = self.batches[-1].start_ns / 2
        return [batch for batch in self.batches if batch.start_ns > middle_ns]

    def settled_rows_per_s(self) -> float:
        batches = self.settled()
        seconds = (batches[-1].start_ns - batches[0].start_ns) / 1e9
        return sum(batch.rows for batch in batches[:-1]) / seconds


def pauses(mean_ns: int, seed: int = 0, same: float = 0.5) -> Callable[[], int]:
    """A client's own time between answer and request: at least the share `same` of the mean, the rest exponential."""
    random = np.random.default_rng(seed)
    return lambda: int(mean_ns * same) + int(random.exponential(mean_ns * (1.0 - same)))


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("pause_ns", [MS // 20, MS // 2, 5 * MS, 50 * MS])
def test_a_client_alone_never_waits(flights: int, pause_ns: int) -> None:
    simulation = Simulation(flights)
    simulation.closed_loop(1, 2000 * MS, pauses(pause_ns))
    assert len(simulation.batches) > 10
    assert {batch.idle_ns for batch in simulation.batches} == {0}


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("pause_ns", [MS // 20, MS // 2, 5 * MS])
def test_two_clients_do_not_wait_for_each_other(flights: int, pause_ns: int) -> None:
    simulation = Simulation(flights)
    simulation.closed_loop(2, 2000 * MS, pauses(pause_ns))
    assert sum(batch.idle_ns for batch in simulation.batches) == 0


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("pause_ns", [MS // 20, MS // 5])
def test_a_full_house_of_closed_loops_has_nearly_the_throughput_of_full_batches(flights: int, pause_ns: int) -> None:
    simulation = Simulation(flights)
    simulation.closed_loop(MOST, 2000 * MS, pauses(pause_ns))
    batches = simulation.settled()
    assert simulation.settled_rows_per_s() > 0.9 * simulation.best_rows_per_s
    assert sum(batch.rows for batch in batches) > 0.9 * sum(batch.bucket for batch in batches)


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("clients", [100, 128, 200])
def test_more_clients_than_a_batch_holds_saturate_the_engine(flights: int, clients: int) -> None:
    simulation = Simulation(flights)
    simulation.closed_loop(clients, 2000 * MS, pauses(MS // 3))
    batches = simulation.settled()
    assert simulation.settled_rows_per_s() > 0.9 * simulation.best_rows_per_s
    assert sum(batch.rows for batch in batches) > 0.9 * sum(batch.bucket for batch in batches)


def poisson(rate_per_s: float, seed: int = 0) -> Iterator[int]:
    random = np.random.default_rng(seed)
    at_ns = 0.0
    while True:
        at_ns += random.exponential(1e9 / rate_per_s)
        yield int(at_ns)


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.8, 1.5])
def test_nothing_waits_longer_than_it_may_while_the_engine_is_idle(flights: int, share: float) -> None:
    simulation = Simulation(flights)
    simulation.open_loop(poisson(share * simulation.best_rows_per_s), 2000 * MS)
    assert max(batch.idle_ns for batch in simulation.batches) <= MAX_DELAY_NS
    assert simulation.answered / 2 > 0.8 * min(share, 1) * simulation.best_rows_per_s  # in 2 s


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4, 0.8])
def test_random_arrivals_are_not_kept_waiting(share: float) -> None:
    """They come no faster after a batch than before it, so a request that waits for others only loses."""
    simulation = Simulation()
    simulation.open_loop(poisson(share * simulation.best_rows_per_s), 2000 * MS)
    waited = sum(batch.idle_ns > 0 for batch in simulation.batches)
    assert waited < 0.1 * len(simulation.batches)


@pytest.mark.parametrize("clients", [32, MOST])
@pytest.mark.parametrize("flights", [1, 2])
def test_nothing_waits_for_clients_that_take_longer_to_ask_again_than_waiting_saves(flights: int, clients: int) -> None:
    simulation = Simulation(flights, fixed_ns=MS // 3, row_ns=MS // 70, turn_ns=MS // 5)
    simulation.closed_loop(clients, 500 * MS, pauses(MS // 2))
    waited = sum(batch.idle_ns > 0 for batch in simulation.settled())
    assert waited < 0.05 * len(simulation.settled())


def test_a_batch_that_takes_long_to_start_starts_earlier() -> None:
    waits = []
    for took_ns in (0, MS // 5):
        former = BatchFormer(8, 0, power_of_two)
        for start_ns in range(0, 100 * MS, MS):
            former.started(start_ns, 4, took_ns)
            former.finished(start_ns + MS)
        former.started(100 * MS, 4, took_ns)
        waits.append(former.wait_ns(100 * MS, 4, 100 * MS))
    assert waits[0] - waits[1] == pytest.approx(MS // 5, rel=0.01)


def test_without_a_delay_nothing_waits_for_an_idle_engine() -> None:
    simulation = Simulation(max_delay_ns=0)
    simulation.closed_loop(MOST, 500 * MS, pauses(MS // 3))
    assert {batch.idle_ns for batch in simulation.batches} == {0}


def test_a_client_that_is_left_alone_soon_does_not_wait() -> None:
    simulation = Simulation()
    simulation.closed_loop(MOST, 1000 * MS, pauses(MS // 3))
    before = len(simulation.batches)
    simulation.closed_loop(1, 2000 * MS, pauses(MS // 3), from_ns=1000 * MS)
    alone = simulation.batches[before:]
    assert len(alone) > 300
    assert {batch.idle_ns for batch in alone[35:]} == {0}
    assert max(batch.idle_ns for batch in alone) <= MAX_DELAY_NS


def test_while_one_batch_is_executed_the_next_starts_just_before_its_end() -> None:
    """Not at once: those who come until then would miss it."""
    simulation = Simulation()
    simulation.open_loop(poisson(0.6 * simulation.best_rows_per_s), 1000 * MS)
    early = [batch.early_ns for batch in simulation.settled()]
    assert 0 < np.median(early) < MS / 4


def measured(times_ns: dict[int, int]) -> BatchFormer:
    """One that has seen each of these buckets once."""
    former = BatchFormer(max(times_ns), 0, lambda rows: next(bucket for bucket in sorted(times_ns) if bucket >= rows))
    now_ns = 0
    for bucket, took_ns in times_ns.items():
        former.started(now_ns, bucket)
        now_ns += took_ns
        former.finished(now_ns)
    return former


def test_a_full_bucket_is_taken_instead_of_a_padded_one_only_if_it_executes_more_rows_per_second() -> None:
    by_row = measured({8: 8 * MS, 16: 16 * MS, 32: 32 * MS})
    assert [by_row.rows_to_take(rows) for rows in (8, 17, 24, 31, 32)] == [8, 16, 16, 16, 32]
    by_batch = measured({8: 98 * MS, 16: 99 * MS, 32: 100 * MS})
    assert [by_batch.rows_to_take(rows) for rows in (9, 17, 24, 31, 32)] == [9, 17, 24, 31, 32]
    half = measured({16: 16 * MS, 32: 24 * MS})
    assert [half.rows_to_take(rows) for rows in (23, 24, 25)] == [16, 24, 25]


def test_before_anything_is_measured_all_rows_are_taken() -> None:
    assert BatchFormer(8, 0, power_of_two).rows_to_take(5) == 5
    assert BatchFormer(8, 0, power_of_two).rows_to_take(9) == 8
