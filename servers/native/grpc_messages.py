"""What gRPC sends: a serialised request as an `InferRequest`, an answer as a message, an error as a status.

A request's raw inputs are cut out of its serialised bytes as views, before protobuf sees the rest: protobuf's parser
would copy them, and so would each access to `raw_input_contents`. The bytes that gRPC has received are therefore what
the batch is gathered from, or what the engine reads when the request runs alone. Its fields are counted first, too:
protobuf holds the interpreter until it is done, and a map of millions of parameters took it a minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from servers.contract.binary_tensors import (
    BytesAllowance,
    array_from_bytes,
    bytes_from_array,
    check_rank,
    element_count,
)
from servers.contract.codec import MAX_ID_CHARACTERS, find_window, window_array
from servers.contract.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.contract.records import InferRequest, InferResponse, InputTensor, Parameter, RequestedOutput
from servers.contract.shared_memory import RegionSource
from servers.contract.tensors import DATATYPES, Array
from servers.native.errors import CallDeadlineError

INLINE_BYTES = 16 * 1024
"""Of a message without its raw inputs: values in longer ones are read in a thread, piece by piece."""
PIECE_VALUES = 64 * 1024
"""Python's other threads run between two pieces, each of which takes two milliseconds."""

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

MAX_TENSORS = 1024
"""More inputs or outputs than this are refused before anything is made of them."""
MAX_FIELDS = 16 * MAX_TENSORS
UNCOUNTED_BYTES = 64 * 1024
"""So much is parsed in a millisecond, however many fields it has."""

_INPUTS, _OUTPUTS, _RAW = 5, 6, 7
_INPUT_CONTENTS = 5
_COUNTED_IN: Mapping[int, Any] = {_INPUTS: {_INPUT_CONTENTS: {}}, _OUTPUTS: {}}
"""Fields whose own fields are counted, too: what is packed into one of them is parsed fast."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

MAX_DETAILS = 1000
"""Characters: a client takes 8 KiB of trailers, in which one character may need twelve bytes."""

_STATUS: tuple[tuple[type[ContractError], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (TooLargeError, grpc.StatusCode.INVALID_ARGUMENT),
    (CallDeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    (InternalError, grpc.StatusCode.INTERNAL),
)


def parse_message(serialised: bytes) -> tuple[Any, list[memoryview]]:
    """A ModelInferRequest without its raw inputs, and these as views. Raises `InvalidRequestError`."""
    rest, raw = _cut_out_raw(serialised)
    _check_fields(rest)
    try:
        message = service_pb2.ModelInferRequest.FromString(rest)
    except DecodeError as exc:
        raise InvalidRequestError("the message is not a ModelInferRequest") from exc
    if len(message.inputs) > MAX_TENSORS or len(message.outputs) > MAX_TENSORS:
        raise InvalidRequestError(f"a request has at most {MAX_TENSORS} inputs and {MAX_TENSORS} outputs")
    return message, raw


def decode_message(message: Any, raw: list[memoryview], regions: RegionSource) -> InferRequest:
    """What `parse_message` gave, as a request; any thread. Raises `ContractError`."""
    if len(message.id) > MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"'id' has {len(message.id)} characters, at most {MAX_ID_CHARACTERS} are taken")
    parameters = {_name(item): _parameters(item, _owner("input", item)) for item in message.inputs}
    carried = [name for name in parameters if "shared_memory_region" not in parameters[name]]
    if raw and len(raw) != len(carried):
        raise InvalidRequestError(
            f"'raw_input_contents' must have one element for each of the {len(carried)} inputs outside shared memory, "
            f"got {len(raw)}"
        )
    if len(parameters) != len(message.inputs):
        raise InvalidRequestError("an input is given more than once")
    waiting = iter(raw)
    allowance = BytesAllowance()
    inputs = []
    for item in message.inputs:
        inputs.append(_input(item, parameters[item.name], waiting if raw else None, regions, allowance))
    return InferRequest(
        id=message.id,
        inputs=tuple(inputs),
        outputs=tuple(_output(item, regions) for item in message.outputs) or None,
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
        if tensor.reference is None:
            message.raw_output_contents.append(bytes_from_array(tensor.data))
            continue
        for name, value in tensor.reference.as_parameters().items():
            if isinstance(value, str):
                output.parameters[name].string_param = value
            else:
                output.parameters[name].int64_param = value
        message.raw_output_contents.append(b"")
    return message


def _input(
    item: Any, parameters: dict[str, Parameter], raw: Any, regions: RegionSource, allowance: BytesAllowance
) -> InputTensor:
    check_rank(len(item.shape), item.name)
    name, datatype, shape = item.name, item.datatype, tuple(item.shape)
    if datatype not in DATATYPES and datatype != "BYTES":
        raise InvalidRequestError(f"input '{name}' must have a 'datatype', one of {', '.join(DATATYPES)}, BYTES")
    if datatype == "BYTES":
        allowance.take(shape, name)
    window = find_window(parameters, f"input '{name}'", regions)
    typed = item.HasField("contents")
    if typed and (raw is not None or window is not None):
        raise InvalidRequestError(
            f"input '{name}' has 'contents' although its data is in raw_input_contents or shared memory"
        )
    if window is not None:
        return InputTensor(name, datatype, shape, window_array(window, datatype, shape, name), window)
    if raw is not None:
        return InputTensor(name, datatype, shape, array_from_bytes(next(raw), datatype, shape, name))
    return InputTensor(name, datatype, shape, _typed(item.contents, datatype, shape, name))


def _typed(contents: Any, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidRequestError(f"input '{name}' is {datatype}, which only raw_input_contents can carry")
    values = getattr(contents, field)
    count = element_count(shape, name)
    if len(values) != count:
        raise InvalidRequestError(
            f"input '{name}' needs {count} elements for its shape, got {len(values)} in '{field}'"
        )
    try:
        return _flat(values, datatype, field, name).reshape(shape)
    except ValueError as exc:  # dimensions around a zero that NumPy cannot hold
        raise InvalidRequestError(f"the shape of input '{name}' cannot be represented") from exc


def _flat(values: Any, datatype: str, field: str, name: str) -> Array:
    count = len(values)
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
                raise InvalidRequestError(
                    f"'{field}' of input '{name}' is outside the range of {datatype}, {limits.min} to {limits.max}"
                )
        flat[start : start + len(piece)] = np.fromiter(piece, dtype, len(piece))
    return flat


def _output(item: Any, regions: RegionSource) -> RequestedOutput:
    owner = _owner("output", item)
    parameters = _parameters(item, owner)
    if parameters.get("classification"):
        raise UnsupportedError(f"{owner} asks for 'classification', which this server does not offer")
    return RequestedOutput(item.name, True, find_window(parameters, owner, regions))


def _name(item: Any) -> str:
    name: str = item.name
    if not 0 < len(name) <= MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"an input's name must have 1 to {MAX_ID_CHARACTERS} characters, got {len(name)}")
    return name


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


def status_of(error: ContractError) -> grpc.StatusCode:
    """The status that a client gets."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def details_of(error: ContractError) -> str:
    """The sentence that a client gets, never too long to arrive."""
    message = str(error)
    return message if len(message) <= MAX_DETAILS else message[: MAX_DETAILS - 1] + "…"


def _cut_out_raw(serialised: bytes) -> tuple[bytes, list[memoryview]]:
    """The message without its raw inputs, and these. Raises `InvalidRequestError`."""
    view = memoryview(serialised)
    raw: list[memoryview] = []
    kept: list[memoryview] = []
    kept_from = 0
    for fields, (number, start, value, end) in enumerate(_fields(view, 0, len(view)), start=1):
        if fields > MAX_FIELDS:
            raise _too_many_fields()
        if number == _RAW:
            raw.append(view[value:end])
            kept.append(view[kept_from:start])
            kept_from = end
    if not raw:
        return serialised, raw
    kept.append(view[kept_from:])
    return b"".join(kept), raw


def _check_fields(rest: bytes) -> None:
    """Raises `InvalidRequestError` for more fields, those inside of tensors included, than a request can need."""
    if len(rest) > UNCOUNTED_BYTES:
        view = memoryview(rest)
        _count(view, 0, len(view), _COUNTED_IN, 0)


def _count(view: memoryview, position: int, end: int, counted_in: Mapping[int, Any], fields: int) -> int:
    """`fields` and those of a message between two positions."""
    for number, _, value, stop in _fields(view, position, end):
        fields += 1
        if fields > MAX_FIELDS:
            raise _too_many_fields()
        if number in counted_in:
            fields = _count(view, value, stop, counted_in[number], fields)
    return fields


def _fields(view: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Each field's number where it has a length, else 0; where it starts, where its value starts, and where it ends."""
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


def _too_many_fields() -> InvalidRequestError:
    return InvalidRequestError(f"the message has more than {MAX_FIELDS} fields")
