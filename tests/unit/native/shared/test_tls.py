from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from servers.native.shared import tls
from servers.native.shared.settings import NativeSettings
from servers.native.shared.tls import Certificate, TlsConnections
from servers.options.defaults import OptionError
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pem(authority: Authority) -> Path:
    return authority.sign("server")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def test_a_certificate_that_cannot_be_used_is_refused_with_the_reason(
    authority: Authority, pem: Path, tmp_path: Path
) -> None:
    other, text, locked, small = authority.sign("other"), tmp_path / "text", tmp_path / "locked", tmp_path / "small"
    text.write_text("no certificate")
    openssl("pkey", "-in", pem, "-aes256", "-passout", "pass:secret", "-out", locked)
    openssl("req", "-x509", "-newkey", "rsa:1024", "-nodes", "-subj", "/CN=s", "-keyout", small, "-out", small)
    refused: dict[str, tuple[Path, Path | None, Path | None]] = {
        "not that of the certificate": (pem, other, None),
        "cannot be read: No such file": (tmp_path / "missing", None, None),
        "--tls-key .* cannot be read": (pem, tmp_path / "missing", None),
        "--tls-client-ca .* cannot be read: Is a directory": (pem, None, tmp_path),
        "not a certificate with its key": (text, None, None),
        "PEM form": (pem, text, None),
        "not a certificate with": (authority.file, None, None),
        "a password": (pem, locked, None),
        "--tls-client-ca .* has no certificates": (pem, None, text),
        "too weak": (small, None, None),
    }
    for reason, files in refused.items():
        with pytest.raises(OptionError, match=reason):
            Certificate(*files)
    for name in ("tls_key", "tls_client_ca"):
        with pytest.raises(OptionError, match="--tls-certificate"):
            Certificate.of(NativeSettings(**{name: pem}))  # type: ignore[arg-type]
    assert Certificate.of(NativeSettings()) is None


def test_a_reload_of_files_that_do_not_fit_keeps_the_certificate(authority: Authority, tmp_path: Path) -> None:
    first, other = authority.sign("first").read_bytes(), authority.sign("other")
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    for file in (certificate, key):
        file.write_bytes(first)
    made = Certificate(certificate, key, None)
    before = made.http, made.grpc
    key.write_bytes(other.read_bytes())
    assert not made.reload()
    assert (made.http, made.grpc) == before
    certificate.write_bytes(other.read_bytes())
    assert made.reload()
    assert made.http is not before[0]


class Echo(asyncio.BufferedProtocol):
    """Sends back what comes, and then `more`."""

    def __init__(self, more: bytes = b"") -> None:
        self._room, self._more = memoryview(bytearray(100)), more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.choked, self.unread = False, 0

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self.transport.write(bytes(self._room[:nbytes]))  # type: ignore[attr-defined]
        self.transport.writelines([self._more])  # type: ignore[attr-defined]
        if not self.unread:
            self.unread, self.was_choked = self.transport.get_write_buffer_size(), self.choked  # type: ignore[attr-defined]

    def pause_writing(self) -> None:
        self.choked = True

    def resume_writing(self) -> None:
        self.choked = False


def run_clients(pem: Path, clients: Callable[[int], None], connect: Callable[[], object] = Echo) -> None:
    """Run these, with the port, in a thread beside a server with TLS."""
    connections = TlsConnections(Certificate(pem, None, None))
    made: list[tls.TlsTransport] = []

    def accept() -> tls.TlsTransport:
        made.append(connections.connect(connect, grpc=False))
        return made[-1]

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        try:
            await asyncio.to_thread(clients, server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for transport in made:
                transport.abort()
            await asyncio.sleep(0)

    uvloop.run(serve())


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def test_a_handshake_that_stalls_is_ended(pem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.05)

    def stall(port: int) -> None:
        for sent in (b"", b"\x16\x03\x01\x02\x00"):
            with connected(port) as client:
                client.sendall(sent)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""

    run_clients(pem, stall)


def test_of_too_many_handshakes_the_oldest_makes_way(
    pem: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "MAX_HANDSHAKES", 3)
    context = ssl.create_default_context(cafile=authority.file)

    def crowd(port: int) -> None:
        stalled = [connected(port) for _ in range(3)]
        for client in stalled:
            client.sendall(b"\x16\x03\x01\x02\x00")
        with connected(port) as plain, context.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            ended, _, _ = select.select(stalled, [], [], 60)
            assert [other.recv(1) for other in ended] == [b""]
        for other in stalled:
            other.close()

    run_clients(pem, crowd)


def test_what_a_client_has_not_taken_is_counted_and_not_all_encrypted(pem: Path, authority: Authority) -> None:
    large = 64 * 2**20
    made: list[Echo] = []

    def connect() -> Echo:
        made.append(Echo(bytes(large)))
        return made[-1]

    def read(port: int) -> None:
        context = ssl.create_default_context(cafile=authority.file)
        with connected(port) as plain, context.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            left = large
            while left:
                left -= len(client.recv(2**20))
            client.sendall(b"y")
            assert client.recv(1) == b"y"
        assert large - tls.ENCRYPT_BYTES <= made[0].unread <= large
        assert made[0].was_choked

    run_clients(pem, read, connect)
