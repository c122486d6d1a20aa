"""Where a tensor's bytes are copied between the socket and the engine: proven by addresses, not by reading the code."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import uvloop

from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.native.front.connections import READ_BYTES
from servers.native.shared.memory import ALIGNMENT, ArrivingBytes
from servers.native.shared.settings import NativeSettings
from servers.protocol.tensors import Array
from tests.unit.native.conftest import served, specification_of

VALUES = 3 * 224 * 224
SPECIFICATION = specification_of("FP32", VALUES, 4)


class WatchedEngine(NullEngine):
    """The null engine, which begins when `gate` is set, noting what it was given."""

    def __init__(self) -> None:
        super().__init__(SPECIFICATION, EngineSettings(kind="null", max_batch_size=8))
        self.reached, self.gate = threading.Event(), threading.Event()
        self.inputs: list[Array] = []

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.reached.set()
        assert self.gate.wait(60)
        self.inputs.append(inputs["x"])
        return super().infer(inputs)


class WatchedBodies:
    """Notes every body, so that none of their memory is used again, and how much came through the shared buffer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bodies: list[ArrivingBytes] = []
        self.copied: list[int] = []
        create, feed = ArrivingBytes.__init__, ArrivingBytes.feed

        def created(body: ArrivingBytes, *arguments: Any, **options: Any) -> None:
            create(body, *arguments, **options)
            self.bodies.append(body)
            self.copied.append(0)

        def fed(body: ArrivingBytes, data: bytes | bytearray, start: int, end: int) -> int:
            taken = feed(body, data, start, end)
            self.copied[self.bodies.index(body)] += taken - start
            return taken

        patch.setattr(ArrivingBytes, "__init__", created)
        patch.setattr(ArrivingBytes, "feed", fed)


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
    """Send the requests, each on a connection of its own: the engine gets the first, and begins when all are there."""
    engine = WatchedEngine()
    with pytest.MonkeyPatch.context() as patch:
        bodies = WatchedBodies(patch)
        async with served(SPECIFICATION, NativeSettings(max_batch_size=8), lambda _: engine) as server:
            sent = []
            async with asyncio.timeout(20):
                for data in requests:
                    sent.append(asyncio.create_task(one_request(server.port, data)))
                    while not engine.reached.is_set():
                        await asyncio.sleep(0.001)
                while not (len(bodies.bodies) == len(requests) and all(body.complete for body in bodies.bodies)):
                    await asyncio.sleep(0.001)
            engine.gate.set()
            await asyncio.gather(*sent)
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
def test_a_request_alone_reaches_the_engine_in_the_slot_it_was_received_in(rows: int) -> None:
    engine, bodies = uvloop.run(exchange([request(rows)]))
    (body,), (seen,) = bodies.bodies, engine.inputs
    assert np.shares_memory(seen, np.asarray(body.slot))
    assert address(seen) % ALIGNMENT == 0
    assert bodies.copied[0] <= READ_BYTES  # what came in one read with the head; the rest was received in place
    assert body.arrived == body.size
    np.testing.assert_array_equal(seen.reshape(-1), np.arange(rows * VALUES, dtype="<f4"))


def test_merged_requests_are_gathered_once() -> None:
    """The first occupies the engine, so that the two others wait and share a batch."""
    engine, bodies = uvloop.run(exchange([request(1), request(4), request(4)]))
    merged = next(seen for seen in engine.inputs if len(seen) == 8)
    assert sorted(map(len, engine.inputs)) == [1, 8]
    assert merged.flags.c_contiguous
    for body, copied in zip(bodies.bodies, bodies.copied, strict=True):
        assert not np.shares_memory(merged, np.asarray(body.slot))
        assert copied <= READ_BYTES


def test_requests_of_one_size_lie_side_by_side_in_the_order_in_which_they_came() -> None:
    """So that an engine can copy them to its device in one piece."""
    _, bodies = uvloop.run(exchange([request(1)] * 4))
    offsets = sorted(body.slot.offset for body in bodies.bodies if body.slot is not None)
    assert [offset - offsets[0] for offset in offsets] == [2**20 * number for number in range(4)]
