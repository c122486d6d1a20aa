"""A server of the running compose stack: found by its labels, stopped and started through the docker SDK.

Where the container's own address can be reached from here (Linux, no Docker Desktop), requests go there: a published
port costs throughput, since every byte passes docker's proxy process. Both arms must go the same way: `via` says which.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from time import monotonic, perf_counter_ns, sleep
from typing import Any

import psutil

from loadgen.documents import DocumentError, read_json
from loadgen.records.payloads import BACKEND_ENDINGS
from loadgen.targets.containers import PROJECT, LogLine, ServiceContainer, find_container
from loadgen.targets.interface import DeploymentError, StartTimes, poll_ready
from loadgen.transport.endpoint import Endpoint
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.http import HttpConnection
from loadgen.transport.requests import Address, Request, request_head

PORTS = {"native": 8100, "triton": 8000}
GRPC_PORTS = {"native": 8101, "triton": 8001}
STOP_SECONDS = 40
_ASK_ENGINE_EVERY_NS = 250_000_000
_REACH_SECONDS = 1.0
_POLL_SECONDS = 0.05


class ComposeDeployment:
    """One server of the stack. It was running before us and runs after us: `restore` sees to that.

    `start` of a container that runs changes nothing; `stop` stops it, so the next `start` is a cold start.
    """

    launched = True
    conditions = "container kept and started again, page cache warm, compile caches of the volume kept"

    def __init__(self, server: str, project: str = PROJECT) -> None:
        """`server` is native or triton. Raises `DeploymentError` where the stack is not up."""
        self.container: ServiceContainer = find_container(server, project)
        self._port, self._grpc_port = PORTS[server], GRPC_PORTS[server]
        self._was_running = self.container.state().status == "running"
        self._address: str | None = None
        self._grpc_address: str | None = None
        self.via: str | None = None
        """How its address was reached: "container network" or "published port"."""
        self._started_ns = 0
        self._started_wall_s = 0.0
        self._restarts = 0
        self._asked_ns = 0
        self._failure: str | None = None
        self._plan = self._read_plan(server)

    @property
    def url(self) -> str:
        """Where it answers HTTP; valid after `start`."""
        if self._address is None:
            raise DeploymentError(f"{self.container.service} was not started")
        return f"http://{self._address}"

    @property
    def grpc_address(self) -> str | None:
        """Where it answers gRPC, by the same way; valid after `start`."""
        return self._grpc_address

    @property
    def title(self) -> str | None:
        """As its launch plan names it, with the image; None for NVIDIA's Triton, which has no plan of ours."""
        title = self._plan.get("title")
        return None if title is None else f"{title}, container"

    @property
    def argv(self) -> tuple[str, ...] | None:
        """The server's own command line, or the container's."""
        argv = self._plan.get("argv")
        return tuple(argv) if isinstance(argv, list) else self.container.command

    @property
    def artefact(self) -> dict[str, object] | None:
        """The manifest in the launch plan."""
        artefact = self._plan.get("artefact")
        return artefact if isinstance(artefact, dict) else None

    @property
    def started_wall_s(self) -> float:
        """Wall clock of the last `start`: from there its log is of this life."""
        return self._started_wall_s

    def start(self) -> None:
        """Start the container unless it runs. The clock starts before the engine is asked."""
        before = self.container.state()
        self._restarts, self._failure = before.restarts, None
        self._started_wall_s, self._started_ns = time.time(), perf_counter_ns()
        if before.status != "running":
            self.container.start()
        self._find_addresses()

    def wait_ready(self, model: str, timeout_s: float) -> StartTimes:
        """Poll until the model can be asked."""
        return poll_ready(self, self._started_ns, model, timeout_s)

    def failure(self) -> str | None:
        """Why the container is gone, or that its policy had to restart it; the engine is asked four times a second."""
        now_ns = perf_counter_ns()
        if self._failure is None and now_ns - self._asked_ns >= _ASK_ENGINE_EVERY_NS:
            self._asked_ns = now_ns
            state = self.container.state()
            if state.restarts > self._restarts or state.status == "restarting":
                self._failure = f"died and was started again by its restart policy: {self.container.last_words()}"
            elif state.status != "running":
                self._failure = f"ended with exit status {state.exit_code}: {self.container.last_words()}"
        return self._failure

    def pids(self) -> tuple[int, ...]:
        """Its processes in this machine's numbers; none where the engine runs in a virtual machine."""
        pid = self.container.main_pid()
        try:
            main = psutil.Process(pid) if pid else None
            return () if main is None else tuple(p.pid for p in (main, *main.children(recursive=True)))
        except psutil.Error:
            return ()

    def cpu_ns(self) -> int | None:
        """CPU time of the whole container."""
        return self.container.cpu_ns()

    def stop(self) -> None:
        """Stop the container. Idempotent."""
        self.container.stop(STOP_SECONDS)

    def restore(self) -> None:
        """Leave the container as it was found: running, if it was. Idempotent."""
        if self._was_running and self.container.state().status != "running":
            self.container.start()

    def await_model(self, asked_for: str, timeout_s: float) -> str:
        """Block until the server has loaded all its models, then `model_name`. Raises `DeploymentError`."""
        endpoint = Endpoint(self.url)
        deadline_s = monotonic() + timeout_s
        while endpoint.status("/v2/health/ready") != 200:
            failure = self.failure()
            if failure is not None:
                raise DeploymentError(f"the server {failure}")
            if monotonic() > deadline_s:
                raise DeploymentError(
                    f"{self.container.service} is not ready after {timeout_s:g} s: docker compose logs "
                    f"{self.container.service}"
                )
            sleep(_POLL_SECONDS)
        return self.model_name(asked_for)

    def log(self) -> list[LogLine]:
        """Of this life of the container."""
        return self.container.log_since(self._started_wall_s)

    def model_name(self, asked_for: str) -> str:
        """What this server calls the model: with Triton's own backends `<model>_onnx` or `<model>_tensorrt`.

        Valid once the server is ready. Raises `DeploymentError` where it serves none or several of them.
        """
        names = self._served_models()
        if asked_for in names:
            return asked_for
        variants = sorted(name for name in names if name in {asked_for + ending for ending in BACKEND_ENDINGS})
        if len(variants) == 1:
            return variants[0]
        found = f"it serves {', '.join(names) or 'nothing'}"
        remedy = "choose one backend with TRITON_BACKENDS" if variants else "choose the model with MODEL"
        raise DeploymentError(
            f"{self.container.service} has no single model {asked_for}: {found}; "
            f"{remedy} in .env, then docker compose up --detach --wait"
        )

    def _served_models(self) -> list[str]:
        address = Address.parse(self.url)
        head = request_head("POST", "/v2/repository/index", address, content_length=2)
        connection = HttpConnection(address, timeout_s=10.0)
        try:
            exchange = connection.send(Request(head, b"{}"))
            rows = read_json(exchange.body) if exchange.status == 200 else []
        except (ConnectionRefused, DocumentError) as exc:
            raise DeploymentError(f"{self.container.service} does not list its models: {exc}") from exc
        finally:
            connection.close()
        entries = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        return sorted(str(row["name"]) for row in entries if "name" in row and row.get("state", "READY") == "READY")

    def _find_addresses(self) -> None:
        inside, published = self.container.addresses(self._port)
        grpc_inside, grpc_published = self.container.addresses(self._grpc_port)
        if inside is not None and _reachable(inside):
            self._address, self._grpc_address, self.via = inside, grpc_inside, "container network"
        elif published is not None:
            self._address, self._grpc_address, self.via = published, grpc_published, "published port"
        else:
            raise DeploymentError(f"{self.container.name} has no port {self._port} that can be reached from here")

    def _read_plan(self, server: str) -> dict[str, Any]:
        if not any("exec-launch-plan" in part for part in self.container.command):
            return {}
        content = self.container.file(f"/models/launch/{server}.json")
        try:
            plan = {} if content is None else read_json(content)
        except DocumentError as exc:
            raise DeploymentError(f"the launch plan of {server} cannot be read: {exc}") from exc
        if not isinstance(plan, dict):
            raise DeploymentError(f"the launch plan of {server} is no JSON object")
        return plan


def require_one_way(deployments: Sequence[object]) -> None:
    """Every started container by the same way: docker's proxy process on one side alone would pass for that server's
    slowness. Raises `DeploymentError`."""
    found = [d for d in deployments if isinstance(d, ComposeDeployment)]
    if len({d.via for d in found}) > 1:
        ways = " and ".join(f"{d.container.service} by its {d.via}" for d in found)
        raise DeploymentError(
            f"the arms are not reached alike: {ways}; publish both ports, or run this where both containers' networks "
            "can be reached"
        )


def _reachable(address: str) -> bool:
    """Whether packets get there: a refusal is an answer, too, since the server may not listen yet."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_REACH_SECONDS):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
