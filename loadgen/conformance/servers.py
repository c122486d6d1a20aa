"""The server under test: where it comes from, requests to it over HTTP and gRPC, its model, statistics and memory.

It is at a URL, or it is started with the options that cases need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadgen.base import exposure
from loadgen.base.child_process import ABSERVE
from loadgen.base.documents import DocumentError, read_json
from loadgen.client.connection import Address, AddressError
from loadgen.client.endpoint import Endpoint, EndpointError
from loadgen.client.outputs import read_body
from loadgen.conformance.model import HEADER, Body, ServedModel, events_of
from loadgen.conformance.records import NotApplicableError, Response, SkippedError
from loadgen.conformance.wire import GrpcClient, RawConnection, request_head
from loadgen.launch.deployment import DeploymentError, RemoteDeployment
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.records.payloads import DEFAULT_NAME
from loadgen.records.targets import Kind

GOLDEN_TOLERANCE = 1e-5
RESPONSE_SECONDS = 20.0
READY_SECONDS = 330.0
_MOST_MODELS = 100
"""Models of a server that are checked for an image input."""
MOST_METRICS_BYTES = 2**22
MOST_METRICS_LINE = 2**13
"""A text with a longer line is not parsed: the parser's time grows with the square of a line's length."""

Samples = dict[str, float]
"""Series, such as `requests_total{status="200"}` → value."""

ERROR_SERIES = re.compile(r'(?:status|code|http_status|status_code)="?[45]|requests?_failure')
"""Series that count 4xx or 5xx answers, or failed requests."""
DISCONNECT_SERIES = re.compile(r"disconnect|clients?_left|abandon|aborted|client_gone", re.IGNORECASE)
"""Series that count clients that disconnected."""


class SubjectError(Exception):
    """The server cannot be tested at all; the message says why."""


@dataclass
class Subject:
    """One running server. Every request has its own connection unless a case keeps one."""

    url: str
    model: ServedModel
    grpc: GrpcClient | None = None
    metrics_url: str | None = None
    image_model: ServedModel | None = None
    pids: Callable[[], tuple[int, ...]] = tuple
    failure: Callable[[], str | None] = lambda: None
    log_path: Path | None = None
    new_server: Callable[[bool], AbstractContextManager[Subject]] | None = None
    """Starts another server with default options; with True it waits until the server is ready."""
    max_body_bytes: int | None = None
    read_timeout_s: float | None = None
    """How long it waits for a slow client, if it was started with that option."""
    golden: Response | None = None
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
        deadline_s: float = RESPONSE_SECONDS,
        *,
        head_only: bool = False,
        url: str | None = None,
    ) -> Response:
        """Send exactly these bytes on a new connection."""
        try:
            with self.connect(url) as connection:
                return connection.request(data, deadline_s, head_only=head_only)
        except OSError:
            return Response("refused")

    def http(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        deadline_s: float = RESPONSE_SECONDS,
    ) -> Response:
        """One well-formed request."""
        head = request_head(method, path, self.authority, headers or {}, None if body is None else len(body))
        return self.raw(head + (body or b""), deadline_s, head_only=method == "HEAD")

    def infer(self, body: Body, *, path: str | None = None, deadline_s: float = RESPONSE_SECONDS) -> Response:
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

    def ask_golden(self) -> Response:
        """Send the golden inference: always the same valid request."""
        return self.infer(self.model.binary())

    def golden_difference(self) -> str | None:
        """How the golden answer has changed; None if it is bit-identical or within 1e-5 relative."""
        if self.golden is None:
            return "there was no golden answer to compare with"
        response = self.ask_golden()
        if response.status != "200":
            return f"the golden inference got {response.status}"
        if self.model.kind is Kind.TOKENS:
            same = generated_ids(self.golden.body) == generated_ids(response.body)
            return None if same else "the golden prompt is answered with other tokens"
        return output_difference(self.golden, response, GOLDEN_TOLERANCE)

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
        response = self.raw(request_head("GET", parts.path, parts.netloc, {}, None), url=self.metrics_url)
        return parse_metrics(response.body.decode("utf-8", "replace")) if response.status == "200" else None

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

    def read_model(self, name: str) -> ServedModel:
        """A model of this server, from its metadata and configuration. Raises `SubjectError`."""
        endpoint = Endpoint(self.url)
        try:
            signature = endpoint.signature(name)
        except EndpointError as exc:
            raise SubjectError(str(exc)) from exc
        config: dict[str, Any] = {}
        with suppress(EndpointError):
            config = endpoint.config(name) or {}
        maximum = config.get("max_batch_size")
        inputs, outputs = signature.inputs, signature.outputs
        if not signature.batched:  # there a signature has a dimension more than the server's metadata
            inputs, outputs = (
                tuple(msgspec.structs.replace(tensor, shape=tensor.shape[1:]) for tensor in tensors)
                for tensors in (inputs, outputs)
            )
        parameters = {}
        with suppress(AttributeError, TypeError, KeyError):
            parameters = {key: str(value["string_value"]) for key, value in config.get("parameters", {}).items()}
        return ServedModel(name, inputs, outputs, maximum if isinstance(maximum, int) else None, parameters)

    def with_model(self, name: str, image_model: str | None, golden: Response | None = None) -> Subject:
        """This server with its model read, the image model found and the golden answer. Raises `SubjectError`."""
        subject = replace(self, model=self.read_model(name))
        subject = replace(subject, image_model=subject.find_image_model(image_model))
        first = golden or subject.ask_golden()
        if first.status != "200":
            body = first.body[:200].decode("utf-8", "replace")
            raise SubjectError(f"a valid inference with {name} got {first.status} {body}")
        return replace(subject, golden=first)

    def find_image_model(self, name: str | None) -> ServedModel | None:
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


def generated_ids(body: bytes) -> list[object]:
    """The token ids of the events of a generate_stream, as they are; [] for another body."""
    try:
        return [event.get("token_ids") for event in events_of(body) if isinstance(event, dict)]
    except (ValueError, RecursionError):
        return []


def output_difference(first: Response, second: Response, tolerance: float) -> str | None:
    """How two binary answers differ by more than `tolerance` of the largest value; None when they do not."""
    header = HEADER.lower()
    try:
        left, right = (read_body(memoryview(response.body), response.headers[header]) for response in (first, second))
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
    samples = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
        samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def increases(before: Samples, after: Samples) -> Samples:
    """The series that have grown, and by how much."""
    changes = {series: value - before.get(series, 0.0) for series, value in after.items()}
    return {series: change for series, change in changes.items() if change > 0}


SMALL_BODY_BYTES = 4_000_000
SMALL_QUEUE = 2
READ_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to start the server. `by_kind` holds the options for `serve KIND`: {} if that kind runs these cases with
    its defaults, no entry if it has no such option; None stands for no options with any kind."""

    name: str
    by_kind: Mapping[str, Mapping[str, str]] | None = field(default=None, hash=False)
    anywhere: bool = True
    """Whether its cases can run on a server that is already running; they find out by asking."""
    own_servers: bool = False
    """The case starts and stops servers itself; the running one is stopped first."""

    def options(self, kind: str) -> Mapping[str, str]:
        """Options for `serve KIND`. Raises `SkippedError` if this kind has none."""
        options_of_kind = {} if self.by_kind is None else self.by_kind.get(kind)
        if options_of_kind is None:
            raise SkippedError(f"serve {kind} has no option for {self.name}")
        return options_of_kind


_QUEUE, _PAYLOADS = {"queue-size": str(SMALL_QUEUE)}, {"payloads": "fp32,jpeg"}

DEFAULTS = Setting("its defaults")
SMALL_QUEUES = Setting("a small queue", {"native": _QUEUE, "triton": _QUEUE}, anywhere=False)
SMALL_BODIES = Setting("a small body limit", {"native": {"max-body-bytes": str(SMALL_BODY_BYTES)}})
SHORT_READS = Setting("a short read timeout", {"native": {"read-timeout-s": str(READ_SECONDS)}, "triton": {}})
WITH_IMAGES = Setting("a model of encoded images", {"native": _PAYLOADS, "triton": _PAYLOADS})
WITH_SHARED_MEMORY = Setting("shared memory", {"native": {"allow-shared-memory": "true"}, "triton": {}})
WITH_MODEL_CONTROL = Setting("model control", {"native": {"allow-model-control": "true"}})
OWN_SERVERS = Setting("separate servers", anywhere=False, own_servers=True)


class RemoteSession:
    """A server that was already running. Its options cannot be changed."""

    def __init__(
        self,
        url: str,
        model: str | None,
        *,
        grpc: str | None = None,
        pid: int | None = None,
        metrics_url: str | None = None,
        image_model: str | None = None,
        max_body_bytes: int | None = None,
    ) -> None:
        """Without a model, the only one that the server serves. Raises `SubjectError` when it cannot be tested."""
        self.title = url
        try:
            _check_plain(url)
            endpoint = RemoteDeployment(url).wait_live()
            self.model = model or endpoint.only_model(DEFAULT_NAME)
        except (AddressError, DeploymentError, EndpointError) as exc:
            raise SubjectError(str(exc)) from exc
        subject = Subject(
            url,
            ServedModel(self.model),
            grpc=GrpcClient(grpc) if grpc else None,
            metrics_url=metrics_url or f"{url.rstrip('/')}/metrics",
            pids=(lambda: _tree(pid)) if pid else tuple,
            failure=(lambda: None if psutil.pid_exists(pid) else f"process {pid} is gone") if pid else (lambda: None),
            max_body_bytes=max_body_bytes,
        )
        self._subject = subject.with_model(self.model, image_model)

    def subject(self, setting: Setting) -> Subject:
        """The server. Raises `SkippedError` if it cannot have that setting."""
        if not setting.anywhere:
            raise SkippedError(f"needs a server with {setting.name}; use --launch")
        return self._subject

    def restart(self) -> bool:
        """Called after a crash. Only the server's owner can start it again."""
        return False

    def close(self) -> None:
        """Close the gRPC channel; the server stays."""
        if self._subject.grpc is not None:
            self._subject.grpc.close()


class LaunchedSession:
    """Servers started with `abserve serve KIND`, one at a time, and restarted when a case needs another setting."""

    def __init__(
        self,
        kind: str,
        model: str,
        options: Mapping[str, str],
        folder: Path,
        *,
        image_model: str | None = None,
        abserve: Sequence[str] = ABSERVE,
    ) -> None:
        """Starts the first server. `model` is what `--model` takes; the launch plan names it as it is served. Logs go
        to `folder`. Raises `SkippedError` or `SubjectError`."""
        self._kind = kind
        self.model = model
        self._options = options
        self._folder = folder
        self._abserve = abserve
        self._started = 0
        self._setting: Setting | None = None
        self._server: EmbeddedDeployment | None = None
        self._golden: Response | None = None
        self._image_model = image_model
        self._refused: dict[Setting, str] = {}
        self._current = self._start(DEFAULTS)
        self.title = (self._server.title if self._server else None) or kind

    def subject(self, setting: Setting) -> Subject:
        """A running server with that setting; if the case starts its own, the last subject, whose server has been
        stopped. Raises `SkippedError`, or `SubjectError` when the server cannot be tested."""
        if setting.own_servers:
            self.close()
            return self._current
        options = setting.options(self._kind)
        if self._server is not None and (setting == self._setting or (not options and self._setting == DEFAULTS)):
            return self._current
        if setting in self._refused:
            raise SkippedError(self._refused[setting])
        try:
            self._current = self._start(setting)
        except SkippedError as exc:
            unknown = "no such option" in str(exc).lower()
            reason = f"serve {self._kind} has no option for {setting.name}" if unknown else str(exc)
            self._refused[setting] = reason
            raise SkippedError(reason) from exc
        return self._current

    def restart(self) -> bool:
        """Called after a crash. The next `subject` starts a new server."""
        self.close()
        return True

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            if self._current.grpc is not None:
                self._current.grpc.close()
            self._server.stop()
        self._server = self._setting = None

    def _start(self, setting: Setting) -> Subject:
        self.close()
        server = self._launch(setting)
        try:
            subject = self._subject_of(server)
            subject = subject.with_model(subject.model.name, self._image_model, self._golden)
        except BaseException:
            server.stop()
            raise
        self._golden = subject.golden
        self._server, self._setting = server, setting
        return replace(
            subject,
            max_body_bytes=SMALL_BODY_BYTES if setting == SMALL_BODIES else None,
            read_timeout_s=READ_SECONDS if setting == SHORT_READS and setting.options(self._kind) else None,
        )

    def _launch(self, setting: Setting, *, ready: bool = True) -> EmbeddedDeployment:
        """Start a process on fresh ports and, with `ready`, wait for its model. Raises `SkippedError`."""
        options = {"model": self.model, **self._options, **setting.options(self._kind)}
        self._started += 1
        server = EmbeddedDeployment(self._kind, options, self._log_path(), abserve=self._abserve)
        try:
            server.start()
            if ready:
                server.wait_ready(server.model or self.model, READY_SECONDS)
        except BaseException as exc:
            server.stop()
            if isinstance(exc, DeploymentError):
                raise SkippedError(str(exc)) from exc
            raise
        return server

    def _subject_of(self, server: EmbeddedDeployment) -> Subject:
        """The server that was started last, its model not read yet."""
        return Subject(
            server.url,
            ServedModel(server.model or self.model),
            grpc=None if server.grpc_address is None else GrpcClient(server.grpc_address),
            metrics_url=server.metrics_url,
            pids=server.pids,
            failure=server.failure,
            log_path=self._log_path(),
            new_server=self._another,
        )

    @contextmanager
    def _another(self, ready: bool) -> Iterator[Subject]:
        """A server with default options, stopped at the end."""
        server = self._launch(DEFAULTS, ready=ready)
        subject = self._subject_of(server)
        try:
            yield subject
        finally:
            if subject.grpc is not None:
                subject.grpc.close()
            server.stop()

    def _log_path(self) -> Path:
        return self._folder / f"{self._kind}-{self._started}.log"


Session = RemoteSession | LaunchedSession


def _check_plain(url: str) -> None:
    """Raises `AddressError` for an address that `Subject` would not reach."""
    address = Address.parse(url)
    if address.tls or address.base_path:
        raise AddressError(f"{url}: the cases are sent without TLS and without a prefix; give a URL http://HOST:PORT")


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine: every address of its host name is a loopback address."""
    return exposure.is_loopback(urlsplit(url if "://" in url else f"http://{url}").hostname or "", unknown=False)


def _tree(pid: int) -> tuple[int, ...]:
    try:
        return (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()
