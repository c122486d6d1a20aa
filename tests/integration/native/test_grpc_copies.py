"""Where a gRPC message's tensor is copied between the socket and the engine: proven by addresses, as over HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import uvloop
from tritonclient.grpc import service_pb2

from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.native.grpc.call import Call, GrpcMessage
from servers.native.grpc.inference import GrpcFrontEnd
from servers.native.shared.memory import ALIGNMENT
from servers.native.shared.settings import NativeSettings
from servers.protocol.tensors import Array
from tests.integration.native.raw_grpc import DATA, END_STREAM, RawGrpc, frame, prefixed
from tests.integration.native.test_copies import SPECIFICATION, VALUES, WatchedEngine, address
from tests.unit.native.conftest import served, specification_of


class WatchedFrontEnd(GrpcFrontEnd):
    """Keeps the memory of all messages, so that none of it is used again and a late look sees what the engine saw."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.taken: list[memoryview] = []

    def allocate_message(self, call: Call, size: int, *, compressed: bool) -> GrpcMessage:
        message = super().allocate_message(call, size, compressed=compressed)
        self.taken.append(message.room)
        return message


def message(rows: int, request_id: str) -> bytes:
    values = np.arange(rows * VALUES, dtype="<f4").tobytes()
    request = service_pb2.ModelInferRequest(model_name="m", id=request_id, raw_input_contents=[values])
    request.inputs.add(name="x", datatype="FP32", shape=[rows, VALUES])
    serialised: bytes = request.SerializeToString()
    return serialised


def talk(port: int, messages: list[bytes]) -> None:
    with RawGrpc(port) as client:
        for index, content in enumerate(messages):
            stream = 2 * index + 1
            client.open(stream)
            client.send(frame(DATA, END_STREAM, stream, prefixed(content)))
            assert client.answer(stream).status == 0


async def exchange(messages: list[bytes], *, handed_over: bool) -> tuple[WatchedEngine, WatchedFrontEnd]:
    """Send the messages, one after the other, on a connection that the server accepts or is given."""
    engine = WatchedEngine()
    engine.gate.set()
    settings = NativeSettings(max_batch_size=8, max_queue_delay_us=0)
    loop = asyncio.get_running_loop()
    async with served(SPECIFICATION, settings, lambda _: engine) as started:
        front_end = WatchedFrontEnd(started.server.models, started.server.regions, settings, started.memory)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            talking = asyncio.create_task(asyncio.to_thread(talk, port, messages))
            if handed_over:
                accepted, _ = await loop.sock_accept(listener)
                await loop.connect_accepted_socket(front_end.connect, accepted)
                await talking
            else:
                server = await loop.create_server(front_end.connect, sock=listener)
                await talking
                server.close()
        await front_end.stop(10)
        assert not front_end.connections
    return engine, front_end


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("request_id", ["", "x", "seventeen letters"])
def test_a_message_alone_reaches_the_engine_in_the_memory_it_was_received_in(
    rows: int, handed_over: bool, request_id: str
) -> None:
    engine, front_end = uvloop.run(exchange([message(rows, request_id)] * 3, handed_over=handed_over))
    assert len(engine.inputs) == len(front_end.taken) == 3
    for seen in engine.inputs:
        np.testing.assert_array_equal(seen.reshape(-1), np.arange(rows * VALUES, dtype="<f4"))
    for seen, taken in zip(engine.inputs[1:], front_end.taken[1:], strict=True):  # the first tells where the tensor is
        assert np.shares_memory(seen, np.frombuffer(taken, np.uint8))
        assert address(seen) % ALIGNMENT == 0


class WaitingEngine(NullEngine):
    """The null engine, once its gate is open."""

    def __init__(self, specification: ModelSpecification) -> None:
        super().__init__(specification, EngineSettings("null"))
        self.gate = threading.Event()

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        assert self.gate.wait(60)
        return super().infer(inputs)


def test_typed_values_count_with_the_bytes_that_they_become() -> None:
    """A zero is one byte of a message and eight of a tensor."""
    count = 50_000
    specification = specification_of("INT64", count, 1)
    request = service_pb2.ModelInferRequest(model_name="m")
    item = request.inputs.add(name="x", datatype="INT64", shape=[1, count])
    item.contents.int64_contents.extend([0] * count)
    content = request.SerializeToString()

    async def hold() -> int:
        engine = WaitingEngine(specification)
        settings = NativeSettings(max_batch_size=8, max_queue_delay_us=0)
        async with served(specification, settings, lambda _: engine) as started:
            front_end = GrpcFrontEnd(started.server.models, started.server.regions, settings, started.memory)
            server = await asyncio.get_running_loop().create_server(front_end.connect, "127.0.0.1", 0)
            talking = asyncio.create_task(asyncio.to_thread(talk, server.sockets[0].getsockname()[1], [content]))
            most = 0
            while not talking.done():
                most = max(most, started.memory.budget.held)
                if most > len(content):
                    engine.gate.set()
                await asyncio.sleep(0.001)
            server.close()
            await front_end.stop(10)
            await talking
            assert started.memory.budget.held == 0
        return most

    assert uvloop.run(hold()) == len(content) + 8 * count
