"""Where the server under test comes from: a URL, or servers started in the states that cases want."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from dataclasses import replace
from time import monotonic, sleep
from urllib.parse import urlsplit

import psutil

from loadgen.conformance.grpc_calls import GrpcClient
from loadgen.conformance.launching import READY_SECONDS, LaunchedServer, Launcher
from loadgen.conformance.model import Model
from loadgen.conformance.records import Answer, SkippedError
from loadgen.conformance.settings import AS_STARTED, READ_SECONDS, SHORT_READS, SMALL_BODIES, SMALL_BODY_BYTES, Setting
from loadgen.conformance.subject import Subject, SubjectError, read_model
from loadgen.documents import read_json

_MOST_MODELS = 100
"""Of a server, that are asked whether they take an image."""


class RemoteSession:
    """A server that was running already. It stays in its state."""

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
        subject = Subject(
            url,
            Model(model, (), (), None),
            grpc=GrpcClient(grpc) if grpc else None,
            metrics_url=metrics_url or f"{url.rstrip('/')}/metrics",
            pids=(lambda: _tree(pid)) if pid else tuple,
            failure=(lambda: None if psutil.pid_exists(pid) else f"process {pid} is gone") if pid else (lambda: None),
            max_body_bytes=max_body_bytes,
        )
        if not urlsplit(url).hostname:
            raise SubjectError(f"{url} is no URL; give one like http://127.0.0.1:8100")
        if not subject.live():
            raise SubjectError(f"nothing is live at {url}; start the server or correct the URL")
        self._subject = complete(subject, model, image_model)

    def subject(self, setting: Setting) -> Subject:
        """The one server there is. Raises `SkippedError` where it cannot be in that state."""
        if not setting.anywhere:
            raise SkippedError(f"needs a server with {setting.name}; use --launch")
        return self._subject

    def restart(self) -> bool:
        """After a crash: only its owner can start it."""
        return False

    def close(self) -> None:
        """End the gRPC channel; the server stays."""
        if self._subject.grpc is not None:
            self._subject.grpc.close()


class LaunchedSession:
    """Servers started here, one at a time, and started again where a case wants another state."""

    def __init__(self, launcher: Launcher, image_model: str | None = None) -> None:
        """Starts the first one. Raises `SkippedError` or `SubjectError`."""
        self._launcher = launcher
        self._setting: Setting | None = None
        self._server: LaunchedServer | None = None
        self._golden: Answer | None = None
        self._image_model = image_model
        self._refused: dict[Setting, str] = {}
        self._current = self._start(AS_STARTED)
        self.title = (self._server.title if self._server else None) or launcher.kind

    def subject(self, setting: Setting) -> Subject:
        """A running server in that state; for cases with servers of their own, the last one's facts and no server.
        Raises `SkippedError`, or `SubjectError` when there is no server at all."""
        if setting.own_servers:
            self.close()
            return self._current
        options = setting.options(self._launcher.kind)
        if self._server is not None and (setting == self._setting or (not options and self._setting == AS_STARTED)):
            return self._current
        if setting in self._refused:
            raise SkippedError(self._refused[setting])
        try:
            self._current = self._start(setting)
        except SkippedError as exc:
            unknown = "no such option" in str(exc).lower()
            reason = f"serve {self._launcher.kind} has no option for {setting.name}" if unknown else str(exc)
            self._refused[setting] = reason
            raise SkippedError(reason) from exc
        return self._current

    def restart(self) -> bool:
        """After a crash: the next `subject` starts a server anew."""
        self.close()
        return True

    def close(self) -> None:
        """End the server."""
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
            server.await_model(launcher.model)
            blank = Subject(server.url, Model(launcher.model, (), (), None), launcher=launcher)
            subject = complete(blank.on(server), launcher.model, self._image_model, self._golden)
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


def complete(subject: Subject, model: str, image_model: str | None, golden: Answer | None = None) -> Subject:
    """With the model read, the image model found, and the golden answer of the run. Raises `SubjectError`."""
    found = replace(subject, model=read_model(subject, model))
    found = replace(found, image_model=_image_model(found, image_model))
    if found.image_model is not None and not _ready(found, found.image_model.name):
        raise SubjectError(f"model {found.image_model.name} does not get ready; name another with --image-model")
    first = golden or found.ask_golden()
    if first.status != "200":
        body = first.body[:200].decode("utf-8", "replace")
        raise SubjectError(f"a valid inference with {model} is answered {first.status} {body}")
    return replace(found, golden=first)


def is_loopback(url: str) -> bool:
    """True when every address that the host name stands for is a loopback address: the server is on this machine."""
    host = urlsplit(url if "://" in url else f"http://{url}").hostname
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _ready(subject: Subject, model: str) -> bool:
    """A server may be ready for one model while it still loads the next."""
    deadline = monotonic() + READY_SECONDS
    while subject.http("GET", f"/v2/models/{model}/ready").status != "200":
        if monotonic() > deadline or subject.failure() is not None:
            return False
        sleep(0.05)
    return True


def _image_model(subject: Subject, name: str | None) -> Model | None:
    """The named model, else the first in the repository index that takes an encoded image."""
    if name is not None:
        return read_model(subject, name)
    names = [subject.model.name]
    with suppress(ValueError, TypeError, KeyError):
        index = subject.http("POST", "/v2/repository/index", body=b"")
        names += [str(entry["name"]) for entry in read_json(index.body)]
    for candidate in names[:_MOST_MODELS]:
        with suppress(SubjectError):
            model = read_model(subject, candidate)
            if model.takes_an_image:
                return model
    return None


def _tree(pid: int) -> tuple[int, ...]:
    try:
        return (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()
