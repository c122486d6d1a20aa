"""Requests whose JSON is slow to read keep nobody else waiting."""

from __future__ import annotations

import contextlib

import pytest

from tests.again import again
from tests.integration.native.health_probe import probed, slowest_quiet_s
from tests.integration.native.raw_client import MIB, check_well, connected, head, read_answer

CLIENTS = 2
SIZE = 4 * MIB - 200


def body(datatype: str, repeated: str, data_start: str = "[NaN,") -> bytes:
    """A request of 4 MiB whose data is NaN and then the same again and again."""
    start = f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":[1,4],"data":{data_start}'
    return (start + repeated * ((SIZE - len(start)) // len(repeated)) + "0]}]}").encode()


BODIES = {
    "ragged lists": body("FP32", "[1],[1,2],"),
    "lists in lists": body("FP32", "[" * 30 + "]" * 30 + ","),
    "NaN": body("FP32", "NaN,"),
    "integers": body("FP32", "1,"),
    "objects": body("FP32", "{},"),
    "strings": body("FP32", '"",'),
    "quotes without an end": body("FP32", '\\"', '[NaN,"'),
    "elements of BYTES": body("BYTES", '"",', "["),
    "lists of BYTES": body("BYTES", "[[]],", "["),
}


@pytest.fixture(scope="module", params=[0, pytest.param(2, marks=pytest.mark.slow)], ids=["fronts 0", "fronts 2"])
def server(request, tmp_path_factory, native_starter):
    folder = tmp_path_factory.mktemp("long")
    return native_starter(folder, "--engine", "null", "--fronts", str(request.param))


SLOWEST = ("ragged lists", "strings", "lists of BYTES")
"""The slowest kind with numbers, with text in their place, and with BYTES."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SLOWEST else pytest.mark.slow) for kind in BODIES]
)
@again
def test_long_json_delays_nobody_else(server, kind) -> None:
    """4 MiB of ragged lists with NaN held the interpreter for 0.8 s."""
    limit_s = 0.3 + 3 * slowest_quiet_s(server.port)
    request = head(f"Content-Length: {len(BODIES[kind])}") + BODIES[kind]
    with probed(server.port) as health, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(CLIENTS)]
        for client in clients:
            client.sendall(request)
        answers = [read_answer(client) for client in clients]
    assert {status for status, *_ in answers} == {400}
    check_well(server)
    assert health.slowest_s < limit_s
