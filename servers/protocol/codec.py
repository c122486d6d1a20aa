"""The HTTP body of an inference request and of its response: Open Inference Protocol V2 with binary tensor data.

    request   a JSON header, then the binary inputs in their order. `Inference-Header-Content-Length` gives the header's
              size; without it the whole body is JSON, and 0 means that the body is the bytes of the only input.
    response  a JSON header, then the binary outputs

Binary inputs become views over the body: no large data is copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Meta, UnsetType

from servers.protocol.errors import InvalidRequestError, UnsupportedError
from servers.protocol.records import (
    FindWindow,
    InferRequest,
    InferResponse,
    InputTensor,
    ModelSignature,
    Parameter,
    RegionReference,
    RegionWindow,
    RequestedOutput,
    parse_reference,
    shape_text,
)
from servers.protocol.tensors import DATATYPES, Array, like
from servers.protocol.values import (
    LONG_BYTES,
    MAX_SPECIAL_BYTES,
    PIECE_VALUES,
    add_bytes_elements,
    array_from_bytes,
    array_from_json,
    bytes_from_array,
    check_byte_size,
    check_datatype,
    element_count,
    json_pieces,
    parse_json,
    reshaped,
    with_marks,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
MAX_ID_CHARACTERS = 1024

_ShortText = Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)]
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
_Parameters = dict[str, Parameter] | None
P = TypeVar("P")


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters = None


class _Input(msgspec.Struct):
    """A part that may be long is its text, which is parsed later."""

    name: _Name
    datatype: str
    shape: msgspec.Raw
    parameters: msgspec.Raw | UnsetType = UNSET
    data: msgspec.Raw | UnsetType = UNSET


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: _ShortText = ""
    outputs: msgspec.Raw | UnsetType = UNSET
    parameters: msgspec.Raw | UnsetType = UNSET


_REQUEST = msgspec.json.Decoder(_Request)
_SHAPE = msgspec.json.Decoder(tuple[int, ...])
_OUTPUTS = msgspec.json.Decoder(list[_Output] | None)
_PARAMETERS = msgspec.json.Decoder(_Parameters)


def parse_header_length(value: str, body_bytes: int) -> int:
    """The value of the header `Inference-Header-Content-Length`. Raises `InvalidRequestError`."""
    if not (value.isascii() and value.isdigit()) or len(value) > 19:
        raise InvalidRequestError(f"{HEADER_LENGTH} must be a whole number from 0 to {body_bytes}, the body's size")
    length = int(value)
    if length > body_bytes:
        raise InvalidRequestError(f"{HEADER_LENGTH} is {length}, but the body has only {body_bytes} bytes")
    return length


def decode_request(
    body: memoryview, header_length: int | None, signature: ModelSignature, find: FindWindow | None = None
) -> InferRequest:
    """Read a whole body. Raises only `ContractError`, whatever the bytes are. `signature` is needed for the raw form
    only, whose body does not describe itself. Without `find` there is no shared memory."""
    if header_length == 0:
        return _decode_raw(body, signature)
    split = body.nbytes if header_length is None else header_length
    document = _parse_request(bytes(body[:split]))
    tensors, offset = _decode_inputs(document.inputs, body, split, find)
    if offset != body.nbytes:
        raise InvalidRequestError(
            f"the binary inputs take {offset - split} bytes, but {body.nbytes - split} bytes follow the JSON"
        )
    parameters = _part(document.parameters, _PARAMETERS, "'parameters' of the request") or {}
    binary_output = _flag(parameters, "binary_data_output", "the request")
    outputs = _part(document.outputs, _OUTPUTS, "'outputs'") or ()
    return InferRequest(
        id=document.id,
        inputs=tuple(tensors),
        outputs=tuple(_decode_output(item, binary_output, find) for item in outputs) or None,
        binary_output=binary_output,
        parameters=parameters,
    )


def encode_response(response: InferResponse) -> tuple[bytes, int | None]:
    """The body, and the size of its JSON header when binary data follows it (None: the body is all JSON)."""
    pieces, header_bytes = encode_pieces(response)
    return b"".join(pieces), header_bytes


def encode_pieces(
    response: InferResponse, hold: Callable[[int], None] = lambda _count: None
) -> tuple[list[bytes], int | None]:
    """The same with the body in pieces. `hold` is called for each of them with its size. Sleeps between those of an
    output with more than `PIECE_VALUES` values. Raises `InvalidRequestError`."""
    document = {"id": response.id} if response.id else {}
    document |= {"model_name": response.model_name, "model_version": response.model_version}
    pieces: list[bytes] = []
    binary: list[bytes] = []

    def add(piece: bytes, to: list[bytes] = pieces) -> None:
        hold(len(piece))
        to.append(piece)

    add(orjson.dumps(document)[:-1] + b',"outputs":[')
    for index, tensor in enumerate(response.outputs):
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.data.shape)}
        ends = b"}"
        # In shared memory it has no parameters, as from Triton: its C++ client takes them as a sign of binary data.
        if tensor.binary and tensor.reference is None:
            add(bytes_from_array(tensor.data), binary)
            output["parameters"] = {"binary_data_size": len(binary[-1])}
        elif tensor.reference is None:
            ends = b',"data":'
        add(b"," * (index > 0) + orjson.dumps(output)[:-1] + ends)
        if ends != b"}":
            for piece in json_pieces(tensor.data, tensor.name):
                add(piece)
            add(b"}")
    add(b"]}")
    return [*pieces, *binary], sum(map(len, pieces)) if binary else None


def is_slow_to_encode(response: InferResponse) -> bool:
    """Whether so many values become JSON, or BYTES, that this is work for a thread."""
    slow = (
        tensor.data.size
        for tensor in response.outputs
        if tensor.reference is None and (not tensor.binary or tensor.data.dtype.hasobject)
    )
    return sum(slow) > PIECE_VALUES


def find_window(parameters: Mapping[str, Parameter], owner: str, find: FindWindow | None) -> RegionWindow | None:
    """The shared memory that an input or output names, or None. Raises `ContractError`."""
    reference = parse_reference(parameters, owner)
    if reference is None:
        return None
    if find is None:
        raise InvalidRequestError(f"{owner} names a shared-memory region, but shared memory is switched off")
    return find(reference)


def window_array(window: RegionWindow, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """A view over the bytes that `RegionWindow.fetch` will read; empty elements for BYTES. Raises `ContractError`. For
    memory on a GPU it only has the shape and the type: nothing reads it."""
    if datatype == "BYTES":
        if window.on_device:
            raise UnsupportedError(f"input '{name}' is BYTES, which this server does not read from CUDA shared memory")
        window.view()  # refused now if it is too large
        return reshaped(np.empty(element_count(shape, name), object), shape, name)
    check_byte_size(window.reference.byte_size, datatype, shape, name)
    if window.on_device:
        return like(DATATYPES[datatype], shape)
    return array_from_bytes(window.view(), datatype, shape, name)


def read_elements(tensor: InputTensor) -> Array:
    """The elements of a BYTES input; blocks if it has to read them from shared memory. Raises `ContractError`."""
    if tensor.window is None:
        return tensor.data
    tensor.window.fetch()
    return array_from_bytes(tensor.window.view(), tensor.datatype, tensor.shape, tensor.name)


def write_output(window: RegionWindow, array: Array) -> RegionReference:
    """Write an output to shared memory without copying it first, and return its place. Raises `ContractError`."""
    if array.dtype != object and array.flags.c_contiguous and array.size:
        data: bytes | memoryview = array.data.cast("B")
    else:
        data = bytes_from_array(array)
    window.write(data)
    return RegionReference(window.reference.region, len(data), window.reference.offset)


def check_classification(parameters: Mapping[str, Parameter], owner: str) -> None:
    """Raises `UnsupportedError` for an output that is to be classified."""
    if parameters.get("classification"):
        raise UnsupportedError(f"{owner} asks for 'classification', which this server does not offer")


def _parse_request(text: bytes) -> _Request:
    try:
        return parse_json(text, _REQUEST)
    except InvalidRequestError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
    if len(text) > MAX_SPECIAL_BYTES:
        raise InvalidRequestError(f"JSON with NaN may have {MAX_SPECIAL_BYTES} bytes: send the tensors as binary data")
    return parse_json(with_marks(text), _REQUEST)


def _part(part: msgspec.Raw | UnsetType, decoder: msgspec.json.Decoder[P], owner: str) -> P | None:
    if part is UNSET:
        return None
    if len(bytes(part)) > LONG_BYTES:
        raise InvalidRequestError(f"{owner} has more than {LONG_BYTES} bytes of JSON")
    return parse_json(part, decoder, owner)


def _decode_raw(body: memoryview, signature: ModelSignature) -> InferRequest:
    if len(signature.inputs) != 1:
        raise InvalidRequestError(f"{HEADER_LENGTH} 0 needs a model with one input, not {len(signature.inputs)} inputs")
    spec = signature.inputs[0]
    if -1 in spec.item_shape:
        raise InvalidRequestError(f"{HEADER_LENGTH} 0 needs a fixed shape, the model's is {shape_text(spec.shape)}")
    if spec.datatype == "BYTES":  # the body is one element, without the length that precedes it elsewhere
        shape = (1,) * len(spec.shape)
        data: Array = np.empty(shape, dtype=object)
        data[...] = bytes(body)
    else:
        shape = (1, *spec.item_shape)
        data = array_from_bytes(body, spec.datatype, shape, spec.name)
    return InferRequest(id="", inputs=(InputTensor(spec.name, spec.datatype, shape, data),), binary_output=True)


def _decode_inputs(
    items: list[_Input], body: memoryview, offset: int, find: FindWindow | None
) -> tuple[list[InputTensor], int]:
    """The inputs, and where the bytes of the binary ones end; they begin at `offset` in the body."""
    tensors: list[InputTensor] = []
    bytes_elements = 0
    for item in items:
        name, datatype, owner = item.name, item.datatype, f"input '{item.name}'"
        check_datatype(datatype, name)
        shape = _part(item.shape, _SHAPE, f"'shape' of {owner}") or ()
        parameters = _part(item.parameters, _PARAMETERS, f"'parameters' of {owner}") or {}
        window = find_window(parameters, owner, find)
        size = parameters.get("binary_data_size")
        if (item.data is not UNSET) + (size is not None) + (window is not None) != 1:
            raise InvalidRequestError(f"{owner} must have exactly one of 'data', 'binary_data_size' and a region")
        if datatype == "BYTES" and item.data is UNSET:  # the length of JSON bounds its elements
            bytes_elements = add_bytes_elements(bytes_elements, shape, name)
        if window is not None:
            data = window_array(window, datatype, shape, name)
        elif isinstance(item.data, msgspec.Raw):
            data = array_from_json(item.data, datatype, shape, name)
        else:
            if type(size) is not int or size < 0:
                raise InvalidRequestError(f"'binary_data_size' of {owner} must be a whole number ≥ 0")
            if offset + size > body.nbytes:
                left = body.nbytes - offset
                raise InvalidRequestError(f"'binary_data_size' of {owner} is {size}, but only {left} bytes are left")
            data = array_from_bytes(body[offset : offset + size], datatype, shape, name)
            offset += size
        tensors.append(InputTensor(name, datatype, shape, data, window))
    return tensors, offset


def _decode_output(item: _Output, binary_default: bool, find: FindWindow | None) -> RequestedOutput:
    owner, parameters = f"output '{item.name[:64]}'", item.parameters or {}
    check_classification(parameters, owner)
    window = find_window(parameters, owner, find)
    return RequestedOutput(item.name, _flag(parameters, "binary_data", owner, binary_default), window)


def _flag(parameters: Mapping[str, Parameter], key: str, owner: str, default: bool = False) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"'{key}' of {owner} must be true or false")
    return value
