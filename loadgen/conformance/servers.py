"""Where the server under test comes from: a URL, or servers that are started with the options that cases need."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from loadgen.client.connection import Address, AddressError
from loadgen.conformance.model import Model
from loadgen.conformance.records import Answer, SkippedError
from loadgen.conformance.subject import READY_SECONDS, Subject, SubjectError
from loadgen.conformance.wire import GrpcClient
from loadgen.invocation import ABSERVE
from loadgen.launch.deployment import DeploymentError
from loadgen.launch.embedded import EmbeddedDeployment

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
        found = {} if self.by_kind is None else self.by_kind.get(kind)
        if found is None:
            raise SkippedError(f"serve {kind} has no option for {self.name}")
        return found


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
        model: str,
        *,
        grpc: str | None = None,
        pid: int | None = None,
        metrics_url: str | None = None,
        image_model: str | None = None,
        max_body_bytes: int | None = None,
    ) -> None:
        """Raises `SubjectError` when it cannot be tested."""
        self.title = url
        try:
            Address.parse(url)
        except AddressError as exc:
            raise SubjectError(str(exc)) from exc
        subject = Subject(
            url,
            Model(model),
            grpc=GrpcClient(grpc) if grpc else None,
            metrics_url=metrics_url or f"{url.rstrip('/')}/metrics",
            pids=(lambda: _tree(pid)) if pid else tuple,
            failure=(lambda: None if psutil.pid_exists(pid) else f"process {pid} is gone") if pid else (lambda: None),
            max_body_bytes=max_body_bytes,
        )
        if not subject.live():
            raise SubjectError(f"nothing is live at {url}; start the server or correct the URL")
        self._subject = subject.with_model(model, image_model)

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


@dataclass
class Launcher:
    """Starts servers with `abserve serve KIND`, one at a time."""

    kind: str
    model: str
    """The model as `--model` takes it; the launch plan names it as it is served."""
    options: Mapping[str, str]
    folder: Path
    abserve: Sequence[str] = ABSERVE
    started: int = 0

    def start(self, setting: Setting, *, ready: bool = True) -> EmbeddedDeployment:
        """Start a process on fresh ports and, with `ready`, wait for its model. Raises `SkippedError`."""
        options = {"model": self.model, **self.options, **setting.options(self.kind)}
        self.started += 1
        server = EmbeddedDeployment(self.kind, options, self._log_path(), abserve=self.abserve)
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

    def subject(self, server: EmbeddedDeployment) -> Subject:
        """The server that was started last, its model not read yet."""
        return Subject(
            server.url,
            Model(server.model or self.model),
            grpc=None if server.grpc_address is None else GrpcClient(server.grpc_address),
            metrics_url=server.metrics_url,
            pids=server.pids,
            failure=server.failure,
            log_path=self._log_path(),
            new_server=self.running,
        )

    @contextmanager
    def running(self, ready: bool) -> Iterator[Subject]:
        """A server with default options, stopped at the end."""
        server = self.start(DEFAULTS, ready=ready)
        subject = self.subject(server)
        try:
            yield subject
        finally:
            if subject.grpc is not None:
                subject.grpc.close()
            server.stop()

    def _log_path(self) -> Path:
        return self.folder / f"{self.kind}-{self.started}.log"


class LaunchedSession:
    """Servers started here, one at a time, and restarted when a case needs another setting."""

    def __init__(self, launcher: Launcher, image_model: str | None = None) -> None:
        """Starts the first server. Raises `SkippedError` or `SubjectError`."""
        self._launcher = launcher
        self._setting: Setting | None = None
        self._server: EmbeddedDeployment | None = None
        self._golden: Answer | None = None
        self._image_model = image_model
        self._refused: dict[Setting, str] = {}
        self._current = self._start(DEFAULTS)
        self.title = (self._server.title if self._server else None) or launcher.kind

    def subject(self, setting: Setting) -> Subject:
        """A running server with that setting; if the case starts its own, the last subject, whose server has been
        stopped. Raises `SkippedError`, or `SubjectError` when the server cannot be tested."""
        if setting.own_servers:
            self.close()
            return self._current
        kind = self._launcher.kind
        options = setting.options(kind)
        if self._server is not None and (setting == self._setting or (not options and self._setting == DEFAULTS)):
            return self._current
        if setting in self._refused:
            raise SkippedError(self._refused[setting])
        try:
            self._current = self._start(setting)
        except SkippedError as exc:
            unknown = "no such option" in str(exc).lower()
            reason = f"serve {kind} has no option for {setting.name}" if unknown else str(exc)
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
        launcher = self._launcher
        server = launcher.start(setting)
        try:
            subject = launcher.subject(server)
            subject = subject.with_model(subject.model.name, self._image_model, self._golden)
        except BaseException:
            server.stop()
            raise
        self._golden = subject.golden
        self._server, self._setting = server, setting
        return replace(
            subject,
            max_body_bytes=SMALL_BODY_BYTES if setting == SMALL_BODIES else None,
            read_timeout_s=READ_SECONDS if setting == SHORT_READS and setting.options(launcher.kind) else None,
        )


Session = RemoteSession | LaunchedSession


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine: every address of its host name is a loopback address."""
    host = urlsplit(url if "://" in url else f"http://{url}").hostname
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _tree(pid: int) -> tuple[int, ...]:
    try:
        return (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()
