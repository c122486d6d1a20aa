"""Asks a server of the Open Inference Protocol about itself: health, models, metadata, configuration, statistics."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from loadgen.base.documents import MOST_BYTES, DocumentError, decode_json, one_line, read_json
from loadgen.client.connection import (
    Address,
    ConnectionRefused,
    Exchange,
    PreparedRequest,
    server_words,
    unasked_coding,
)
from loadgen.client.http import HttpConnection, request_head
from loadgen.records.run import DEFAULT_ACCESS, Access

MOST_VALUES = 2**28
"""Most values of a tensor: one item of an input or output in the metadata, or all items of generated inputs."""
_MOST_DIGITS = 20
_MOST_NAMES, _MOST_NAME = 8, 80
_MOST_ASKED = 64
"""Most models of a list that are asked one by one whether they are ready."""


class EndpointError(Exception):
    """The server or the model cannot be reached, or its response cannot be used; the message says which."""


class TensorSignature(msgspec.Struct, frozen=True):
    """One input or output in the server's metadata; shape[0] is the batch dimension, -1 is a variable one."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    datatype: Annotated[str, msgspec.Meta(min_length=1)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=-1, lt=2**31)], ...], msgspec.Meta(max_length=32)]


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model."""

    model: str
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    version: str | None = None
    """The version that is asked for; None: the server chooses."""
    optional: frozenset[str] = frozenset()
    """Inputs that a request may leave out, by the server's configuration of the model."""
    batched: bool = True
    """Whether requests have a batch dimension. If not, the shapes here begin with -1 all the same; a request then has
    one item and leaves that dimension out."""


class IndexRow(msgspec.Struct, frozen=True):
    """One version of a model in a server's list of its models."""

    name: str
    version: str | int | None = None
    state: str | None = None
    """READY, or another word of the server's; None where it does not say."""
    reason: str | None = None
    """Why it is not ready."""
    parent: Any = None
    """Of a language model the one that it adapts, if it is an adapter."""
    root: Any = None
    """Of a language model what is served under its name, where the server says so."""

    @property
    def ready(self) -> bool:
        return self.state == "READY"


def answer_text(exchange: Exchange) -> str:
    """What a server answered, for a sentence: "401 (no key)", or why nothing came."""
    return exchange.failure or f"{exchange.status} ({server_words(exchange)})"


class Endpoint:
    """A server's answers about itself, each on a new connection; not for measurements."""

    most_bytes = MOST_BYTES
    live_path = "/v2/health/live"
    """The path whose answer shows whether the server is live."""

    def __init__(self, url: str, *, timeout_s: float = 10.0, access: Access = DEFAULT_ACCESS) -> None:
        """Raises `AddressError`."""
        self.address = Address.parse(url, access)
        self._timeout_s = timeout_s

    def get(self, path: str) -> Exchange:
        """The answer to a GET; a refused connection counts as a failed request."""
        return self._send(PreparedRequest(request_head("GET", path, self.address)))

    def _send(self, request: PreparedRequest) -> Exchange:
        """Send one request; a refused connection counts as a failed request."""
        connection = HttpConnection(self.address, timeout_s=self._timeout_s, most_bytes=self.most_bytes)
        try:
            return connection.send(request)
        except ConnectionRefused as exc:
            refused = Exchange()
            refused.failure = str(exc)
            return refused
        finally:
            connection.close()

    def status(self, path: str) -> int | None:
        """The status of a GET; None when nothing answers."""
        return self.get(path).status or None

    def document(self, path: str) -> dict[str, Any] | None:
        """The JSON object at a path; None for any status but 200. Raises `EndpointError` when nothing answers or the
        response is not a JSON object."""
        exchange, request = self.get(path), f"GET {self.address.url}{path}"
        if exchange.failure is not None:
            raise EndpointError(f"{request}: {exchange.failure}")
        if exchange.status != 200:
            return None
        if (fault := unasked_coding(exchange)) is not None:
            raise EndpointError(f"{request}: the response cannot be used: {fault}")
        try:
            document = read_json(exchange.body)
        except DocumentError as exc:
            raise EndpointError(f"{request}: the response cannot be used: {exc}") from exc
        if not isinstance(document, dict):
            raise EndpointError(f"{request}: the response is not a JSON object")
        return document

    def live(self) -> bool:
        """Whether the process answers, and not with the page that some servers send for every path."""
        exchange = self.get(self.live_path)
        return exchange.status == 200 and "text/html" not in (exchange.header("content-type") or "")

    def why_not_live(self) -> str:
        """Why the server is not live, from another request, for a message."""
        exchange = self.get(self.live_path)
        return exchange.failure or f"GET {self.address.base_path}{self.live_path} answers {answer_text(exchange)}"

    def ready(self, model: str) -> bool:
        """Whether the model is ready."""
        return self.status(f"{self.address.model_path(model)}/ready") == 200

    def repository_index(self) -> tuple[IndexRow, ...] | None:
        """The models that the server knows, loaded or not; None if it does not list them.

        Of a model whose state is not listed, as Triton does for one that was never loaded, it asks whether it is ready.
        """
        rows = self._listed_models()
        if rows is None:
            return None
        asked = [row if row.state else self._with_state(row) for row in rows[:_MOST_ASKED]]
        return (*asked, *rows[_MOST_ASKED:])

    def _listed_models(self) -> tuple[IndexRow, ...] | None:
        """The repository index; without that extension, the lists of KServe's and of OpenVINO's server."""
        head = request_head("POST", "/v2/repository/index", self.address, content_length=2)
        exchange = self._send(PreparedRequest(head, b"{}"))
        if exchange.failure is None and exchange.status == 200:
            try:
                return msgspec.convert(read_json(exchange.body), tuple[IndexRow, ...])
            except (DocumentError, ValueError):
                return None
        try:
            names = (self.document("/v2/models") or {}).get("models")
            if not isinstance(names, list):
                names = [
                    name
                    for name, about in (self.document("/v1/config") or {}).items()
                    if isinstance(about, dict) and "model_version_status" in about
                ]
        except EndpointError:
            return None
        return tuple(IndexRow(name) for name in names if isinstance(name, str)) or None

    def _with_state(self, row: IndexRow) -> IndexRow:
        return msgspec.structs.replace(row, state="READY") if self.ready(row.name) else row

    def served_models(self) -> tuple[str, ...] | None:
        """The names of the models that are ready; None if the server does not list its models."""
        rows = self.repository_index()
        return None if rows is None else ready_models(rows)

    def only_model(self, preferred: str) -> str:
        """The model to send to if none was named: `preferred` if the server has it, else the only one that is ready.
        Raises `EndpointError` with the models to choose from."""
        if self.ready(preferred):
            return preferred
        rows = self.repository_index()
        if rows is None:
            why = "does not list its models" if self.live() else f"is not live ({self.why_not_live()})"
            raise EndpointError(f"the server at {self.address.url} {why}; name its model with --model NAME")
        ready = ready_models(rows)
        if not ready:
            raise EndpointError(nothing_ready(self.address.url, rows))
        if len(ready) > 1:
            raise EndpointError(
                f"the server at {self.address.url} serves {model_names(ready)}; choose one with --model, as in --model "
                f"{shlex.quote(one_line(ready[0]))}"
            )
        return ready[0]

    def config(self, model: str) -> dict[str, Any] | None:
        """The model's configuration; None if the server does not have that extension. Raises `EndpointError`."""
        return self.document(f"{self.address.model_path(model)}/config")

    def signature(self, model: str) -> Signature:
        """The model's metadata. Raises `EndpointError` when the server or the model cannot be reached."""
        document, version = self.document(self.address.model_path(model)), self.address.access.version
        if document is None:
            state = "" if self.live() else ", which does not answer /v2/health/live either"
            if served := self.served_models():
                state = f", which serves {model_names(served)}"
            raise EndpointError(
                f"no {versioned(model, version)} at {self.address.url}{state}; name another with --model"
            )
        try:
            inputs, outputs = read_tensors(document, "inputs"), read_tensors(document, "outputs")
        except EndpointError as exc:
            raise EndpointError(f"model {model} at {self.address.url}: {exc}") from exc
        try:
            config = self.config(model) or {}
        except EndpointError:
            config = {}
        entries = _objects(config.get("input"))
        left_out = {str(entry.get("name")) for entry in entries if entry.get("optional") is True}
        optional = frozenset(left_out & {tensor.name for tensor in inputs})
        largest = config.get("max_batch_size")
        unbatched = type(largest) is int and largest == 0
        if unbatched or not all(tensor.shape and tensor.shape[0] in (-1, 1) for tensor in inputs):
            return Signature(
                model, _with_batch_dimension(inputs), _with_batch_dimension(outputs), version, optional, batched=False
            )
        return Signature(model, inputs, outputs, version, optional)

    def statistics(self, model: str) -> dict[str, Any] | None:
        """The model's entry in `model_stats` of the statistics extension: without a version the latest one's, which
        answers requests. None if the server does not have the extension."""
        try:
            document = self.document(f"{self.address.model_path(model)}/stats")
        except EndpointError:
            return None
        return max(_objects((document or {}).get("model_stats")), key=_version, default=None)


class CompletionsEndpoint(Endpoint):
    """A server that speaks OpenAI's API and not the Open Inference Protocol, such as vLLM."""

    most_bytes = 2**24
    """A gateway describes each of its hundreds of models."""

    @property
    def live_path(self) -> str:  # type: ignore[override]  # the version of OpenAI's API may stand in the URL
        return self.address.openai_path("models")

    def live(self) -> bool:
        """Whether the server answers, with its list of models or without one. A server that still loads its model does
        not, or with an error of its own."""
        status = self.status(self.live_path)
        return status is not None and (status < 500 or status == 501)

    def ready(self, model: str) -> bool:  # noqa: ARG002 (a server need not list all its models)
        """Whether the server answers; discovery has sent a prompt to its model."""
        return self.live()

    def document(self, path: str) -> dict[str, Any] | None:
        """The JSON object at a path; None also for the page that some servers send for every path."""
        try:
            return super().document(path)
        except EndpointError:
            if self.live():
                return None
            raise

    def list_models(self) -> tuple[tuple[IndexRow, ...] | None, Exchange]:
        """The language models that the server lists, and its answer; None if that is no list of them."""
        exchange = self.get(self.live_path)
        if exchange.failure is not None or exchange.status != 200:
            return None, exchange
        try:
            document = decode_json(exchange.body, Any, most_bytes=self.most_bytes)
        except DocumentError:
            return None, exchange
        entries = document.get("data", ()) if isinstance(document, dict) else document
        if not isinstance(entries, list | None):
            return None, exchange
        named = [entry for entry in _objects(entries) if _text(entry.get("id"))]
        return tuple(
            IndexRow(card["id"], state="READY", parent=_text(card.get("parent")), root=_text(card.get("root")))
            for card in named
        ), exchange

    def _listed_models(self) -> tuple[IndexRow, ...] | None:
        return self.list_models()[0]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value and value.isprintable() else None


def _objects(entries: object) -> list[dict[str, Any]]:
    """The JSON objects in what should be a list of them."""
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _version(entry: Mapping[str, Any]) -> int:
    """The version of an entry of the statistics; 0 if it is not a number."""
    version = str(entry.get("version"))
    return int(version) if version.isascii() and version.isdecimal() and len(version) < _MOST_DIGITS else 0


def unmeasurable(config: Mapping[str, Any] | None, model: str) -> str | None:
    """Why a model with this configuration of Triton cannot be measured, as a sentence; None if it can."""
    policy = (config or {}).get("model_transaction_policy")
    if isinstance(policy, dict) and policy.get("decoupled") is True:
        return (
            f"{model} is decoupled (model_transaction_policy in its configuration), and abserve measures models with "
            "one answer per request"
        )
    if isinstance((config or {}).get("sequence_batching"), dict):
        return f"{model} is stateful (sequence_batching in its configuration), and abserve sends no correlation ids"
    return None


def ready_models(rows: Sequence[IndexRow]) -> tuple[str, ...]:
    """The names of the listed models that are ready, sorted."""
    return tuple(sorted({row.name for row in rows if row.ready}))


def nothing_ready(url: str, rows: Sequence[IndexRow], wanted: str = "one") -> str:
    """A sentence about a server that lists no model that is ready."""
    if not rows:
        return f"the server at {url} has no models; load {wanted} there"
    states = (": ".join(filter(None, (row.state, row.reason))) for row in rows)
    listed = [f"{row.name} ({state or 'not loaded'})" for row, state in zip(rows, states, strict=True)]
    return f"the server at {url} has no model that is ready: {model_names(listed)}; load {wanted} there"


def versioned(model: str, version: str | None) -> str:
    """A model, or a version of it, for a message."""
    return f"model {model}" if version is None else f"version {version} of model {model}"


def model_names(models: Sequence[str]) -> str:
    """The names of models on a server for a message: the first of many, without control characters."""
    shown = [one_line(name, _MOST_NAME) for name in models[:_MOST_NAMES]]
    more = len(models) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether a shape is one that the metadata allow."""
    return len(shape) == len(expected) and all(
        size >= 0 and allowed in (-1, size) for size, allowed in zip(shape, expected, strict=True)
    )


def _with_batch_dimension(tensors: tuple[TensorSignature, ...]) -> tuple[TensorSignature, ...]:
    """The tensors with a batch dimension before their shapes."""
    return tuple(msgspec.structs.replace(tensor, shape=(-1, *tensor.shape)) for tensor in tensors)


def read_tensors(document: Mapping[str, Any], key: str) -> tuple[TensorSignature, ...]:
    """The inputs or outputs in a model's metadata: at least one, with different names and sizes that fit into a
    request. Raises `EndpointError`."""
    try:
        tensors: tuple[TensorSignature, ...] = msgspec.convert(
            document.get(key), tuple[TensorSignature, ...], strict=False
        )
    except ValueError as exc:
        raise EndpointError(f"the model's metadata has no usable {key}: {exc}") from exc
    if not tensors:
        raise EndpointError(
            f"the model's metadata has no {key}, so there is nothing to send or to compare; declare the tensors in the "
            "model's configuration on that server"
        )
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise EndpointError(f"two {key} in the model's metadata have the same name")
    for tensor in tensors:
        if math.prod(size for size in tensor.shape if size > 0) > MOST_VALUES:
            raise EndpointError(f"the model's metadata gives {tensor.name} a shape of more than {MOST_VALUES:,} values")
    return tensors
