"""The containers of the running compose stack, through the docker SDK: the one module that imports it."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from time import perf_counter_ns
from typing import Any

from loadgen.launch.interface import DeploymentError

PROJECT = "abserve"
UP = "docker compose up --detach --wait"
_PROJECT_LABEL = "com.docker.compose.project"
_SERVICE_LABEL = "com.docker.compose.service"
_ENGINE_SECONDS = 60
LAST_LOG_LINES = 3


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a container's log with the wall-clock time at which the engine got it."""

    at_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class State:
    """The state of a container. `restarts` counts restarts by its restart policy."""

    status: str
    exit_code: int
    restarts: int


class ServiceContainer:
    """One container of a compose project. Every method raises `DeploymentError` when the engine fails."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self.service = str(container.labels[_SERVICE_LABEL])
        self.name = str(container.name)
        created = container.attrs["Config"]
        self.command: tuple[str, ...] = (*(created.get("Entrypoint") or ()), *(created.get("Cmd") or ()))

    @property
    def image(self) -> str:
        with _translated():
            image = self._container.image
            return f"{(image.tags or ['untagged'])[0]} {image.short_id}"

    def state(self) -> State:
        """Ask the engine, which takes about 2 ms of its CPU: not for a tight loop."""
        with _translated():
            self._container.reload()
        state = self._container.attrs["State"]
        return State(
            status=str(state["Status"]),
            exit_code=int(state["ExitCode"]),
            restarts=int(self._container.attrs["RestartCount"]),
        )

    def created_process_ns(self) -> int | None:
        """Wall clock at which the engine had created its process, as of the last `state`."""
        return _timestamp_ns(str(self._container.attrs["State"]["StartedAt"]))

    def start(self) -> None:
        """Returns when the engine has created the process."""
        with _translated():
            self._container.start()

    def stop(self, grace_s: int) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; does nothing when it does not run."""
        with _translated():
            self._container.stop(timeout=grace_s)

    def execute(self, *argv: str) -> tuple[int, str]:
        with _translated():
            done = self._container.exec_run(list(argv))
        return int(done.exit_code), done.output.decode("utf-8", "replace")

    def addresses(self, port: int) -> tuple[str | None, str | None]:
        """(address on its network, published address) of one of its TCP ports, as host:port; None for a missing one."""
        with _translated():
            self._container.reload()
        settings = self._container.attrs["NetworkSettings"]
        inside = [network["IPAddress"] for network in settings["Networks"].values() if network.get("IPAddress")]
        published = (settings["Ports"].get(f"{port}/tcp") or [None])[0]
        host = None
        if published is not None:
            address = "127.0.0.1" if published["HostIp"] in {"", "0.0.0.0"} else published["HostIp"]
            host = f"{address}:{published['HostPort']}"
        return (f"{inside[0]}:{port}" if inside else None), host

    def cpu_ns(self) -> int:
        """CPU time of all its processes since its start, health checks included."""
        with _translated():
            stats = self._container.stats(stream=False, one_shot=True)
        return int(stats["cpu_stats"]["cpu_usage"]["total_usage"])

    def main_pid(self) -> int | None:
        """The PID of its first process on this machine; None when it does not run."""
        return int(self._container.attrs["State"]["Pid"]) or None

    def file(self, path: str) -> bytes | None:
        """The content of a small file inside, also of a stopped container; None when there is no such file."""
        import docker

        with _translated():
            try:
                stream, _ = self._container.get_archive(path)
            except docker.errors.NotFound:
                return None
            archive = b"".join(stream)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            member = next((entry for entry in tar.getmembers() if entry.isfile()), None)
            file = None if member is None else tar.extractfile(member)
            return None if file is None else file.read()

    def log_since(self, wall_s: float) -> list[LogLine]:
        with _translated():
            raw = self._container.logs(timestamps=True, since=wall_s)
        return list(_log_lines(raw))

    def last_words(self) -> str:
        with _translated():
            raw = self._container.logs(tail=LAST_LOG_LINES)
        return " | ".join(line for line in raw.decode("utf-8", "replace").splitlines() if line.strip())


def find_container(service: str, project: str = PROJECT) -> ServiceContainer:
    """The container of `service` or `service`-cpu, the running one of the two.

    Raises `DeploymentError` without the SDK, the engine or such a container.
    """
    try:
        import docker
        import requests  # noqa: F401 (comes with the SDK)

        docker.from_env  # noqa: B018 (a folder called docker can be imported too)
    except (ImportError, AttributeError) as exc:
        raise DeploymentError("the docker SDK is not installed: pip install 'abserve[compose]'") from exc
    try:
        with _translated():
            client = docker.from_env(timeout=_ENGINE_SECONDS)
            client.ping()
    except DeploymentError as exc:
        innermost = _innermost(exc)
        if isinstance(innermost, PermissionError):
            raise DeploymentError(
                "this user may not use the Docker engine; run: sudo usermod -aG docker $USER, then log in again"
            ) from exc
        reason = innermost.strerror if isinstance(innermost, OSError) and innermost.strerror else exc
        raise DeploymentError(
            f"no Docker engine answers ({reason}); start it, then run: {UP}; without Docker leave --deployment out"
        ) from exc
    with _translated():
        found = [
            container
            for name in (service, f"{service}-cpu")
            for container in client.containers.list(
                all=True, filters={"label": [f"{_PROJECT_LABEL}={project}", f"{_SERVICE_LABEL}={name}"]}
            )
        ]
    if not found:
        raise DeploymentError(f"no container of the service {service} in the compose project {project}; run: {UP}")
    found.sort(key=lambda container: container.status != "running")
    return ServiceContainer(found[0])


def _innermost(exc: BaseException) -> BaseException:
    """The exception that was raised first."""
    while (below := exc.__cause__ or exc.__context__) is not None:
        exc = below
    return exc


def wall_to_monotonic_ns() -> int:
    """Add this to a wall-clock time to get `perf_counter_ns`; valid until the wall clock is set."""
    return perf_counter_ns() - time.time_ns()


def _log_lines(raw: bytes) -> Iterator[LogLine]:
    for line in raw.decode("utf-8", "replace").splitlines():
        stamp, _, text = line.partition(" ")
        at_ns = _timestamp_ns(stamp)
        if at_ns is not None:
            yield LogLine(at_ns, text)


def _timestamp_ns(stamp: str) -> int | None:
    """Parse RFC 3339 with nanoseconds, as in 2026-11-20T09:43:32.725604732Z; a datetime keeps microseconds only."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    try:
        seconds = datetime.fromisoformat(f"{whole}+00:00").timestamp()
        return int(seconds) * 10**9 + int(fraction.ljust(9, "0")[:9])
    except ValueError:
        return None


@contextmanager
def _translated() -> Iterator[None]:
    """Raise failures of the SDK and of its HTTP client as `DeploymentError`."""
    import docker
    import requests

    try:
        yield
    except docker.errors.DockerException as exc:
        words = getattr(exc, "explanation", None) or str(exc)
        raise DeploymentError(f"the docker engine: {' '.join(str(words).split())[:300]}") from exc
    except requests.RequestException as exc:
        raise DeploymentError(f"the docker engine does not answer: {exc}") from exc
