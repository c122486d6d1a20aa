"""Receives the body of an inference request straight from the socket into the memory that the engine reads.

uvicorn's own path copies a body four times (the read, the parser, the accumulated body, its copy for the application).
Here uvicorn parses the head and sends the answer as ever, but once a head announces a body for `…/infer`, the
transport is handed the request's own buffer until that body is complete. Only what came in one read with the head, at
most 64 KiB, is copied once; the rest is not copied at all.

The buffer is laid out so that the first binary tensor after the JSON header begins on a 64-byte boundary.
Relies on asyncio's BufferedProtocol and on `HttpToolsProtocol`'s parser callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import httptools
import numpy as np
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from servers.native.errors import ClientGoneError

SCOPE_KEY = "abserve.body"
ALIGNMENT = 64
HEAD_BYTES = 64 * 1024
"""Room for one read of a head: a small body comes with it and saves a read, a large one has that much copied."""

_INFER_BEGINS = b"POST /v2/models/"
_HEAD_ENDS = b"\r\n\r\n"


class DirectBody:
    """One body while it arrives, for the application to wait for. `start_ns` is when the head was complete."""

    __slots__ = ("_on_gone", "_waiter", "answered", "filled", "gone", "size", "start_ns", "view")

    def __init__(self, size: int, json_bytes: int) -> None:
        memory = np.empty(size + ALIGNMENT, np.uint8)  # unlike bytearray it is not cleared first
        offset = -(memory.__array_interface__["data"][0] + json_bytes) % ALIGNMENT
        self.view = memory[offset : offset + size].data
        self.size = size
        self.filled = 0
        self.gone = False
        self.answered = False
        self.start_ns = time.perf_counter_ns()
        self._waiter: asyncio.Future[None] | None = None
        self._on_gone: Callable[[], object] | None = None

    def append(self, data: bytes | memoryview) -> int:
        """Add what was read together with the head; tells how many bytes of `data` belong to this body."""
        taken = min(len(data), self.size - self.filled)
        end = self.filled + taken
        self.view[self.filled : end] = data[:taken]
        self.filled = end
        return taken

    async def received(self) -> memoryview:
        """The whole body. Raises `ClientGoneError` if the connection ends first."""
        if self.filled < self.size and not self.gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.filled < self.size:
            raise ClientGoneError("the client left before its request was complete")
        return self.view

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Call `on_gone` when the client leaves before `answered` is set."""
        self._on_gone = on_gone

    def wake(self) -> None:
        """The body is complete, or never will be."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lose(self) -> None:
        """The connection has ended."""
        if self.answered:
            return
        self.gone = True
        if self._on_gone is not None and self.filled == self.size:
            self._on_gone()
        self.wake()


class _HeadProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the bodies of inference requests taken out of its hands."""

    def __init__(self, max_body_bytes: int, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.arriving: DirectBody | None = None
        self._max_body_bytes = max_body_bytes
        self._unanswered: list[DirectBody] = []

    def on_headers_complete(self) -> None:
        self.arriving = body = self._direct_body()
        super().on_headers_complete()
        if body is None:
            return
        self._unanswered = [earlier for earlier in self._unanswered if not earlier.answered]
        self._unanswered.append(body)
        self.scope[SCOPE_KEY] = body  # type: ignore[literal-required]  # ASGI scopes may carry more
        if self.cycle.waiting_for_100_continue:
            self.cycle.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self.arriving is None:
            super().on_body(body)
        else:
            self.arriving.append(body)

    def on_message_complete(self) -> None:
        body, self.arriving = self.arriving, None
        super().on_message_complete()
        if body is not None:
            body.wake()

    def complete_body(self) -> None:
        """The body was received past the parser, which now waits for bytes that never come: begin with a new one."""
        self.parser = httptools.HttpRequestParser(self)
        # As in uvicorn: answer the first of pipelined requests even when it closes the connection.
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.cycle.more_body = False
        body, self.arriving = self.arriving, None
        if body is not None:
            body.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for body in self._unanswered:
            body.lose()

    def _direct_body(self) -> DirectBody | None:
        if not self.url.endswith(b"/infer") or self.parser.get_method() != b"POST":
            return None
        size = json_bytes = 0
        for name, value in self.headers:
            if name == b"content-length" and value.isdigit() and len(value) < 19:
                size = int(value)
            elif name == b"inference-header-content-length" and value.isdigit() and len(value) < 19:
                json_bytes = int(value)
            elif name == b"transfer-encoding":
                return None
        # Everything that will be refused for its size is left to the application, which has not allocated anything.
        return DirectBody(size, json_bytes) if 0 < size <= self._max_body_bytes else None


class DirectBodyProtocol(asyncio.BufferedProtocol):
    """What the transport talks to: feeds heads to the parser and lets bodies land where they are needed."""

    def __init__(
        self,
        max_body_bytes: int,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._http = _HeadProtocol(
            max_body_bytes, config=config, server_state=server_state, app_state=app_state, _loop=_loop
        )
        self._scratch = bytearray(HEAD_BYTES)
        self._head = memoryview(self._scratch)
        self._body: DirectBody | None = None

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Where the next bytes belong; never longer than the body, so a pipelined request stays in the socket."""
        body = self._body
        return self._head if body is None else body.view[body.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have arrived there."""
        body = self._body
        if body is None:
            self._read_heads(nbytes)
            return
        body.filled += nbytes
        if body.filled == body.size:
            self._body = None
            self._http.complete_body()

    def _read_heads(self, end: int) -> None:
        """Feed the parser from the scratch, but not the bodies that are received directly: it would copy them."""
        http, scratch, start = self._http, self._scratch, 0
        while start < end and not http.transport.is_closing():  # a parser that has failed answers once
            split = end
            if scratch.startswith(_INFER_BEGINS, start):
                found = scratch.find(_HEAD_ENDS, start, end)
                split = end if found < 0 else found + len(_HEAD_ENDS)
            # The parser copies what it keeps, so the next read may overwrite the scratch.
            http.data_received(self._head[start:split])  # type: ignore[arg-type]  # httptools takes any buffer
            start = split
            body = http.arriving
            if body is None:
                continue
            start += body.append(self._head[start:end])
            if body.filled < body.size:
                self._body = body
            else:
                http.complete_body()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._http.connection_made(transport)  # type: ignore[arg-type]  # uvicorn's types want the narrower Transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The client or the server has closed."""
        self._http.connection_lost(exc)

    def eof_received(self) -> None:
        """The client sends no more; the transport closes."""
        self._http.eof_received()

    def pause_writing(self) -> None:
        """The client reads slower than it is answered."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._http.resume_writing()
