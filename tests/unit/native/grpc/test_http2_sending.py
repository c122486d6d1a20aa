"""What a client's windows and settings let an answer do, and how often each call is looked at."""

from __future__ import annotations

import tracemalloc
from collections import deque
from typing import Any

import pytest

from servers.native.grpc import http2
from servers.native.grpc.call import OutgoingMessages


class WaitingCall:
    """As much of a `Call` as `OutgoingMessages` uses; it counts how often its window is read."""

    headers_sent = True
    trailers: bytes | None = None
    blocked_since = 0.0
    sent_blocked = 0

    def __init__(self, stream: int, window: int) -> None:
        self.stream = stream
        self.stream_bytes = stream.to_bytes(4, "big")
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.reads = 0
        self._window = window

    @property
    def send_window(self) -> int:
        self.reads += 1
        return self._window

    @send_window.setter
    def send_window(self, value: int) -> None:
        self._window = value

    def go_on(self) -> None:
        """Nothing more to answer."""


@pytest.fixture
def written() -> list[bytes]:
    return []


@pytest.fixture
def answers(written) -> OutgoingMessages:
    return OutgoingMessages(written.append, lambda _: None)


def waiting(answers: OutgoingMessages, count: int, window: int) -> list[Any]:
    """Calls with an answer that does not fit, after the connection's window has been used up."""
    calls: list[Any] = [WaitingCall(2 * number + 1, window) for number in range(count)]
    for call in calls:
        answers.send(call, [bytes(100_000)], last=False)
    for call in calls:
        call.reads = 0
    return calls


def test_only_the_last_window_of_a_frame_is_applied_once(answers) -> None:
    calls: list[Any] = [WaitingCall(2 * number + 1, http2.DEFAULT_WINDOW) for number in range(100)]
    sizes = [http2.DEFAULT_WINDOW + number for number in range(1000)]
    answers.set_up([(http2.INITIAL_WINDOW_SIZE, size) for size in sizes], calls)
    assert answers.initial_window == sizes[-1]
    assert {call.send_window for call in calls} == {sizes[-1]}
    assert sum(call.reads for call in calls) <= 3 * len(calls)


def test_a_small_window_of_the_connection_costs_no_look_at_every_call(answers, written) -> None:
    calls = waiting(answers, 100, 10**6)
    written.clear()
    answers.widen(1)
    assert b"".join(written)[-1:] == b"\0"
    assert len(written) == 1
    assert sum(call.reads for call in calls) < 10


def test_calls_without_a_window_of_their_own_are_not_looked_at(answers, written) -> None:
    calls = waiting(answers, 100, 0)
    for _ in range(10):
        answers.widen(1)
    assert sum(call.reads for call in calls) == 0
    written.clear()
    answers.widen_call(calls[7], 5)
    assert [data[5:9] for data in written] == [calls[7].stream_bytes]


def test_new_settings_let_blocked_calls_go_on(answers, written) -> None:
    calls = waiting(answers, 2, 0)
    written.clear()
    answers.set_up([(http2.INITIAL_WINDOW_SIZE, http2.DEFAULT_WINDOW + 20)], calls)
    assert [data[5:9] for data in written] == [call.stream_bytes for call in calls]


@pytest.mark.parametrize("window", [0, 2**30])
def test_a_large_answer_is_held_once_while_it_waits_and_written_in_parts(window: int) -> None:
    """It was copied twice, so answers that nobody read took three times what they count as held."""
    tensor, passed, largest = bytes(2**24), 0, 0

    def write(data: bytes) -> None:
        nonlocal passed, largest
        passed, largest = passed + len(data), max(largest, len(data))

    answers = OutgoingMessages(write, lambda _: None)
    answers.widen(2**30)
    call: Any = WaitingCall(1, window)
    tracemalloc.start()
    answers.send(call, [b"prefix", tensor, b"end"], last=False)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < len(tensor) // 4
    assert largest < len(tensor) // 4
    assert passed >= len(tensor) if window else passed == 0
