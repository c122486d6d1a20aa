"""HTTP/1.1 by hand: sends bytes that no client library would send, and reads whatever comes back.

It sends and reads at the same time, because a server that refuses a body answers before it has read all of it.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from loadgen.conformance.records import Answer

RECEIVE_BYTES = 1 << 16
MAXIMAL_ANSWER_BYTES = 1 << 28
CONNECT_SECONDS = 5.0
_CONNECTIONS = Path("/proc/net/tcp")


class RawConnection:
    """One TCP connection. Use as a context manager."""

    def __init__(self, host: str, port: int) -> None:
        """Raises `OSError` when nothing listens."""
        self._socket = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> bool:
        """Send all of it without reading; False when the server has closed."""
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def exchange(
        self, data: bytes | Iterable[bytes], deadline_s: float, *, head_only: bool = False, end: bool = False
    ) -> Answer:
        """Send `data` and read one answer; what is left to send when it arrives is not sent. With `end` the stream is
        half-closed after the last byte."""
        started = perf_counter()
        self._received.clear()
        pieces = iter((data,) if isinstance(data, bytes) else data)
        pending = memoryview(next(pieces, b""))
        sending = True
        self._socket.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while True:
                left = deadline_s - (perf_counter() - started)
                if left <= 0:
                    return Answer("silent", elapsed_s=perf_counter() - started)
                for _, events in selector.select(left):
                    if events & selectors.EVENT_READ:
                        ended = self._read()
                        answer = parse_answer(bytes(self._received), ended is not None, head_only=head_only)
                        if answer is not None or ended is not None:
                            answer = answer or Answer(ended or "closed")
                            return replace(answer, elapsed_s=perf_counter() - started)
                    elif sending:
                        try:
                            pending = pending[self._socket.send(pending) :]
                        except BlockingIOError:
                            continue
                        except OSError:
                            # The server takes no more; its answer may still be in our buffer.
                            sending = False
                        if sending and not pending:
                            piece = next(pieces, None)
                            sending = piece is not None
                            pending = memoryview(piece or b"")
                            if end and not sending:
                                self.end_sending()
                    if not sending:
                        selector.modify(self._socket, selectors.EVENT_READ)

    def names(self) -> tuple[str, str] | None:
        """The client's end and the server's as the kernel's table writes them; None when closed, or not over IPv4."""
        try:
            if self._socket.family != socket.AF_INET:
                return None
            return _kernel_address(*self._socket.getsockname()), _kernel_address(*self._socket.getpeername())
        except OSError:
            return None

    def end_sending(self) -> None:
        """Half-close: the server reads the end of the stream, its answer can still come."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def closed_within(self, seconds: float) -> bool:
        """Whether the server ends the connection in that time; an answer before the end is dropped."""
        deadline = perf_counter() + seconds
        while (left := deadline - perf_counter()) > 0:
            self._socket.settimeout(left)
            try:
                if not self._socket.recv(RECEIVE_BYTES):
                    return True
            except TimeoutError:
                return False
            except OSError:
                return True
        return False

    def close(self, *, abruptly: bool = False) -> None:
        """End it, `abruptly` with a reset, as a client does whose process is killed."""
        if abruptly:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _read(self) -> str | None:
        """None while the stream goes on, else how it ended."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return "reset"
        if not data or len(self._received) > MAXIMAL_ANSWER_BYTES:
            return "closed"
        self._received += data
        return None


def all_read(connections: Iterable[RawConnection]) -> bool:
    """Whether the server has taken every byte of these out of its receive buffers, as far as the kernel says: it does
    for servers on this machine. Reads the kernel's table once, since that takes tens of milliseconds after a fuzz run.
    """
    names = [pair for connection in connections if (pair := connection.names()) is not None]
    if not names or not _CONNECTIONS.exists():
        return True
    waiting = {}
    for line in _CONNECTIONS.read_text().splitlines()[1:]:
        fields = line.split(maxsplit=5)
        waiting[fields[1], fields[2]] = fields[4]
    empty = "00000000"
    return all(
        waiting.get((ours, theirs), empty)[:8] == empty == waiting.get((theirs, ours), f":{empty}").partition(":")[2]
        for ours, theirs in names
    )


def _kernel_address(host: str, port: int) -> str:
    """As /proc/net/tcp writes it on a little-endian machine."""
    return f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}"


def request_head(method: str, path: str, host: str, headers: Mapping[str, str], length: int | None) -> bytes:
    """A well-formed head; `length` None leaves Content-Length out."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_answer(data: bytes, ended: bool, *, head_only: bool = False) -> Answer | None:
    """The first final answer in `data`; None when it is not complete yet (or never will be, when `ended`)."""
    while True:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            return None
        lines = head.decode("latin-1").split("\r\n")
        status = [*lines[0].split(" "), "", ""][1]
        if not (status.startswith("1") and status != "101"):
            break
        data = rest
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if head_only or status in {"204", "304"}:
        return Answer(status, headers)
    if "chunked" in headers.get("transfer-encoding", ""):
        body = _join_chunks(rest)
    elif headers.get("content-length", "").isdigit():
        length = int(headers["content-length"])
        body = rest[:length] if len(rest) >= length else None
    else:
        body = rest if ended else None
    return None if body is None else Answer(status, headers, body)


def _join_chunks(data: bytes) -> bytes | None:
    body = b""
    while True:
        line, separator, data = data.partition(b"\r\n")
        try:
            size = int(line.split(b";")[0] or b"0", 16)
        except ValueError:
            return None
        if not separator or len(data) < size + 2:
            return None
        if size == 0:
            return body
        body, data = body + data[:size], data[size + 2 :]
