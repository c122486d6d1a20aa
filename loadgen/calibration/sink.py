"""The null server of a calibration: `python -m loadgen.calibration.sink` takes requests whole and answers 2 KB.

It speaks as much of the protocol as a load generator needs, over HTTP and gRPC, and does nothing with what it gets:
there is no model, no decoding and no queue, so it costs less than any server. gRPC has two doors: a lean one for our
own client (`loadgen.calibration.http2_sink`), and the library's for any other. Requests that refer to shared memory
are answered without looking at the memory. A delay can be planted; how long each request was really kept, from its
last byte read to just before its answer is written, is what the sink reports.

    --port P --grpc-port Q --library-grpc-port R   0: free ones. Several processes may share them (SO_REUSEPORT)
    first line of output     {"port": …, "grpc_port": …, "library_grpc_port": …}
    delay MS  on input       plants a delay from now on            → {}
    held      on input       ns for which it kept each request since the last `held`  → {"held_ns": […]}
    count     on input       inference requests answered so far    → {"count": …}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2

from loadgen.calibration.http2_sink import Http2Sink

MODEL = "sink"
INPUT, OUTPUT = "pixel_values", "embedding"
ITEM_SHAPE = (3, 224, 224)
ANSWER_BYTES = 2048

_RECEIVE_BYTES = 1 << 20
_EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class Sink:
    """What both protocols share."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.count = 0
        self.held_ns: list[int] = []

    def whole(self, since_ns: int, send: Callable[[], None]) -> None:
        """A request is whole since `since_ns`: send its answer, after the delay where there is one."""
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self._answer, since_ns, send)
        else:
            self._answer(since_ns, send)

    def _answer(self, since_ns: int, send: Callable[[], None]) -> None:
        self.answered(since_ns)
        send()

    def answered(self, since_ns: int) -> None:
        """A request that was whole at `since_ns` is about to be answered."""
        self.count += 1
        self.held_ns.append(perf_counter_ns() - since_ns)

    def command(self, line: str) -> dict[str, object]:
        """One line of the standard input. Raises `ValueError` for anything unknown."""
        word, _, value = line.strip().partition(" ")
        if word == "delay":
            self.delay_s = float(value) / 1000.0
            return {}
        if word == "held":
            held, self.held_ns = self.held_ns, []
            return {"held_ns": held}
        if word == "count":
            return {"count": self.count}
        raise ValueError(f"unknown command: {line!r}")


def _http(document: object, binary: bytes = b"") -> bytes:
    text = json.dumps(document).encode()
    extra = f"Inference-Header-Content-Length: {len(text)}\r\n" if binary else ""
    kind = "application/octet-stream" if binary else "application/json"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{extra}Content-Length: {len(text) + len(binary)}\r\n\r\n"
    return head.encode() + text + binary


_TENSOR = {"name": OUTPUT, "datatype": "FP32", "shape": [1, ANSWER_BYTES // 4]}
_BINARY_ANSWER = _http(
    {"model_name": MODEL, "outputs": [{**_TENSOR, "parameters": {"binary_data_size": ANSWER_BYTES}}]},
    bytes(ANSWER_BYTES),
)
_MEMORY_ANSWER = _http({"model_name": MODEL, "outputs": [_TENSOR]})
_DOCUMENTS = {
    "/v2": {"name": "sink", "version": "1", "extensions": ["binary_tensor_data", "system_shared_memory"]},
    f"/v2/models/{MODEL}": {
        "name": MODEL,
        "versions": ["1"],
        "platform": "sink",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *ITEM_SHAPE]}],
        "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, ANSWER_BYTES // 4]}],
    },
    f"/v2/models/{MODEL}/config": {
        "name": MODEL,
        "platform": "sink",
        "backend": "sink",
        "max_batch_size": 128,
        "input": [{"name": INPUT, "data_type": "TYPE_FP32", "dims": ITEM_SHAPE}],
        "output": [{"name": OUTPUT, "data_type": "TYPE_FP32", "dims": [ANSWER_BYTES // 4]}],
    },
    f"/v2/models/{MODEL}/stats": {"model_stats": [{"name": MODEL, "version": "1", "inference_stats": {}}]},
}
_PATHS = {path: _http(document) for path, document in _DOCUMENTS.items()} | {
    "/v2/health/live": _EMPTY,
    "/v2/health/ready": _EMPTY,
    f"/v2/models/{MODEL}/ready": _EMPTY,
}


class HttpSink(asyncio.BufferedProtocol):
    """One connection: requests one after the other, each read whole into one buffer and forgotten."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._head = bytearray()
        self._left = 0
        self._answer = _NOT_FOUND
        self._counts = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = transport

    def get_buffer(self, _sizehint: int) -> bytearray:
        """Where the next bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        if self._left:
            self._left -= nbytes
        else:
            self._head += memoryview(self._buffer)[:nbytes]
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self._begin(bytes(self._head[:end]), len(self._head) - end - 4)
            self._head.clear()
        if not self._left:
            self._whole()

    def _begin(self, head: bytes, body_bytes: int) -> None:
        _, path, _ = head[: head.index(b"\r\n")].decode("latin-1").split(" ")
        fields = head.lower()
        self._counts = path.endswith("/infer")
        if self._counts:
            self._answer = _BINARY_ANSWER if b"\r\ninference-header-content-length:" in fields else _MEMORY_ANSWER
        elif path.startswith("/v2/systemsharedmemory/"):
            self._answer = _EMPTY
        else:
            self._answer = _PATHS.get(path, _NOT_FOUND)
        start = fields.find(b"\r\ncontent-length:")
        length = 0 if start < 0 else int(fields[start + 17 :].split(b"\r\n", 1)[0])
        self._left = length - body_bytes

    def _whole(self) -> None:
        if self._counts:
            self._sink.whole(perf_counter_ns(), self._send)
        else:
            self._send()

    def _send(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._answer)


class GrpcSink(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Every method by its name; messages in and out stay bytes."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._infer_answer = infer_answer()
        self._methods: dict[str, Callable[[bytes, Any], Awaitable[bytes]]] = {"ModelInfer": self._infer}
        for name, message in _grpc_documents().items():
            self._methods[name] = self._document(message)

    def service(self, handler_call_details: Any) -> Any:
        """What answers a call; None where nothing does."""
        method = self._methods.get(handler_call_details.method.rpartition("/")[2])
        return None if method is None else grpc.unary_unary_rpc_method_handler(method)

    async def _infer(self, _message: bytes, _context: Any) -> bytes:
        since_ns = perf_counter_ns()
        if self._sink.delay_s:
            await asyncio.sleep(self._sink.delay_s)
        self._sink.answered(since_ns)
        return self._infer_answer

    @staticmethod
    def _document(message: Any) -> Callable[[bytes, Any], Awaitable[bytes]]:
        content: bytes = message.SerializeToString()

        async def answer(_message: bytes, _context: Any) -> bytes:
            return content

        return answer


def infer_answer() -> bytes:
    """The serialised `ModelInferResponse` of every request."""
    answer = service_pb2.ModelInferResponse(model_name=MODEL, model_version="1")
    answer.outputs.add(name=OUTPUT, datatype="FP32", shape=(1, ANSWER_BYTES // 4))
    answer.raw_output_contents.append(bytes(ANSWER_BYTES))
    content: bytes = answer.SerializeToString()
    return content


def _grpc_documents() -> dict[str, Any]:
    metadata = service_pb2.ModelMetadataResponse(name=MODEL, versions=["1"], platform="sink")
    metadata.inputs.add(name=INPUT, datatype="FP32", shape=(-1, *ITEM_SHAPE))
    metadata.outputs.add(name=OUTPUT, datatype="FP32", shape=(-1, ANSWER_BYTES // 4))
    configured = service_pb2.ModelConfigResponse()
    configured.config.name = MODEL
    configured.config.max_batch_size = 128
    configured.config.input.add(name=INPUT, data_type="TYPE_FP32", dims=ITEM_SHAPE)
    configured.config.output.add(name=OUTPUT, data_type="TYPE_FP32", dims=(ANSWER_BYTES // 4,))
    statistics = service_pb2.ModelStatisticsResponse()
    statistics.model_stats.add(name=MODEL, version="1")
    return {
        "ServerLive": service_pb2.ServerLiveResponse(live=True),
        "ServerReady": service_pb2.ServerReadyResponse(ready=True),
        "ModelReady": service_pb2.ModelReadyResponse(ready=True),
        "ServerMetadata": service_pb2.ServerMetadataResponse(name="sink", version="1"),
        "ModelMetadata": metadata,
        "ModelConfig": configured,
        "ModelStatistics": statistics,
    }


async def _serve(port: int, grpc_port: int, library_grpc_port: int) -> None:
    loop = asyncio.get_running_loop()
    sink, message = Sink(), infer_answer()
    server = await loop.create_server(lambda: HttpSink(sink), "127.0.0.1", port, reuse_port=True, backlog=1024)
    lean = await loop.create_server(
        lambda: Http2Sink(message, sink.whole), "127.0.0.1", grpc_port, reuse_port=True, backlog=1024
    )
    grpc_server = grpc.aio.server(
        handlers=(GrpcSink(sink),), options=(("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 1))
    )
    library_grpc_port = grpc_server.add_insecure_port(f"127.0.0.1:{library_grpc_port}")
    await grpc_server.start()
    ports = {name: listener.sockets[0].getsockname()[1] for name, listener in (("port", server), ("grpc_port", lean))}
    _say({**ports, "library_grpc_port": library_grpc_port})
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        _say(sink.command(line.decode()))
    await grpc_server.stop(None)
    server.close()
    lean.close()


def _say(document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until standard input closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--grpc-port", type=int, default=0)
    parser.add_argument("--library-grpc-port", type=int, default=0)
    options = parser.parse_args()
    asyncio.run(_serve(options.port, options.grpc_port, options.library_grpc_port))


if __name__ == "__main__":
    main()
