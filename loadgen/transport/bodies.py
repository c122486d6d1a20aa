"""Request bodies made before anything is measured, by NVIDIA's own encoder, and answers as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tritonclient.http as triton_http

from loadgen.documents import DocumentError, one_line, read_json
from loadgen.transport.endpoint import Signature
from loadgen.transport.exchange import Exchange
from loadgen.transport.inputs import Array, InputError, SampleInputs
from loadgen.transport.outputs import read_body
from loadgen.transport.requests import Address, Pieces, Request, cut, request_head
from loadgen.transport.variation import Variation

_HEADER_LENGTH = "inference-header-content-length"


class AnswerError(Exception):
    """The server's answer to an inference request is not what the protocol says; the message is its error."""


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """One inference request without its head: JSON of `json_bytes`, then the tensors' bytes."""

    body: bytes
    json_bytes: int
    pieces: Pieces = ()

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors in the body."""
        return len(self.body) - self.json_bytes

    def request(self, address: Address, model: str) -> Request:
        """Ready for one server; the body is shared, not copied."""
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(self.json_bytes),
        }
        head = request_head(
            "POST", f"/v2/models/{model}/infer", address, content_length=len(self.body), headers=headers
        )
        return Request(head, self.body, self.payload_bytes, self.pieces)


def prepare_body(
    inputs: SampleInputs, signature: Signature, items: Sequence[int], variation: Variation | None = None
) -> PreparedBody:
    """One request for these items, every output asked for in binary, cut where the variation writes. Raises
    `InputError` when an input is missing or has another datatype than the server wants."""
    tensors, start = [], 0
    places: tuple[int, ...] = ()
    for expected in signature.inputs:
        chosen = inputs.take(expected.name, items)
        tensor = triton_http.InferInput(expected.name, list(chosen.shape), expected.datatype)
        try:
            tensor.set_data_from_numpy(chosen, binary_data=True)
        except triton_http.InferenceServerException as exc:
            raise InputError(f"the samples do not fit input {expected.name}: {exc}") from exc
        tensors.append(tensor)
        if variation is not None and variation.name == expected.name:
            places = tuple(start + offset for offset in variation.offsets(chosen, items))
        start += serialised_bytes(chosen)
    outputs = [triton_http.InferRequestedOutput(output.name, binary_data=True) for output in signature.outputs]
    encoded, json_bytes = triton_http.InferenceServerClient.generate_request_body(tensors, outputs=outputs)
    body = bytes(encoded)
    pieces = () if variation is None else cut(body, [json_bytes + place for place in places], variation.byte_size)
    return PreparedBody(body, json_bytes, pieces)


def serialised_bytes(array: Array) -> int:
    """Of an input as binary data, where each element of a BYTES tensor has its length before it."""
    return sum(4 + len(part) for part in array.ravel()) if array.dtype.hasobject else array.nbytes


def body_count(batch_size: int) -> int:
    """How many different bodies a batch size gets: enough that no cache can hold one answer, few enough for memory."""
    return max(4, 32 // batch_size)


def choose_items(
    available: int, batch_size: int, seed: int, *, count: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The items of the bodies of one batch size; inside a body, and over all of them, they repeat as late as they
    can. The same for every transport and payload."""
    random = np.random.default_rng((seed, batch_size))
    count = body_count(batch_size) if count is None else count
    order = np.concatenate([random.permutation(available) for _ in range(-(-count * batch_size // available) + 1)])
    return tuple(
        tuple(int(item) for item in order[start : start + batch_size])
        for start in range(0, count * batch_size, batch_size)
    )


def parse_answer(exchange: Exchange) -> Mapping[str, Array]:
    """The outputs of a good answer, as arrays of their own. Raises `AnswerError`."""
    if exchange.status != 200:
        raise AnswerError(failure_message(exchange))
    try:
        return read_body(exchange.body, exchange.header(_HEADER_LENGTH))
    except DocumentError as exc:
        raise AnswerError(f"the answer cannot be read: {exc}") from exc


def failure_message(exchange: Exchange) -> str:
    """One line for a failed exchange: the transport's failure, or the status with the server's own words."""
    if exchange.failure is not None:
        return exchange.failure
    try:
        words = str(read_json(exchange.body)["error"])
    except (DocumentError, KeyError, TypeError):
        words = bytes(exchange.body[:80]).decode("utf-8", "replace")
    return f"HTTP {exchange.status}: {one_line(words)}"
