"""One server of a comparison, wherever it runs: how it is started, found and stopped."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns, sleep

from loadgen.transport.endpoint import Endpoint
from loadgen.transport.requests import Address

_POLL_SECONDS = 0.005


class DeploymentError(Exception):
    """A server cannot be started, is not ready in time or has died; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """When a server was started, first answered `live` and first answered `ready` (`perf_counter_ns`)."""

    started_ns: int
    live_ns: int
    ready_ns: int


class Deployment:
    """One server. Life: `start` → `wait_ready` → … → `stop`; it may be started again after that.

    This base class knows nothing but its URL: it starts and stops nothing, and its processes are unknown.
    """

    launched = False
    """Whether `start` starts the server and `stop` ends it."""
    url: str
    """Where it answers HTTP; set by `start` for a launched server, like the rest."""
    grpc_address: str | None = None
    """HOST:PORT where it answers gRPC."""
    title: str | None = None
    """The name in its launch plan."""
    argv: tuple[str, ...] | None = None
    artefact: dict[str, object] | None = None
    """The manifest of the exported file that it executes."""
    started_ns: int | None = None

    def start(self) -> None:
        """Create the process, on fresh ports, and return at once. Raises `DeploymentError`."""

    def wait_ready(self, model: str, timeout_s: float) -> StartTimes:
        """Ask `live`, then `ready`, every 5 ms until the model is ready. Raises `DeploymentError` when the server ends
        or the time is up."""
        started_ns = perf_counter_ns() if self.started_ns is None else self.started_ns
        endpoint = Endpoint(self.url, timeout_s=timeout_s)
        deadline_ns = perf_counter_ns() + int(timeout_s * 1e9)
        live_ns: int | None = None
        while True:
            if live_ns is None and endpoint.live():
                live_ns = perf_counter_ns()
            if live_ns is not None and endpoint.ready(model):
                return StartTimes(started_ns, live_ns, perf_counter_ns())
            failure = self.failure()
            if failure is not None:
                raise DeploymentError(f"the server {failure}")
            if perf_counter_ns() > deadline_ns:
                if live_ns is None:
                    raise DeploymentError(
                        f"the server at {self.url} is not live after {timeout_s:g} s ({endpoint.silence()})"
                    )
                raise DeploymentError(
                    f"the server at {self.url} is live, but model {model} is not ready after {timeout_s:g} s"
                )
            sleep(_POLL_SECONDS)

    def failure(self) -> str | None:
        """How the server ended; None while it runs, or when that cannot be known."""
        return None

    def pids(self) -> tuple[int, ...]:
        """Its processes; empty where they are unknown."""
        return ()

    def cpu_ns(self) -> int | None:
        """CPU time that its processes have used so far; None where they are unknown."""
        return None

    def stop(self) -> None:
        """End a launched server. Bounded and idempotent."""


class RemoteDeployment(Deployment):
    """A server at a URL that is already running. Cold starts cannot be measured on it."""

    def __init__(self, url: str, grpc_address: str | None = None) -> None:
        """Raises `AddressError` for anything but plain HTTP."""
        self.url = Address.parse(url).url
        self.grpc_address = grpc_address

    def wait_ready(self, model: str, timeout_s: float) -> StartTimes:
        """As for any server; the error says what its owner can do."""
        try:
            return super().wait_ready(model, timeout_s)
        except DeploymentError as exc:
            raise DeploymentError(f"{exc}; start it, or correct the URL or --model") from exc
