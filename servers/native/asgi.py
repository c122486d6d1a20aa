"""Answers complete requests through an ASGI application: every route but inference goes this way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog

from servers.native.answers import Answer, Headers, refusal
from servers.native.heads import Head

log = structlog.get_logger("abserve.http")

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
Address = tuple[str, int] | None


async def ask(application: Application, head: Head, body: bytes, client: Address, server: Address) -> Answer:
    """The application's whole answer; one with status 500 when it fails."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.version,
        "method": head.method.decode("ascii"),
        "scheme": "http",
        "path": head.path,
        "raw_path": head.url.partition(b"?")[0],
        "query_string": head.query,
        "root_path": "",
        "headers": list(head.headers),
        "client": client,
        "server": server,
        "state": {},
    }
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
        log.exception("a request failed unexpectedly", path=head.path[:200])
        return refusal(500, "internal error, the server's log has it")
    content = b"".join(parts)
    if not any(name.lower() == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(content)))
    return Answer(status, headers, content)
