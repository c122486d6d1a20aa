"""gRPC calls with any bytes as the message, answered as an `Answer`; the only module here that imports grpc."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from loadgen.conformance.model import InferenceRequest
from loadgen.conformance.records import Answer

SERVICE = "inference.GRPCInferenceService"
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
messages: Any = service_pb2


class GrpcClient:
    """One channel of its own to one server."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def start(self, method: str, message: Any, deadline_s: float) -> Any:
        """A call under way: the grpc future. `message` is a protobuf message or raw bytes."""
        call = self._channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=_serialise)
        return call.future(message, timeout=deadline_s)

    def call(self, method: str, message: Any, deadline_s: float = 15.0) -> Answer:
        """One finished call."""
        started = perf_counter()
        return finish(self.start(method, message, deadline_s), started)

    def infer(self, message: Any) -> Answer:
        """ModelInfer."""
        return self.call("ModelInfer", message, 30.0)

    def close(self) -> None:
        """End the channel."""
        self._channel.close()


def finish(future: Any, started: float) -> Answer:
    """Wait for a call. DEADLINE_EXCEEDED where the client's own deadline passes."""
    try:
        body = future.result()
    except grpc.RpcError as exc:
        error: Any = exc
        headers = {name: str(value) for name, value in error.trailing_metadata() or ()}
        return Answer(error.code().name, headers, b"", error.details() or "", perf_counter() - started)
    except grpc.FutureCancelledError:
        return Answer("CANCELLED", message="cancelled by the client", elapsed_s=perf_counter() - started)
    return Answer("OK", body=body, elapsed_s=perf_counter() - started)


def infer_message(request: InferenceRequest) -> Any:
    """The ModelInferRequest with raw contents."""
    message = messages.ModelInferRequest(
        model_name=request.name,
        model_version=request.version,
        id=request.document.get("id", ""),
        raw_input_contents=request.blobs,
    )
    for entry in request.entries:
        made = message.inputs.add(name=entry["name"], datatype=entry["datatype"], shape=entry["shape"])
        for name, value in entry.get("parameters", {}).items():
            _set(made.parameters[name], value)
    for output in request.document.get("outputs", ()):
        message.outputs.add(name=output["name"])
    for name, value in request.document.get("parameters", {}).items():
        if name != "binary_data_output":
            _set(message.parameters[name], value)
    return message


def _set(parameter: Any, value: str | int) -> None:
    setattr(parameter, "string_param" if isinstance(value, str) else "int64_param", value)


def _serialise(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())
