"""Responses as HTTP sends them: status, headers and body as data and as bytes; and what an application answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import structlog

from servers.contract.errors import ContractError, InternalError
from servers.native.errors import INTERNAL_ERROR, HttpError, http_status

log = structlog.get_logger("abserve.http")

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
Headers = list[tuple[bytes, bytes]]

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_FORBIDDEN = b"\r\n\x00"


@dataclass(frozen=True, slots=True)
class Answer:
    """One response; `headers` include its Content-Length."""

    status: int
    headers: Headers
    body: bytes

    def encode(self, common: bytes, *, with_body: bool = True) -> bytes:
        """The bytes to send, with the header lines `common`. Line ends inside a header are left out."""
        parts = [STATUS_LINES.get(self.status, b"HTTP/1.1 %d \r\n" % self.status), common]
        for name, value in self.headers:
            # Starlette's redirects and errors may quote the client; a line end in the quote would begin a header.
            parts += [name.translate(None, _FORBIDDEN), b": ", value.translate(None, _FORBIDDEN), b"\r\n"]
        parts.append(b"\r\n")
        if with_body:
            parts.append(self.body)
        return b"".join(parts)


def refusal(error: ContractError | HttpError) -> Answer:
    """The response to a failed request: `{"error": …}` in ASCII, since a message may quote any text of a client."""
    status = http_status(error)
    body = json.dumps({"error": str(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return Answer(status, headers, body)


async def ask(application: Application, scope: Message, body: bytes) -> Answer:
    """The application's whole response to a request; one with status 500 when it fails."""
    received = False
    status = 500
    headers: Headers = []
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal received
        if received:
            return {"type": "http.disconnect"}
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message["headers"])
        else:
            parts.append(message.get("body", b""))

    try:
        await application(scope, receive, send)
    except Exception:
        log.exception("a request failed unexpectedly", path=scope["path"][:200])
        return refusal(InternalError(INTERNAL_ERROR))
    content = b"".join(parts)
    if not any(name.lower() == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(content)))
    return Answer(status, headers, content)
