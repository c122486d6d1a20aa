"""Request bodies, encoded before the measurement by NVIDIA's encoder, and descriptions of failed responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tritonclient.http as triton_http
from tritonclient.utils import serialize_byte_tensor

from loadgen.client.endpoint import Signature, fits
from loadgen.client.exchange import Exchange
from loadgen.client.inputs import SAMPLE_TYPES, InputError, SampleInputs
from loadgen.client.requests import Address, Pieces, Request, cut, request_head
from loadgen.client.variation import Variation
from loadgen.documents import DocumentError, one_line, read_json
from loadgen.records.run import body_count


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
    """The model's inputs for these items. Raises `InputError` when one is missing or has another datatype or shape."""
    tensors = []
    if len(items) > 1 and not signature.batched:
        raise InputError(f"{signature.model} has no batch dimension, so a request cannot have {len(items)} items")
    for expected in signature.inputs:
        if expected.name in signature.optional and expected.name not in inputs.arrays:
            continue
        chosen = inputs.take(expected.name, items)
        if chosen.dtype != SAMPLE_TYPES.get(expected.datatype):
            raise InputError(
                f"the samples do not fit input {expected.name}: the model takes {expected.datatype}, "
                f"the samples are {chosen.dtype}"
            )
        if chosen.ndim == 1 and expected.shape[1:] == (1,):
            chosen = chosen[:, np.newaxis]  # Triton takes one value per item as a list of one
        if not signature.batched and fits(chosen.shape, expected.shape[1:]):
            chosen = chosen[np.newaxis]  # the item's row is the first dimension of a model that has no other batch
        if not fits(chosen.shape[1:], expected.shape[1:]):
            raise InputError(
                f"the samples do not fit input {expected.name}: the model takes items of shape "
                f"{list(expected.shape[1:])}, the samples have {list(chosen.shape[1:])}"
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


def choose_items(
    inputs: SampleInputs, batch_size: int, seed: int, *, length: int | None = None, count: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The items of each body of a batch size, of all lengths or of one; the same for every transport and payload.

    Within a body, and over all of them, items repeat as late as possible. Where items of different shapes cannot share
    a request, a body has items of one shape, drawn in proportion to their number. Raises `InputError` if no item has
    that length.
    """
    random = np.random.default_rng((seed, batch_size) if length is None else (seed, batch_size, length))
    count = body_count(batch_size) if count is None else count
    groups = inputs.groups(length)
    sizes = np.array([len(group) for group in groups])
    picks = random.choice(len(groups), count, p=sizes / sizes.sum()) if len(groups) > 1 else np.zeros(count, dtype=int)
    order = [_endless(random, group) for group in groups]
    return tuple(tuple(next(order[pick]) for _ in range(batch_size)) for pick in picks)


def _endless(random: np.random.Generator, items: Sequence[int]) -> Iterator[int]:
    """All items in random order, again and again."""
    while True:
        yield from (items[place] for place in random.permutation(len(items)))


def failure_message(exchange: Exchange) -> str:
    """One line for a failed request: the transport's failure, or the status with the server's error."""
    if exchange.failure is not None:
        return exchange.failure
    try:
        words = str(read_json(exchange.body)["error"])
    except (DocumentError, KeyError, TypeError):
        words = bytes(exchange.body[:80]).decode("utf-8", "replace")
    return f"HTTP {exchange.status}: {one_line(words)}"
