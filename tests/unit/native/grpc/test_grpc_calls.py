"""Every error has a status of its own choosing, its sentence fits into the trailers, and headers are not trusted."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import unquote

import grpc
import pytest
from hpack import Decoder

from servers.native.grpc.call import Call, GrpcMessage
from servers.native.grpc.http2 import STATUS_CODES, CallHead, GrpcMethod, read_call_head, shortened, status_of
from servers.native.shared.errors import REFUSALS, RefusedError, failure_reason
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.protocol import errors

METHODS = {b"/s/M": GrpcMethod("M", True, False, 1000)}
HEAD = [(b":method", b"POST"), (b":path", b"/s/M"), (b"content-type", b"application/grpc+proto")]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequestError("x"), "INVALID_ARGUMENT"),
        (errors.NotFoundError("x"), "NOT_FOUND"),
        (errors.TooLargeError("x"), "INVALID_ARGUMENT"),
        (errors.UnavailableError("x"), "UNAVAILABLE"),
        *((RefusedError(reason, "x"), "UNAVAILABLE") for reason in REFUSALS),
        (errors.UnsupportedError("x"), "UNIMPLEMENTED"),
        (errors.InternalError("x"), "INTERNAL"),
        (errors.ContractError("x"), "INTERNAL"),
    ],
)
def test_triton_s_mapping(error, status):
    assert status_of(error).status == status


def test_every_direct_kind_of_error_is_in_the_table():
    """A kind that is forgotten would be answered as the server's own fault."""
    own_fault = {kind for kind in errors.ContractError.__subclasses__() if status_of(kind("x")).status == "INTERNAL"}
    assert {kind.__name__ for kind in own_fault} == {"InternalError"}


def test_the_codes_are_those_of_grpc():
    assert {name: grpc.StatusCode[name].value[0] for name in STATUS_CODES} == STATUS_CODES


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("words", ["short", "é\n% \x7f\0", "€" * 5000])
def test_the_words_arrive_as_they_are_or_shortened(words, alone):
    block = status_of(errors.InvalidRequestError(words)).block(alone=alone)
    fields = {str(name): str(value) for name, value in Decoder().decode(block)}
    assert fields["grpc-status"] == "3"
    assert fields["grpc-message"].isprintable()
    assert unquote(fields["grpc-message"]) == shortened(words)
    assert len(shortened(words)) <= 1000
    assert (":status" in fields) is alone


@pytest.mark.parametrize(
    ("timeout", "expected_ns"),
    [
        ("1H", 3600 * 10**9),
        ("2M", 120 * 10**9),
        ("3S", 3 * 10**9),
        ("4m", 4 * 10**6),
        ("5u", 5000),
        ("99999999n", 99999999),
    ],
)
def test_timeouts_are_read(timeout, expected_ns):
    assert read_call_head([*HEAD, (b"grpc-timeout", timeout.encode())], METHODS).timeout_ns == expected_ns


@pytest.mark.parametrize("timeout", ["", "1", "S", "-1S", "1 S", "123456789S", "1.5S", "1s", "\u0661S"])
def test_timeouts_that_are_none_are_refused(timeout):
    refusal = read_call_head([*HEAD, (b"grpc-timeout", timeout.encode())], METHODS).refusal
    assert refusal is not None
    assert refusal.status == "INTERNAL"


class Answering:
    """Answers a message in `begin`, or when it is told to."""

    def __init__(self, call: Call, at_once: bool) -> None:
        self._call = call
        self._at_once = at_once

    def begin(self) -> None:
        if self._at_once:
            self._call.answered([b"answer"])

    def stop(self, reason: str) -> None:
        """Nothing to stop."""


class Answered:
    """In place of a connection and of the front end: only the first message's answer takes time."""

    settings = NativeSettings()
    waiting_messages = 0

    def __init__(self) -> None:
        self._memory = RequestMemory.alone(self.settings)
        self.answering_count = 0
        self.sent: list[str] = []
        self.counted: list[str] = []
        """Why inferences without a message failed."""

    def count_failure(self, error: errors.ContractError, _start_ns: int) -> None:
        self.counted.append(failure_reason(error))

    def allocate_message(self, call: Call, size: int, *, compressed: bool) -> GrpcMessage:
        message = GrpcMessage(self._memory, call, size, aligned_at=0, spare=9)
        message.compressed = compressed
        return message

    def answering(self, call: Call, message: GrpcMessage) -> Answering:
        message.release()
        self.answering_count += 1
        return Answering(call, self.answering_count > 1)

    def send(self, call: Call, pieces: list[bytes], *, last: bool) -> None:
        assert not last
        self.sent.append("answer")

    def finish(self, call: Call, trailers: bytes) -> None:
        self.sent.append("end")


def test_a_stream_s_messages_that_waited_are_all_answered_before_it_ends():
    everything: Any = Answered()
    call = Call(everything, everything, 1, CallHead(GrpcMethod("S", True, True, 1000)), 65535)
    data = (b"\0\0\0\0\1x") * 900
    assert call.feed(data, 0, 6) == 5  # the prefix alone
    place = 5
    while place < len(data):
        place = call.feed(data, place, len(data))
    call.remote_end()
    assert everything.sent == []
    call.answered([b"answer"])
    assert everything.sent == ["answer"] * 900 + ["end"]


def test_a_message_that_has_not_come_when_its_deadline_passes_is_counted_as_expired():
    everything: Any = Answered()
    ends = list[bytes]()
    everything.finish = lambda _call, trailers: ends.append(trailers)
    call = Call(everything, everything, 1, CallHead(GrpcMethod("M", True, False, 1000), 1_000_000), 65535)
    half = b"\0\0\0\0\2x"
    for place in (0, 5):
        call.feed(half, place, len(half))
    call.expire(time.monotonic() + 1, 0.0, pressed=False, scarce=False)
    assert everything.counted == ["expired"]
    (fields,) = ({str(name): str(value) for name, value in Decoder().decode(end)} for end in ends)
    assert fields["grpc-status"] == "4"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("prefix", "reason"),
    [(b"\0\0\0\4\0", "too_large"), (b"\0\0\0\0\t", "unavailable"), (b"\1\0\0\0\t", "invalid_request")],
)
def test_a_message_that_is_not_taken_is_counted(streams, prefix, reason):
    """Also one of a stream, of which the server has read no more than its length."""
    everything: Any = Answered()

    def full(*_: object, **__: object) -> None:
        raise errors.UnavailableError("full")

    everything.allocate_message = full
    call = Call(everything, everything, 1, CallHead(GrpcMethod("M", True, streams, 1000)), 65535)
    call.feed(prefix, 0, 5)
    assert everything.counted == [reason]
    assert everything.sent == ["end"]


def test_a_call_that_is_given_up_is_counted_once():
    everything: Any = Answered()
    call = Call(everything, everything, 1, CallHead(GrpcMethod("M", True, False, 1000)), 65535)
    whole = b"\0\0\0\0\1x"
    for place in (0, 5):
        call.feed(whole, place, len(whole))
    answering: Any = call.answering
    answering.stop = everything.counted.append
    call.give_up()
    assert everything.counted == ["shutting_down"]
    assert everything.sent == ["end"]


def test_a_message_for_which_there_is_no_room_to_wait_is_counted():
    everything: Any = Answered()
    call = Call(everything, everything, 1, CallHead(GrpcMethod("S", True, True, 1000)), 65535)
    both = b"\0\0\0\0\1x\0\0\0\0\2xy"
    place = 0
    for end in (5, 6, 11, 12):
        place = call.feed(both, place, end)
    budget = everything._memory.budget
    assert budget.hold(budget.left - 1)
    call.feed(both, place, len(both))
    assert everything.counted == ["unavailable"]
    assert everything.sent == ["end"]
