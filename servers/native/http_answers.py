"""Answers as HTTP sends them: status, headers and body as data, and as bytes; and what an application answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import structlog

from servers.contract.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.native.errors import INTERNAL_ERROR

log = structlog.get_logger("abserve.http")

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
Headers = list[tuple[bytes, bytes]]

_STATUS: tuple[tuple[type[ContractError], int], ...] = (
    (InvalidRequestError, 400),
    (NotFoundError, 404),
    (TooLargeError, 413),
    (UnavailableError, 503),
    (UnsupportedError, 501),
    (InternalError, 500),
)
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_FORBIDDEN = b"\r\n\x00"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; `headers` hold its Content-Length."""

    status: int
    headers: Headers
    body: bytes

    def encode(self, common: bytes, *, with_body: bool = True) -> bytes:
        """The bytes to send; `common` is whole header lines. What a header may not hold is left out of it."""
        parts = [STATUS_LINES.get(self.status, b"HTTP/1.1 %d \r\n" % self.status), common]
        for name, value in self.headers:
            parts += [_clean(name), b": ", _clean(value), b"\r\n"]
        parts.append(b"\r\n")
        if with_body:
            parts.append(self.body)
        return b"".join(parts)


def refusal(status: int, message: str, headers: Headers | None = None) -> Answer:
    """An error as the protocol wants it."""
    body = error_body(message)
    return Answer(status, error_headers(status, body) + (headers or []), body)


def error_status(error: ContractError) -> int:
    """Triton's mapping of an error to an HTTP status."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(message: str) -> bytes:
    """`{"error": …}`; pure ASCII, since a message may quote anything that a client sent."""
    return json.dumps({"error": message}).encode()


def error_headers(status: int, body: bytes) -> Headers:
    """Headers of an error's answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return headers


async def ask(application: Application, scope: Message, body: bytes) -> Answer:
    """The application's whole answer to a request; one with status 500 when it fails."""
    asked = False
    status = 500
    headers: Headers = []
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal asked
        if asked:
            return {"type": "http.disconnect"}
        asked = True
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
        return refusal(500, INTERNAL_ERROR)
    content = b"".join(parts)
    if not any(name.lower() == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(content)))
    return Answer(status, headers, content)


def _clean(text: bytes) -> bytes:
    """Starlette's redirects and errors may quote what a client sent; a line end in it would begin a header."""
    return text.translate(None, _FORBIDDEN) if any(byte in text for byte in _FORBIDDEN) else text
