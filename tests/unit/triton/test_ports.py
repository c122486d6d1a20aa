"""A taken port is one clear sentence before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from servers.triton.installation import TritonOptionError
from servers.triton.launch import assert_free


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_taken_port_names_its_option(taken: int) -> None:
    with pytest.raises(TritonOptionError, match=rf"port {taken} on 127.0.0.1 .* --grpc-port"):
        assert_free("127.0.0.1", {"--grpc-port": taken})


def test_two_options_with_one_port() -> None:
    with pytest.raises(TritonOptionError, match="--http-port and --grpc-port are both 4711"):
        assert_free("127.0.0.1", {"--http-port": 4711, "--grpc-port": 4711})


def test_a_free_port_and_one_just_given_back(taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = listener.accept()
            connection.close()  # this side closes first and keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    assert_free("127.0.0.1", {"--http-port": port})


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(TritonOptionError, match="--host"):
        assert_free("192.0.2.1", {"--http-port": 4711})
