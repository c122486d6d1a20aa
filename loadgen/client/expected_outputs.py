"""Checks every response under load against the outputs in the model's metadata: names, datatypes, shapes and sizes.

Values are not checked. A server describes its outputs with the same bytes each time, so after the first good response
a check compares some hundred bytes, which takes about a microsecond.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from loadgen.client.endpoint import Signature, fits
from loadgen.client.exchange import Exchange
from loadgen.client.outputs import HEADER_LENGTH, byte_size, read_document, typed_values
from loadgen.documents import one_line
from loadgen.records.run import Transport

_MOST_KNOWN = 1_000


class ExpectedOutputs:
    """The outputs of one batch size over one transport. Not thread-safe."""

    def __init__(self, transport: Transport, signature: Signature, batch_size: int) -> None:
        self._outputs = {
            output.name: (
                output.datatype,
                output.shape[1:]
                if not signature.batched
                else (batch_size, *output.shape[1:])
                if output.shape and output.shape[0] < 0
                else output.shape,
            )
            for output in signature.outputs
        }
        self._transport = transport
        self._known: set[tuple[bytes, int]] = set()
        sizes = [byte_size(*output) for output in self._outputs.values()]
        self._raw_heads: list[tuple[int, bytes]] = []
        """The field number and length before each tensor of a gRPC message, with its place after the first."""
        self._raw_bytes = 0
        """Bytes of all tensors with these; 0 if a size is not fixed."""
        for size in sizes if None not in sizes else ():
            field = service_pb2.ModelInferResponse(raw_output_contents=[bytes(size or 0)]).SerializeToString()
            self._raw_heads.append((self._raw_bytes, field[: len(field) - (size or 0)]))
            self._raw_bytes += len(field)

    def fault(self, exchange: Exchange) -> str | None:
        """How a response of good status differs from the metadata; None if it does not."""
        try:
            wrong = self._grpc_fault(exchange) if self._transport == "grpc" else self._http_fault(exchange)
        except (ValueError, DecodeError) as exc:
            wrong = f"it cannot be read ({one_line(str(exc))})"
        return None if wrong is None else f"the response does not match the model's metadata: {wrong}"

    def _http_fault(self, exchange: Exchange) -> str | None:
        length, body = exchange.header(HEADER_LENGTH), exchange.body
        json_bytes = int(length) if length is not None and length.isdigit() and len(length) < 12 else len(body)
        key = bytes(body[:json_bytes]), len(body) - json_bytes
        if key in self._known:
            return None
        outputs, left = read_document(key[0]), key[1]
        wrong = self._shapes_fault([(output.name, output.datatype, tuple(output.shape)) for output in outputs])
        for output in outputs if wrong is None else ():
            if self._transport == "shm":
                if output.data is not None:
                    return f"output {output.name} is not in the shared memory"
                continue
            sent = output.binary_bytes
            if sent is None:
                return (
                    f"output {output.name} is not binary, although binary outputs were requested; use --transport grpc "
                    "if the server has it"
                )
            wrong = wrong or _size_fault(output.name, output.datatype, tuple(output.shape), sent)
            left -= sent
        if wrong is None and left:
            wrong = f"its outputs end {abs(left):,} bytes {'before' if left > 0 else 'after'} the body does"
        if wrong is None and len(self._known) < _MOST_KNOWN:
            self._known.add(key)
        return wrong

    def _grpc_fault(self, exchange: Exchange) -> str | None:
        body = exchange.body
        start = len(body) - self._raw_bytes
        placed = self._raw_bytes > 0 and start >= 0
        placed = placed and all(body[start + at : start + at + len(head)] == head for at, head in self._raw_heads)
        if placed and (bytes(body[:start]), start) in self._known:
            return None
        message = service_pb2.ModelInferResponse.FromString(bytes(body))
        outputs = [(output.name, output.datatype, tuple(output.shape)) for output in message.outputs]
        wrong = self._shapes_fault(outputs)
        if wrong is None and not message.raw_output_contents:
            for output in message.outputs:
                typed_values(output)
            return None
        if wrong is None and len(message.raw_output_contents) != len(outputs):
            return f"{len(message.raw_output_contents)} of {len(outputs)} outputs are binary"
        for described, raw in zip(outputs, message.raw_output_contents, strict=False):
            wrong = wrong or _size_fault(*described, len(raw))
        in_order = [name for name, _, _ in outputs] == list(self._outputs)
        if wrong is None and placed and in_order and len(self._known) < _MOST_KNOWN:
            self._known.add((bytes(body[:start]), start))
        return wrong

    def _shapes_fault(self, found: list[tuple[str, str, tuple[int, ...]]]) -> str | None:
        names = sorted(name for name, _, _ in found)
        if names != sorted(self._outputs):
            return one_line(f"its outputs are {names} instead of {sorted(self._outputs)}")
        for name, datatype, shape in found:
            expected_type, expected = self._outputs[name]
            if datatype != expected_type or not fits(shape, expected):
                return one_line(
                    f"output {name} is {datatype} {list(shape)} instead of {expected_type} {list(expected)}"
                )
        return None


def _size_fault(name: str, datatype: str, shape: tuple[int, ...], sent: int) -> str | None:
    size = byte_size(datatype, shape)
    return None if size in (None, sent) else one_line(f"output {name} has {sent:,} bytes instead of {size:,}")
