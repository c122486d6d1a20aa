"""A server of the Open Inference Protocol as a client finds it: health, metadata, configuration, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen.clients.http import ConnectionRefused, HttpConnection
from loadgen.clients.requests import Address, Request, request_head


class EndpointError(Exception):
    """The server, or the model on it, is not there or answers something else; the message says which."""


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """One input or output as the server's metadata names it; shape[0] is the batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


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

    def status(self, path: str) -> int | None:
        """The status of a GET, None where nothing answers."""
        connection = HttpConnection(self.address, timeout_s=self._timeout_s)
        try:
            exchange = connection.send(Request(request_head("GET", path, self.address)))
        except ConnectionRefused:
            return None
        finally:
            connection.close()
        return exchange.status or None

    def document(self, path: str) -> dict[str, Any] | None:
        """The JSON object behind a path, None for any status but 200.

        Raises `EndpointError` when nothing answers or the answer is no JSON object.
        """
        connection = HttpConnection(self.address, timeout_s=self._timeout_s)
        try:
            exchange = connection.send(Request(request_head("GET", path, self.address)))
            if exchange.failure is not None:
                raise EndpointError(f"GET {self.address.url}{path}: {exchange.failure}")
            if exchange.status != 200:
                return None
            try:
                document = msgspec.json.decode(exchange.body)
            except ValueError as exc:  # msgspec's, and what is no UTF-8
                raise EndpointError(f"GET {self.address.url}{path}: the answer is not JSON ({exc})") from exc
        except ConnectionRefused as exc:
            raise EndpointError(f"nothing answers at {self.address.url}: {exc}") from None
        finally:
            connection.close()
        if not isinstance(document, dict):
            raise EndpointError(f"GET {self.address.url}{path}: the answer is no JSON object")
        return document

    def live(self) -> bool:
        """Whether the process answers."""
        return self.status("/v2/health/live") == 200

    def silence(self) -> str:
        """Why it is not live, asked once more, for a message."""
        connection = HttpConnection(self.address, timeout_s=self._timeout_s)
        try:
            exchange = connection.send(Request(request_head("GET", "/v2/health/live", self.address)))
        except ConnectionRefused as exc:
            return str(exc)
        finally:
            connection.close()
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
        return Signature(model, _tensors(document, "inputs"), _tensors(document, "outputs"))

    def statistics(self, model: str) -> dict[str, Any] | None:
        """`model_stats[0]` of the statistics extension, None where the server does not offer it."""
        try:
            document = self.document(f"/v2/models/{model}/stats")
        except EndpointError:
            return None
        entries = (document or {}).get("model_stats")
        return entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else None


def _tensors(document: dict[str, Any], key: str) -> tuple[TensorSignature, ...]:
    try:
        return tuple(
            TensorSignature(str(entry["name"]), str(entry["datatype"]), tuple(int(size) for size in entry["shape"]))
            for entry in document[key]
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise EndpointError(f"the model's metadata has no usable {key}") from exc
