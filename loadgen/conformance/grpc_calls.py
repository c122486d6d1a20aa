"""gRPC calls with any bytes as the message, answered as an `Answer`; the only module here that imports grpc."""

from __future__ import annotations

import struct
from time import perf_counter
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from loadgen.conformance.model import Model, tensor_bytes
from loadgen.conformance.records import Answer

SERVICE = "inference.GRPCInferenceService"
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
messages: Any = service_pb2


class GrpcDoor:
    """One channel of its own to one server."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def start(self, method: str, message: Any, deadline_s: float) -> Any:
        """A call under way: the grpc future. `message` is a protobuf message or raw bytes."""
        call = self._channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=_serialise)
        return call.future(message, timeout=deadline_s)

    def call(self, method: str, message: Any, deadline_s: float = 15.0) -> Answer:
        """One finished call."""
        started = perf_counter()
        return finish(self.start(method, message, deadline_s), started)

    def infer(self, message: Any, deadline_s: float = 30.0) -> Answer:
        """ModelInfer."""
        return self.call("ModelInfer", message, deadline_s)

    def close(self) -> None:
        """End the channel."""
        self._channel.close()


def finish(future: Any, started: float) -> Answer:
    """Wait for a call. A deadline of ours that passes is DEADLINE_EXCEEDED."""
    try:
        body = future.result()
    except grpc.RpcError as exc:
        error: Any = exc
        return Answer(
            error.code().name,
            {name: str(value) for name, value in error.trailing_metadata() or ()},
            message=error.details() or "",
            elapsed_s=perf_counter() - started,
        )
    except grpc.FutureCancelledError:
        return Answer("CANCELLED", message="cancelled by the client", elapsed_s=perf_counter() - started)
    return Answer("OK", body=body, elapsed_s=perf_counter() - started)


def infer_message(model: Model, rows: int = 1, seed: int = 0) -> Any:
    """A valid ModelInferRequest with raw contents."""
    message = messages.ModelInferRequest(model_name=model.name)
    for tensor, array in zip(model.inputs, model.arrays(rows, seed).values(), strict=True):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=model.shape(tensor, rows))
        message.raw_input_contents.append(tensor_bytes(array))
    return message


def first_output(body: bytes) -> list[float] | None:
    """The first output's FP32 values of a serialised ModelInferResponse; None for other datatypes."""
    response = messages.ModelInferResponse.FromString(body)
    if not response.outputs or response.outputs[0].datatype != "FP32" or not response.raw_output_contents:
        return None
    raw = response.raw_output_contents[0]
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def _serialise(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())
