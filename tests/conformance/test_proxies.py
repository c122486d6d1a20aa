"""The conformance tool asks the server itself, whatever proxy the environment names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from loadgen.conformance.wire import GrpcClient, messages


@pytest.fixture
def address() -> Iterator[str]:
    """A gRPC server that answers every call with nothing."""
    server = grpc.server(ThreadPoolExecutor(1))

    class Anything(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
        def service(self, _: object) -> object:
            return grpc.unary_unary_rpc_method_handler(lambda *_: b"")

    server.add_generic_rpc_handlers((Anything(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_grpc_calls_do_not_pass_a_proxy(address: str, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nothing listens
    client = GrpcClient(address)
    try:
        assert client.call("ServerLive", messages.ServerLiveRequest(), 5.0).status == "OK"
    finally:
        client.close()
