"""What every answer under load is held to: the outputs that the model's own metadata promises for that batch size.

Names, datatypes, shapes and sizes are checked, values are not. A server describes its outputs in the same bytes each
time, so after the first good answer this is a comparison of some hundred bytes, about a microsecond.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from loadgen.documents import one_line
from loadgen.records.run import Transport
from loadgen.transport.endpoint import Signature
from loadgen.transport.exchange import Exchange
from loadgen.transport.outputs import byte_size, read_document

_HEADER_LENGTH = "inference-header-content-length"
_MOST_KNOWN = 1_000
_RAW_TAG = b"\x32"
"""Of the field raw_output_contents of a ModelInferResponse."""


class Promise:
    """The outputs of one batch size over one transport. Not for several threads."""

    def __init__(self, transport: Transport, signature: Signature, batch_size: int) -> None:
        self._outputs = {
            output.name: (output.datatype, _of_batch(output.shape, batch_size)) for output in signature.outputs
        }
        self._transport = transport
        self._known: set[tuple[bytes, int]] = set()
        self._ends, self._raw_bytes = _raw_ends([byte_size(*output) for output in self._outputs.values()])

    def fault(self, exchange: Exchange) -> str | None:
        """What is wrong with an answer of good status; None where it is as promised."""
        try:
            wrong = self._grpc_fault(exchange) if self._transport == "grpc" else self._http_fault(exchange)
        except (ValueError, DecodeError) as exc:
            wrong = f"it cannot be read ({one_line(str(exc))})"
        return None if wrong is None else f"the answer is not what the model promises: {wrong}"

    def _http_fault(self, exchange: Exchange) -> str | None:
        length, body = exchange.header(_HEADER_LENGTH), exchange.body
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
            sent = None if output.parameters is None else output.parameters.binary_data_size
            if sent is None:
                return f"output {output.name} is not binary, as was asked for"
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
        ends_right = self._raw_bytes > 0 and start >= 0
        ends_right = ends_right and all(body[start + at : start + at + len(end)] == end for at, end in self._ends)
        if ends_right and (bytes(body[:start]), start) in self._known:
            return None
        message = service_pb2.ModelInferResponse.FromString(bytes(body))
        wrong = self._shapes_fault([(o.name, o.datatype, tuple(o.shape)) for o in message.outputs])
        if wrong is None and len(message.raw_output_contents) != len(message.outputs):
            return f"{len(message.raw_output_contents)} of {len(message.outputs)} outputs are binary"
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=False):
            wrong = wrong or _size_fault(output.name, output.datatype, tuple(output.shape), len(raw))
        in_order = [output.name for output in message.outputs] == list(self._outputs)
        if wrong is None and ends_right and in_order and len(self._known) < _MOST_KNOWN:
            self._known.add((bytes(body[:start]), start))
        return wrong

    def _shapes_fault(self, found: list[tuple[str, str, tuple[int, ...]]]) -> str | None:
        names = [name for name, _, _ in found]
        if sorted(names) != sorted(self._outputs):
            return one_line(f"its outputs are {sorted(names)} instead of {sorted(self._outputs)}")
        for name, datatype, shape in found:
            promised_type, promised = self._outputs[name]
            fits = len(shape) == len(promised) and all(
                (size >= 0 and size == wanted) or wanted < 0 <= size
                for size, wanted in zip(shape, promised, strict=True)
            )
            if datatype != promised_type or not fits:
                return one_line(
                    f"output {name} is {datatype} {list(shape)} instead of {promised_type} {list(promised)}"
                )
        return None


def _of_batch(shape: tuple[int, ...], batch_size: int) -> tuple[int, ...]:
    """A first dimension that is free is the batch's."""
    return (batch_size, *shape[1:]) if shape and shape[0] < 0 else shape


def _size_fault(name: str, datatype: str, shape: tuple[int, ...], sent: int) -> str | None:
    size = byte_size(datatype, shape)
    return None if size in (None, sent) else one_line(f"output {name} has {sent:,} bytes instead of {size:,}")


def _raw_ends(sizes: list[int | None]) -> tuple[list[tuple[int, bytes]], int]:
    """The tags and lengths of a message's raw outputs, each with its place from the first, and their bytes in all; 0
    where a size is not fixed."""
    ends, place = [], 0
    for size in sizes:
        if size is None:
            return [], 0
        end = _RAW_TAG + _varint(size)
        ends.append((place, end))
        place += len(end) + size
    return ends, place


def _varint(value: int) -> bytes:
    content = bytearray()
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*content, value])
