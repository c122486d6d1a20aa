"""From a connection's bytes to whole requests within the limits: head, then body, then the next head."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from servers.contract.errors import ContractError, UnavailableError
from servers.native.answers import error_status
from servers.native.bodies import ChunkedBody, DroppedBody, FixedBody
from servers.native.heads import HEAD_ENDS, Head
from servers.native.limits import HOLDS_ENOUGH, HttpError

if TYPE_CHECKING:
    from servers.native.http_door import HttpDoor

_CARRIAGE_RETURN = 13


class Receiver(Protocol):
    """Who is told what has arrived."""

    def wait_at_most(self, seconds: float) -> None:
        """Something has begun that must be complete in that time."""

    def go_ahead(self) -> None:
        """The client waits for leave to send its body."""

    def take(self, head: Head, body: memoryview, start_ns: int) -> None:
        """A whole request; its head was complete at `start_ns`."""

    def refuse(self, head: Head, error: ContractError, start_ns: int) -> None:
        """The same, of a request whose body was read and dropped."""


class Intake:
    """Of one connection, and of the event loop, but for `release`."""

    def __init__(self, door: HttpDoor, receiver: Receiver) -> None:
        self._door = door
        self._receiver = receiver
        self._body: FixedBody | ChunkedBody | DroppedBody | None = None
        self._refusal: ContractError | None = None
        self._held = 0
        self._last: FixedBody | None = None  # of the request that waits for its answer
        self.head: Head | None = None
        """Of the request that is arriving, or arrived last; None when its head could not be read."""
        self.start_ns = 0
        self.fixed: FixedBody | None = None
        """A body that wants its bytes from the transport directly."""

    @property
    def in_body(self) -> bool:
        """Whether a head is complete, and its body is not."""
        return self._body is not None

    def use(self, data: bytearray, start: int, end: int) -> int:
        """Take the next piece of `data[start:end]`; where it ends, `start` when more is needed. Raises `HttpError`."""
        body = self._body
        if body is None:
            return self._use_head(data, start, end)
        start = body.feed(data, start, end)
        if isinstance(body, ChunkedBody):
            self._hold_more(body)
        if body.complete:
            self._complete()
        return start

    def received(self, count: int) -> None:
        """`count` bytes have been written into `fixed`."""
        body = self.fixed
        assert body is not None
        body.received(count)
        if body.complete:
            self._complete()

    def release(self, *, read: bool = True) -> None:
        """The last request is over; any thread. Unless all of its body is `read`, the engine may still be at it."""
        body, self._last = self._last, None
        if body is not None and read:
            self._door.bodies.give(body)
        if self._held:
            self._door.budget.release(self._held)
            self._held = 0

    def give_up(self) -> None:
        """The request that is arriving is not wanted any more, and no other will be."""
        self._body = self.fixed = None
        self.release(read=False)

    def end(self) -> None:
        """The connection is lost. Nothing is left to keep it in memory until the garbage collector comes by."""
        self.give_up()
        del self._receiver

    def _use_head(self, data: bytearray, start: int, end: int) -> int:
        door = self._door
        if data.startswith(b"\r\n", start, end):
            return start + 2  # an empty line before a request is allowed
        found = data.find(HEAD_ENDS, start, end)
        if found < 0:
            self.head = None
            if not ord("A") <= data[start] <= ord("Z") and data[start] != _CARRIAGE_RETURN:
                raise HttpError(400, "the request is not valid HTTP")
            door.heads.check_size(end - start)
            return start
        found += len(HEAD_ENDS)
        self.head = None
        self.head = head = door.heads.read(bytes(data[start:found]))
        self.start_ns = time.perf_counter_ns()
        self._choose_body(head)
        body = self._body
        if body is None:
            self._complete()
            return found
        found = body.feed(data, found, end)
        if isinstance(body, ChunkedBody):
            self._hold_more(body)
        if body.complete:
            self._complete()
            return found
        if head.expects_continue:
            if self._refusal is not None:  # its body need not be sent at all
                raise HttpError(error_status(self._refusal), str(self._refusal))
            self._receiver.go_ahead()
        self._receiver.wait_at_most(door.limits.body_timeout_s(head.length or 0))
        if isinstance(body, FixedBody):
            self.fixed = body
        return found

    def _choose_body(self, head: Head) -> None:
        """Decide where the body goes. Raises `HttpError` for one that is not read at all."""
        door = self._door
        size = head.length or 0
        limit = door.body_limit(head)
        self._refusal = None
        if size > limit:
            raise HttpError(413, f"the body has {size} bytes, the server takes at most {limit}")
        if head.infers:
            self._refusal = door.infer.check(head)
        if head.chunked:
            if self._refusal is not None:
                raise HttpError(error_status(self._refusal), str(self._refusal))
            self._body = ChunkedBody(limit, door.limits.chunks)
        elif size == 0:
            self._body = None
        else:
            if self._refusal is None and not self._hold(size):
                self._refusal = UnavailableError(HOLDS_ENOUGH)
            self._body = door.bodies.take(size, head.json_bytes) if self._refusal is None else DroppedBody(size)

    def _complete(self) -> None:
        head, body = self.head, self._body
        assert head is not None
        self._body = self.fixed = None
        if self._refusal is not None:
            self._receiver.refuse(head, self._refusal, self.start_ns)
        elif isinstance(body, FixedBody):
            self._last = body
            self._receiver.take(head, body.view, self.start_ns)
        else:
            content = body.content if isinstance(body, ChunkedBody) else b""
            self._receiver.take(head, memoryview(content), self.start_ns)

    def _hold(self, size: int) -> bool:
        held = self._door.budget.hold(size)
        self._held += size if held else 0
        return held

    def _hold_more(self, body: ChunkedBody) -> None:
        more = len(body.content) - self._held
        if more > 0 and not self._hold(more):
            raise HttpError(503, HOLDS_ENOUGH)
