"""The server under test as a case sees it: HTTP and gRPC, its model, its statistics, its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from loadgen.conformance.grpc_calls import GrpcClient
from loadgen.conformance.launching import LaunchedServer, Launcher
from loadgen.conformance.metrics import Samples, parse_metrics
from loadgen.conformance.model import HEADER, Body, Model
from loadgen.conformance.records import Answer, NotApplicableError
from loadgen.conformance.wire import RawConnection, request_head
from loadgen.documents import DocumentError, read_json
from loadgen.transport.endpoint import EndpointError, read_tensors
from loadgen.transport.outputs import read_body

GOLDEN_TOLERANCE = 1e-5
ANSWER_SECONDS = 20.0


class SubjectError(Exception):
    """The server cannot be tested at all; the message says why."""


@dataclass
class Subject:
    """One running server. Every request is on a connection of its own unless a case keeps one."""

    url: str
    model: Model
    grpc: GrpcClient | None = None
    metrics_url: str | None = None
    image_model: Model | None = None
    pids: Callable[[], tuple[int, ...]] = tuple
    failure: Callable[[], str | None] = lambda: None
    log_path: Path | None = None
    launcher: Launcher | None = None
    max_body_bytes: int | None = None
    read_timeout_s: float | None = None
    """How long it waits for a slow client, where it was started with that option."""
    golden: Answer | None = None

    def on(self, server: LaunchedServer) -> Subject:
        """The same model on another server that has just been started."""
        return replace(
            self,
            url=server.url,
            grpc=None if server.grpc_address is None else GrpcClient(server.grpc_address),
            metrics_url=server.metrics_url,
            pids=server.pids,
            failure=server.failure,
            log_path=server.log_path,
        )

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return urlsplit(self.url).netloc

    def connect(self, url: str | None = None) -> RawConnection:
        """To the server, or to its metrics. Raises `OSError` when nothing listens."""
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
        """Exactly these bytes on a connection of their own."""
        try:
            with self.connect(url) as connection:
                return connection.exchange(data, deadline_s, head_only=head_only)
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
        """One inference request, to the model unless another route is given."""
        return self.http(
            "POST", path or self.model.path, headers=body.headers, body=body.content, deadline_s=deadline_s
        )

    def infer_bytes(self, body: Body) -> bytes:
        """An inference request as bytes, for connections that a case holds itself."""
        return request_head("POST", self.model.path, self.authority, body.headers, len(body.content)) + body.content

    def call(self) -> GrpcClient:
        """The gRPC client. Raises `NotApplicableError` where there is none."""
        if self.grpc is None:
            raise NotApplicableError("no gRPC address is known; give one with --grpc HOST:PORT")
        return self.grpc

    def ask_golden(self) -> Answer:
        """Always the same valid inference."""
        return self.infer(self.model.binary(1, seed=0))

    def golden_difference(self) -> str | None:
        """How the golden inference has changed; None where it is the same bit by bit or within 1e-5 relative."""
        if self.golden is None:
            return "there was no golden answer to begin with"
        answer = self.ask_golden()
        if answer.status != "200":
            return f"the golden inference is answered {answer.status}"
        return output_difference(self.golden, answer, GOLDEN_TOLERANCE)

    def statistics(self) -> dict[str, int]:
        """`inference_count`, `execution_count`, `success` and `fail` of the model; raises `NotApplicableError`."""
        answer = self.http("GET", f"/v2/models/{self.model.name}/stats")
        with suppress(ValueError, KeyError, IndexError, TypeError, OverflowError):
            entry = read_json(answer.body)["model_stats"][0]
            counts = {name: int(entry["inference_stats"][name]["count"]) for name in ("success", "fail")}
            return counts | {name: int(entry[name]) for name in ("inference_count", "execution_count")}
        raise NotApplicableError("the server offers no statistics, which this case is observed by")

    def metrics(self) -> Samples | None:
        """Prometheus samples; None where the server has none that can be read."""
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


def read_model(subject: Subject, name: str) -> Model:
    """Ask for metadata and configuration. Raises `SubjectError`."""
    answer = subject.http("GET", f"/v2/models/{name}")
    if answer.status != "200":
        raise SubjectError(f"no model {name} at {subject.url} ({answer.status}); name one that is ready with --model")
    try:
        document = read_json(answer.body)
        inputs, outputs = read_tensors(document, "inputs"), read_tensors(document, "outputs")
    except (DocumentError, EndpointError, AttributeError) as exc:
        raise SubjectError(f"the metadata of model {name} at {subject.url} cannot be read: {exc}") from exc
    maximum: Any = None
    with suppress(DocumentError, AttributeError):
        maximum = read_json(subject.http("GET", f"/v2/models/{name}/config").body).get("max_batch_size")
    return Model(name, inputs, outputs, int(maximum) if isinstance(maximum, int) else None)


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
            return f"output {name} has moved by {worst:.2g} of its largest value"
    return None
