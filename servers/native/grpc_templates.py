"""Templates of gRPC messages: a decoded and checked request, kept by its bytes around its id and the raw tensors.

A message of the same size, without its id, that has the same bytes in the same places is the same message with other
values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tritonclient.grpc import service_pb2

from servers.native.grpc_messages import RawInput, encode_message, encode_streamed
from servers.native.inference import InferenceService
from servers.native.templates import KEPT_BYTES, KEPT_TEMPLATES, Repeated, Template
from servers.protocol.records import InferRequest, Window
from servers.protocol.tensors import Array

_KEPT_LAYOUTS = 4
"""Of one size; every one costs a look-up."""
_KEPT_OFFSETS = 1024
_PREFIX = struct.Struct(">BI")
_NAME, _VERSION, _ID, _STREAMED = b"\x0a", b"\x12", b"\x1a", b"\x12"
"""Tags: the first fields of a request and of a response, and the response in a message of a stream."""
_MOST = 127
"""Longest field whose length is one byte."""
_END = b"\xff"
"""Neither a tag nor such a length."""


class _Between(NamedTuple):
    """The bytes of a response around its id and its outputs."""

    lead: bytes
    rest: Sequence[bytes]
    """Before each output; the first piece follows the id."""
    size: int
    """Of the whole response without an id."""
    whole: Sequence[bytes]
    """Before each output, all bytes of a response without an id."""


class MessageTemplate(Template):
    """The request that these bytes make, with any id and any values of its tensors."""

    __slots__ = ("service",)
    service: InferenceService

    def answer(
        self, outputs: Mapping[str, Array], targets: Mapping[str, Window], request_id: bytes, *, streamed: bool
    ) -> list[bytes]:
        """The response's message in pieces, with its prefix. Raises `ContractError`."""
        data = self.data(outputs, targets)
        shapes = streamed, self.shapes(outputs)
        between: _Between | None = self._answers.get(shapes)
        if between is None:
            between = self._between(outputs, [len(one) for one in data], streamed=streamed)
            self.keep_answer(shapes, between)
        before = between.whole
        if request_id:
            before = [
                _head(between.lead, request_id, between.size, streamed=streamed) + between.rest[0],
                *between.rest[1:],
            ]
        return [piece for pair in zip(before, data, strict=True) for piece in pair]

    def _between(self, outputs: Mapping[str, Array], sizes: Sequence[int], *, streamed: bool) -> _Between:
        signature = self.service.signature
        message = encode_message(self.response(outputs, signature))
        content = (encode_streamed(message).infer_response if streamed else message).SerializeToString()
        end = len(content)
        rest: list[bytes] = []
        for size in reversed(sizes):  # the raw outputs are the message's last fields
            end -= size
            start = end - 1 - len(_varint(size))
            rest.append(content[start:end])
            end = start
        named = service_pb2.ModelInferResponse(model_name=signature.name, model_version=signature.version)
        lead = named.SerializeToString()  # the id is the next field
        rest[-1] = content[len(lead) : end] + rest[-1]
        rest.reverse()
        whole = [_head(lead, b"", len(content), streamed=streamed) + rest[0], *rest[1:]]
        return _Between(lead, rest, len(content), whole)


def _head(lead: bytes, request_id: bytes, size: int, *, streamed: bool) -> bytes:
    """A response's bytes up to the end of its id, with the message's prefix; `size` is that without an id."""
    field = b"".join([_ID, _varint(len(request_id)), request_id]) if request_id else b""
    size += len(field)
    envelope = _STREAMED + _varint(size) if streamed else b""
    return b"".join([_PREFIX.pack(0, len(envelope) + size), envelope, lead, field])


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > _MOST:
        found.append(value & _MOST | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def id_field(content: memoryview) -> tuple[int, int]:
    """Where the field of a message's id begins and ends, if libraries wrote it where they do; two zeros otherwise."""
    start = bytes(content[: 3 * (2 + _MOST)]) + _END
    place = 0
    if start[:1] == _NAME and start[1] <= _MOST:
        place = 2 + start[1]
    if start[place : place + 1] == _VERSION and start[place + 1] <= _MOST:
        place += 2 + start[place + 1]
    if start[place : place + 1] != _ID or start[place + 1] > _MOST:
        return 0, 0
    end = place + 2 + start[place + 1]
    return (place, end) if start[place:end].isascii() else (0, 0)


@dataclass(eq=False, slots=True)
class _Layout:
    """Where the raw tensors are in messages of one size without their ids, and the templates by the bytes around."""

    spans: tuple[tuple[int, int], ...]
    templates: dict[bytes, tuple[MessageTemplate, bytes | None]]
    """With the id of those whose key holds it."""

    def head(self, content: memoryview, start: int, end: int) -> bytes:
        """The bytes around the tensors, without the id, whose field is at this place."""
        moved = end - start
        if len(self.spans) == 1 and self.spans[0][1] + moved == len(content):  # nearly always
            first = self.spans[0][0] + moved
            return bytes(content[:start]) + bytes(content[end:first]) if end else bytes(content[:first])
        pieces, place = [content[:start]], end
        for first, last in self.spans:
            pieces.append(content[place : first + moved])
            place = last + moved
        return b"".join([*pieces, content[place:]])


class MessageTemplates:
    """The latest templates of one server, for messages of all models."""

    def __init__(self) -> None:
        self._layouts: dict[int, list[_Layout]] = {}
        self._count = 0
        self._offsets: dict[int, int] = {}  # by the size of a message, with its id: where its first tensor began

    def tensor_offset(self, size: int) -> int:
        """Where the first raw tensor probably begins in a message of this size."""
        return self._offsets.get(size, 0)

    def find(self, content: memoryview) -> Repeated[MessageTemplate] | None:
        """What is known of a message that came before with another id and other values."""
        found = self._find(content, 0, 0)
        if found is None:
            start, end = id_field(content)
            found = self._find(content, start, end) if end else None
        return found

    def _find(self, content: memoryview, start: int, end: int) -> Repeated[MessageTemplate] | None:
        moved = end - start
        for layout in self._layouts.get(len(content) - moved, ()):
            known = layout.templates.get(layout.head(content, start, end))
            if known is not None:
                template, fixed = known
                if layout.spans and len(content) not in self._offsets:
                    self._note_offset(len(content), layout.spans[0][0] + moved)
                return template, bytes(content[start + 2 : end]) if fixed is None else fixed, moved
        return None

    def keep(
        self, content: memoryview, raw: Sequence[RawInput], request: InferRequest, service: InferenceService
    ) -> None:
        """Keep a decoded message's template, unless it must be decoded each time. Raises `ContractError`."""
        head_bytes = len(content) - sum(item.end - item.start for item in raw)
        if len(raw) != sum(item.window is None for item in request.inputs) or head_bytes > KEPT_BYTES:
            return
        start, end = id_field(content)
        fixed = None
        if bytes(content[start + 2 : end]).decode() != request.id or not _is_only_id(content, raw, start, end):
            start, end, fixed = 0, 0, request.id.encode()
        moved = end - start
        spans = tuple((item.start - moved, item.end - moved) for item in raw)
        template = MessageTemplate.of(request, [first for first, _ in spans], service.signature, service.padding)
        if template is None:
            return
        template.service = service
        if self._count >= KEPT_TEMPLATES:  # messages that differ each time must not accumulate
            self._layouts.clear()
            self._count = 0
        layouts = self._layouts.setdefault(len(content) - moved, [])
        layout = next((layout for layout in layouts if layout.spans == spans), None)
        if layout is None:
            layout = _Layout(spans, {})
            del layouts[_KEPT_LAYOUTS - 1 :]
            layouts.insert(0, layout)
        layout.templates[layout.head(content, start, end)] = template, fixed
        self._count += 1
        if raw:
            self._note_offset(len(content), raw[0].start)

    def _note_offset(self, size: int, offset: int) -> None:
        if len(self._offsets) >= _KEPT_OFFSETS:
            self._offsets.clear()
        self._offsets[size] = offset


def _is_only_id(content: memoryview, raw: Sequence[RawInput], start: int, end: int) -> bool:
    """Whether the message has no id without this field: of several the last one counts."""
    pieces, place = [content[:start]], end
    for item in raw:
        pieces.append(content[place : item.tag])
        place = item.end
    return not service_pb2.ModelInferRequest.FromString(b"".join([*pieces, content[place:]])).id
