"""A server of the Open Inference Protocol as a client finds it: health, metadata, configuration, statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from loadgen.documents import MOST_BYTES, DocumentError, read_json
from loadgen.transport.exchange import ConnectionRefused, Exchange
from loadgen.transport.http import HttpConnection
from loadgen.transport.requests import Address, Request, request_head

_MOST_VALUES = 2**28
"""Of one item of one input or output."""


class EndpointError(Exception):
    """The server, or the model on it, is not there or answers something else; the message says which."""


class TensorSignature(msgspec.Struct, frozen=True):
    """One input or output as the server's metadata names it, other keys left out; shape[0] is the batch dimension."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    datatype: Annotated[str, msgspec.Meta(min_length=1)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=-1, lt=2**31)], ...], msgspec.Meta(max_length=32)]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a model takes and gives."""

    model: str
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]


class Endpoint:
    """Questions other than inference, each on its own connection; not for the measured path."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self.address = Address.parse(url)
        self._timeout_s = timeout_s

    def _get(self, path: str) -> Exchange:
        """Raises `ConnectionRefused`."""
        connection = HttpConnection(self.address, timeout_s=self._timeout_s, most_bytes=MOST_BYTES)
        try:
            return connection.send(Request(request_head("GET", path, self.address)))
        finally:
            connection.close()

    def status(self, path: str) -> int | None:
        """The status of a GET, None where nothing answers."""
        try:
            return self._get(path).status or None
        except ConnectionRefused:
            return None

    def document(self, path: str) -> dict[str, Any] | None:
        """The JSON object behind a path, None for any status but 200.

        Raises `EndpointError` when nothing answers or the answer is no JSON object.
        """
        try:
            exchange = self._get(path)
        except ConnectionRefused as exc:
            raise EndpointError(f"nothing answers at {self.address.url}: {exc}") from None
        if exchange.failure is not None:
            raise EndpointError(f"GET {self.address.url}{path}: {exchange.failure}")
        if exchange.status != 200:
            return None
        try:
            document = read_json(exchange.body)
        except DocumentError as exc:
            raise EndpointError(f"GET {self.address.url}{path}: the answer cannot be used: {exc}") from exc
        if not isinstance(document, dict):
            raise EndpointError(f"GET {self.address.url}{path}: the answer is no JSON object")
        return document

    def live(self) -> bool:
        """Whether the process answers."""
        return self.status("/v2/health/live") == 200

    def silence(self) -> str:
        """Why it is not live, asked once more, for a message."""
        try:
            exchange = self._get("/v2/health/live")
        except ConnectionRefused as exc:
            return str(exc)
        return exchange.failure or f"/v2/health/live answers {exchange.status}"

    def ready(self, model: str) -> bool:
        """Whether the model can be asked."""
        return self.status(f"/v2/models/{model}/ready") == 200

    def signature(self, model: str) -> Signature:
        """Raises `EndpointError` when the server or the model is not there."""
        document = self.document(f"/v2/models/{model}")
        if document is None:
            known = "" if self.live() else ", which does not answer /v2/health/live either"
            raise EndpointError(f"no model {model} at {self.address.url}{known}; name another with --model")
        return Signature(model, read_tensors(document, "inputs"), read_tensors(document, "outputs"))

    def statistics(self, model: str) -> dict[str, Any] | None:
        """`model_stats[0]` of the statistics extension, None where the server does not offer it."""
        try:
            document = self.document(f"/v2/models/{model}/stats")
        except EndpointError:
            return None
        entries = (document or {}).get("model_stats")
        return entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else None


def read_tensors(document: Mapping[str, Any], key: str) -> tuple[TensorSignature, ...]:
    """The inputs or outputs in a model's metadata: one at least, each name once, of sizes that fit into a request.
    Raises `EndpointError`."""
    try:
        found: tuple[TensorSignature, ...] = msgspec.convert(
            document.get(key), tuple[TensorSignature, ...], strict=False
        )
    except ValueError as exc:
        raise EndpointError(f"the model's metadata has no usable {key}: {exc}") from exc
    if not found:
        raise EndpointError(f"the model's metadata names no {key}")
    if len({tensor.name for tensor in found}) != len(found):
        raise EndpointError(f"the model's metadata names one of its {key} twice")
    if large := next((one for one in found if math.prod(size for size in one.shape if size > 0) > _MOST_VALUES), None):
        raise EndpointError(f"the model's metadata gives {large.name} a shape of more than {_MOST_VALUES:,} values")
    return found
