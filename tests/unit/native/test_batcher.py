"""The batcher's rules, with real threads and an engine that stops where a test wants it to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.contract.errors import InternalError, InvalidRequestError
from servers.native.errors import QueueFullError, RequestExpiredError, ShuttingDownError


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


@pytest.mark.parametrize("harness", [{"delay_us": 5_000_000, "max_batch_size": 4}], indirect=True)
def test_a_batch_starts_as_soon_as_it_is_full(harness):
    harness.engine.gate.set()
    entries = [harness.submit([value]) for value in range(4)]
    assert [harness.answer(entry) for entry in entries] == [[0], [1], [2], [3]]  # long before 5 s, or `answer` fails
    assert harness.sizes() == [4]


@pytest.mark.parametrize("harness", [{"delay_us": 200_000}], indirect=True)
def test_the_oldest_waits_for_others_and_then_no_longer(harness):
    harness.engine.gate.set()
    entries = [harness.submit([1]), harness.submit([2])]
    assert [harness.answer(entry) for entry in entries] == [[1], [2]]
    assert harness.sizes() == [2]
    waited_ns = harness.statistics.snapshot().stages["queue"]["ns"] / 2
    assert 150e6 < waited_ns < 5e9


@pytest.mark.parametrize("harness", [{"queue_size": 2}], indirect=True)
def test_a_full_queue_refuses_at_once_and_recovers(harness):
    harness.occupy()
    entries = [harness.submit([1]), harness.submit([2])]
    with pytest.raises(QueueFullError, match="maximum queue size of 2"):
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
    with pytest.raises(RequestExpiredError):
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
    assert harness.broken.acquire(timeout=10)
    assert harness.batcher.stop(10)  # what else there was to tell has been told
    assert not harness.broken.acquire(blocking=False)


def test_stop_executes_what_is_queued_and_refuses_the_rest(harness):
    harness.occupy()
    entries = [harness.submit([value] * 5) for value in (1, 2, 3)]
    assert not harness.batcher.stop(0)
    with pytest.raises(ShuttingDownError):
        harness.submit([9])
    harness.engine.gate.set()
    assert [harness.answer(entry) for entry in entries] == [[1] * 5, [2] * 5, [3] * 5]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=40), st.sampled_from([0, 500]))
def test_whatever_the_sizes_every_request_gets_its_own_rows(harness_type, requests, delay_us):
    harness = harness_type(delay_us=delay_us)
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
    executed = np.concatenate([batch[:, 0] for batch in harness.engine.batches] or [np.empty(0)]).tolist()
    assert executed == [value for _, values, withdrawn in sent if not withdrawn for value in values]
    assert max(harness.sizes(), default=0) <= 8
    assert harness.batcher.waiting == 0


def test_a_merged_batch_is_assembled_in_the_engines_own_memory(start_harness):
    harness = start_harness(own_memory=True)
    first = harness.occupy()
    merged = [harness.submit([1]), harness.submit([2, 3])]
    harness.engine.gate.set()
    assert [harness.answer(entry) for entry in (first, *merged)] == [[0], [1], [2, 3]]
    alone, together = harness.engine.given
    assert not np.shares_memory(alone, harness.engine.memory)  # handed on as it came
    assert together.ctypes.data == harness.engine.memory.ctypes.data
    assert harness.sizes() == [1, 3]


class Window:
    """Shared memory that can be fetched, or is gone."""

    on_device = True

    def __init__(self, error=None):
        self.error = error

    def fetch(self):
        if self.error is not None:
            raise self.error


def test_a_request_whose_memory_is_gone_leaves_its_place_to_the_next(harness):
    harness.occupy()
    lost = harness.submit([1], windows=[Window(InvalidRequestError("gone"))])
    kept = harness.submit([2], windows=[Window()])
    harness.engine.gate.set()
    with pytest.raises(InvalidRequestError, match="gone"):
        harness.answer(lost)
    assert harness.answer(kept) == [2]
    assert harness.sizes() == [1, 1]
