"""A server with TLS: independent clients reach it, broken and stalled ones hold nobody up, and its certificate changes
while it serves."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from loadgen.records.traffic import RecordedTraffic
from tests.again import again
from tests.certificates import Authority
from tests.integration.native.conftest import Server, wait_until
from tests.integration.native.health_probe import probed
from tests.integration.native.test_processes import front_ends
from tests.recording import recorder

ROW = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
BODY = json.dumps({"inputs": [ROW]}).encode()
INFER = "/v2/models/rows/infer"
Begin = Callable[..., Server]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def trusting(authority: Authority, *, client: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if client is not None:
        context.load_cert_chain(client)
    return context


@pytest.fixture(params=["0", "2"])
def begin(request: pytest.FixtureRequest, tmp_path: Path, controlled: Begin, authority: Authority) -> Begin:
    """Starts a ready server with TLS, in one process and in several; its certificate is `served.pem`."""

    def start(*options: str, client: Path | None = None) -> Server:
        shutil.copy(authority.sign("server"), tmp_path / "served.pem")
        tls = ("--tls-certificate", str(tmp_path / "served.pem"))
        server = controlled("--fronts", request.param, *tls, *options, grpc=True)
        server.tls = trusting(authority, client=client)
        server.open("load", "infer")
        server.wait_ready()
        return server

    return start


@contextlib.contextmanager
def secured(server: Server) -> Iterator[ssl.SSLSocket]:
    assert server.tls is not None
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
        server.tls.wrap_socket(connection, server_hostname="127.0.0.1") as client,
    ):
        yield client


def rows(module: object = tritonclient.grpc) -> list[tritonclient.grpc.InferInput]:
    tensor = module.InferInput("x", [1, 4], "FP32")  # type: ignore[attr-defined]
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    return [tensor]


def output(*command: str | Path, given: bytes = b"") -> str:
    done = subprocess.run([*map(str, command)], input=given, capture_output=True, check=False, timeout=100)
    return (done.stdout + done.stderr).decode(errors="replace")


def test_clients_of_others_are_answered(begin: Begin, authority: Authority) -> None:
    server = begin()
    http, grpc = f"https://{server.address}", server.grpc_address
    body = ("--data-binary", BODY.decode(), http + INFER)
    assert '"data":[1' in output("curl", "-sS", "--cacert", authority.file, *body).replace(".0", "")
    assert "certificate" in output("curl", "-sS", *body)
    assert f"{http}{INFER}" in server.request("GET", "/").body.decode()
    with tritonclient.http.InferenceServerClient(
        server.address, ssl=True, ssl_options={"ca_certs": str(authority.file)}
    ) as client:
        assert client.infer("rows", rows(tritonclient.http)).as_numpy("y").shape == (1, 4)
    with tritonclient.grpc.InferenceServerClient(grpc, ssl=True, root_certificates=str(authority.file)) as calls:
        assert calls.infer("rows", rows()).as_numpy("y").shape == (1, 4)


def test_openssl_sees_a_safe_protocol_and_no_renegotiation(begin: Begin, authority: Authority) -> None:
    server = begin()

    def seen(port: int, *options: str, given: bytes = b"") -> str:
        command = ("openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-CAfile", authority.file, *options)
        return output(*map(str, command), given=given)

    for port, protocol in ((server.port, "http/1.1"), (server.grpc_port, "h2")):
        text = seen(port, "-alpn", "h2,http/1.1")
        assert f"ALPN protocol: {protocol}" in text
        assert "TLSv1.3" in text
        assert "Verify return code: 0" in text
        assert "TLSv1.2" in seen(port, "-tls1_2")
        assert "Cipher is (NONE)" in seen(port, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0")
        assert "Cipher is (NONE)" in seen(port, "-tls1_2", "-cipher", "AES128-SHA:@SECLEVEL=0")
    assert "no renegotiation" in seen(server.port, "-tls1_2", given=b"R\n")


@pytest.mark.skipif(shutil.which("h2load") is None, reason="nghttp2-client is not installed")
def test_another_http2_client_is_answered(begin: Begin) -> None:
    server = begin()
    path = "/inference.GRPCInferenceService/ServerLive"
    text = output("h2load", "-n20", "-c4", "-m2", f"https://{server.grpc_address}{path}")
    assert "20 done" in text
    assert "Application protocol: h2" in text
    assert "0 errored" in text


def test_client_certificates(begin: Begin, authority: Authority, tmp_path: Path) -> None:
    client = authority.sign("client")
    server = begin("--tls-client-ca", str(authority.file), client=client)
    assert server.request("POST", INFER, BODY).status == 200
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").sign("stranger")
    for certificate in (None, stranger):
        server.tls = trusting(authority, client=certificate)
        with pytest.raises(OSError):  # noqa: PT011  an alert, or the end
            server.request("POST", INFER, BODY)

    def infer(pem: Path) -> Any:
        files = {"root_certificates": authority.file, "private_key": pem, "certificate_chain": pem}
        options = {name: str(file) for name, file in files.items()}
        with tritonclient.grpc.InferenceServerClient(server.grpc_address, ssl=True, **options) as calls:
            return calls.infer("rows", rows()).as_numpy("y")

    assert np.array_equal(infer(client), np.ones((1, 4)))
    with pytest.raises(InferenceServerException):
        infer(stranger)


@pytest.mark.parametrize(("gate", "sent", "answered"), [("wide", 2**21, 4), ("large", 4, 8 * 2**20)])
def test_large_requests_and_answers_are_whole(
    begin: Begin, authority: Authority, tmp_path: Path, gate: str, sent: int, answered: int
) -> None:
    (tmp_path / gate).touch()
    server = begin()
    values, expected = np.arange(sent, dtype="<f4"), np.arange(answered, dtype="<f4") / 7
    expected[:4] = values[:4]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, sent], "parameters": {"binary_data_size": values.nbytes}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    with contextlib.closing(server.connect()) as connection:
        for _ in range(2):
            lengths = {"Inference-Header-Content-Length": str(len(header))}
            connection.request("POST", INFER, header + values.tobytes(), lengths)
            answer = connection.getresponse()
            content = answer.read()[int(answer.headers["Inference-Header-Content-Length"]) :]
            assert np.array_equal(np.frombuffer(content, "<f4"), expected)
    large = tritonclient.grpc.InferInput("x", [1, sent], "FP32")
    large.set_data_from_numpy(values[None])
    files = {"root_certificates": str(authority.file)}
    with tritonclient.grpc.InferenceServerClient(server.grpc_address, ssl=True, **files) as calls:
        assert np.array_equal(calls.infer("rows", [large]).as_numpy("y")[0], expected)


def hello() -> bytes:
    """What a client sends first."""
    begun = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), begun, server_hostname="a").do_handshake()
    return begun.read()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + bytes(2**16),
        hello()[:40] + b"?" * 900,
    ],
    ids=["zeros", "HTTP/2", "oversize", "garbage"],
)
def test_what_is_not_tls_ends_its_connection(begin: Begin, sent: bytes) -> None:
    server = begin()
    for port in (server.port, server.grpc_port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(4096):
                    pass
    with secured(server) as client:  # and after a handshake
        with socket.socket(fileno=os.dup(client.fileno())) as raw:
            raw.sendall(b"\x17\x03\x03\xff\xff" + bytes(2**16))
        with contextlib.suppress(OSError):  # an alert, or the end
            while client.recv(4096):
                pass
    assert server.request("POST", INFER, BODY).status == 200


def test_plain_http_is_told_that_the_port_speaks_tls(begin: Begin) -> None:
    server = begin()
    server.tls = None
    answer = server.request("GET", "/v2")
    assert (answer.status, "https://" in answer.body.decode()) == (400, True)


def test_a_request_in_records_of_one_byte_is_answered(begin: Begin) -> None:
    with secured(begin()) as client:
        for byte in f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY:
            client.send(bytes([byte]))
        assert client.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("count", [600, pytest.param(5000, marks=pytest.mark.slow)])
@again
def test_stalled_handshakes_hold_nobody_up(begin: Begin, authority: Authority, count: int) -> None:
    server = begin()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with probed(server.port, 20, authority.file) as quiet:
        before, first = server.memory_bytes, hello()
    with contextlib.ExitStack() as stack, contextlib.closing(server.connect()) as kept:
        with probed(server.port, 20, authority.file) as health:
            for number in range(count):
                port = (server.port, server.grpc_port)[number % 2]
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                client.sendall((b"", first[:100], first)[number % 3])
                if number % 10 == 0:  # so that the server has taken them: their number counts, not how fast they come
                    kept.request("POST", INFER, BODY)
                    assert kept.getresponse().read()
        assert server.request("POST", INFER, BODY).status == 200
        assert server.memory_bytes - before < 2**27
        server.process.terminate()
        assert server.process.wait(60) == 0
    assert health.slowest_s < 0.1 + 3 * quiet.slowest_s, f"{health}; before: {quiet}"


def test_the_certificate_changes_under_load_and_no_request_is_lost(
    begin: Begin, authority: Authority, tmp_path: Path, changes: int
) -> None:
    server = begin()
    stopped, lost = threading.Event(), []

    def ask(*, kept: bool) -> None:
        connection = server.connect()
        while not stopped.is_set():
            connection.request("POST", INFER, BODY)
            answer = connection.getresponse()
            if (answer.status, bool(answer.read())) != (200, True):
                lost.append(answer.status)
            if not kept:
                connection.close()
        connection.close()

    def call() -> None:
        files = {"root_certificates": str(authority.file)}
        with tritonclient.grpc.InferenceServerClient(server.grpc_address, ssl=True, **files) as calls:
            while not stopped.is_set():
                calls.infer("rows", rows())

    def served() -> str:
        with secured(server) as client:
            certificate: Any = client.getpeercert()
            return str(certificate["subject"][0][0][1])

    def serves(name: str) -> bool:
        return {served() for _ in range(4)} == {name}

    names = ["first", "second"]
    files = {name: authority.sign(name) for name in names}
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, kept=True), pool.submit(ask, kept=False), pool.submit(call)]
        try:
            for change in range(changes):
                name = names[change % 2]
                shutil.copy(files[name], tmp_path / "new.pem")
                (tmp_path / "new.pem").rename(tmp_path / "served.pem")
                os.kill(server.process.pid, signal.SIGHUP)
                wait_until(partial(serves, name), "the new certificate is served")
        finally:
            stopped.set()
        for future in asking:
            future.result(60)
    assert lost == []
    (tmp_path / "served.pem").write_text("no certificate")
    os.kill(server.process.pid, signal.SIGHUP)
    log = tmp_path / f"log-{server.port}"
    wait_until(lambda: "the certificate before is kept" in log.read_text(), "the file is refused")
    for front_end in front_ends(server)[:1]:  # its successor has the last one that could be used
        front_end.kill()
    wait_until(lambda: server.status("/v2/health/ready") == 200, "it answers")
    assert serves(name)


@pytest.fixture(params=[20, pytest.param(100, marks=pytest.mark.slow)])
def changes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_server_records_what_comes_over_tls(begin: Begin, tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    server = begin("--record", str(folder))
    server.wait_until((folder / "traffic.json").exists, "the recording has begun")
    assert server.request("POST", INFER, BODY).status == 200
    server.process.terminate()
    assert server.process.wait(60) == 0
    read = RecordedTraffic(folder)
    assert [(each.status, read.content(each)) for each in read.requests] == [(200, BODY)]


def test_a_recorder_trusts_the_authority_that_it_is_given(begin: Begin, authority: Authority, tmp_path: Path) -> None:
    server = begin()
    to, ca = f"https://{server.address}", f"--to-ca={authority.file}"
    with recorder(tmp_path / "traffic", ca, to=to, grpc_to=f"grpcs://{server.grpc_address}") as running:
        assert output("curl", "-sS", "--data-binary", BODY.decode(), running.url + INFER).startswith('{"model_name')
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{running.ports[1]}") as calls:
            assert calls.infer("rows", rows()).as_numpy("y").shape == (1, 4)
        assert len(running.end().requests) == 2
    with recorder(tmp_path / "nothing", to=to) as running:
        output("curl", "-sS", running.url + INFER)
        running.process.terminate()
        _, said = running.process.communicate(timeout=60)
    assert "unknown authority" in " ".join(said.split())
