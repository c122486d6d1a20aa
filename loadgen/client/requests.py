"""Addresses of servers, request heads, and requests that are ready to send."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from loadgen.client.exchange import ConnectionRefused, Deadline, TlsRefused
from loadgen.client.greenlet_socket import AnySocket, GreenletSocket, is_patched
from loadgen.client.tls import Protocol, TlsError, secured, tls_context
from loadgen.headers import secret_of
from loadgen.records.run import DEFAULT_ACCESS, Access

_UNQUOTED = "/-._~%!$&'()*+,;=:@?"
"""Characters that are not quoted in a path whose names are quoted already."""
_IN_A_NAME = "!$&'()*+,;=:@"
"""Characters of RFC 3986's path segments that stay as they are in a model's name or version."""
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
    """Where a server listens, from a URL such as http://127.0.0.1:8100, and how it is reached there."""

    host: str
    port: int
    base_path: str = ""
    tls: bool = False
    access: Access = DEFAULT_ACCESS

    @classmethod
    def parse(cls, url: str, access: Access = DEFAULT_ACCESS) -> Address:
        """Raises `AddressError` for anything but HTTP with a host."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError as exc:
            raise AddressError(f"{url} is not an address ({exc}); give one like http://127.0.0.1:8100") from None
        if parts.username is not None:
            raise AddressError("an address with a user name or a password would be stored; send them with a header")
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_host(parts.hostname):
            raise AddressError(f"{url} is not an http:// or https:// address; give one like http://127.0.0.1:8100")
        tls = parts.scheme == "https"
        try:
            port = parts.port or (443 if tls else 80)
        except ValueError:
            raise AddressError(f"{url} has no valid port; give one like http://127.0.0.1:8100") from None
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls, access)

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
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base_path}"

    def model_path(self, model: str) -> str:
        """The path of a model, or of its version, below which its requests go."""
        return model_path(model, self.access.version)


def quoted(name: str) -> str:
    """A name as one segment of a path, whatever characters it holds."""
    return quote(name, safe=_IN_A_NAME)


def model_path(model: str, version: str | None = None) -> str:
    """The path of a model, or of its version, below which its requests go."""
    return f"/v2/models/{quoted(model)}" + ("" if version is None else f"/versions/{quoted(version)}")


def open_socket(address: Address, timeout_s: float, protocol: Protocol = "http/1.1") -> AnySocket:
    """A connection without Nagle's delay, after the TLS handshake if there is one. Raises `ConnectionRefused` with a
    sentence."""
    shown = address.authority
    try:
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except TimeoutError:
        raise ConnectionRefused(f"no connection to {shown} within {timeout_s:g} s") from None
    except OSError as exc:
        raise ConnectionRefused(f"no connection to {shown}: {exc.strerror or exc}") from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not address.tls:
        return GreenletSocket(connection) if is_patched() else connection
    try:
        return secured(connection, tls_context(address.access, protocol), address.host, protocol)
    except (TlsError, TimeoutError) as exc:
        raise TlsRefused(f"no connection to {shown}: {exc}") from None


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
    if not pieces:
        return [first]
    parts = [first, *pieces]
    if patches:
        parts[2::2] = patches
    return parts


def send_parts(connection: AnySocket, parts: list[bytes | memoryview], deadline: Deadline) -> None:
    """Send all parts without joining them. Raises `OSError`, `TimeoutError` past the deadline."""
    while parts:
        sent = connection.sendmsg(parts[:_MOST_PARTS] if len(parts) > _MOST_PARTS else parts)
        if len(parts) == 1 and sent == len(parts[0]):
            return
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
    """The request line and headers, with those of the address. They ask for `identity`, since Triton compresses if it
    may (8.7 → 38 ms)."""
    fields = {"Host": address.authority, "Accept-Encoding": "identity"}
    if content_length or method == "POST":
        fields["Content-Length"] = str(content_length)
    fields |= headers or {}
    fields |= {name: secret_of(value) for name, value in address.access.header.items()}
    lines = [f"{method} {quote(address.base_path + path, safe=_UNQUOTED)} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
