"""What one client sends at once is used in turns, so that the others need not wait for all of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from servers.native.grpc import connection
from servers.native.grpc.connection import TURN_NS, GrpcServerConnection
from servers.native.grpc.http2 import ACK, PING, PREFACE, SETTINGS, frame

PINGS = 45
FRAMES_IN_A_TURN = 10


class Transport:
    """Keeps what the server does."""

    def __init__(self) -> None:
        self.written, self.reads = b"", True

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return False

    @property
    def answered(self) -> int:
        return sum(self.written.count(frame(PING, ACK, 0, ping(number)[-8:])) for number in range(PINGS))


def ping(number: int) -> bytes:
    return frame(PING, 0, 0, number.to_bytes(8, "big"))


def test_frames_that_cost_much_are_used_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0, TURN_NS // FRAMES_IN_A_TURN)  # each frame takes a tenth of a turn
    monkeypatch.setattr(connection, "time", SimpleNamespace(perf_counter_ns=clock.__next__, monotonic=time.monotonic))
    scratch, turns, transport = bytearray(1 << 16), list[Callable[[], None]](), Transport()
    connections: Any = SimpleNamespace(
        add=lambda _: True, read_head=None, budget=None, turns=SimpleNamespace(add=turns.append),
        scratch=scratch, room=memoryview(scratch),
    )  # fmt: skip
    client = GrpcServerConnection(connections)
    client.connection_made(transport)  # type: ignore[arg-type]
    sent = PREFACE + frame(SETTINGS, 0, 0, b"") + b"".join(map(ping, range(PINGS)))
    scratch[: len(sent)] = sent
    client.buffer_updated(len(sent))
    answered = [transport.answered]
    while turns:
        assert not transport.reads, "nothing more is read before all of it is used"
        turns.pop()()
        answered.append(transport.answered)
    assert transport.reads
    assert answered[-1] == PINGS
    each = [later - earlier for earlier, later in zip([0, *answered], answered, strict=False)]
    assert len(each) >= PINGS / FRAMES_IN_A_TURN
    assert max(each) <= FRAMES_IN_A_TURN + 1
