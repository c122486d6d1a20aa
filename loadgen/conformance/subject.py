"""The server under test: requests to it over HTTP and gRPC, its model, its statistics, metrics and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadgen.client.endpoint import Endpoint, EndpointError
from loadgen.client.outputs import read_body
from loadgen.conformance.model import HEADER, Body, Model
from loadgen.conformance.records import Answer, NotApplicableError
from loadgen.conformance.wire import GrpcClient, RawConnection, request_head
from loadgen.documents import DocumentError, read_json
from loadgen.launch.deployment import DeploymentError, RemoteDeployment

GOLDEN_TOLERANCE = 1e-5
ANSWER_SECONDS = 20.0
READY_SECONDS = 330.0
_MOST_MODELS = 100
"""Models of a server that are checked for an image input."""
MOST_METRICS_BYTES = 2**22
MOST_METRICS_LINE = 2**13
"""A text with a longer line is not parsed: the parser's time grows with the square of a line's length."""

Samples = dict[str, float]
"""Series, such as `requests_total{status="200"}` → value."""

_ERROR_SERIES = re.compile(r'(?:status|code|http_status|status_code)="?[45]|requests?_failure')
_DISCONNECT_SERIES = re.compile(r"disconnect|clients?_left|abandon|aborted|client_gone", re.IGNORECASE)


class SubjectError(Exception):
    """The server cannot be tested at all; the message says why."""


@dataclass
class Subject:
    """One running server. Every request has its own connection unless a case keeps one."""

    url: str
    model: Model
    grpc: GrpcClient | None = None
    metrics_url: str | None = None
    image_model: Model | None = None
    pids: Callable[[], tuple[int, ...]] = tuple
    failure: Callable[[], str | None] = lambda: None
    log_path: Path | None = None
    new_server: Callable[[bool], AbstractContextManager[Subject]] | None = None
    """Starts another server with default options; with True it waits until the server is ready."""
    max_body_bytes: int | None = None
    read_timeout_s: float | None = None
    """How long it waits for a slow client, if it was started with that option."""
    golden: Answer | None = None
    """The first answer to the golden inference, which later answers must equal."""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return urlsplit(self.url).netloc

    def connect(self, url: str | None = None) -> RawConnection:
        """Connect to the server, or to its metrics. Raises `OSError` when nothing listens."""
        parts = urlsplit(url or self.url)
        return RawConnection(parts.hostname or "127.0.0.1", parts.port or 80)

    def raw(
        self,
        data: bytes | Iterable[bytes],
        deadline_s: float = ANSWER_SECONDS,
        *,
        head_only: bool = False,
        url: str | None = None,
    ) -> Answer:
        """Send exactly these bytes on a new connection."""
        try:
            with self.connect(url) as connection:
                return connection.request(data, deadline_s, head_only=head_only)
        except OSError:
            return Answer("refused")

    def http(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        deadline_s: float = ANSWER_SECONDS,
    ) -> Answer:
        """One well-formed request."""
        head = request_head(method, path, self.authority, headers or {}, None if body is None else len(body))
        return self.raw(head + (body or b""), deadline_s, head_only=method == "HEAD")

    def infer(self, body: Body, *, path: str | None = None, deadline_s: float = ANSWER_SECONDS) -> Answer:
        """One inference request to the model, or to another route."""
        path = path or self.model.path
        return self.http("POST", path, headers=body.headers, body=body.content, deadline_s=deadline_s)

    def infer_bytes(self, body: Body) -> bytes:
        """An inference request as bytes, for a connection that the case keeps."""
        return request_head("POST", self.model.path, self.authority, body.headers, len(body.content)) + body.content

    def grpc_client(self) -> GrpcClient:
        """The gRPC client. Raises `NotApplicableError` if no gRPC address is known."""
        if self.grpc is None:
            raise NotApplicableError("no gRPC address is known; give one with --grpc HOST:PORT")
        return self.grpc

    def ask_golden(self) -> Answer:
        """Send the golden inference: always the same valid request."""
        return self.infer(self.model.binary(1, seed=0))

    def golden_difference(self) -> str | None:
        """How the golden answer has changed; None if it is bit-identical or within 1e-5 relative."""
        if self.golden is None:
            return "there was no golden answer to compare with"
        answer = self.ask_golden()
        if answer.status != "200":
            return f"the golden inference got {answer.status}"
        return output_difference(self.golden, answer, GOLDEN_TOLERANCE)

    def statistics(self) -> dict[str, int]:
        """`inference_count`, `execution_count`, `success` and `fail` of the model; raises `NotApplicableError`."""
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            entry = Endpoint(self.url).statistics(self.model.name) or {}
            counts = {name: int(entry["inference_stats"][name]["count"]) for name in ("success", "fail")}
            return counts | {name: int(entry[name]) for name in ("inference_count", "execution_count")}
        raise NotApplicableError("the server has no statistics extension, which this case needs")

    def metrics(self) -> Samples | None:
        """Prometheus samples; None if the server has none that can be read."""
        if self.metrics_url is None:
            return None
        parts = urlsplit(self.metrics_url)
        answer = self.raw(request_head("GET", parts.path, parts.netloc, {}, None), url=self.metrics_url)
        return parse_metrics(answer.body.decode("utf-8", "replace")) if answer.status == "200" else None

    def live(self, seconds: float = 2.0) -> bool:
        """Whether health/live answers 200 in that time."""
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            if self.http("GET", "/v2/health/live", deadline_s=left).status == "200":
                return True
            sleep(0.02)
        return False

    def resident_bytes(self) -> int | None:
        """Resident memory of its processes; None when none of them can be read."""
        total = None
        for pid in self.pids():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total = (total or 0) + psutil.Process(pid).memory_info().rss
        return total

    def read_model(self, name: str) -> Model:
        """A model of this server, from its metadata and configuration. Raises `SubjectError`."""
        endpoint = Endpoint(self.url)
        try:
            signature = endpoint.signature(name)
        except EndpointError as exc:
            raise SubjectError(str(exc)) from exc
        maximum: Any = None
        with suppress(EndpointError):
            maximum = (endpoint.config(name) or {}).get("max_batch_size")
        inputs, outputs = signature.inputs, signature.outputs
        if not signature.batched:  # there a signature has a dimension more than the server's metadata
            inputs, outputs = (
                tuple(msgspec.structs.replace(one, shape=one.shape[1:]) for one in tensors)
                for tensors in (inputs, outputs)
            )
        return Model(name, inputs, outputs, maximum if isinstance(maximum, int) else None)

    def with_model(self, name: str, image_model: str | None, golden: Answer | None = None) -> Subject:
        """This server with its model read, the image model found and the golden answer. Raises `SubjectError`."""
        found = replace(self, model=self.read_model(name))
        found = replace(found, image_model=found.find_image_model(image_model))
        first = golden or found.ask_golden()
        if first.status != "200":
            body = first.body[:200].decode("utf-8", "replace")
            raise SubjectError(f"a valid inference with {name} got {first.status} {body}")
        return replace(found, golden=first)

    def find_image_model(self, name: str | None) -> Model | None:
        """The named model, else the first in the repository index that takes an encoded image; None if there is none.
        Raises `SubjectError`."""
        names = [name or self.model.name]
        with suppress(ValueError, TypeError, KeyError):
            index = b"[]" if name else self.http("POST", "/v2/repository/index", body=b"").body
            names += [str(entry["name"]) for entry in read_json(index)]
        for candidate in names[:_MOST_MODELS]:
            try:
                model = self.read_model(candidate)
            except SubjectError:
                if name:
                    raise
                continue
            if name or model.takes_an_image:
                try:  # a server may be ready for one model while it still loads the next
                    RemoteDeployment(self.url).wait_ready(candidate, READY_SECONDS)
                except DeploymentError as exc:
                    raise SubjectError(f"{exc}; name another model with --image-model") from exc
                return model
        return None


def output_difference(first: Answer, second: Answer, tolerance: float) -> str | None:
    """How two binary answers differ by more than `tolerance` of the largest value; None when they do not."""
    header = HEADER.lower()
    try:
        left, right = (read_body(memoryview(one.body), one.headers[header]) for one in (first, second))
    except (DocumentError, KeyError):
        return "an answer has no binary outputs"
    if left.keys() != right.keys():
        return "the outputs have other names"
    for name, was in left.items():
        now = right[name]
        if was.dtype == now.dtype and (was.tolist() == now.tolist() or was.tobytes() == now.tobytes()):
            continue
        if was.dtype not in (np.float32, np.float64) or (now.dtype, now.size) != (was.dtype, was.size):
            return f"output {name} has changed"
        wide, other = was.astype(np.float64).ravel(), now.astype(np.float64).ravel()
        worst = float(np.max(np.abs(wide - other))) / (float(np.max(np.abs(wide), initial=0.0)) or 1.0)
        if not worst <= tolerance:
            return f"output {name} has changed by {worst:.2g} of its largest value"
    return None


def parse_metrics(text: str) -> Samples | None:
    """Series → value; None for a text that is not Prometheus exposition, or is too large."""
    longest = max(map(len, text.splitlines()), default=0)
    if len(text) > MOST_METRICS_BYTES or longest > MOST_METRICS_LINE:
        return None
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, IndexError):  # IndexError: a label without a name
        return None
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
        found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def increases(before: Samples, after: Samples) -> Samples:
    """The series that have grown, and by how much."""
    changes = {series: value - before.get(series, 0.0) for series, value in after.items()}
    return {series: change for series, change in changes.items() if change > 0}


def counts_errors(series: str) -> bool:
    """Whether the series counts 4xx or 5xx answers, or failed requests."""
    return bool(_ERROR_SERIES.search(series))


def counts_disconnects(series: str) -> bool:
    """Whether the series counts clients that disconnected."""
    return bool(_DISCONNECT_SERIES.search(series))
