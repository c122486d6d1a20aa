"""Request bodies made before anything is measured, by NVIDIA's own encoder, and answers read by its own decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import tritonclient.http as triton_http

from loadgen.clients.endpoint import Signature
from loadgen.clients.exchange import Exchange, one_line
from loadgen.clients.inputs import Array, InputError, SampleInputs
from loadgen.clients.requests import Address, Request, request_head

_HEADER_LENGTH = "inference-header-content-length"


class AnswerError(Exception):
    """The server's answer to an inference request is not what the protocol says; the message is its error."""


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """One inference request without its head: JSON, then the tensors' bytes. `items` index the sample inputs."""

    body: bytes
    json_bytes: int | None
    items: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """Items in the request."""
        return len(self.items)

    def request(self, address: Address, model: str) -> Request:
        """Ready for one server; the body is shared, not copied."""
        headers = {"Content-Type": "application/octet-stream"}
        if self.json_bytes is not None:
            headers["Inference-Header-Content-Length"] = str(self.json_bytes)
        head = request_head(
            "POST", f"/v2/models/{model}/infer", address, content_length=len(self.body), headers=headers
        )
        return Request(head, self.body, self.payload_bytes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors in the body."""
        return 0 if self.json_bytes is None else len(self.body) - self.json_bytes


def prepare_body(inputs: SampleInputs, signature: Signature, items: Sequence[int]) -> PreparedBody:
    """One request for these items, every output asked for in binary. Raises `InputError` when an input is missing or
    has another datatype than the server wants."""
    tensors = []
    for expected in signature.inputs:
        chosen = inputs.take(expected.name, items)
        tensor = triton_http.InferInput(expected.name, list(chosen.shape), expected.datatype)
        try:
            tensor.set_data_from_numpy(chosen, binary_data=True)
        except triton_http.InferenceServerException as exc:
            raise InputError(f"the samples do not fit input {expected.name}: {exc}") from exc
        tensors.append(tensor)
    outputs = [triton_http.InferRequestedOutput(output.name, binary_data=True) for output in signature.outputs]
    body, json_bytes = triton_http.InferenceServerClient.generate_request_body(tensors, outputs=outputs)
    return PreparedBody(bytes(body), json_bytes, tuple(items))


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


def prepare_bodies(
    inputs: SampleInputs, signature: Signature, batch_size: int, seed: int, *, count: int | None = None
) -> tuple[PreparedBody, ...]:
    """Different bodies of one batch size."""
    chosen = choose_items(inputs.count, batch_size, seed, count=count)
    return tuple(prepare_body(inputs, signature, items) for items in chosen)


def parse_answer(exchange: Exchange) -> Mapping[str, Array]:
    """The outputs of a good answer, as arrays of their own. Raises `AnswerError`."""
    if exchange.status != 200:
        raise AnswerError(failure_message(exchange))
    header_length = exchange.header(_HEADER_LENGTH)
    try:
        result = triton_http.InferenceServerClient.parse_response_body(
            bytes(exchange.body), header_length=None if header_length is None else int(header_length)
        )
        names = [output["name"] for output in result.get_response()["outputs"]]
        return {name: np.array(result.as_numpy(name)) for name in names}
    except (triton_http.InferenceServerException, ValueError, KeyError, TypeError) as exc:
        raise AnswerError(f"the answer cannot be read: {exc}") from exc


def failure_message(exchange: Exchange) -> str:
    """One line for a failed exchange: the transport's failure, or the status with the server's own words."""
    if exchange.failure is not None:
        return exchange.failure
    try:
        document = msgspec.json.decode(exchange.body)
        words = str(document["error"])
    except (ValueError, KeyError, TypeError):  # of msgspec, and of what is no UTF-8
        words = bytes(exchange.body[:80]).decode("utf-8", "replace")
    return f"HTTP {exchange.status}: {one_line(words)}"
