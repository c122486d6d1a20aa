"""gRPC messages: a serialised request as an `InferRequest`, an `InferResponse` as a message, and request templates.

The raw inputs are cut out of the serialised bytes as views before protobuf parses the rest: its parser would copy them,
and so would each access to `raw_input_contents`. So a batch is gathered from the bytes that gRPC received, and a
request that runs alone is read there. Typed contents are cut out as well, and decoded here once the model has accepted
their number: protobuf makes eight bytes and more of a value that was sent as one, and holds the interpreter until it is
done. For the same reason the fields are counted before parsing: a map of millions of parameters took it a minute.

A template is a decoded and checked request, kept by the bytes around its id and its raw tensors: a message of the same
size that has the same bytes there is the same message with other values.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from servers.native.front.inference import InferenceService
from servers.native.front.templates import KEPT_BYTES, KEPT_TEMPLATES, Repeated, Template
from servers.protocol.codec import MAX_ID_CHARACTERS, check_classification, find_window, window_array
from servers.protocol.errors import InvalidRequestError
from servers.protocol.records import (
    FindWindow,
    InferRequest,
    InferResponse,
    InputTensor,
    ModelSignature,
    Parameter,
    RegionWindow,
    RequestedOutput,
)
from servers.protocol.tensors import DATATYPES, Array, like
from servers.protocol.values import (
    MAX_BYTES_ELEMENTS,
    PAUSE_S,
    add_bytes_elements,
    array_from_bytes,
    bytes_from_array,
    check_datatype,
    element_count,
    reshaped,
)

INLINE_BYTES = 4 * 1024
"""Bytes of a message without its raw inputs; longer ones are parsed and decoded in a thread."""
INLINE_FIELDS = 256
"""Fields of a message, without those inside of others; one with more is parsed in a thread, too."""
PIECE_VALUES = 64 * 1024
"""Python's other threads run between two pieces, each of which takes a millisecond."""
_OCTETS_BYTES = 256 * 1024

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_CONTENTS = {
    "BOOL": ("bool_contents", 1, _VARINT),
    **dict.fromkeys(("INT8", "INT16", "INT32"), ("int_contents", 2, _VARINT)),
    "INT64": ("int64_contents", 3, _VARINT),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), ("uint_contents", 4, _VARINT)),
    "UINT64": ("uint64_contents", 5, _VARINT),
    "FP32": ("fp32_contents", 6, _FIXED32),
    "FP64": ("fp64_contents", 7, _FIXED64),
    "BYTES": ("bytes_contents", 8, _LENGTH),
}
"""By datatype: the field with its values, that field's number, and how one value is encoded."""
_LONGEST_VARINT = 10

MAX_TENSORS = 1024
"""More inputs or outputs than this are refused."""
MAX_FIELDS = MAX_BYTES_ELEMENTS + 2 * MAX_TENSORS
"""Of a message and inside of its tensors; packed values are one field."""
MAX_REST_BYTES = 2**20
"""Of a message without the values of its inputs: protobuf parses this much in a millisecond."""

_INPUTS, _OUTPUTS, _RAW = 5, 6, 7
_INPUT_CONTENTS = 5
_INPUT_TAG = bytes([_INPUTS << 3 | _LENGTH])

FINAL = "triton_final_response"
"""The parameter of each message of a stream that says whether it is its request's last."""

Allocate = Callable[[int], Array]
"""Bytes for decoded values. Raises `ContractError` where the server's limits forbid it."""


class RawInput(NamedTuple):
    """A view of a raw input, where it is in its message, and where its field's tag begins."""

    data: memoryview
    start: int
    end: int
    tag: int


ParsedMessage = tuple[Any, list[RawInput], list[list[memoryview]]]
"""A ModelInferRequest without the values of its inputs, and these: raw ones, and by input its typed contents."""


def is_short(content: memoryview) -> bool:
    """Whether `parse_message` and `decode_message` take a fraction of a millisecond. Raises `InvalidRequestError`."""
    rest = len(content)
    for fields, (number, _, _, value, end) in enumerate(_fields(content, 0, len(content))):
        if fields >= INLINE_FIELDS:
            return False
        if number == _RAW:
            rest -= end - value
    return rest <= INLINE_BYTES


def parse_message(content: bytes | memoryview) -> ParsedMessage:
    """Split a serialised ModelInferRequest; any thread. Raises `InvalidRequestError`."""
    view = memoryview(content)
    raw: list[RawInput] = []
    contents: list[list[memoryview]] = []
    pieces: list[bytes | memoryview] = []
    piece_start = fields = 0
    for number, _, start, value, end in _fields(view, 0, len(view)):
        fields = _counted(fields)
        item, cut = b"", number == _RAW
        if cut:
            raw.append(RawInput(view[value:end], value, end, start))
        elif number == _INPUTS:
            item, values, fields = _without_contents(view[value:end], fields)
            contents.append(values)
            cut = bool(values)
        elif number == _OUTPUTS:
            for _ in _fields(view, value, end):
                fields = _counted(fields)
        if cut:
            pieces += [view[piece_start:start], item]
            piece_start = end
    rest = b"".join([*pieces, view[piece_start:]])
    if len(rest) > MAX_REST_BYTES:
        raise InvalidRequestError(
            f"the message has {len(rest)} bytes beside the values of its inputs, the limit is {MAX_REST_BYTES}"
        )
    try:
        message = service_pb2.ModelInferRequest.FromString(rest)
    except DecodeError as exc:
        raise InvalidRequestError("the message is not a ModelInferRequest") from exc
    if len(message.inputs) > MAX_TENSORS or len(message.outputs) > MAX_TENSORS:
        raise InvalidRequestError(f"a request has at most {MAX_TENSORS} inputs and {MAX_TENSORS} outputs")
    return message, raw, contents


def decode_message(
    parsed: ParsedMessage,
    find: FindWindow,
    signature: ModelSignature | None = None,
    allocate: Allocate = lambda size: np.empty(size, np.uint8),
) -> InferRequest:
    """The request of a message; any thread. Raises `ContractError`.

    Typed contents are decoded when all else is right: with a `signature`, when that accepts the request.
    """
    message, raw, contents = parsed
    if len(message.id) > MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"'id' has {len(message.id)} characters, the limit is {MAX_ID_CHARACTERS}")
    parameters = [_parameters(item, _owner("input", item)) for item in message.inputs]
    carried = sum("shared_memory_region" not in named for named in parameters)
    if raw and len(raw) != carried:
        raise InvalidRequestError(f"'raw_input_contents' must have {carried} elements, one per input, got {len(raw)}")
    waiting = iter(raw)
    bytes_elements = 0
    inputs: list[InputTensor] = []
    typed: dict[int, list[memoryview]] = {}
    for index, (item, named) in enumerate(zip(message.inputs, parameters, strict=True)):
        name, datatype = item.name, item.datatype
        if not 0 < len(name) <= MAX_ID_CHARACTERS:
            raise InvalidRequestError(f"an input's name must have 1 to {MAX_ID_CHARACTERS} characters, got {len(name)}")
        check_datatype(datatype, name)
        element_count(item.shape, name)  # before the shape, of any length, becomes a tuple
        shape = tuple(item.shape)
        if datatype == "BYTES":
            bytes_elements = add_bytes_elements(bytes_elements, shape, name)
        window = find_window(named, _owner("input", item), find)
        if contents[index] and (raw or window is not None):
            raise InvalidRequestError(f"input '{name}' has 'contents' and also raw_input_contents or shared memory")
        if window is not None:
            data = window_array(window, datatype, shape, name)
        elif raw:
            data = array_from_bytes(next(waiting).data, datatype, shape, name)
        else:
            typed[index] = _values(contents[index], datatype, element_count(shape, name), name)
            data = reshaped(like(DATATYPES.get(datatype, np.dtype(object)), (prod(shape),)), shape, name)
        inputs.append(InputTensor(name, datatype, shape, data, window))
    request = InferRequest(
        id=message.id,
        inputs=tuple(inputs),
        outputs=tuple(_output(item, find) for item in message.outputs) or None,
        binary_output=True,
        parameters=_parameters(message, "the request"),
    )
    if not typed:
        return request
    if signature is not None:
        signature.validate(request)
    for index, pieces in typed.items():
        item = inputs[index]
        flat = _decoded(pieces, item.datatype, item.data.size, item.name, allocate)
        inputs[index] = replace(item, data=flat.reshape(item.shape))
    return replace(request, inputs=tuple(inputs))


def encode_message(response: InferResponse) -> Any:
    """A ModelInferResponse; an output in shared memory has an empty element in `raw_output_contents`, as in Triton."""
    message = service_pb2.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    for tensor in response.outputs:
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.data.shape)
        message.raw_output_contents.append(b"" if tensor.reference is not None else bytes_from_array(tensor.data))
        for name, value in tensor.reference.as_parameters().items() if tensor.reference is not None else ():
            if isinstance(value, str):
                output.parameters[name].string_param = value
            else:
                output.parameters[name].int64_param = value
    return message


def encode_streamed(response: Any) -> Any:
    """A ModelInferResponse as the only, and so the final, response to a message of a stream."""
    response.parameters[FINAL].bool_param = True
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def _values(contents: Sequence[memoryview], datatype: str, count: int, name: str) -> list[memoryview]:
    """The encoded values of an input, checked for their number; they may come in several pieces, packed or not."""
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidRequestError(f"input '{name}' is {datatype}, which only raw_input_contents can carry")
    title, value_field, encoding = field
    pieces: list[memoryview] = []
    for part in contents:
        for number, kind, _, start, end in _fields(part, 0, len(part)):
            if number == value_field and kind in (encoding, _LENGTH):
                pieces.append(part[start:end])
    if encoding == _LENGTH:
        value_count = len(pieces)
    elif encoding == _VARINT:
        value_count = sum(int(np.count_nonzero(octets < 0x80)) for piece in pieces for octets in _octets(piece))
    else:
        size = DATATYPES[datatype].itemsize
        value_count = sum(map(len, pieces)) // size
        if any(len(piece) % size for piece in pieces):
            raise InvalidRequestError(f"'{title}' of input '{name}' ends inside a value")
    if value_count != count:
        raise InvalidRequestError(f"input '{name}' needs {count} elements for its shape, '{title}' has {value_count}")
    return pieces


def _decoded(pieces: list[memoryview], datatype: str, count: int, name: str, allocate: Allocate) -> Array:
    """The values of an input from `_values`; flat."""
    title, _, encoding = _CONTENTS[datatype]
    if datatype == "BYTES":
        elements = np.empty(count, dtype=object)
        elements[:] = list(map(bytes, pieces))
        return elements
    dtype = DATATYPES[datatype]
    if encoding != _VARINT and len(pieces) == 1:
        return np.frombuffer(pieces[0], dtype)
    flat = allocate(count * dtype.itemsize).view(dtype) if count else np.empty(0, dtype)
    filled = 0
    for values in chain.from_iterable(_numbers(piece, dtype, encoding, f"'{title}' of '{name}'") for piece in pieces):
        if dtype.kind in "iu" and dtype.itemsize < 4:
            limits = np.iinfo(dtype.name)
            if values.min() < limits.min or values.max() > limits.max:
                allowed = f"{limits.min} to {limits.max}"
                raise InvalidRequestError(f"'{title}' of input '{name}' is outside the range of {datatype}, {allowed}")
        flat[filled : filled + len(values)] = values
        filled += len(values)
    return flat


def _numbers(data: memoryview, dtype: np.dtype[Any], encoding: int, owner: str) -> Iterator[npt.NDArray[Any]]:
    """Encoded values in pieces, those of a smaller integer with 32 bits. Raises `InvalidRequestError`."""
    if encoding != _VARINT:
        yield np.frombuffer(data, dtype)
        return
    width = max(4, dtype.itemsize)
    place = 0
    while place < len(data):
        if place:
            time.sleep(PAUSE_S)
        octets = np.frombuffer(data[place : place + PIECE_VALUES], np.uint8)
        ends = np.flatnonzero(octets < 0x80) + 1
        if not ends.size:
            raise InvalidRequestError(f"{owner} ends inside a value, or has one of more than 64 bits")
        octets = octets[: ends[-1]]
        place += octets.size
        numbers = octets.astype(np.uint64)
        if ends.size < octets.size:
            starts = np.concatenate(([0], ends[:-1]))
            sizes = ends - starts
            if sizes.max() > _LONGEST_VARINT:
                raise InvalidRequestError(f"{owner} has a value of more than 64 bits")
            shifts = 7 * (np.arange(octets.size) - np.repeat(starts, sizes))
            numbers = np.bitwise_or.reduceat((numbers & 0x7F) << shifts.astype(np.uint64), starts)
        yield numbers != 0 if dtype.kind == "b" else numbers.astype(f"<u{width}").view(f"<{dtype.kind}{width}")


def _octets(data: memoryview) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes in pieces, between which other threads run."""
    for start in range(0, len(data), _OCTETS_BYTES):
        if start:
            time.sleep(PAUSE_S)
        yield np.frombuffer(data[start : start + _OCTETS_BYTES], np.uint8)


def _output(item: Any, find: FindWindow) -> RequestedOutput:
    owner = _owner("output", item)
    parameters = _parameters(item, owner)
    check_classification(parameters, owner)
    return RequestedOutput(item.name, True, find_window(parameters, owner, find))


def _owner(kind: str, item: Any) -> str:
    return f"{kind} '{item.name[:64]}'"


def _parameters(item: Any, owner: str) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for name, parameter in item.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequestError(f"a parameter of {owner} has no value")
        parameters[name] = getattr(parameter, choice)
    return parameters


def _without_contents(item: memoryview, fields: int) -> tuple[bytes, list[memoryview], int]:
    """An input without its typed contents, these, and `fields` plus its own. Raises `InvalidRequestError`."""
    contents: list[memoryview] = []
    pieces: list[memoryview] = []
    piece_start = 0
    for number, kind, start, value, end in _fields(item, 0, len(item)):
        fields = _counted(fields)
        if number == _INPUT_CONTENTS and kind == _LENGTH:
            contents.append(item[value:end])
            for _ in _fields(item, value, end):
                fields = _counted(fields)
            pieces.append(item[piece_start:start])
            piece_start = end
    if not contents:
        return b"", contents, fields
    rest = b"".join([*pieces, item[piece_start:]])
    return _INPUT_TAG + _as_varint(len(rest)) + rest, contents, fields


def _counted(fields: int) -> int:
    if fields >= MAX_FIELDS:
        raise InvalidRequestError(f"the message has more than {MAX_FIELDS} fields")
    return fields + 1


def _fields(view: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Each field's number, how it is encoded, its start, its value's start, and its end."""
    while position < end:
        start = position
        tag, position = _varint(view, position)
        kind = tag & 7
        value = position
        if kind == _LENGTH:
            size, value = _varint(view, position)
            position = value + size
        elif kind == _VARINT:
            _, position = _varint(view, position)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise InvalidRequestError("the message is not a ModelInferRequest")
        if position > end:
            raise InvalidRequestError("the message ends inside a field")
        yield tag >> 3, kind, start, value, position


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(view) and shift < 64:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise InvalidRequestError("the message ends inside a field")


def _as_varint(value: int) -> bytes:
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


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


_ResponseParts = tuple[bytes, Sequence[bytes], int, Sequence[bytes]]
"""The bytes of a response around its id and its outputs: those before the id, those before each output, of which the
first follow the id, the size of the whole response without an id, and before each output all bytes of that."""


class MessageTemplate(Template):
    """The request that these bytes make, with any id and any values of its tensors."""

    __slots__ = ("service",)
    service: InferenceService

    def answer(
        self, outputs: Mapping[str, Array], targets: Mapping[str, RegionWindow], request_id: bytes, *, streamed: bool
    ) -> list[bytes]:
        """The response's message in pieces, with its prefix. Raises `ContractError`."""
        data = self.data(outputs, targets, np.ndarray.tobytes, b"")
        shapes = streamed, self.shapes(outputs)
        between: _ResponseParts | None = self._answers.get(shapes)
        if between is None:
            between = self._between(outputs, [len(piece) for piece in data], streamed=streamed)
            self.keep_answer(shapes, between)
        lead, rest, size, before = between
        if request_id:
            before = [_head(lead, request_id, size, streamed=streamed) + rest[0], *rest[1:]]
        return [piece for pair in zip(before, data, strict=True) for piece in pair]

    def _between(self, outputs: Mapping[str, Array], sizes: Sequence[int], *, streamed: bool) -> _ResponseParts:
        signature = self.service.signature
        message = encode_message(self.response(outputs, signature))
        content = (encode_streamed(message).infer_response if streamed else message).SerializeToString()
        end = len(content)
        rest: list[bytes] = []
        for size in reversed(sizes):  # the raw outputs are the message's last fields
            end -= size
            start = end - 1 - len(_as_varint(size))
            rest.append(content[start:end])
            end = start
        named = service_pb2.ModelInferResponse(model_name=signature.name, model_version=signature.version)
        lead = named.SerializeToString()  # the id is the next field
        rest[-1] = content[len(lead) : end] + rest[-1]
        rest.reverse()
        whole = [_head(lead, b"", len(content), streamed=streamed) + rest[0], *rest[1:]]
        return lead, rest, len(content), whole


def _head(lead: bytes, request_id: bytes, size: int, *, streamed: bool) -> bytes:
    """A response's bytes up to the end of its id, with the message's prefix; `size` is that without an id."""
    field = b"".join([_ID, _as_varint(len(request_id)), request_id]) if request_id else b""
    size += len(field)
    envelope = _STREAMED + _as_varint(size) if streamed else b""
    return b"".join([_PREFIX.pack(0, len(envelope) + size), envelope, lead, field])


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
    templates: dict[bytes, MessageTemplate]

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
        repeated = self._find(content, 0, 0)
        if repeated is None:
            start, end = id_field(content)
            repeated = self._find(content, start, end) if end else None
        return repeated

    def _find(self, content: memoryview, start: int, end: int) -> Repeated[MessageTemplate] | None:
        moved = end - start
        for layout in self._layouts.get(len(content) - moved, ()):
            template = layout.templates.get(layout.head(content, start, end))
            if template is not None:
                if layout.spans and len(content) not in self._offsets:
                    self._note_offset(len(content), layout.spans[0][0] + moved)
                request_id = bytes(content[start + 2 : end]) if template.fixed_id is None else template.fixed_id
                return template, request_id, moved
        return None

    def keep(
        self, content: memoryview, raw: Sequence[RawInput], request: InferRequest, service: InferenceService
    ) -> None:
        """Keep a decoded message's template, unless it must be decoded each time. Raises `ContractError`."""
        head_bytes = len(content) - sum(item.end - item.start for item in raw)
        if len(raw) != sum(item.window is None for item in request.inputs) or head_bytes > KEPT_BYTES:
            return
        start, end = id_field(content)
        fixed_id = None
        if bytes(content[start + 2 : end]).decode() != request.id or not _is_only_id(content, raw, start, end):
            start, end, fixed_id = 0, 0, request.id.encode()
        moved = end - start
        spans = tuple((item.start - moved, item.end - moved) for item in raw)
        template = MessageTemplate.of(request, [first for first, _ in spans], service.signature, service.padding)
        if template is None:
            return
        template.service, template.fixed_id = service, fixed_id
        if self._count >= KEPT_TEMPLATES:  # messages that differ each time must not accumulate
            self._layouts.clear()
            self._count = 0
        layouts = self._layouts.setdefault(len(content) - moved, [])
        layout = next((layout for layout in layouts if layout.spans == spans), None)
        if layout is None:
            layout = _Layout(spans, {})
            del layouts[_KEPT_LAYOUTS - 1 :]
            layouts.insert(0, layout)
        layout.templates[layout.head(content, start, end)] = template
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
