"""One server of a comparison, wherever it runs: how it is started, found and stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter_ns, sleep

from loadgen.transport.endpoint import Endpoint
from loadgen.transport.requests import Address

RUNNING_READY_SECONDS = 5.0
"""How long a server at a URL, which runs already, may take to be ready."""
_POLL_SECONDS = 0.005


class DeploymentError(Exception):
    """A server cannot be started, is not ready in time or has died; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """When a server was started, first answered `live` and first answered `ready` (`perf_counter_ns`)."""

    started_ns: int
    live_ns: int
    ready_ns: int


def batch_sentence(limit: int, largest: int) -> str:
    """Why a server does not take the batches of the load."""
    return (
        f"the load has batches of {largest}, but it accepts at most {limit}; raise its max-batch-size or leave them out"
    )


class Deployment:
    """One server. Life: `start` → `wait_ready` → … → `stop`; it may be started again after that.

    This base class knows only its URL: it starts and stops nothing, and its processes are unknown.
    """

    launched = False
    """Whether `start` starts the server and `stop` ends it."""
    url: str
    """The URL where it answers HTTP; set by `start` for a launched server, like the rest."""
    grpc_address: str | None = None
    """HOST:PORT where it answers gRPC."""
    model: str | None = None
    """The name under which a launched server serves the model, by its launch plan; known after `check` or `start`."""
    title: str | None = None
    """The name in its launch plan."""
    argv: tuple[str, ...] | None = None
    artefact: dict[str, object] | None = None
    """The manifest of the exported file that it executes."""
    started_ns: int | None = None
    largest_batch = 1
    """The largest batch of the load."""

    def check(self, model: str) -> None:
        """Find what would keep the server from serving the load, before a run begins. Raises `DeploymentError`."""

    def start(self) -> None:
        """Create the process, on fresh ports, and return at once. Raises `DeploymentError`."""

    def wait_ready(self, model: str, timeout_s: float) -> StartTimes:
        """Ask `live`, then `ready`, every 5 ms until the model is ready. Raises `DeploymentError` when the server ends
        or the time is up."""
        started_ns = perf_counter_ns() if self.started_ns is None else self.started_ns
        endpoint = Endpoint(self.url, timeout_s=timeout_s)
        deadline_s = monotonic() + timeout_s
        late = f"after {timeout_s:g} s"
        self.wait_until(
            endpoint.live, deadline_s, lambda: f"the server at {self.url} is not live {late} ({endpoint.silence()})"
        )
        live_ns = perf_counter_ns()
        self.wait_until(
            lambda: endpoint.ready(model),
            deadline_s,
            lambda: f"the server at {self.url} is live, but model {model} is not ready {late}",
        )
        return StartTimes(started_ns, live_ns, perf_counter_ns())

    def wait_until(self, condition: Callable[[], bool], deadline_s: float, problem: Callable[[], str]) -> None:
        """Poll a condition of the running server. Raises `DeploymentError` when the server ends, and with `problem` at
        the deadline (`time.monotonic`)."""
        while not condition():
            failure = self.failure()
            if failure is not None:
                raise DeploymentError(f"the server {failure}")
            if monotonic() > deadline_s:
                raise DeploymentError(problem())
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

    def check(self, model: str) -> None:
        """Wait a moment for a server that was started just now, then read its configuration if it has one."""
        self.wait_ready(model, RUNNING_READY_SECONDS)
        limit = (Endpoint(self.url).document(f"/v2/models/{model}/config") or {}).get("max_batch_size")
        if isinstance(limit, int) and 0 < limit < self.largest_batch:
            raise DeploymentError(batch_sentence(limit, self.largest_batch))

    def wait_ready(self, model: str, timeout_s: float) -> StartTimes:
        """Wait until the server is ready; the error says what its owner can do."""
        try:
            return super().wait_ready(model, timeout_s)
        except DeploymentError as exc:
            raise DeploymentError(f"{exc}; start it, or correct the URL or --model") from exc
