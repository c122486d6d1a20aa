"""The HTTP body of an inference request and of its answer: Open Inference Protocol V2 with binary tensor data.

    request   JSON header, then the binary inputs in their order; `Inference-Header-Content-Length` tells the header's
              size, its absence means that all is JSON, and 0 means that all is the one input's bytes
    answer    the same, with the binary outputs

Binary inputs become views over the body: nothing of size is copied here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from servers.contract.binary_tensors import (
    BytesAllowance,
    array_from_bytes,
    bytes_from_array,
    element_count,
    empty_elements,
    wrong_size,
)
from servers.contract.errors import InvalidRequestError, UnsupportedError
from servers.contract.json_tensors import array_from_json, dump_json, json_from_array, parse_request
from servers.contract.records import InferRequest, InferResponse, InputTensor, Parameter, RequestedOutput
from servers.contract.shared_memory import RegionReference, RegionSource, RegionWindow, parse_reference
from servers.contract.signature import ModelSignature, shape_text
from servers.contract.tensors import DATATYPES, Array

HEADER_LENGTH = "Inference-Header-Content-Length"
MAX_ID_CHARACTERS = 1024
_PARAMETER_TYPES = frozenset({str, int, float, bool})


def parse_header_length(value: str, body_bytes: int) -> int:
    """The value of the header `Inference-Header-Content-Length`. Raises `InvalidRequestError`."""
    if not (value.isascii() and value.isdigit()) or len(value) > 19:
        raise InvalidRequestError(f"{HEADER_LENGTH} must be a whole number from 0 to {body_bytes}, the body's size")
    length = int(value)
    if length > body_bytes:
        raise InvalidRequestError(f"{HEADER_LENGTH} is {length}, but the body has only {body_bytes} bytes")
    return length


def decode_request(
    body: memoryview, header_length: int | None, signature: ModelSignature, regions: RegionSource | None = None
) -> InferRequest:
    """Read a whole body. Raises `ContractError`, and nothing else whatever the bytes are.

    `signature` is used by the raw form alone, whose body does not say what it is. Without `regions` there is no shared
    memory.
    """
    if header_length == 0:
        return _decode_raw(body, signature)
    split = body.nbytes if header_length is None else header_length
    document = parse_request(body[:split])
    if not isinstance(document, dict):
        raise InvalidRequestError("the request JSON must be an object")
    inputs = document.get("inputs")
    if not isinstance(inputs, list):
        raise InvalidRequestError("the request JSON must have an array 'inputs'")
    tensors: list[InputTensor] = []
    offset = split
    allowance = BytesAllowance()
    for item in inputs:
        tensor, offset = _decode_input(item, body, offset, regions, allowance)
        tensors.append(tensor)
    if offset != body.nbytes:
        raise InvalidRequestError(
            f"the binary inputs take {offset - split} bytes, but {body.nbytes - split} bytes follow the JSON header"
        )
    parameters = _parameters(document, "the request")
    binary_output = _flag(parameters, "binary_data_output", "the request")
    return InferRequest(
        id=_request_id(document),
        inputs=tuple(tensors),
        outputs=_requested_outputs(document.get("outputs"), binary_output, regions),
        binary_output=binary_output,
        parameters=parameters,
    )


def encode_response(response: InferResponse) -> tuple[bytes, int | None]:
    """The body, and the size of its JSON header when binary data follows it (None: the body is all JSON)."""
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    finite = True
    for tensor in response.outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.data.shape)}
        if tensor.reference is not None:
            # Without parameters, as from Triton: its C++ client would take them for a sign that binary data follows.
            outputs.append(output)
            continue
        if tensor.binary:
            data = bytes_from_array(tensor.data)
            binary.append(data)
            output["parameters"] = {"binary_data_size": len(data)}
        else:
            values = json_from_array(tensor.data, tensor.name)
            finite = finite and not (isinstance(values, list) and tensor.datatype != "BYTES")
            output["data"] = values
        outputs.append(output)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    document["outputs"] = outputs
    header = dump_json(document, finite=finite)
    if not binary:
        return header, None
    return b"".join([header, *binary]), len(header)


def _decode_raw(body: memoryview, signature: ModelSignature) -> InferRequest:
    if len(signature.inputs) != 1:
        raise InvalidRequestError(
            f"{HEADER_LENGTH} 0 means one raw input, but model '{signature.name}' has {len(signature.inputs)} inputs"
        )
    spec = signature.inputs[0]
    variable = sum(dimension == -1 for dimension in spec.item_shape)
    if variable > 1:
        raise InvalidRequestError(
            f"{HEADER_LENGTH} 0 allows one variable dimension, but input '{spec.name}' has shape "
            f"{shape_text(spec.shape)}"
        )
    if spec.datatype == "BYTES":  # the body is one element, without the length that precedes it elsewhere
        element = np.empty(1, dtype=object)
        element[0] = bytes(body)
        shape = (1,) * len(spec.shape)
        return InferRequest(
            id="", inputs=(InputTensor(spec.name, "BYTES", shape, element.reshape(shape)),), binary_output=True
        )
    shape = (1, *spec.item_shape)
    if variable:
        known = spec.dtype.itemsize
        for dimension in spec.item_shape:
            known *= dimension if dimension != -1 else 1
        shape = tuple(body.nbytes // known if dimension == -1 else dimension for dimension in shape)
    data = array_from_bytes(body, spec.datatype, shape, spec.name)
    return InferRequest(id="", inputs=(InputTensor(spec.name, spec.datatype, shape, data),), binary_output=True)


def find_window(parameters: Mapping[str, Parameter], owner: str, regions: RegionSource | None) -> RegionWindow | None:
    """The shared memory that an input or output names, None where it names none. Raises `ContractError`."""
    reference = parse_reference(parameters, owner)
    if reference is None:
        return None
    if regions is None:
        raise InvalidRequestError(f"{owner} names a shared-memory region, but shared memory is switched off")
    return regions.find(reference)


def window_array(window: RegionWindow, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """An input as a view over what `RegionWindow.fetch` will read, BYTES as empty elements. Raises `ContractError`."""
    if datatype == "BYTES":
        if window.on_device:
            raise UnsupportedError(
                f"input '{name}' is BYTES, which this server does not read from CUDA shared memory; use system shared "
                "memory or send the data"
            )
        window.view()  # refused here and now if it is too large
        return empty_elements(shape, name)
    expected = element_count(shape, name) * DATATYPES[datatype].itemsize
    if expected != window.reference.byte_size:
        raise wrong_size(name, datatype, expected, window.reference.byte_size)
    return array_from_bytes(window.view(), datatype, shape, name)


def read_elements(tensor: InputTensor) -> Array:
    """The elements of a BYTES input; blocks if it has to read them from shared memory. Raises `ContractError`."""
    if tensor.window is None:
        return tensor.data
    tensor.window.fetch()
    return array_from_bytes(tensor.window.view(), tensor.datatype, tensor.shape, tensor.name)


def write_output(window: RegionWindow, array: Array) -> RegionReference:
    """Put an output into shared memory without a copy in between; where it then lies. Raises `ContractError`."""
    if array.dtype != object and array.flags.c_contiguous and array.size:
        data: bytes | memoryview = array.data.cast("B")
    else:
        data = bytes_from_array(array)
    window.write(data)
    return RegionReference(window.reference.region, len(data), window.reference.offset)


def _decode_input(
    item: object, body: memoryview, offset: int, regions: RegionSource | None, allowance: BytesAllowance
) -> tuple[InputTensor, int]:
    if not isinstance(item, dict):
        raise InvalidRequestError("each of 'inputs' must be an object")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("each of 'inputs' must have a 'name'")
    if len(name) > MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"an input's name has {len(name)} characters, at most {MAX_ID_CHARACTERS} are taken")
    datatype = item.get("datatype")
    if not isinstance(datatype, str) or (datatype not in DATATYPES and datatype != "BYTES"):
        raise InvalidRequestError(f"input '{name}' must have a 'datatype', one of {', '.join(DATATYPES)}, BYTES")
    shape = item.get("shape")
    if not isinstance(shape, list) or any([type(dimension) is not int for dimension in shape]):  # noqa: C419  faster
        raise InvalidRequestError(f"input '{name}' must have a 'shape', an array of whole numbers")
    dimensions = tuple(shape)
    parameters = _parameters(item, f"input '{name}'")
    size = parameters.get("binary_data_size")
    window = find_window(parameters, f"input '{name}'", regions) if parameters else None
    if datatype == "BYTES" and (window is not None or size is not None):  # values in the JSON its length bounds
        allowance.take(dimensions, name)
    if window is not None:
        if "data" in item or size is not None:
            raise InvalidRequestError(f"input '{name}' names a shared-memory region and brings data as well")
        data = window_array(window, datatype, dimensions, name)
        return InputTensor(name, datatype, dimensions, data, window), offset
    if size is None:
        if "data" not in item:
            raise InvalidRequestError(f"input '{name}' must have either 'data' or the parameter 'binary_data_size'")
        return InputTensor(
            name, datatype, dimensions, array_from_json(item["data"], datatype, dimensions, name)
        ), offset
    if "data" in item:
        raise InvalidRequestError(f"input '{name}' has both 'data' and the parameter 'binary_data_size'")
    if type(size) is not int or size < 0:
        raise InvalidRequestError(f"'binary_data_size' of input '{name}' must be a whole number ≥ 0")
    if offset + size > body.nbytes:
        raise InvalidRequestError(
            f"'binary_data_size' of input '{name}' is {size}, but only {body.nbytes - offset} bytes are left"
        )
    data = array_from_bytes(body[offset : offset + size], datatype, dimensions, name)
    return InputTensor(name, datatype, dimensions, data), offset + size


def _requested_outputs(
    outputs: object, binary_default: bool, regions: RegionSource | None
) -> tuple[RequestedOutput, ...] | None:
    if outputs is None or outputs == []:
        return None
    if not isinstance(outputs, list):
        raise InvalidRequestError("'outputs' must be an array")
    requested: list[RequestedOutput] = []
    for item in outputs:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise InvalidRequestError("each of 'outputs' must be an object with a 'name'")
        owner = f"output '{item['name'][:64]}'"
        parameters = _parameters(item, owner)
        window = find_window(parameters, owner, regions) if parameters else None
        if parameters.get("classification"):
            raise UnsupportedError(f"{owner} asks for 'classification', which this server does not offer")
        binary = _flag(parameters, "binary_data", owner, binary_default)
        requested.append(RequestedOutput(item["name"], binary, window))
    return tuple(requested)


def _parameters(item: dict[str, Any], owner: str) -> dict[str, Parameter]:
    parameters = item.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or not all(type(value) in _PARAMETER_TYPES for value in parameters.values()):
        raise InvalidRequestError(f"'parameters' of {owner} must be an object of strings, numbers and booleans")
    return parameters


def _flag(parameters: dict[str, Parameter], key: str, owner: str, default: bool = False) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"'{key}' of {owner} must be true or false")
    return value


def _request_id(document: dict[str, Any]) -> str:
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise InvalidRequestError("'id' must be a string")
    if len(request_id) > MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"'id' has {len(request_id)} characters, at most {MAX_ID_CHARACTERS} are taken")
    if not request_id.isascii():
        try:
            request_id.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequestError("'id' is not valid Unicode") from exc
    return request_id
