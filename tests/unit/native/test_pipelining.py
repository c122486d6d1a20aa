"""Two batches under way at once: that they overlap, keep apart, and account for each moment once."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.contract.errors import InternalError, InvalidRequestError
from servers.native.batcher import batch_slots, pipeline_in_use
from servers.native.errors import QueueFullError, RequestExpiredError


def wait_until(condition, what):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


class Window:
    """Shared memory that is fetched when it is told to, or is gone."""

    on_device = True

    def __init__(self, error=None):
        self.fetched = threading.Event()
        self.error = error

    def fetch(self):
        self.fetched.set()
        if self.error is not None:
            raise self.error


@pytest.fixture
def harness(start_harness):
    return start_harness(pipelined=True)


def test_a_full_batch_is_submitted_while_another_is_executed(harness):
    first = harness.occupy()
    full = harness.submit([1] * 8)
    assert harness.engine.staged.acquire(timeout=10)
    assert harness.engine.staged.acquire(timeout=10)
    assert harness.engine.events == [("submitted", 1), ("submitted", 8)]  # and the gate is still closed
    assert harness.engine.in_flight == [1, 8]
    harness.engine.gate.set()
    assert [harness.answer(first), harness.answer(full)] == [[0], [1] * 8]
    assert harness.engine.events[2:] == [("collected", 1), ("collected", 8)]


def test_a_batch_that_is_not_full_is_gathered_meanwhile_and_stays_open(harness):
    harness.occupy()
    entries = [harness.submit([value]) for value in (1, 2)]
    wait_until(lambda: harness.engine.memory[1][1, 0] == 2, "both are in the other slot's memory")
    entries.append(harness.submit([3, 4]))
    wait_until(lambda: harness.engine.memory[1][3, 0] == 4, "the third as well")
    assert harness.engine.events == [("submitted", 1)]
    assert harness.batcher.pending == 3  # they may still be withdrawn, and count as waiting
    harness.engine.gate.set()
    assert [harness.answer(entry) for entry in entries] == [[1], [2], [3, 4]]
    assert harness.sizes() == [1, 4]


def test_rows_of_those_who_left_meanwhile_are_not_executed(harness):
    harness.occupy()
    entries = [harness.submit([value] * 2) for value in (1, 2, 3)]
    expiring = harness.submit([4])
    wait_until(lambda: harness.engine.memory[1][6, 0] == 4, "all are gathered")
    assert harness.batcher.withdraw(entries[1])
    expiring.deadline_ns = time.perf_counter_ns()
    harness.engine.gate.set()
    assert harness.answer(entries[0]) == [1, 1]
    assert harness.answer(entries[2]) == [3, 3]
    with pytest.raises(RequestExpiredError):
        harness.answer(expiring)
    assert not entries[1].token.is_set()
    assert [batch[:, 0].tolist() for batch in harness.engine.batches] == [[0], [1, 1, 3, 3]]
    assert harness.batcher.pending == 0


def test_a_batch_that_everybody_left_is_not_submitted(harness):
    harness.occupy()
    left = harness.submit([1])
    wait_until(lambda: harness.engine.memory[1][0, 0] == 1, "it is gathered")
    assert harness.batcher.withdraw(left)
    harness.engine.gate.set()
    assert harness.answer(harness.submit([2])) == [2]
    assert harness.sizes() == [1, 1]


def test_with_both_slots_in_flight_requests_wait_in_the_bounded_queue(start_harness):
    harness = start_harness(pipelined=True, queue_size=2)
    harness.occupy()
    full = harness.submit([1] * 8)
    wait_until(lambda: harness.engine.in_flight == [1, 8], "both slots are in flight")
    entries = [harness.submit([2]), harness.submit([3])]
    with pytest.raises(QueueFullError):
        harness.submit([4])
    assert harness.batcher.withdraw(entries[0])
    harness.engine.gate.set()
    assert harness.answer(full) == [1] * 8
    assert harness.answer(entries[1]) == [3]
    assert harness.sizes() == [1, 8, 1]


@pytest.mark.parametrize("bad", [666, 667, 668])  # fails in its execution, returns too few rows, cannot be submitted
def test_a_batch_that_fails_beside_another_fails_alone(harness, bad):
    before = harness.submit([1] * 8)
    failing = harness.submit([bad] * 8)
    after = harness.submit([2] * 8)
    harness.engine.gate.set()
    assert harness.answer(before) == [1] * 8
    with pytest.raises(InternalError, match="its log has the cause"):
        harness.answer(failing)
    assert harness.answer(after) == [2] * 8
    assert harness.statistics.snapshot().inference_count == 16


def test_a_request_whose_memory_is_gone_leaves_its_place_to_the_next(harness):
    harness.occupy()
    gone = Window(InvalidRequestError("gone"))
    lost = harness.submit([1], windows=[gone])
    kept = harness.submit([2], windows=[Window()])
    with pytest.raises(InvalidRequestError, match="gone"):
        harness.answer(lost)  # told at once, though the engine is busy
    harness.engine.gate.set()
    assert harness.answer(kept) == [2]
    assert harness.sizes() == [1, 1]


def test_an_input_of_another_shape_fails_alone(harness):
    """NumPy would broadcast it into the slot's rows."""
    harness.engine.gate.set()
    with pytest.raises(InternalError):
        harness.answer(harness.submit([1], width=1))
    assert harness.answer(harness.submit([2])) == [2]


def test_stop_finishes_both_slots_and_the_queue(harness):
    entries = [harness.submit([value] * 8) for value in range(4)]
    wait_until(lambda: harness.engine.in_flight == [8, 8], "both slots are in flight")
    assert not harness.batcher.stop(0)
    harness.engine.gate.set()
    assert [harness.answer(entry) for entry in entries] == [[value] * 8 for value in range(4)]
    harness.stop()
    assert harness.engine.in_flight == [0, 0]


def test_each_moment_of_a_request_is_charged_to_one_stage(harness):
    """Four full batches, two at a time: each request is charged its own time, from its queueing to its answer."""
    start_ns = time.perf_counter_ns()
    entries = [harness.submit([value] * 4) for value in range(8)]
    wait_until(lambda: harness.engine.in_flight == [8, 8], "both slots are in flight")
    held_ns = time.perf_counter_ns()
    wait_until(lambda: time.perf_counter_ns() > held_ns + 30_000_000, "30 ms in which the first executes")
    harness.engine.gate.set()
    for entry in entries:
        harness.answer(entry)
    harness.stop()
    wall_ns = time.perf_counter_ns() - start_ns
    snapshot = harness.statistics.snapshot()
    executed_ns = sum(times["compute_infer"]["ns"] for times in snapshot.batches.values())
    assert 30_000_000 <= executed_ns <= wall_ns  # of two batches in flight only one is executed at a time
    charged_ns = snapshot.stages["queue"]["ns"] + snapshot.stages["compute"]["ns"]
    assert snapshot.stages["queue"]["count"] == len(entries)
    assert charged_ns <= len(entries) * wall_ns
    # The second batch was submitted before those 30 ms and waited for its turn in them.
    assert snapshot.stages["queue"]["ns"] >= 2 * 30_000_000
    # Each request is charged its own copying and the two of a batch its submission: never less than the batches are.
    inputs_ns = sum(times["compute_input"]["ns"] for times in snapshot.batches.values())
    assert 0 < inputs_ns <= snapshot.compute["compute_input"]["ns"]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from(["keep", "keep", "withdraw", "fail"])), max_size=40),
    st.sampled_from([0, 300]),
)
def test_random_mixes_have_the_plain_paths_answers(harness_type, requests, delay_us):
    def answers(*, pipeline):
        harness = harness_type(pipelined=True, pipeline=pipeline, delay_us=delay_us)
        harness.engine.gate.set()
        sent = []
        for number, (rows, fate) in enumerate(requests):
            entry = harness.submit([1000.0 * number + row for row in range(rows)], width=3 if fate == "fail" else 2)
            sent.append(None if fate == "withdraw" and harness.batcher.withdraw(entry) else entry)
        got = []
        for (_, fate), entry in zip(requests, sent, strict=True):
            if entry is None or fate == "withdraw":  # whether it came too late to withdraw is a matter of timing
                got.append(None)
            elif fate == "fail" and pipeline:
                with pytest.raises(InternalError):
                    harness.answer(entry)
                got.append(None)
            else:
                got.append(None if fate == "fail" else harness.answer(entry))
                assert entry.token.wait(10)
        harness.stop()
        assert harness.batcher.pending == 0
        return got

    assert answers(pipeline=True) == answers(pipeline=False)


def test_the_setting_and_one_slot_alone_switch_it_off(start_harness):
    plain = start_harness(pipelined=True, pipeline=False)
    plain.engine.gate.set()
    entries = [plain.submit([value] * 8) for value in range(3)]
    assert [plain.answer(entry) for entry in entries] == [[value] * 8 for value in range(3)]
    assert plain.engine.events == []
    np.testing.assert_array_equal(plain.engine.memory[0], -1)
    assert (batch_slots(plain.engine, wanted=True), batch_slots(plain.engine, wanted=False)) == (2, 1)
    plain.engine.slots = 1
    assert pipeline_in_use(plain.engine, wanted=True) is None
    assert batch_slots(start_harness().engine, wanted=True) is None


def test_without_the_pipeline_a_merged_batch_is_assembled_in_the_engines_first_slot(start_harness):
    plain = start_harness(pipelined=True, pipeline=False)
    first = plain.occupy()
    merged = [plain.submit([1]), plain.submit([2, 3])]
    plain.engine.gate.set()
    assert [plain.answer(entry) for entry in (first, *merged)] == [[0], [1], [2, 3]]
    alone, together = plain.engine.given
    assert not np.shares_memory(alone, plain.engine.memory[0])  # handed on as it came
    assert together.ctypes.data == plain.engine.memory[0].ctypes.data
    assert plain.sizes() == [1, 3]
