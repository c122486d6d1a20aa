"""A server of the running compose stack: found by its labels, stopped and started through the docker SDK.

Where the container's own address can be reached from here (Linux, no Docker Desktop), requests go there: a published
port costs throughput, since every byte passes docker's proxy process. All arms must be reached the same way, which
`via` names.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from time import monotonic, perf_counter_ns
from typing import Any

import psutil

from loadgen.client.endpoint import Endpoint
from loadgen.documents import DocumentError, read_json
from loadgen.launch.containers import PROJECT, UP, LogLine, ServiceContainer, find_container
from loadgen.launch.interface import Deployment, DeploymentError
from loadgen.launch.listeners import tree
from loadgen.launch.process import cause_in
from loadgen.records.payloads import BACKEND_ENDINGS

PORTS = {"native": (8100, 8101), "triton": (8000, 8001)}
"""HTTP and gRPC inside the container."""
STOP_SECONDS = 40
_ASK_ENGINE_EVERY_NS = 250_000_000
_REACH_SECONDS = 1.0


class ComposeDeployment(Deployment):
    """One server of the stack, which ran before the comparison; `restore` starts it again afterwards.

    `start` leaves a running container alone; `stop` stops it, so the next `start` is a cold start. Several arms may be
    models of one container, each with a `backend` of Triton.
    """

    launched = True

    def __init__(self, server: str, project: str = PROJECT, backend: str | None = None) -> None:
        """`server` is native or triton; `backend` of Triton chooses one of its models. Raises `DeploymentError` when
        the stack is not up."""
        self.container: ServiceContainer = find_container(server, project)
        self._server, self._backend = server, backend
        self._was_running = self.container.state().status == "running"
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
        before = self.container.state()
        self._restarts, self._failure = before.restarts, None
        self._started_wall_s, self.started_ns = time.time(), perf_counter_ns()
        if before.status != "running":
            self.container.start()
        self._find_addresses()

    def failure(self) -> str | None:
        """How the container ended, or that it died and was restarted; the engine is asked four times a second."""
        now_ns = perf_counter_ns()
        if self._failure is None and now_ns - self._asked_ns >= _ASK_ENGINE_EVERY_NS:
            self._asked_ns = now_ns
            state = self.container.state()
            if state.restarts > self._restarts or state.status == "restarting":
                self._failure = f"died and was started again by its restart policy: {self._last_words()}"
            elif state.status != "running":
                self._failure = f"ended with exit status {state.exit_code}: {self._last_words()}"
        return self._failure

    def _last_words(self) -> str:
        """The cause of the end if the log has it, else the log's end: the reason stands far above a long shutdown."""
        log = "\n".join(line.text for line in self.container.log_since(self._started_wall_s))
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
        if self._was_running and self.container.state().status != "running":
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
        """The model's name on this server: with Triton's own backends `<model>_onnx` or `<model>_tensorrt`.

        Valid once the server is ready. Raises `DeploymentError` when it serves none or several of them.
        """
        names = Endpoint(self.url).served_models()
        if names is None:
            raise DeploymentError(f"{self.container.service} does not list its models")
        service, found = self.container.service, f"it serves {', '.join(names) or 'nothing'}"
        if self._backend is not None:
            if (wanted := asked_for + BACKEND_ENDINGS[self._backend]) in names:
                return wanted
            raise DeploymentError(
                f"{service} has no model {wanted} for backend={self._backend}, but {found}; set MODEL and "
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
            f"{service} must serve exactly one variant of {asked_for}, or the arm must name one, but {found}; {remedy}"
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
    found = [d for d in deployments if isinstance(d, ComposeDeployment)]
    if len({d.via for d in found}) > 1:
        ways = " and ".join(f"{d.container.service} by its {d.via}" for d in found)
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
