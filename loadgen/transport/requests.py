"""Addresses of servers, request heads, and requests that are ready to send."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from loadgen.transport.exchange import Deadline

_UNQUOTED = "/-._~%!$&'()*+,;=:@?"
"""Characters that are not quoted in a path; a model's name may hold any character."""
_MOST_PARTS = 1_000
"""Most parts per `sendmsg`; the kernel takes 1,024."""


class AddressError(ValueError):
    """A server's address cannot be used; the message shows a valid one."""


def is_host(name: str) -> bool:
    """Whether the socket module takes it as a host: it refuses empty labels and those of more than 63 characters."""
    try:
        return b"\0" not in name.encode("idna")
    except UnicodeError:
        return False


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, from a URL such as http://127.0.0.1:8100."""

    host: str
    port: int
    base_path: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises `AddressError` for anything but plain HTTP with a host."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError as exc:
            raise AddressError(f"{url} is not an address ({exc}); give one like http://127.0.0.1:8100") from None
        if parts.scheme != "http" or not parts.hostname or not is_host(parts.hostname):
            raise AddressError(f"{url} is not a plain http:// address; give one like http://127.0.0.1:8100")
        try:
            port = parts.port or 80
        except ValueError:
            raise AddressError(f"{url} has no valid port; give one like http://127.0.0.1:8100") from None
        return cls(parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether it is this machine's loopback address."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")

    @property
    def url(self) -> str:
        """The normalised URL, without a trailing slash."""
        return f"http://{self.authority}{self.base_path}"


Pieces = tuple[bytes | memoryview, ...]


def cut(body: bytes, places: Sequence[int], byte_size: int) -> Pieces:
    """Views of the body: constant, varying, constant, …; `byte_size` bytes vary at each of the places."""
    view, start, pieces = memoryview(body), 0, []
    for place in places:
        pieces += [view[start:place], view[place : place + byte_size]]
        start = place + byte_size
    return (*pieces, view[start:])


def assemble(first: bytes, pieces: Pieces, patches: Sequence[bytes]) -> list[bytes | memoryview]:
    """The parts to send: `first`, then the pieces, where the patches (if any) replace the varying ones."""
    parts = [first, *pieces]
    if patches:
        parts[2::2] = patches
    return parts


def send_parts(connection: socket.socket, parts: list[bytes | memoryview], deadline: Deadline) -> None:
    """Send all parts without joining them. Raises `OSError`, `TimeoutError` past the deadline."""
    while parts:
        sent = connection.sendmsg(parts[:_MOST_PARTS])
        done = 0
        while done < len(parts) and sent >= len(parts[done]):
            sent -= len(parts[done])
            done += 1
        parts = parts[done:]
        if sent:
            parts[0] = memoryview(parts[0])[sent:]
        if parts:
            deadline.check(connection)


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, ready to send. Requests to several servers share `body`; `payload_bytes` of it are tensors.
    `pieces` are the body's if a part of it varies."""

    head: bytes
    body: bytes = b""
    payload_bytes: int = 0
    pieces: Pieces = ()


def request_head(
    method: str, path: str, address: Address, *, content_length: int = 0, headers: dict[str, str] | None = None
) -> bytes:
    """The request line and headers. They ask for `identity`, since Triton compresses if it may (8.7 → 38 ms)."""
    lines = [
        f"{method} {quote(address.base_path + path, safe=_UNQUOTED)} HTTP/1.1",
        f"Host: {address.authority}",
        "Accept-Encoding: identity",
    ]
    if content_length or method == "POST":
        lines.append(f"Content-Length: {content_length}")
    lines.extend(f"{name}: {value}" for name, value in (headers or {}).items())
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
