"""What a deployment offers, wherever its server runs."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns, sleep
from typing import Protocol

from loadgen.transport.endpoint import Endpoint

_POLL_SECONDS = 0.005


class DeploymentError(Exception):
    """A server cannot be started, does not get ready or has died; the message says why, with its last words."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """When a server was started, first answered `live`, first answered `ready` (`perf_counter_ns`)."""

    started_ns: int
    live_ns: int
    ready_ns: int


class Answering(Protocol):
    """What can be waited for."""

    @property
    def url(self) -> str:
        """Where it answers HTTP."""

    def failure(self) -> str | None:
        """Why the server is gone; None while it runs."""


class Deployment(Protocol):
    """One server. Life: `start` → `wait_ready` → … → `stop`; it may be started again after that."""

    launched: bool
    """Whether the server is ours: started by `start`, ended by `stop`."""

    @property
    def url(self) -> str:
        """Where it answers HTTP; valid after `start`."""

    @property
    def grpc_address(self) -> str | None:
        """Where it answers gRPC, HOST:PORT, None where it does not; valid after `start`."""

    @property
    def title(self) -> str | None:
        """What the server calls itself before it runs; None for somebody else's."""

    @property
    def argv(self) -> tuple[str, ...] | None:
        """How it was started; None for somebody else's."""

    @property
    def artefact(self) -> dict[str, object] | None:
        """The manifest of the exported file that it executes, where it does."""

    def start(self) -> None:
        """Create the process, on fresh ports, and return at once. Raises `DeploymentError`."""

    def wait_ready(self, model: str, timeout_s: float) -> StartTimes:
        """Block until the model can be asked. Raises `DeploymentError`."""

    def failure(self) -> str | None:
        """Why the server is gone; None while it runs, or when that cannot be known."""

    def pids(self) -> tuple[int, ...]:
        """Its processes, where they are ours."""

    def cpu_ns(self) -> int | None:
        """CPU time that its processes have used so far, where they are ours."""

    def stop(self) -> None:
        """End it if it is ours. Bounded and idempotent."""


def poll_ready(deployment: Answering, started_ns: int, model: str, timeout_s: float) -> StartTimes:
    """Ask `live`, then `ready`, every 5 ms. Raises `DeploymentError` when the process ends or the time is up."""
    endpoint = Endpoint(deployment.url, timeout_s=timeout_s)
    deadline_ns = perf_counter_ns() + int(timeout_s * 1e9)
    live_ns: int | None = None
    while True:
        if live_ns is None and endpoint.live():
            live_ns = perf_counter_ns()
        if live_ns is not None and endpoint.ready(model):
            return StartTimes(started_ns, live_ns, perf_counter_ns())
        failure = deployment.failure()
        if failure is not None:
            raise DeploymentError(f"the server {failure}")
        if perf_counter_ns() > deadline_ns:
            if live_ns is None:
                raise DeploymentError(
                    f"the server at {deployment.url} is not live after {timeout_s:g} s ({endpoint.silence()})"
                )
            raise DeploymentError(
                f"the server at {deployment.url} is live, but model {model} is not ready after {timeout_s:g} s"
            )
        sleep(_POLL_SECONDS)
