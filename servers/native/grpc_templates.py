"""Templates of repeated gRPC messages: a decoded and checked request, kept by its bytes around the raw tensors.

As with HTTP (see `request_templates`), the meaning of a message with plain raw tensors depends only on the other bytes.
A message of the same size that has the same bytes in the same places is the same message with other values. Messages
with values in typed fields, a timeout, BYTES or shared memory (whose regions come and go) are never kept.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from servers.contract.records import InferRequest, InferResponse, OutputTensor
from servers.contract.tensors import Array
from servers.engines.padding import BatchKey, batch_key
from servers.native.grpc_messages import RawInput, encode_message, encode_streamed
from servers.native.inference import InferenceService

KEPT_HEAD_BYTES = 4096
"""Messages with more bytes around their tensors are decoded each time."""
_KEPT_TEMPLATES = 256
_KEPT_LAYOUTS = 4
"""Of one size; every one costs a look-up."""
_KEPT_ANSWERS = 8
_PREFIX = struct.Struct(">BI")


@dataclass(eq=False, slots=True)
class MessageTemplate:
    """The request that these bytes make, with any values of its tensors."""

    service: InferenceService
    rows: int
    key: BatchKey
    _inputs: tuple[tuple[str, np.dtype[np.generic], tuple[int, ...], int], ...]
    _names: tuple[str, ...]
    _request_id: str
    _answers: dict[tuple[bool, tuple[tuple[int, ...], ...]], list[bytes]] = field(default_factory=dict)

    def arrays(self, content: memoryview) -> Mapping[str, Array]:
        """Views over a whole message; nothing is copied."""
        return {name: np.ndarray(shape, dtype, content, offset) for name, dtype, shape, offset in self._inputs}

    def answer(self, outputs: Mapping[str, Array], *, streamed: bool) -> list[bytes]:
        """The response's message in pieces, with its prefix.

        Everything but the outputs' bytes is the same for the same shapes, so it is kept.
        """
        arrays = [outputs[name] for name in self._names]
        shapes = streamed, tuple([array.shape for array in arrays])
        between = self._answers.get(shapes)
        if between is None:
            between = self._between(arrays, streamed=streamed)
            if len(self._answers) < _KEPT_ANSWERS:
                self._answers[shapes] = between
        pieces: list[bytes] = []
        for before, array in zip(between, arrays, strict=True):
            pieces += (before, array.tobytes())
        return pieces

    def _between(self, arrays: Sequence[Array], *, streamed: bool) -> list[bytes]:
        """The bytes before each output's."""
        signature = self.service.signature
        datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        tensors = [
            OutputTensor(name, datatypes[name], array, True) for name, array in zip(self._names, arrays, strict=True)
        ]
        message = encode_message(InferResponse(signature.name, signature.version, self._request_id, tuple(tensors)))
        content = (encode_streamed(message) if streamed else message).SerializeToString()
        end = len(content)
        between: list[bytes] = []
        for array in reversed(arrays):  # the raw outputs are the message's last fields
            end -= array.nbytes
            start = end - 1 - _varint_bytes(array.nbytes)
            between.append(content[start:end])
            end = start
        between[-1] = _PREFIX.pack(0, len(content)) + content[:end] + between[-1]
        return between[::-1]


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


@dataclass(eq=False, slots=True)
class _Layout:
    """Where the raw tensors are in messages of one size, and the templates by the bytes around them."""

    spans: tuple[tuple[int, int], ...]
    templates: dict[bytes, MessageTemplate]

    def head(self, content: memoryview) -> bytes:
        if len(self.spans) == 1 and self.spans[0][1] == len(content):  # nearly always
            return bytes(content[: self.spans[0][0]])
        pieces, place = [], 0
        for start, end in self.spans:
            pieces.append(content[place:start])
            place = end
        return b"".join([*pieces, content[place:]])


class MessageTemplates:
    """The latest templates of one server, for messages of all models."""

    def __init__(self) -> None:
        self._layouts: dict[int, list[_Layout]] = {}
        self._count = 0

    def tensor_offset(self, size: int) -> int:
        """Where the first raw tensor probably begins in a message of this size."""
        layouts = self._layouts.get(size)
        return layouts[0].spans[0][0] if layouts else 0

    def find(self, content: memoryview) -> MessageTemplate | None:
        """The template of a message that came before with other values."""
        for layout in self._layouts.get(len(content), ()):
            template = layout.templates.get(layout.head(content))
            if template is not None:
                return template
        return None

    def keep(
        self, content: memoryview, raw: Sequence[RawInput], request: InferRequest, service: InferenceService
    ) -> None:
        """Keep a decoded message's template, unless it must be decoded each time. Raises `ContractError`."""
        known = service.signature.outputs
        wanted = request.outputs or ()
        inputs = request.inputs
        plain = (
            "timeout" not in request.parameters
            and all(spec.datatype != "BYTES" for spec in known)
            and all(output.binary and output.window is None for output in wanted)
            and all(item.window is None and item.datatype != "BYTES" and item.data.size for item in inputs)
        )
        spans = tuple((item.start, item.end) for item in raw)
        head_bytes = len(content) - sum(end - start for start, end in spans)
        if not plain or not spans or len(spans) != len(inputs) or head_bytes > KEPT_HEAD_BYTES:
            return
        rows, _ = service.signature.validate(request)
        names = tuple(output.name for output in wanted or known)
        items = tuple(
            (item.name, item.data.dtype, item.shape, start) for item, (start, _) in zip(inputs, spans, strict=True)
        )
        key = batch_key(((item.name, item.shape) for item in inputs), service.padding)
        template = MessageTemplate(service, rows, key, items, names, request.id)
        if self._count >= _KEPT_TEMPLATES:  # messages that differ each time must not accumulate
            self._layouts.clear()
            self._count = 0
        layouts = self._layouts.setdefault(len(content), [])
        layout = next((layout for layout in layouts if layout.spans == spans), None)
        if layout is None:
            layout = _Layout(spans, {})
            del layouts[_KEPT_LAYOUTS - 1 :]
            layouts.insert(0, layout)
        layout.templates[layout.head(content)] = template
        self._count += 1
