"""A server of the running compose stack: found by its labels, stopped and started through the docker SDK.

Where the container's own address can be reached from here (Linux, no Docker Desktop), requests go there: a published
port costs throughput, since every byte passes docker's proxy process. All arms must be reached the same way, which
`via` names. This is the one module that imports the docker SDK.
"""

from __future__ import annotations

import io
import socket
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from time import monotonic, perf_counter_ns
from typing import Any

import psutil

from loadgen.base.child_process import cause_in, tree
from loadgen.base.documents import DocumentError, read_json
from loadgen.client.endpoint import Endpoint
from loadgen.launch.deployment import Deployment, DeploymentError
from loadgen.records.payloads import BACKEND_ENDINGS

PROJECT = "abserve"
UP = "docker compose up --detach --wait"
_PROJECT_LABEL = "com.docker.compose.project"
_SERVICE_LABEL = "com.docker.compose.service"
_ENGINE_SECONDS = 60
LAST_LOG_LINES = 3

PORTS = {"native": (8100, 8101), "triton": (8000, 8001)}
"""HTTP and gRPC inside the container."""
STOP_SECONDS = 40
_ASK_ENGINE_EVERY_NS = 250_000_000
_REACH_SECONDS = 1.0


LogLine = tuple[int, str]
"""A line of a container's log after the wall-clock time in ns at which the engine got it."""


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

    def status(self) -> str:
        """Ask the engine, which takes about 2 ms of its CPU: not for a tight loop."""
        with _translated():
            self._container.reload()
        return str(self._container.attrs["State"]["Status"])

    @property
    def exit_code(self) -> int:
        """As of the last `status`, like all properties."""
        return int(self._container.attrs["State"]["ExitCode"])

    @property
    def restarts(self) -> int:
        """Restarts by its restart policy."""
        return int(self._container.attrs["RestartCount"])

    def created_process_ns(self) -> int | None:
        """Wall clock at which the engine had created its process, as of the last `status`."""
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
    """The container of `service` or `service`-cpu, the running one of the two. Raises `DeploymentError` without the
    SDK, the engine or such a container."""
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
        containers = [
            container
            for name in (service, f"{service}-cpu")
            for container in client.containers.list(
                all=True, filters={"label": [f"{_PROJECT_LABEL}={project}", f"{_SERVICE_LABEL}={name}"]}
            )
        ]
    if not containers:
        raise DeploymentError(f"no container of the service {service} in the compose project {project}; run: {UP}")
    return ServiceContainer(min(containers, key=lambda container: container.status != "running"))


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
            yield at_ns, text


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


class ComposeDeployment(Deployment):
    """One server of the stack, which ran before the comparison; `restore` starts it again afterwards. `start` leaves a
    running container alone; `stop` stops it, so the next `start` is a cold start. Several arms may be models of one
    container, each with a `backend` of Triton."""

    launched = True

    def __init__(self, server: str, project: str = PROJECT, backend: str | None = None) -> None:
        """`server` is native or triton; `backend` of Triton chooses one of its models. Raises `DeploymentError` when
        the stack is not up."""
        self.container: ServiceContainer = find_container(server, project)
        self._server, self._backend = server, backend
        self._was_running = self.container.status() == "running"
        self.via: str | None = None
        """How its address is reached: "container network" or "published port"."""
        self._started_wall_s = 0.0
        self._restarts = 0
        self._asked_ns = 0
        self._failure: str | None = None
        plan = self._read_plan()
        argv, artefact, causes = plan.get("argv"), plan.get("artefact"), plan.get("causes")
        self._causes = tuple(map(str, causes)) if isinstance(causes, list) else ()
        self.title = f"{plan['title']}, container" if "title" in plan else None
        self.argv = tuple(argv) if isinstance(argv, list) else self.container.command
        self.artefact = artefact if isinstance(artefact, dict) else None

    def start(self) -> None:
        """Start the container unless it runs. The clock starts before the engine is asked."""
        status = self.container.status()
        self._restarts, self._failure = self.container.restarts, None
        self._started_wall_s, self.started_ns = time.time(), perf_counter_ns()
        if status != "running":
            self.container.start()
        self._find_addresses()

    def failure(self) -> str | None:
        """How the container ended, or that it died and was restarted; the engine is asked four times a second."""
        now_ns = perf_counter_ns()
        if self._failure is None and now_ns - self._asked_ns >= _ASK_ENGINE_EVERY_NS:
            self._asked_ns = now_ns
            status = self.container.status()
            if self.container.restarts > self._restarts or status == "restarting":
                self._failure = f"died and was started again by its restart policy: {self._last_words()}"
            elif status != "running":
                self._failure = f"ended with exit status {self.container.exit_code}: {self._last_words()}"
        return self._failure

    def _last_words(self) -> str:
        """The cause of the end if the log has it, else the log's end: the reason stands far above a long shutdown."""
        log = "\n".join(text for _, text in self.container.log_since(self._started_wall_s))
        return cause_in(log, self._causes) or self.container.last_words()

    def pids(self) -> tuple[int, ...]:
        """The PIDs of its processes on this machine; empty when the engine runs in a virtual machine."""
        pid = self.container.main_pid()
        try:
            return tuple(process.pid for process in tree([psutil.Process(pid)])) if pid else ()
        except psutil.Error:
            return ()

    def cpu_ns(self) -> int | None:
        return self.container.cpu_ns()

    def stop(self) -> None:
        self.container.stop(STOP_SECONDS)

    def restore(self) -> None:
        """Start the container again if it was running before. Idempotent."""
        if self._was_running and self.container.status() != "running":
            self.container.start()

    def await_model(self, asked_for: str, timeout_s: float) -> str:
        """Wait until the server has loaded all its models, then return `model_name`. Raises `DeploymentError`."""
        endpoint, service = Endpoint(self.url), self.container.service
        self.wait_until(
            lambda: endpoint.status("/v2/health/ready") == 200,
            monotonic() + timeout_s,
            lambda: f"{service} is not ready after {timeout_s:g} s; see: docker compose logs {service}",
        )
        return self.model_name(asked_for)

    def log(self) -> list[LogLine]:
        return self.container.log_since(self._started_wall_s)

    def model_name(self, asked_for: str) -> str:
        """The model's name on this server: with Triton's own backends `<model>_onnx` or `<model>_tensorrt`. Valid once
        the server is ready. Raises `DeploymentError` when it serves none or several of them."""
        names = Endpoint(self.url).served_models()
        if names is None:
            raise DeploymentError(f"{self.container.service} does not list its models")
        service, served_names = self.container.service, f"it serves {', '.join(names) or 'nothing'}"
        if self._backend is not None:
            if (variant := asked_for + BACKEND_ENDINGS[self._backend]) in names:
                return variant
            raise DeploymentError(
                f"{service} has no model {variant} for backend={self._backend}, but {served_names}; set MODEL and "
                f"TRITON_BACKENDS in .env, then: {UP}"
            )
        if asked_for in names:
            return asked_for
        variants = {asked_for + ending: backend for backend, ending in BACKEND_ENDINGS.items()}
        served = [name for name in names if name in variants]
        if len(served) == 1:
            return served[0]
        choice = " or ".join(f"backend={variants[name]}" for name in served)
        remedy = f"choose one with an option of that arm, {choice}" if served else f"set MODEL in .env, then: {UP}"
        raise DeploymentError(
            f"{service} must serve exactly one variant of {asked_for}, or the arm must name one, but {served_names}; "
            f"{remedy}"
        )

    def _find_addresses(self) -> None:
        (inside, published), (grpc_inside, grpc_published) = (
            self.container.addresses(port) for port in PORTS[self._server]
        )
        if inside is not None and _reachable(inside):
            self.url, self.grpc_address, self.via = f"http://{inside}", grpc_inside, "container network"
        elif published is not None:
            self.url, self.grpc_address, self.via = f"http://{published}", grpc_published, "published port"
        else:
            port = PORTS[self._server][0]
            raise DeploymentError(
                f"port {port} of {self.container.name} cannot be reached from here; publish it in docker-compose.yml"
            )

    def _read_plan(self) -> dict[str, Any]:
        """The launch plan of abserve's servers; empty for NVIDIA's Triton image, which has none."""
        if not any("exec-launch-plan" in part for part in self.container.command):
            return {}
        content = self.container.file(f"/models/launch/{self._server}.json")
        try:
            plan = {} if content is None else read_json(content)
        except DocumentError as exc:
            raise DeploymentError(f"the launch plan of {self._server} cannot be read: {exc}") from exc
        if not isinstance(plan, dict):
            raise DeploymentError(f"the launch plan of {self._server} is not a JSON object")
        return plan


def require_one_way(deployments: Sequence[object]) -> None:
    """Raises `DeploymentError` when containers are reached by different ways: docker's proxy process before one server
    alone would make that server look slow."""
    servers = [deployment for deployment in deployments if isinstance(deployment, ComposeDeployment)]
    if len({server.via for server in servers}) > 1:
        ways = " and ".join(f"{server.container.service} by its {server.via}" for server in servers)
        raise DeploymentError(
            f"the arms are reached in different ways: {ways}; publish both ports, or run this where both containers' "
            "networks can be reached"
        )


def _reachable(address: str) -> bool:
    """Whether the address can be reached. A refusal counts: the server may not listen yet."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_REACH_SECONDS):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
