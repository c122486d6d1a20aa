"""The server under test as a case's probe sees it: its two doors, its model, its statistics, its processes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from loadgen.conformance.grpc_calls import GrpcDoor
from loadgen.conformance.launching import LaunchedServer, Launcher
from loadgen.conformance.metrics import Samples, parse_metrics
from loadgen.conformance.model import Body, Model, Tensor
from loadgen.conformance.records import Answer, NotApplicableError
from loadgen.conformance.wire import RawConnection, request_head

GOLDEN_TOLERANCE = 1e-5
ANSWER_SECONDS = 20.0


class SubjectError(Exception):
    """The server cannot be tested at all; the message says why."""


@dataclass
class Subject:
    """One running server. Every request is on a connection of its own unless a probe keeps one."""

    url: str
    model: Model
    grpc: GrpcDoor | None = None
    metrics_url: str | None = None
    image_model: Model | None = None
    pids: Callable[[], tuple[int, ...]] = tuple
    failure: Callable[[], str | None] = lambda: None
    log_path: Path | None = None
    launcher: Launcher | None = None
    max_body_bytes: int | None = None
    read_timeout_s: float | None = None
    """How long it waits for a slow client, where we have told it so."""
    golden: Answer | None = None
    _host: str = field(init=False)
    _port: int = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80

    def on(self, server: LaunchedServer) -> Subject:
        """The same questions to another server of ours that has just been started."""
        deployment = server.deployment
        return replace(
            self,
            url=server.url,
            grpc=None if deployment.grpc_address is None else GrpcDoor(deployment.grpc_address),
            metrics_url=deployment.metrics_url,
            pids=deployment.pids,
            failure=deployment.failure,
            log_path=server.log_path,
        )

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return urlsplit(self.url).netloc

    def connect(self) -> RawConnection:
        """Raises `OSError` when nobody listens."""
        return RawConnection(self._host, self._port)

    def raw(self, data: bytes | Iterable[bytes], deadline_s: float = ANSWER_SECONDS) -> Answer:
        """Exactly these bytes on a connection of their own."""
        try:
            with self.connect() as connection:
                return connection.exchange(data, deadline_s)
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
        try:
            with self.connect() as connection:
                return connection.exchange(head + (body or b""), deadline_s, head_only=method == "HEAD")
        except OSError:
            return Answer("refused")

    def infer(self, body: Body, *, model: Model | None = None, deadline_s: float = ANSWER_SECONDS) -> Answer:
        """One inference request."""
        path = (model or self.model).path
        return self.http("POST", path, headers=body.headers, body=body.content, deadline_s=deadline_s)

    def infer_bytes(self, body: Body) -> bytes:
        """The same as bytes, for connections that a probe holds itself."""
        return request_head("POST", self.model.path, self.authority, body.headers, len(body.content)) + body.content

    def call(self) -> GrpcDoor:
        """The gRPC door. Raises `NotApplicableError` where there is none."""
        if self.grpc is None:
            raise NotApplicableError("no gRPC address is known; give one with --grpc HOST:PORT")
        return self.grpc

    def ask_golden(self) -> Answer:
        """The same valid inference as always."""
        return self.infer(self.model.binary(1, seed=0))

    def golden_difference(self) -> str | None:
        """Why the golden inference is not what it was; None when it is, bit by bit or within 1e-5 relative."""
        if self.golden is None:
            return "there was no golden answer to begin with"
        answer = self.ask_golden()
        if answer.status != "200":
            return f"the golden inference is answered {answer.status}"
        return output_difference(self.golden, answer, GOLDEN_TOLERANCE)

    def statistics(self) -> dict[str, int]:
        """`inference_count`, `execution_count`, `success` and `fail` of the model; raises `NotApplicableError`."""
        answer = self.http("GET", f"/v2/models/{self.model.name}/stats")
        with suppress(ValueError, KeyError, IndexError, TypeError):
            entry = json.loads(answer.body)["model_stats"][0]
            return {
                "inference_count": int(entry["inference_count"]),
                "execution_count": int(entry["execution_count"]),
                "success": int(entry["inference_stats"]["success"]["count"]),
                "fail": int(entry["inference_stats"]["fail"]["count"]),
            }
        raise NotApplicableError("the server offers no statistics, which this case is observed by")

    def metrics(self) -> Samples | None:
        """Prometheus samples; None where the server has none."""
        if self.metrics_url is None:
            return None
        parts = urlsplit(self.metrics_url)
        try:
            with RawConnection(parts.hostname or self._host, parts.port or 80) as connection:
                answer = connection.exchange(request_head("GET", parts.path, parts.netloc, {}, None), ANSWER_SECONDS)
        except OSError:
            return None
        return parse_metrics(answer.body.decode("utf-8", "replace")) if answer.status == "200" else None

    def live(self, seconds: float = 2.0) -> bool:
        """Whether health/live says 200 in that time."""
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
        document = json.loads(answer.body)
        inputs, outputs = (
            tuple(Tensor(str(t["name"]), str(t["datatype"]), tuple(map(int, t["shape"]))) for t in document[key])
            for key in ("inputs", "outputs")
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise SubjectError(f"the metadata of model {name} at {subject.url} cannot be read: {exc}") from exc
    maximum: Any = None
    with suppress(ValueError, TypeError, AttributeError):
        maximum = json.loads(subject.http("GET", f"/v2/models/{name}/config").body).get("max_batch_size")
    return Model(name, inputs, outputs, int(maximum) if isinstance(maximum, int) else None)


def outputs_of(answer: Answer) -> dict[str, tuple[str, bytes]]:
    """Name → datatype and bytes of a binary answer. Raises `ValueError` for what is none."""
    length = int(answer.headers["inference-header-content-length"])
    position, found = length, {}
    for entry in json.loads(answer.body[:length])["outputs"]:
        size = int(entry["parameters"]["binary_data_size"])
        found[str(entry["name"])] = (str(entry["datatype"]), answer.body[position : position + size])
        position += size
    return found


def output_difference(first: Answer, second: Answer, tolerance: float) -> str | None:
    """Why two binary answers differ by more than `tolerance` of the largest value; None when they do not."""
    try:
        left, right = outputs_of(first), outputs_of(second)
    except (ValueError, KeyError, TypeError, struct.error):
        return "an answer has no binary outputs"
    if left == right:
        return None
    if left.keys() != right.keys():
        return "the outputs have other names"
    for name, (datatype, data) in left.items():
        if right[name] == (datatype, data):
            continue
        if datatype not in {"FP32", "FP64"} or len(right[name][1]) != len(data):
            return f"output {name} has changed"
        dtype = np.float32 if datatype == "FP32" else np.float64
        was, now = (np.frombuffer(raw, dtype).astype(np.float64) for raw in (data, right[name][1]))
        scale = float(np.max(np.abs(was), initial=0.0)) or 1.0
        worst = float(np.max(np.abs(was - now))) / scale
        if not worst <= tolerance:
            return f"output {name} has moved by {worst:.2g} of its largest value"
    return None
