"""TLS: the server's certificate, and a transport between the socket's and a connection of HTTP or gRPC.

Not asyncio's transport: that keeps 256 KiB for each client, encrypts a large answer at once, does not count what the
client has not taken of it, and cannot close one direction, as a refusal needs. This one is as the socket's: what it
decrypts goes into the connection's own memory, and it encrypts no more than the socket takes.

A handshake has `HANDSHAKE_S`, and of at most `MAX_HANDSHAKES` the oldest makes way; before its turn it has no state of
TLS. What TLS costs in one turn of the event loop is bounded: many handshakes, or records that bring nothing, hold up
only each other.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import structlog

from servers.native.shared.limits import Turns
from servers.native.shared.settings import NativeSettings
from servers.options.defaults import OptionError

log = structlog.get_logger("abserve.server")

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 256
"""Of one front end that wait for their clients."""
MAX_WAITING = 4096
"""Clients without a handshake, also those that wait for their turn; less where that is more than an eighth of the
process's file descriptors."""
READ_BYTES = 64 * 1024
RECORDS_PER_STEP = 32
"""Records that are decrypted before time is looked at: one of 27 bytes may change the keys, which takes over 20 us."""
STEPS_NS = 1_000_000
"""What one connection may take before the others have their turn."""
TURN_NS = 2_000_000
"""What all connections may take of one turn of the event loop; the others are read in later turns, for as long each."""
_HEAD_BYTES = 5
ENCRYPT_BYTES = 256 * 1024
"""Most bytes of an answer that are encrypted in one turn of the event loop."""
JOINED_BYTES = 16 * 1024
"""Pieces of an answer that are so small together become one record."""
PLAIN_HTTP = b"this port speaks TLS: use https://"
_HANDSHAKE_RECORD = 0x16
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2, as HTTP/2 demands; TLS 1.3 has no others."""


class Certificate:
    """The certificate of a server; front ends have that of the process that has started them."""

    def __init__(self, certificate: Path, key: Path | None, client_ca: Path | None) -> None:
        """Raises `OptionError`."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self.http, self.grpc = self._contexts()

    @classmethod
    def of(cls, settings: NativeSettings) -> Certificate | None:
        """The certificate of the settings; None: the server speaks no TLS. Raises `OptionError`."""
        if settings.tls_certificate is None:
            for option, file in (("--tls-key", settings.tls_key), ("--tls-client-ca", settings.tls_client_ca)):
                if file is not None:
                    raise OptionError(f"{option} is for a server with TLS: add --tls-certificate FILE")
            return None
        return cls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)

    @classmethod
    def check(cls, file: Path | None) -> None:
        """Raise `OptionError` unless another server can use this file."""
        if file is not None:
            cls(file, None, None)

    def reload(self) -> bool:
        """Take what the files have now for new connections; if they cannot be used, what was before stays. Returns
        whether they could."""
        try:
            self.http, self.grpc = self._contexts()
        except OptionError as error:
            log.error("the certificate before is kept", reason=str(error))  # noqa: TRY400  the sentence says it all
            return False
        return True

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return self._context("http/1.1"), self._context("h2")

    def _context(self, protocol: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_ciphers(_CIPHERS)
        context.set_alpn_protocols([protocol])
        for option, file in (("certificate", self._certificate), ("key", self._key), ("client-ca", self._client_ca)):
            if file is not None:
                try:
                    file.open("rb").close()
                except OSError as exc:
                    raise OptionError(f"--tls-{option} {file} cannot be read: {exc.strerror}") from exc
        self._load(context)
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as exc:
                raise OptionError(f"--tls-client-ca {self._client_ca} has no certificates in PEM form") from exc
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        encrypted = False

        def password() -> str:  # else OpenSSL would ask on the terminal
            nonlocal encrypted
            encrypted = True
            return ""

        files = f"--tls-certificate {self._certificate}"
        files += "" if self._key is None else f" and --tls-key {self._key}"
        try:
            context.load_cert_chain(self._certificate, self._key, password)
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "reason", None) or ""
            if "KEY_VALUES_MISMATCH" in reason:
                raise OptionError(f"{files}: the key is not that of the certificate") from exc
            if encrypted:
                raise OptionError(f"{files}: the key has a password; write it without: openssl pkey") from exc
            if "TOO_SMALL" in reason or "TOO_WEAK" in reason:
                raise OptionError(f"{files}: too weak, clients refuse it; use RSA of 2048 bits, or P-256") from exc
            raise OptionError(f"{files}: not a certificate with its key in PEM form") from exc


class Front(Protocol):
    """What a connection of HTTP or gRPC is to a transport."""

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a message, so that what came before does not matter."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def get_buffer(self, sizehint: int, /) -> memoryview: ...
    def buffer_updated(self, nbytes: int) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class _Share:
    """What connections may take of each turn of the event loop, and those that have to wait for a later one, for as
    long each."""

    def __init__(self, *, newest_first: bool) -> None:
        self._spent_ns = 0
        self._turns = Turns(TURN_NS)
        self._waiting: deque[TlsTransport] = deque()
        self._next = self._waiting.pop if newest_first else self._waiting.popleft

    @property
    def exhausted(self) -> bool:
        return self._spent_ns > TURN_NS

    def spend(self, spent_ns: int) -> None:
        if not self._spent_ns:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._spent_ns += spent_ns

    def _begin_turn(self) -> None:
        self._spent_ns = 0

    def wait(self, transport: TlsTransport) -> None:
        self._waiting.append(transport)
        self._turns.add(lambda: self._next().take_turn())


class TlsConnections:
    """All connections with TLS of one event loop: their handshakes, and the time and memory that they share."""

    def __init__(self, certificate: Certificate) -> None:
        self.certificate = certificate
        self.room = memoryview(bytearray(READ_BYTES))
        self.on_close: Callable[[], None] = lambda: None
        """Called for a connection that has been closed before its handshake was done."""
        self.reads = _Share(newest_first=False)
        self.handshakes = _Share(newest_first=True)  # that of an honest client does not wait for those of a flood
        self._begun: dict[TlsTransport, asyncio.TimerHandle] = {}  # handshakes, the oldest first
        self._shaking: dict[TlsTransport, None] = {}  # those with a state of TLS
        self._max_begun = max(1, min(MAX_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))

    def connect(self, connect: Callable[[], Any], *, grpc: bool) -> TlsTransport:
        """What receives the bytes of a new client; once its handshake is done, it has a connection."""
        context = self.certificate.grpc if grpc else self.certificate.http
        return TlsTransport(self, context, connect, b"" if grpc else PLAIN_HTTP)

    def stop(self) -> None:
        """End the handshakes that are under way."""
        for transport in list(self._begun):
            transport.abort()

    # Called by transports

    def begin(self, transport: TlsTransport) -> None:
        """A client has connected."""
        if len(self._begun) >= self._max_begun:
            next(iter(self._begun)).abort()
        self._begun[transport] = asyncio.get_running_loop().call_later(HANDSHAKE_S, transport.abort)

    def shake(self, transport: TlsTransport) -> None:
        """Its handshake begins."""
        if len(self._shaking) >= MAX_HANDSHAKES:
            next(iter(self._shaking)).abort()
        self._shaking[transport] = None

    def end(self, transport: TlsTransport) -> None:
        """Its handshake is done, or its connection lost."""
        self._shaking.pop(transport, None)
        if (timer := self._begun.pop(transport, None)) is not None:
            timer.cancel()


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """Between one client's socket and its connection: the protocol of the one, the transport of the other."""

    def __init__(
        self, connections: TlsConnections, context: ssl.SSLContext, connect: Callable[[], Front], plain_refusal: bytes
    ) -> None:
        """`connect` makes the connection; `plain_refusal` is for a client that speaks HTTP without TLS."""
        super().__init__()
        self._connections = connections
        self._context = context
        self._connect = connect
        self._connection: Front = None  # type: ignore[assignment]  # once the handshake is done
        self._plain_refusal = plain_refusal
        self._socket: asyncio.Transport = None  # type: ignore[assignment]  # from connection_made on
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl: ssl.SSLObject
        self._begun = False  # the client has sent something
        self._shaking = False  # and the handshake has begun
        self._open = False  # and is done
        self._held = b""  # has come and is not decrypted yet
        self._record_left = 0  # bytes of the present record that are still to come
        self._partial = 0  # and those that have come
        self._waits = False  # for its turn
        self._reading = False
        self._paused = False  # the connection wants no bytes
        self._socket_paused = False
        self._unsent: deque[memoryview] = deque()  # not encrypted yet: the socket takes no more
        self._unsent_bytes = 0
        self._full = False  # the socket takes no more
        self._sending = False  # `_send_more` is going to be called
        self._choked = False  # as the connection knows
        self._closing = False
        self._eof_wanted = self._eof_sent = False
        self._eof: bool | None = None  # whether the connection goes on after the client's end; None: it has not come

    # The protocol of the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        self._connections.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.end(self)
        was_open, self._open, self._closing = self._open, False, True
        self._held = b""
        self._unsent.clear()
        self._unsent_bytes = 0
        if was_open:
            self._connection.connection_lost(exc)
        else:
            self._connections.on_close()
        del self._connection  # breaks the cycle of the two

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._connections.room

    def buffer_updated(self, nbytes: int) -> None:
        received = self._connections.room[:nbytes]
        if self._eof_sent:  # dropped, but counted
            self._connection.get_buffer(-1)
            self._connection.buffer_updated(nbytes)
            return
        if not self._begun and received[0] != _HANDSHAKE_RECORD:
            self._refuse_plain(bytes(received))
            return
        self._begun = True
        if (share := self._share).exhausted:
            self._held += received
            self._wait_for_turn()
        else:
            share.spend(self._advance(memoryview(self._held + received) if self._held else received))

    def eof_received(self) -> bool:
        """The client sends nothing more; it need not have said so by TLS, since requests have lengths."""
        if self._open and self._eof is None and not self._closing:
            self._eof = bool(self._connection.eof_received())
        return bool(self._eof)

    def pause_writing(self) -> None:
        self._full = True
        self._choke()

    def resume_writing(self) -> None:
        self._full = False
        if not self._sending:
            self._send_more()

    # From encrypted bytes to the connection

    @property
    def _share(self) -> _Share:
        return self._connections.reads if self._open else self._connections.handshakes

    def _wait_for_turn(self) -> None:
        if not self._waits:
            self._waits = True
            self._pause_socket()
            self._share.wait(self)

    def take_turn(self) -> None:
        """Go on after the others have had their turn."""
        self._waits = False
        self._go_on()

    def _go_on(self) -> None:
        """Use the bytes that have come, and read more, unless something forbids it."""
        if not self._waits and not self._reading and not self._closing:
            if not self._paused:
                self._advance(memoryview(self._held))
            if not (self._paused or self._waits or self._closing) and self._socket_paused:
                self._socket_paused = False
                self._socket.resume_reading()

    def _pause_socket(self) -> None:
        if not self._socket_paused and not self._socket.is_closing():
            self._socket_paused = True
            self._socket.pause_reading()

    def _advance(self, data: memoryview) -> int:
        """Use these bytes as far as possible, or until it is the others' turn; returns how long that took in ns."""
        begin_ns = time.perf_counter_ns()
        spent_ns, more = 0, True
        self._reading = True
        if not self._shaking:
            self._shaking = True
            self._connections.shake(self)
            self._ssl = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        try:
            while more and spent_ns < STEPS_NS:
                data = self._feed(data)
                if self._open or self._shake_hands():
                    self._read()
                if self._outgoing.pending and not self._closing:
                    self._socket.write(self._outgoing.read())
                more = len(data) >= _HEAD_BYTES and not (self._paused or self._closing or self._eof_sent or self._full)
                spent_ns = time.perf_counter_ns() - begin_ns
        except ssl.SSLError:
            self._fail()
        finally:
            self._reading = False
        self._held = bytes(data)
        if more:
            self._wait_for_turn()
        elif self._full:  # nothing is read of a client that does not read what TLS itself answers
            self._pause_socket()
        return spent_ns

    def _feed(self, data: memoryview) -> memoryview:
        """Give OpenSSL the first records of this; returns the others, or the beginning of a record's head."""
        place, size = self._record_left, len(data)
        begin = -self._partial
        for _ in range(RECORDS_PER_STEP):
            if place + _HEAD_BYTES > size:
                break
            begin = place
            place += _HEAD_BYTES + (data[place + 3] << 8 | data[place + 4])
        used = min(place, size)
        self._partial = 0 if place <= size else min(used - begin, self._partial + used)
        self._record_left = place - used
        self._incoming.write(data[:used])
        return data[used:]

    def _shake_hands(self) -> bool:
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._connections.end(self)
        self._open = True
        self._socket.write(self._outgoing.read())
        self._connection = self._connect()
        self._connection.connection_made(self)
        return True

    @property
    def _readable(self) -> bool:
        """Whether a whole record has come: without one OpenSSL raises, which takes as long as reading a short one."""
        return self._incoming.pending > self._partial or self._ssl.pending() > 0

    def _read(self) -> None:
        while self._readable and not self._paused and not self._closing and not self._eof_sent:
            room, filled, ended = self._connection.get_buffer(-1), 0, False
            with suppress(ssl.SSLWantReadError):  # such as a change of keys
                while filled < len(room) and not ended and self._readable:
                    count = cast("int", self._ssl.read(len(room) - filled, room[filled:]))
                    filled, ended = filled + count, not count
            if filled:
                self._connection.buffer_updated(filled)
            if ended:
                if not self.eof_received():
                    self.close()
                return

    def _fail(self) -> None:
        """The client breaks TLS: tell it why, and end."""
        self._closing = True
        self._socket.write(self._outgoing.read())
        self._socket.close()

    def _refuse_plain(self, received: bytes) -> None:
        if self._plain_refusal and received.split(b" ")[0] in (b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS"):
            body = b'{"error":"%b"}' % self._plain_refusal
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            self._socket.write(head + b"connection: close\r\n\r\n" + body)
        self._socket.close()

    # From the connection to the socket

    def _encrypt(self, data: memoryview) -> int:
        """Send the first bytes; returns how many."""
        used, end = 0, min(len(data), ENCRYPT_BYTES)
        try:
            while used < end:  # a record at a time
                used += self._ssl.write(data[used:end])
        except ssl.SSLError:
            self.abort()
            return len(data)
        self._socket.write(self._outgoing.read())
        return used

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        if self._closing or self._eof_wanted or not view:
            return
        used = 0 if self._unsent or self._full else self._encrypt(view)
        if used < len(view):
            self._unsent.append(view[used:])
            self._unsent_bytes += len(view) - used
            self._choke()
            self._send_soon()

    def _choke(self) -> None:
        if self._open and not self._choked:
            self._choked = True
            self._connection.pause_writing()

    def _send_soon(self) -> None:
        if not self._sending and not self._full:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send_more)

    def _send_more(self) -> None:
        """Encrypt what the socket takes in this turn of the event loop."""
        self._sending = False
        if self._unsent and not self._full:
            data = self._unsent.popleft()
            used = self._encrypt(data)
            if used < len(data):
                self._unsent.appendleft(data[used:])
            self._unsent_bytes -= min(used, self._unsent_bytes)
        if self._unsent:
            self._send_soon()
        elif self._open and not self._full:
            if self._closing:
                self._close()
                return
            if self._eof_wanted:
                self._send_eof()
            self._choked = False
            self._connection.resume_writing()
            self._go_on()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        parts = [memoryview(part).cast("B") for part in list_of_data]
        if sum(map(len, parts)) <= JOINED_BYTES:
            self.write(b"".join(parts))
        else:
            for part in parts:
                self.write(part)

    def write_eof(self) -> None:
        if not self._eof_wanted and not self._closing:
            self._eof_wanted = True
            if not self._unsent:
                self._send_eof()

    def _send_eof(self) -> None:
        if not self._eof_sent:
            self._eof_sent = True
            self._say_end()
            self._socket.write_eof()
            self._go_on()

    def _say_end(self) -> None:
        with suppress(ssl.SSLError):  # it would wait for the client's
            self._ssl.unwrap()
        self._socket.write(self._outgoing.read())

    def close(self) -> None:
        """Close when the client has taken everything."""
        if self._closing:
            return
        self._closing = True
        if not self._open:
            self._socket.abort()
            return
        self._pause_socket()
        if not self._unsent:
            self._close()

    def _close(self) -> None:
        if not self._socket.is_closing():
            if not self._eof_sent:
                self._say_end()
            self._socket.close()

    def abort(self) -> None:
        self._connections.end(self)
        self._closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._socket.abort()

    def is_closing(self) -> bool:
        return self._closing or self._socket.is_closing()

    def pause_reading(self) -> None:
        self._paused = True
        self._pause_socket()

    def resume_reading(self) -> None:
        self._paused = False
        if not self._reading:
            asyncio.get_running_loop().call_soon(self._go_on)
        elif self._socket_paused and not self._waits and not self._closing:
            self._socket_paused = False
            self._socket.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes + self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._ssl if name == "ssl_object" else self._socket.get_extra_info(name, default)
