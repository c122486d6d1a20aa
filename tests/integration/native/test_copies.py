"""Where a tensor's bytes are copied between the socket and the engine: proven by addresses, not by reading the code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import uvloop
from uvicorn.server import ServerState

from servers.contract.tensors import Array, TensorSpec
from servers.engines.interface import Engine, EngineDescription
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.native.app import create_app
from servers.native.http_body import ALIGNMENT, FixedBody
from servers.native.http_connection import connection_factory
from servers.native.http_front_end import READ_BYTES, HttpFrontEnd
from servers.native.inference import InferenceService
from servers.native.limits import ByteBudget
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.settings import NativeSettings

VALUES = 3 * 224 * 224
SPECIFICATION = ModelSpecification(
    name="m",
    title="m",
    version="1",
    inputs=(TensorSpec("x", "FP32", (-1, VALUES)),),
    outputs=(TensorSpec("y", "FP32", (-1, 4)),),
    max_batch_size=8,
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
)


class WatchedEngine(Engine):
    """The null engine, noting what it was given."""

    def __init__(self) -> None:
        self._null = NullEngine(SPECIFICATION, EngineSettings(kind="null", max_batch_size=8))
        self.inputs: list[Array] = []

    def load(self) -> None:
        self._null.load()

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        self._null.warm_up(batch_sizes)

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.inputs.append(inputs["x"])
        return self._null.infer(inputs)

    def describe(self) -> EngineDescription:
        return self._null.describe()

    def close(self) -> None:
        self._null.close()


class WatchedBodies:
    """In place of the pool: notes every body, and how many of its bytes came through the shared buffer."""

    def __init__(self) -> None:
        self.bodies: list[WatchedBody] = []

    def take(self, size: int, json_bytes: int) -> FixedBody:
        self.bodies.append(WatchedBody(size, json_bytes))
        return self.bodies[-1]

    def settle(self, body: FixedBody) -> None:
        """Not lent."""

    def give(self, body: FixedBody) -> None:
        """Never used again, so that a late look at it sees what the engine saw."""


class WatchedBody(FixedBody):
    def __init__(self, size: int, json_bytes: int) -> None:
        super().__init__(size, json_bytes)
        self.copied = 0

    def feed(self, data: bytearray, start: int, end: int) -> int:
        taken = super().feed(data, start, end)
        self.copied += taken - start
        return taken


def request(rows: int) -> bytes:
    values = np.arange(rows * VALUES, dtype="<f4")
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [rows, VALUES]}
    tensor["parameters"] = {"binary_data_size": values.nbytes}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(header) + values.nbytes}\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\n\r\n"
    )
    return head.encode() + header + values.tobytes()


async def exchange(requests: Sequence[bytes]) -> tuple[WatchedEngine, WatchedBodies]:
    """Send the requests at the same moment, each on a connection of its own, to a server that merges what it can."""
    engine, bodies = WatchedEngine(), WatchedBodies()
    settings = NativeSettings(max_batch_size=8, max_queue_delay_us=2_000_000 if len(requests) > 1 else 0)
    service = InferenceService(SPECIFICATION, lambda: engine, settings)
    budget = ByteBudget(settings.max_held_bytes)
    models, regions = ServedModels([service]), RegionTable(settings, budget)
    application = create_app(models, regions)
    front_end = HttpFrontEnd(application, models, regions, settings, budget)
    front_end.bodies = bodies  # type: ignore[assignment]
    loop, connect = asyncio.get_running_loop(), connection_factory(front_end)
    server = await loop.create_server(lambda: connect(ServerState(), loop), "127.0.0.1", 0)
    service.start(lambda: None)
    await service._settled.wait()
    try:
        port = server.sockets[0].getsockname()[1]
        await asyncio.gather(*(one_request(port, data) for data in requests))
    finally:
        server.close()
        await asyncio.to_thread(service.stop, 10)
    return engine, bodies


async def one_request(port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


def address(array: Array) -> int:
    where: int = array.__array_interface__["data"][0]
    return where


@pytest.mark.parametrize("rows", [1, 4])
def test_a_request_alone_reaches_the_engine_in_the_memory_it_was_received_in(rows: int) -> None:
    engine, bodies = uvloop.run(exchange([request(rows)]))
    (body,), (seen,) = bodies.bodies, engine.inputs
    assert np.shares_memory(seen, np.frombuffer(body.view, np.uint8))
    assert address(seen) % ALIGNMENT == 0
    assert body.copied <= READ_BYTES  # what came in one read with the head; the rest was received in place
    assert body.filled == body.size
    np.testing.assert_array_equal(seen.reshape(-1), np.arange(rows * VALUES, dtype="<f4"))


def test_merged_requests_are_copied_once_more_into_the_batch() -> None:
    engine, bodies = uvloop.run(exchange([request(4), request(4)]))
    (seen,) = engine.inputs
    assert len(seen) == 8
    assert seen.flags.c_contiguous
    for body in bodies.bodies:
        assert not np.shares_memory(seen, np.frombuffer(body.view, np.uint8))
        assert body.copied <= READ_BYTES
