"""The batcher's rules, with real threads and an engine that stops where a test wants it to."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.native.engine.batcher import BatchFormer
from servers.native.shared.errors import RefusedError
from servers.protocol.errors import InternalError, InvalidRequestError


@pytest.fixture
def harness(request, start_harness):
    return start_harness(**getattr(request, "param", {}))


def test_queued_requests_are_merged_in_order_and_never_split(harness):
    first = harness.occupy()
    entries = [harness.submit([size] * size) for size in (3, 4, 5, 3, 8, 1)]
    harness.engine.gate.set()
    assert harness.answer(first) == [0]
    for size, entry in zip((3, 4, 5, 3, 8, 1), entries, strict=True):
        assert harness.answer(entry) == [size] * size
    assert harness.sizes() == [1, 7, 8, 8, 1]
    assert harness.calls == [1, 2, 2, 1, 1]


def test_other_item_shapes_are_not_merged(harness):
    harness.occupy()
    entries = [harness.submit([1], width=2), harness.submit([2], width=3), harness.submit([3], width=3)]
    harness.engine.gate.set()
    assert [harness.answer(entry) for entry in entries] == [[1], [2], [3]]
    assert harness.sizes() == [1, 1, 2]


@pytest.mark.parametrize("harness", [{"delay_us": 5_000_000}], indirect=True)
def test_a_request_that_finds_the_engine_idle_starts_at_once(harness):
    harness.engine.gate.set()
    for value in range(5):
        assert harness.answer(harness.submit([value])) == [value]
    assert harness.sizes() == [1] * 5
    assert harness.statistics.snapshot().stages["queue"]["ns"] < 5e9


@pytest.fixture
def patient(monkeypatch):
    """Every batch waits for others as long as it may."""

    def wait_ns(former, now_ns, rows, oldest_ns):
        return 0 if rows >= former._max_rows else max(0, oldest_ns + former._max_delay_ns - now_ns)

    monkeypatch.setattr(BatchFormer, "wait_ns", wait_ns)


@pytest.mark.parametrize("harness", [{"delay_us": 5_000_000, "max_batch_size": 4}], indirect=True)
def test_a_batch_that_waits_starts_as_soon_as_it_is_full(harness, patient):
    harness.engine.gate.set()
    entries = [harness.submit([value]) for value in range(4)]
    assert [harness.answer(entry) for entry in entries] == [[0], [1], [2], [3]]
    assert harness.sizes() == [4]
    assert harness.statistics.snapshot().stages["queue"]["ns"] < 5e9


@pytest.mark.parametrize("harness", [{"delay_us": 200_000}], indirect=True)
def test_a_batch_that_waits_takes_those_who_come_and_then_starts(harness, patient):
    harness.engine.gate.set()
    entries = [harness.submit([1]), harness.submit([2])]
    assert [harness.answer(entry) for entry in entries] == [[1], [2]]
    assert harness.sizes() == [2]
    waited_ns = harness.statistics.snapshot().stages["queue"]["ns"] / 2
    assert 150e6 < waited_ns < 5e9


@pytest.mark.parametrize("harness", [{"delay_us": 5_000_000, "max_batch_size": 4}], indirect=True)
def test_a_batch_that_nobody_else_can_join_does_not_wait(harness, patient):
    harness.engine.gate.set()
    entries = [harness.submit([1]), harness.submit([2], width=3), harness.submit([3] * 4)]
    assert [harness.answer(entry) for entry in entries] == [[1], [2], [3] * 4]
    assert harness.statistics.snapshot().stages["queue"]["ns"] < 5e9


@pytest.mark.parametrize("harness", [{"queue_size": 2}], indirect=True)
def test_a_full_queue_refuses_at_once_and_recovers(harness):
    harness.occupy()
    entries = [harness.submit([1]), harness.submit([2])]
    with pytest.raises(RefusedError, match="maximum queue size of 2"):
        harness.submit([3])
    assert harness.batcher.waiting == 2
    harness.engine.gate.set()
    assert [harness.answer(entry) for entry in entries] == [[1], [2]]
    assert harness.batcher.waiting == 0
    assert harness.answer(harness.submit([4])) == [4]


def test_expired_and_withdrawn_requests_never_reach_the_engine(harness):
    harness.occupy()
    late = harness.submit([1], deadline_ns=1)
    left = harness.submit([2])
    kept = harness.submit([3])
    assert harness.batcher.withdraw(left)
    assert not harness.batcher.withdraw(left)
    harness.engine.gate.set()
    assert harness.answer(kept) == [3]
    with pytest.raises(RefusedError, match="timeout expired"):
        harness.answer(late)
    assert harness.sizes() == [1, 1]
    assert not left.waiter.is_set()
    assert not harness.batcher.withdraw(kept)
    assert harness.batcher.waiting == 0


def test_a_request_that_makes_its_batch_fail_fails_alone(harness):
    harness.occupy()
    entries = [harness.submit([1]), harness.submit([666] * 2), harness.submit([2, 3])]
    harness.engine.gate.set()
    assert harness.answer(entries[0]) == [1]
    assert harness.answer(entries[2]) == [2, 3]
    with pytest.raises(InternalError):
        harness.answer(entries[1])
    assert harness.sizes() == [1, 5, 1, 2, 2]  # together, then each alone
    assert harness.answer(harness.submit([2])) == [2]
    assert harness.statistics.snapshot().inference_count == 5  # failed executions are not counted


def test_an_answer_with_too_few_rows_is_a_failure(harness):
    harness.engine.gate.set()
    with pytest.raises(InternalError):
        harness.answer(harness.submit([667, 667]))


def test_an_engine_that_can_execute_nothing_any_more_is_told_once(harness):
    harness.engine.gate.set()
    with pytest.raises(InternalError):
        harness.answer(harness.submit([666]))
    assert harness.answer(harness.submit([1])) == [1]
    assert harness.engine.checks == 1
    assert not harness.broken.acquire(blocking=False)  # it was the batch
    harness.engine.dead = True
    for _ in range(2):
        with pytest.raises(InternalError):
            harness.answer(harness.submit([666]))
    assert harness.broken.acquire(timeout=60)
    assert harness.batcher.stop(10)  # what else there was to tell has been told
    assert not harness.broken.acquire(blocking=False)


def test_stop_executes_what_is_queued_and_refuses_the_rest(harness):
    harness.occupy()
    entries = [harness.submit([value] * 5) for value in (1, 2, 3)]
    assert not harness.batcher.stop(0)
    with pytest.raises(RefusedError, match="shutting down"):
        harness.submit([9])
    harness.engine.gate.set()
    assert [harness.answer(entry) for entry in entries] == [[1] * 5, [2] * 5, [3] * 5]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([0, 500]),
    st.sampled_from([1, 2]),
)
def test_whatever_the_sizes_every_request_gets_its_own_rows(harness_type, requests, delay_us, flights):
    harness = harness_type(delay_us=delay_us, flights=flights)
    harness.engine.gate.set()
    sent = []
    value = 700.0
    for rows, withdraw in requests:
        values = [value + row for row in range(rows)]
        value += rows
        entry = harness.submit(values)
        sent.append((entry, values, withdraw and harness.batcher.withdraw(entry)))
    for entry, values, withdrawn in sent:
        if not withdrawn:
            assert harness.answer(entry) == values
    harness.stop()
    # Inside a batch the rows of different requests may stand in another order, such as that of their memory.
    executed = [value for batch in harness.engine.batches for value in sorted(batch[:, 0].tolist())]
    assert executed == [value for _, values, withdrawn in sent if not withdrawn for value in values]
    assert max(harness.sizes(), default=0) <= 8
    assert harness.batcher.waiting == 0


class CudaWindow:
    """Memory of another device than the engine's, which can be read or is gone."""

    def __init__(self, value=0.0, error=None):
        self.value = value
        self.error = error

    def on(self, _device):
        return False

    def read(self):
        if self.error is not None:
            raise self.error
        return np.full((1, 2), self.value, np.float32)


def test_a_request_whose_memory_is_gone_leaves_its_place_to_the_next(harness):
    harness.occupy()
    lost = harness.submit([1], window=CudaWindow(error=InvalidRequestError("gone")))
    kept = harness.submit([1], window=CudaWindow(2))
    harness.engine.gate.set()
    with pytest.raises(InvalidRequestError, match="gone"):
        harness.answer(lost)
    assert harness.answer(kept) == [2]
    assert harness.sizes() == [1, 1]


@pytest.mark.parametrize("harness", [{"flights": 2, "max_batch_size": 2}], indirect=True)
def test_an_engine_with_room_for_two_has_the_next_batch_before_the_first_has_ended(harness, monkeypatch):
    started = threading.Semaphore(0)

    def start(requests, _padding=None):
        started.release()
        return lambda: [{"y": request["x"]} for request in requests]

    monkeypatch.setattr(harness.engine, "start", start)
    monkeypatch.setattr(harness.engine, "ready", harness.engine.gate.is_set)
    entries = [harness.submit([value] * 2) for value in (1, 2, 3)]
    for _ in range(2):
        assert started.acquire(timeout=60)
    assert harness.batcher.waiting == 1
    assert not started.acquire(blocking=False)
    harness.engine.gate.set()
    assert [harness.answer(entry) for entry in entries] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("harness", [{"flights": 2, "max_batch_size": 3}], indirect=True)
def test_the_batch_behind_one_that_fails_is_answered_and_then_each_alone(harness):
    first = harness.occupy()
    failing = [harness.submit([666]), harness.submit([1, 2])]
    behind = harness.submit([3] * 3)
    harness.engine.gate.set()
    assert harness.answer(first) == [0]
    assert harness.answer(behind) == [3] * 3
    assert harness.answer(failing[1]) == [1, 2]
    with pytest.raises(InternalError):
        harness.answer(failing[0])
    assert harness.answer(harness.submit([4])) == [4]


@pytest.mark.parametrize("harness", [{"flights": 2, "max_batch_size": 1}], indirect=True)
def test_an_engine_s_thread_that_fails_leaves_no_request_waiting(harness, monkeypatch):
    entries = [harness.occupy(), *(harness.submit([value]) for value in (1, 2, 3))]

    def fail(_finished_ns):
        raise AssertionError("planted: a bug of the server")

    monkeypatch.setattr(harness.batcher._former, "finished", fail)
    harness.engine.gate.set()
    for entry in entries:
        with pytest.raises(InternalError):
            harness.answer(entry)
    assert harness.broken.acquire(timeout=60)
    assert harness.batcher.waiting == 0
    with pytest.raises(RefusedError, match="shutting down"):
        harness.submit([4])


def test_a_request_whose_inputs_cannot_be_read_for_another_reason_fails_alone(harness):
    class CudaWindow:
        """Device memory that there is no host memory for."""

        def on(self, _device: int | None) -> bool:
            return False

        def read(self) -> np.ndarray:
            raise MemoryError

    harness.engine.gate.set()
    with pytest.raises(InternalError):
        harness.answer(harness.submit([0], window=CudaWindow()))
    assert harness.answer(harness.submit([1])) == [1]


def test_values_that_the_engine_cannot_take_are_refused_before_the_batch(harness, monkeypatch):
    """Both checks are made, nothing is executed again, and the engine is not tested."""

    def check(inputs):
        if (inputs["x"] == 5).any():
            raise InvalidRequestError("five")

    monkeypatch.setattr(harness.engine, "check_values", check)
    harness.batcher._checks.append(harness.engine.check_values)
    harness.occupy()
    entries = [harness.submit([value]) for value in (1, 5, 2)]
    harness.engine.gate.set()
    assert [harness.answer(entries[place]) for place in (0, 2)] == [[1], [2]]
    with pytest.raises(InvalidRequestError, match="five"):
        harness.answer(entries[1])
    assert harness.sizes() == [1, 2]
    assert harness.engine.checks == 0


def test_a_shape_that_the_engine_does_not_take_is_no_failure_of_it(harness, monkeypatch):
    start = harness.engine.start

    def refuse(requests, *others):
        if requests[0]["x"].shape[1] == 3:
            raise InvalidRequestError("not prepared")
        return start(requests, *others)

    monkeypatch.setattr(harness.engine, "start", refuse)
    harness.occupy()
    entries = [harness.submit([1], width=3), harness.submit([2], width=3), harness.submit([3])]
    harness.engine.gate.set()
    assert harness.answer(entries[2]) == [3]
    for entry in entries[:2]:
        with pytest.raises(InvalidRequestError, match="not prepared"):
            harness.answer(entry)
    assert harness.engine.checks == 0
