"""Where the server under test comes from: somebody else's URL, or servers of ours in the states that cases want."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from time import monotonic, sleep
from typing import Protocol
from urllib.parse import urlsplit

import psutil

from loadgen.conformance.cases.pictures import is_image_model
from loadgen.conformance.grpc_calls import GrpcDoor
from loadgen.conformance.launching import READY_SECONDS, LaunchedServer, Launcher, LaunchError
from loadgen.conformance.model import Model
from loadgen.conformance.records import Answer
from loadgen.conformance.settings import AS_STARTED, READ_SECONDS, SHORT_READS, SMALL_BODIES, SMALL_BODY_BYTES, Setting
from loadgen.conformance.subject import Subject, SubjectError, read_model


class UnavailableSettingError(Exception):
    """The server cannot be brought into the state that a case wants; the message says why."""


class Session(Protocol):
    """Gives the subject in a wanted state."""

    title: str

    def subject(self, setting: Setting) -> Subject:
        """Raises `UnavailableSettingError`, or `SubjectError` when there is no server at all."""

    def restart(self) -> bool:
        """After a crash: whether there is a server again, or will be at the next `subject`."""

    def close(self) -> None:
        """End what was started."""


class RemoteSession:
    """A server that somebody else has started. It is as it is."""

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
        unknown = Model(model, (), (), None)
        subject = Subject(
            url,
            unknown,
            grpc=GrpcDoor(grpc) if grpc else None,
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
        """The one server there is."""
        if not setting.anywhere:
            raise UnavailableSettingError(f"needs a server with {setting.name}; use --launch")
        return self._subject

    def restart(self) -> bool:
        """It is not ours."""
        return False

    def close(self) -> None:
        """Only our channel."""
        if self._subject.grpc is not None:
            self._subject.grpc.close()


class LaunchedSession:
    """Servers of ours, one at a time, started again where a case wants another state."""

    def __init__(self, launcher: Launcher, image_model: str | None = None) -> None:
        """Starts the first one. Raises `LaunchError` or `SubjectError`."""
        self._launcher = launcher
        self._setting: Setting | None = None
        self._server: LaunchedServer | None = None
        self._golden: Answer | None = None
        self._image_model = image_model
        self._refused: dict[Setting, str] = {}
        self._current = self._start(AS_STARTED)
        self.title = self._server.deployment.title or launcher.kind if self._server else launcher.kind

    def subject(self, setting: Setting) -> Subject:
        """A running server in that state; for cases with servers of their own, the last one's facts and no server."""
        if setting.own_servers:
            self._stop()
            return self._current
        if setting == self._setting and self._server is not None:
            return self._current
        options = setting.options(self._launcher.kind)
        if isinstance(options, str):
            raise UnavailableSettingError(options)
        if not options and self._server is not None and self._setting == AS_STARTED:
            return self._current
        if setting in self._refused:
            raise UnavailableSettingError(self._refused[setting])
        try:
            self._current = self._start(setting)
        except LaunchError as exc:
            unknown = "no such option" in str(exc).lower()
            reason = f"serve {self._launcher.kind} has no option for {setting.name}" if unknown else str(exc)
            self._refused[setting] = reason
            raise UnavailableSettingError(reason) from exc
        return self._current

    def restart(self) -> bool:
        """The next `subject` starts a server anew."""
        self._stop()
        return True

    def close(self) -> None:
        """End the server."""
        self._stop()

    def _start(self, setting: Setting) -> Subject:
        self._stop()
        server = self._launcher.start(setting)
        try:
            server.wait_ready()
            blank = Subject(server.url, Model(self._launcher.model, (), (), None), launcher=self._launcher)
            subject = complete(blank.on(server), self._launcher.model, self._image_model, self._golden)
        except BaseException:
            server.stop()
            raise
        self._golden = subject.golden
        self._server, self._setting = server, setting
        wanted = setting.options(self._launcher.kind)
        return replace(
            subject,
            max_body_bytes=SMALL_BODY_BYTES if setting == SMALL_BODIES else None,
            read_timeout_s=READ_SECONDS if setting == SHORT_READS and wanted else None,
        )

    def _stop(self) -> None:
        if self._server is not None:
            if self._current.grpc is not None:
                self._current.grpc.close()
            self._server.stop()
        self._server = self._setting = None


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


def _ready(subject: Subject, model: str) -> bool:
    """A server may be ready for one model while it still loads the next."""
    deadline = monotonic() + READY_SECONDS
    while subject.http("GET", f"/v2/models/{model}/ready").status != "200":
        if monotonic() > deadline or subject.failure() is not None:
            return False
        sleep(0.05)
    return True


def _image_model(subject: Subject, name: str | None) -> Model | None:
    """The one that is named, else the first in the repository index that takes an encoded image."""
    if name is not None:
        return read_model(subject, name)
    names = [subject.model.name]
    with suppress(ValueError, TypeError, KeyError):
        names += [
            str(entry["name"]) for entry in json.loads(subject.http("POST", "/v2/repository/index", body=b"").body)
        ]
    for candidate in names:
        with suppress(SubjectError):
            model = read_model(subject, candidate)
            if is_image_model(model):
                return model
    return None


def _tree(pid: int) -> tuple[int, ...]:
    try:
        root = psutil.Process(pid)
        return (pid, *(child.pid for child in root.children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()
