"""Templates of gRPC messages: a decoded and checked request, kept by its bytes around the raw tensors.

A message of the same size that has the same bytes in the same places is the same message with other values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servers.contract.records import InferRequest, Window
from servers.contract.tensors import Array
from servers.native.grpc_messages import RawInput, encode_message, encode_streamed
from servers.native.inference import InferenceService
from servers.native.templates import KEPT_BYTES, KEPT_TEMPLATES, Template

_KEPT_LAYOUTS = 4
"""Of one size; every one costs a look-up."""
_PREFIX = struct.Struct(">BI")


class MessageTemplate(Template):
    """The request that these bytes make, with any values of its tensors."""

    __slots__ = ("service",)
    service: InferenceService

    def answer(self, outputs: Mapping[str, Array], targets: Mapping[str, Window], *, streamed: bool) -> list[bytes]:
        """The response's message in pieces, with its prefix. Raises `ContractError`."""
        data = self.data(outputs, targets)
        shapes = streamed, self.shapes(outputs)
        between = self._answers.get(shapes)
        if between is None:
            between = self._between(outputs, [len(one) for one in data], streamed=streamed)
            self.keep_answer(shapes, between)
        return [piece for pair in zip(between, data, strict=True) for piece in pair]

    def _between(self, outputs: Mapping[str, Array], sizes: Sequence[int], *, streamed: bool) -> list[bytes]:
        """The bytes before each output's."""
        message = encode_message(self.response(outputs, self.service.signature))
        content = (encode_streamed(message) if streamed else message).SerializeToString()
        end = len(content)
        between: list[bytes] = []
        for size in reversed(sizes):  # the raw outputs are the message's last fields
            end -= size
            start = end - 1 - _varint_bytes(size)
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
        spans = [layout.spans for layout in self._layouts.get(size, ()) if layout.spans]
        return spans[0][0][0] if spans else 0

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
        spans = tuple((item.start, item.end) for item in raw)
        head_bytes = len(content) - sum(end - start for start, end in spans)
        if len(spans) != sum(item.window is None for item in request.inputs) or head_bytes > KEPT_BYTES:
            return
        starts = [start for start, _ in spans]
        template = MessageTemplate.of(request, starts, service.signature, service.padding)
        if template is None:
            return
        template.service = service
        if self._count >= KEPT_TEMPLATES:  # messages that differ each time must not accumulate
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
