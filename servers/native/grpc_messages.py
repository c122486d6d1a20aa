"""gRPC messages: a serialised request as an `InferRequest`, and an `InferResponse` as a message.

The raw inputs are cut out of the serialised bytes as views before protobuf parses the rest: its parser would copy them,
and so would each access to `raw_input_contents`. So a batch is gathered from the bytes that gRPC received, and a
request that runs alone is read there. The fields are counted before parsing, too: protobuf holds the interpreter until
it is done, and a map of millions of parameters took it a minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from servers.contract.codec import MAX_ID_CHARACTERS, check_classification, find_window, window_array
from servers.contract.errors import InvalidRequestError
from servers.contract.records import (
    FindWindow,
    InferRequest,
    InferResponse,
    InputTensor,
    Parameter,
    RequestedOutput,
)
from servers.contract.tensors import DATATYPES, Array
from servers.contract.values import (
    add_bytes_elements,
    array_from_bytes,
    bytes_from_array,
    check_datatype,
    element_count,
    reshaped,
)

INLINE_BYTES = 16 * 1024
"""Bytes of a message without its raw inputs; longer ones are decoded in a thread, piece by piece."""
PIECE_VALUES = 64 * 1024
"""Python's other threads run between two pieces, each of which takes two milliseconds."""

_CONTENTS = {
    **{name: f"{name.lower()}_contents" for name in ("BOOL", "INT64", "UINT64", "FP32", "FP64", "BYTES")},
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}

MAX_TENSORS = 1024
"""More inputs or outputs than this are refused."""
MAX_FIELDS = 16 * MAX_TENSORS
UNCOUNTED_BYTES = 64 * 1024
"""A message of this size is parsed in a millisecond, however many fields it has."""

_INPUTS, _OUTPUTS, _RAW = 5, 6, 7
_INPUT_CONTENTS = 5
_COUNTED_IN: Mapping[int, Any] = {_INPUTS: {_INPUT_CONTENTS: {}}, _OUTPUTS: {}}
"""Fields whose own fields are counted, too. Packed values count as one field: they are parsed fast."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class RawInput(NamedTuple):
    """A view of a raw input, where it is in its message, and where its field's tag begins."""

    data: memoryview
    start: int
    end: int
    tag: int


def parse_message(content: bytes | memoryview) -> tuple[Any, list[RawInput]]:
    """A ModelInferRequest without its raw inputs, and these. Raises `InvalidRequestError`."""
    view = memoryview(content)
    raw = _find_raw(view)
    kept, kept_from = [], 0
    for item in raw:
        kept.append(view[kept_from : item.tag])
        kept_from = item.end
    rest = b"".join([*kept, view[kept_from:]])
    if len(rest) > UNCOUNTED_BYTES:
        _count_fields(memoryview(rest), 0, len(rest), _COUNTED_IN, 0)
    try:
        message = service_pb2.ModelInferRequest.FromString(rest)
    except DecodeError as exc:
        raise InvalidRequestError("the message is not a ModelInferRequest") from exc
    if len(message.inputs) > MAX_TENSORS or len(message.outputs) > MAX_TENSORS:
        raise InvalidRequestError(f"a request has at most {MAX_TENSORS} inputs and {MAX_TENSORS} outputs")
    return message, raw


def decode_message(message: Any, raw: list[RawInput], find: FindWindow) -> InferRequest:
    """The request of a message from `parse_message`; any thread. Raises `ContractError`."""
    if len(message.id) > MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"'id' has {len(message.id)} characters, the limit is {MAX_ID_CHARACTERS}")
    parameters = [_parameters(item, _owner("input", item)) for item in message.inputs]
    carried = sum("shared_memory_region" not in named for named in parameters)
    if raw and len(raw) != carried:
        raise InvalidRequestError(f"'raw_input_contents' must have {carried} elements, one per input, got {len(raw)}")
    waiting = iter(raw)
    bytes_elements = 0
    inputs: list[InputTensor] = []
    for item, named in zip(message.inputs, parameters, strict=True):
        name, datatype = item.name, item.datatype
        if not 0 < len(name) <= MAX_ID_CHARACTERS:
            raise InvalidRequestError(f"an input's name must have 1 to {MAX_ID_CHARACTERS} characters, got {len(name)}")
        check_datatype(datatype, name)
        element_count(item.shape, name)  # before the shape, of any length, becomes a tuple
        shape = tuple(item.shape)
        if datatype == "BYTES":
            bytes_elements = add_bytes_elements(bytes_elements, shape, name)
        window = find_window(named, _owner("input", item), find)
        if item.HasField("contents") and (raw or window is not None):
            raise InvalidRequestError(f"input '{name}' has 'contents' and also raw_input_contents or shared memory")
        if window is not None:
            data = window_array(window, datatype, shape, name)
        elif raw:
            data = array_from_bytes(next(waiting).data, datatype, shape, name)
        else:
            data = reshaped(_typed(item.contents, datatype, element_count(shape, name), name), shape, name)
        inputs.append(InputTensor(name, datatype, shape, data, window))
    return InferRequest(
        id=message.id,
        inputs=tuple(inputs),
        outputs=tuple(_output(item, find) for item in message.outputs) or None,
        binary_output=True,
        parameters=_parameters(message, "the request"),
    )


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
    response.parameters["triton_final_response"].bool_param = True
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def _typed(contents: Any, datatype: str, count: int, name: str) -> Array:
    """The values of an input in typed fields; flat."""
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidRequestError(f"input '{name}' is {datatype}, which only raw_input_contents can carry")
    values = getattr(contents, field)
    if len(values) != count:
        raise InvalidRequestError(f"input '{name}' needs {count} elements for its shape, '{field}' has {len(values)}")
    if datatype == "BYTES":
        elements = np.empty(count, dtype=object)
        elements[:] = list(values)
        return elements
    dtype = DATATYPES[datatype]
    flat = np.empty(count, dtype)
    for start in range(0, count, PIECE_VALUES):
        piece = values[start : start + PIECE_VALUES]
        if dtype.kind in "iu" and dtype.itemsize < 4:
            limits = np.iinfo(dtype.name)
            if min(piece) < limits.min or max(piece) > limits.max:
                allowed = f"{limits.min} to {limits.max}"
                raise InvalidRequestError(f"'{field}' of input '{name}' is outside the range of {datatype}, {allowed}")
        flat[start : start + len(piece)] = np.fromiter(piece, dtype, len(piece))
    return flat


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


def _find_raw(view: memoryview) -> list[RawInput]:
    """Raises `InvalidRequestError`."""
    raw: list[RawInput] = []
    for fields, (number, start, value, end) in enumerate(_fields(view, 0, len(view)), start=1):
        _check_fields(fields)
        if number == _RAW:
            raw.append(RawInput(view[value:end], value, end, start))
    return raw


def _count_fields(view: memoryview, position: int, end: int, counted_in: Mapping[int, Any], fields: int) -> int:
    """`fields` plus those of a message between two positions. Raises `InvalidRequestError` for too many."""
    for number, _, value, stop in _fields(view, position, end):
        fields += 1
        _check_fields(fields)
        if number in counted_in:
            fields = _count_fields(view, value, stop, counted_in[number], fields)
    return fields


def _check_fields(fields: int) -> None:
    if fields > MAX_FIELDS:
        raise InvalidRequestError(f"the message has more than {MAX_FIELDS} fields")


def _fields(view: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Each field's number (0 if it has no length), its start, its value's start, and its end."""
    while position < end:
        start = position
        tag, position = _varint(view, position)
        kind, number = tag & 7, 0
        value = position
        if kind == _LENGTH:
            size, value = _varint(view, position)
            position, number = value + size, tag >> 3
        elif kind == _VARINT:
            _, position = _varint(view, position)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise InvalidRequestError("the message is not a ModelInferRequest")
        if position > end:
            raise InvalidRequestError("the message ends inside a field")
        yield number, start, value, position


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
