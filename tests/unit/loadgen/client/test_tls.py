"""The clients over TLS, against servers of the standard library and of grpcio."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from loadgen.base.headers import read_headers
from loadgen.client.connection import Address, Exchange, PreparedRequest, TlsRefused, split_at
from loadgen.client.grpc import GrpcConnection, grpc_request
from loadgen.client.http import HttpConnection, request_head
from loadgen.client.tls import TlsError, speaks_tls, tls_context
from loadgen.records.run import Access
from tests.certificates import Authority
from tests.unit.loadgen.client.test_grpc_connection import Scripted

BODY = bytes(range(256)) * 4096
"""A megabyte, in which a missing or repeated part shows."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def trusted(authority: Authority) -> Access:
    authority.sign("server")
    return Access(ca=str(authority.file))


def server_context(authority: Authority, name: str = "server", *, client: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.folder / f"{name}.pem")
    if client:
        context.load_verify_locations(authority.file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def echo(connection: socket.socket) -> None:
    """Answer each request with its body."""
    received = b""
    while True:
        while b"\r\n\r\n" not in received:
            more = connection.recv(65536)
            if not more:
                return
            received += more
        head, _, received = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
        while len(received) < length:
            received += connection.recv(65536)
        body, received = received[:length], received[length:]
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@contextmanager
def serving(
    context: ssl.SSLContext | None, serve: Callable[[socket.socket], None] = echo, access: Access | None = None
) -> Iterator[Address]:
    """A server with one thread per connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def handle(connection: socket.socket) -> None:
            try:
                with connection if context is None else context.wrap_socket(connection, server_side=True) as made:
                    serve(made)
            except OSError:
                connection.close()

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield Address("127.0.0.1", listener.getsockname()[1], "", True, access or Access())
        listener.shutdown(socket.SHUT_RDWR)


def await_length(found: list[int], length: int) -> None:
    deadline = time.monotonic() + 60
    while len(found) < length:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def say_nothing(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def post(address: Address, body: bytes = BODY, places: tuple[int, ...] = ()) -> PreparedRequest:
    head = request_head("POST", "/", address, content_length=len(body))
    return PreparedRequest(head, body, len(body), split_at(body, places, 4) if places else ())


def asked(address: Address) -> Exchange:
    """One request on a connection of its own."""
    connection = HttpConnection(address, timeout_s=10)
    try:
        return connection.send(post(address, b"x"))
    finally:
        connection.close()


def test_bodies_of_every_shape_arrive_unchanged(authority: Authority, trusted: Access) -> None:
    with serving(server_context(authority), access=trusted) as address:
        connection = HttpConnection(address, timeout_s=10)
        connection.connect()
        for body in (b"", b"x", BODY[:16_384], BODY):
            exchange = connection.send(post(address, body))
            assert (exchange.status, bytes(exchange.body), exchange.failure) == (200, body, None)
            assert exchange.send_ns < exchange.first_byte_ns <= exchange.end_ns
        places = (0, 100, 20_000, len(BODY) - 4)
        exchange = connection.send(post(address, BODY, places), [b"abcd", b"efgh", b"ijkl", b"mnop"])
        wanted = bytearray(BODY)
        for place, patch in zip(places, (b"abcd", b"efgh", b"ijkl", b"mnop"), strict=True):
            wanted[place : place + 4] = patch
        assert bytes(exchange.body) == wanted
        assert connection.reconnects == 0, "session tickets after the handshake are not a response to nothing"
        connection.close()


def test_a_connection_that_was_closed_while_idle_is_made_again(authority: Authority, trusted: Access) -> None:
    served: list[int] = []

    def once(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        connection.settimeout(0.1)
        with suppress(OSError):
            if len(served) % 2:
                connection.unwrap()  # type: ignore[attr-defined]  # an SSL socket; it announces that it closes
        connection.close()
        served.append(1)

    with serving(server_context(authority), once, trusted) as address:
        connection = HttpConnection(address, timeout_s=10)
        for number in range(1, 5):
            assert connection.send(post(address, b"")).status == 200
            await_length(served, number)
        assert connection.reconnects == 3
        connection.close()


def test_a_slow_response_ends_with_the_timeout(authority: Authority, trusted: Access) -> None:
    with serving(server_context(authority), say_nothing, trusted) as address:
        exchange = HttpConnection(address, timeout_s=0.3).send(post(address, b"x"))
        assert exchange.failure == "no complete response within 0.3 s"


@pytest.mark.parametrize(
    ("name", "expired", "hosts", "access", "words"),
    [
        ("fine", False, "IP:127.0.0.1", {}, "signed by an unknown authority"),
        ("old", True, "IP:127.0.0.1", {"ca": "ours"}, "certificate has expired"),
        ("other", False, "DNS:elsewhere", {"ca": "ours"}, "certificate is not for 127.0.0.1"),
    ],
)
def test_a_certificate_that_does_not_fit_is_refused_with_its_reason(
    authority: Authority, name: str, expired: bool, hosts: str, access: dict[str, str], words: str
) -> None:
    authority.sign(name, hosts, expired=expired)
    given = Access(ca=str(authority.file)) if access else Access()
    with serving(server_context(authority, name), access=given) as address:
        with pytest.raises(TlsRefused, match=words):
            HttpConnection(address, timeout_s=10).connect()
        unverified = Address(address.host, address.port, "", True, Access(insecure=True))
        assert asked(unverified).status == 200


def test_a_client_certificate_is_sent_and_missed(authority: Authority, trusted: Access) -> None:
    client = str(authority.sign("client"))
    with serving(server_context(authority, client=True), access=trusted) as address:
        failure = asked(address).failure
        assert failure is not None
        assert "options cert and key" in failure
        known = Address(address.host, address.port, "", True, Access(ca=trusted.ca, cert=client))
        assert asked(known).status == 200


def test_files_that_hold_no_certificate_are_named(authority: Authority, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    encrypted = tmp_path / "encrypted.pem"
    client = authority.sign("client")
    argv = ["openssl", "pkey", "-in", str(client), "-aes256", "-passout", "pass:word", "-out", str(encrypted)]
    subprocess.run(argv, check=True, capture_output=True)
    for access in (
        Access(ca=str(empty)),
        Access(ca=str(tmp_path / "none")),
        Access(cert=str(empty)),
        Access(cert=str(client), key=str(encrypted)),
    ):
        file = access.ca or access.key or access.cert
        with pytest.raises(TlsError, match=str(file)):
            tls_context(access, "http/1.1")


def test_plain_http_is_told_from_tls(authority: Authority, trusted: Access) -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with serving(None, refuse, trusted) as address:
        assert not speaks_tls(address.host, address.port, 5)
        with pytest.raises(TlsRefused, match="does not speak TLS; give its address with http://"):
            HttpConnection(address, timeout_s=5).connect()
    with serving(server_context(authority)) as address:
        assert speaks_tls(address.host, address.port, 5)
        with pytest.raises(TlsRefused, match="does not offer HTTP/2"):
            GrpcConnection(f"grpcs://{address.authority}", timeout_s=5, access=trusted).connect()


@pytest.fixture
def scripted(authority: Authority, trusted: Access) -> Iterator[tuple[Scripted, str]]:
    handler = Scripted()
    file = (authority.folder / "server.pem").read_bytes()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(handler,))
        credentials = grpc.ssl_server_credentials([(file, file)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        yield handler, f"grpcs://127.0.0.1:{port}"
        server.stop(0).wait()


def test_grpc_over_tls_with_metadata(
    scripted: tuple[Scripted, str], trusted: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, address = scripted
    seen: list[Any] = []

    def infer(message: bytes, context: Any) -> bytes:
        seen.append(dict(context.invocation_metadata()))
        return message

    handler.infer = infer
    monkeypatch.setenv("TOKEN_OF_TEST", "s3cret")
    header = read_headers({"Authorization": "Bearer $TOKEN_OF_TEST", "X-Team": "blue"})
    connection = GrpcConnection(address, timeout_s=10, access=Access(ca=trusted.ca, header=header))
    for body in (b"question", BODY):
        exchange = connection.send(grpc_request(body, len(body)))
        assert (exchange.good, exchange.failure) == (True, None)
        assert bytes(exchange.body) == body
    assert connection.reconnects == 0
    connection.close()
    assert (seen[0]["authorization"], seen[0]["x-team"]) == ("Bearer s3cret", "blue")
    with pytest.raises(TlsRefused, match="unknown authority"):
        GrpcConnection(address, timeout_s=10).connect()


PATCHED = """
from gevent import monkey; monkey.patch_all()
import gevent, ssl, sys, time
from gevent.pywsgi import WSGIServer
from loadgen.records.run import Access
from loadgen.client.http import HttpConnection, request_head
from loadgen.client.connection import Address, PreparedRequest

def answer(environ, start_response):
    body = environ["wsgi.input"].read()
    gevent.sleep(0.2)
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]

server = WSGIServer(("127.0.0.1", 0), answer, log=None, certfile=sys.argv[1], keyfile=sys.argv[1]); server.start()
address = Address("127.0.0.1", server.server_port, "", True, Access(ca=sys.argv[2]))
body = bytes(range(256)) * 1000
request = PreparedRequest(request_head("POST", "/", address, content_length=len(body)), body)
def ask():
    connection = HttpConnection(address, timeout_s=20)
    for _ in range(2):
        exchange = connection.send(request)
        assert exchange.status == 200 and bytes(exchange.body) == body, exchange.failure
    assert connection.reconnects == 0
started = time.monotonic()
gevent.joinall([gevent.spawn(ask) for _ in range(20)], raise_error=True)
assert time.monotonic() - started < 6.0, "the users waited for each other"
"""


def test_under_gevent_users_do_not_wait_for_each_other(authority: Authority, trusted: Access) -> None:
    """20 users × 2 requests × 0.2 s would take 8 s one after the other."""
    argv = [sys.executable, "-c", PATCHED, str(authority.folder / "server.pem"), str(trusted.ca)]
    subprocess.run(argv, check=True, timeout=60)
