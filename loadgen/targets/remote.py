"""A server that somebody else started: a URL, nothing to start or stop."""

from __future__ import annotations

from time import perf_counter_ns

from loadgen.targets.interface import DeploymentError, StartTimes, poll_ready
from loadgen.transport.requests import Address


class RemoteDeployment:
    """Any server of the protocol, with or without our extras. Cold starts cannot be measured on it."""

    launched = False
    title: str | None = None
    argv: tuple[str, ...] | None = None
    artefact: dict[str, object] | None = None

    def __init__(self, url: str, grpc_address: str | None = None) -> None:
        """Raises `AddressError` for anything but plain HTTP."""
        self.grpc_address = grpc_address
        self.url = Address.parse(url).url

    def start(self) -> None:
        """Nothing: it runs."""

    def wait_ready(self, model: str, timeout_s: float) -> StartTimes:
        """Poll until the model can be asked. Raises `DeploymentError` with what its owner can do."""
        try:
            return poll_ready(self, perf_counter_ns(), model, timeout_s)
        except DeploymentError as exc:
            raise DeploymentError(f"{exc}; start it, or correct the URL or --model") from exc

    def failure(self) -> str | None:
        """Unknown from here."""
        return None

    def pids(self) -> tuple[int, ...]:
        """Unknown from here."""
        return ()

    def cpu_ns(self) -> int | None:
        """Unknown from here."""
        return None

    def stop(self) -> None:
        """Nothing: it is not ours."""
