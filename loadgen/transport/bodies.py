"""Request bodies, encoded before the measurement by NVIDIA's encoder, and descriptions of failed responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tritonclient.http as triton_http
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from loadgen.documents import DocumentError, one_line, read_json
from loadgen.transport.endpoint import Signature
from loadgen.transport.exchange import Exchange
from loadgen.transport.inputs import InputError, SampleInputs
from loadgen.transport.requests import Address, Pieces, Request, cut, request_head
from loadgen.transport.variation import Variation


class AnswerError(Exception):
    """An inference failed, or its response breaks the protocol; the message says how."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """An input in the protocol's binary form."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    places: tuple[int, ...] = ()
    """Where the bytes that vary begin."""


def raw_tensors(
    inputs: SampleInputs, signature: Signature, items: Sequence[int], variation: Variation | None = None
) -> tuple[RawTensor, ...]:
    """The model's inputs for these items. Raises `InputError` when one is missing or has another datatype."""
    tensors = []
    if len(items) > 1 and not signature.batched:
        raise InputError(f"{signature.model} has no batch dimension, so a request cannot have {len(items)} items")
    for expected in signature.inputs:
        chosen = inputs.take(expected.name, items)
        if np_to_triton_dtype(chosen.dtype) != expected.datatype:
            raise InputError(
                f"the samples do not fit input {expected.name}: the model takes {expected.datatype}, "
                f"the samples are {chosen.dtype}"
            )
        data = serialize_byte_tensor(chosen).item() if expected.datatype == "BYTES" else chosen.tobytes()
        places = variation.offsets(chosen, items) if variation and variation.name == expected.name else ()
        shape = chosen.shape if signature.batched else chosen.shape[1:]
        tensors.append(RawTensor(expected.name, expected.datatype, shape, data, places))
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """One inference request's body: JSON of `json_bytes`, then the tensors; `pieces` are its parts if some vary."""

    body: bytes
    json_bytes: int
    pieces: Pieces = ()

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors in the body."""
        return len(self.body) - self.json_bytes

    def request(self, address: Address, model: str) -> Request:
        """The request for one server; the body is shared, not copied."""
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(self.json_bytes)}
        path, length = f"{address.model_path(model)}/infer", len(self.body)
        head = request_head("POST", path, address, content_length=length, headers=headers)
        return Request(head, self.body, self.payload_bytes, self.pieces)


def prepare_body(
    inputs: SampleInputs, signature: Signature, items: Sequence[int], variation: Variation | None = None
) -> PreparedBody:
    """One request for these items, with every output requested in binary, cut at the places that vary. Raises
    `InputError` when an input is missing or has another datatype."""
    tensors, places, start = [], [], 0
    for raw in raw_tensors(inputs, signature, items, variation):
        tensor = triton_http.InferInput(raw.name, list(raw.shape), raw.datatype)
        tensor.set_data_from_numpy(inputs.take(raw.name, items).reshape(raw.shape), binary_data=True)
        tensors.append(tensor)
        places += [start + place for place in raw.places]
        start += len(raw.data)
    outputs = [triton_http.InferRequestedOutput(output.name, binary_data=True) for output in signature.outputs]
    encoded, json_bytes = triton_http.InferenceServerClient.generate_request_body(tensors, outputs=outputs)
    body = bytes(encoded)
    pieces = () if variation is None else cut(body, [json_bytes + place for place in places], variation.byte_size)
    return PreparedBody(body, json_bytes, pieces)


def body_count(batch_size: int) -> int:
    """How many different bodies a batch size gets: enough that no cache can hold one response, few enough to fit
    into memory."""
    return max(4, 32 // batch_size)


def choose_items(
    available: int, batch_size: int, seed: int, *, count: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The items of each body of a batch size, the same for every transport and payload. Within a body, and over all of
    them, items repeat as late as possible."""
    random = np.random.default_rng((seed, batch_size))
    count = body_count(batch_size) if count is None else count
    order = np.concatenate([random.permutation(available) for _ in range(-(-count * batch_size // available) + 1)])
    return tuple(
        tuple(int(item) for item in order[start : start + batch_size])
        for start in range(0, count * batch_size, batch_size)
    )


def failure_message(exchange: Exchange) -> str:
    """One line for a failed request: the transport's failure, or the status with the server's error."""
    if exchange.failure is not None:
        return exchange.failure
    try:
        words = str(read_json(exchange.body)["error"])
    except (DocumentError, KeyError, TypeError):
        words = bytes(exchange.body[:80]).decode("utf-8", "replace")
    return f"HTTP {exchange.status}: {one_line(words)}"
