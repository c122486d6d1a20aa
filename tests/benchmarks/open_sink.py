"""The calibration's sink for any client: with the documents of the protocol, and gRPC by the library.

python -m tests.benchmarks.open_sink     first line of output: {"port": …, "grpc_port": …}; ends with its input
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2

from loadgen.client.sink import (
    ANSWER_BYTES,
    INPUT,
    ITEM_SHAPE,
    MODEL,
    OUTPUT,
    HttpSink,
    Sink,
    http_answer,
    infer_answer,
)

_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_DOCUMENTS: dict[str, object] = {
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
_PATHS = {path: http_answer(document) for path, document in _DOCUMENTS.items()}


class OpenHttpSink(HttpSink):
    """With metadata, configuration and statistics."""

    def document(self, path: str) -> bytes:
        if path.startswith("/v2/systemsharedmemory/") or path.endswith(("/live", "/ready")):
            return super().document(path)
        return _PATHS.get(path, _NOT_FOUND)


class LibraryGrpcSink(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Every method by its name; messages in and out stay bytes."""

    def __init__(self) -> None:
        messages = {name: message.SerializeToString() for name, message in _grpc_documents().items()}
        self._methods = {
            name: _answer(content) for name, content in (messages | {"ModelInfer": infer_answer()}).items()
        }

    def service(self, handler_call_details: Any) -> Any:
        method = self._methods.get(handler_call_details.method.rpartition("/")[2])
        return None if method is None else grpc.unary_unary_rpc_method_handler(method)


def _answer(content: bytes) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def answer(_message: bytes, _context: Any) -> bytes:
        return content

    return answer


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


async def serve() -> None:
    loop = asyncio.get_running_loop()
    sink = Sink()
    server = await loop.create_server(lambda: OpenHttpSink(sink), "127.0.0.1", 0)
    grpc_server = grpc.aio.server(handlers=(LibraryGrpcSink(),), options=(("grpc.max_receive_message_length", -1),))
    grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    sys.stdout.write(json.dumps({"port": server.sockets[0].getsockname()[1], "grpc_port": grpc_port}) + "\n")
    sys.stdout.flush()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    await grpc_server.stop(None)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve())
