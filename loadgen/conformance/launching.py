"""Starts servers of ours in the states that cases want, and ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, perf_counter, sleep

from loadgen.conformance.settings import Setting
from loadgen.deployment.embedded import EmbeddedDeployment
from loadgen.deployment.interface import DeploymentError
from loadgen.invocation import ABSERVE

READY_SECONDS = 330.0


class LaunchError(Exception):
    """A server cannot be started in the state that is wanted; the message says why."""


class LaunchedServer:
    """One process tree of ours, started and perhaps not ready yet."""

    def __init__(self, deployment: EmbeddedDeployment, model: str, log_path: Path) -> None:
        self.deployment = deployment
        self.model = model
        self.log_path = log_path

    @property
    def url(self) -> str:
        """Where it answers HTTP."""
        return self.deployment.url

    def wait_ready(self) -> None:
        """Raises `LaunchError` when it ends or does not get ready."""
        try:
            self.deployment.wait_ready(self.model, READY_SECONDS)
        except DeploymentError as exc:
            raise LaunchError(str(exc)) from exc

    def terminate(self) -> float:
        """SIGTERM to the server's own process; the moment (`perf_counter`)."""
        os.kill(self.deployment.pids()[0], signal.SIGTERM)
        return perf_counter()

    def seconds_to_exit(self, limit_s: float) -> float | None:
        """How long until the process is gone; None when it still runs after that time."""
        started = monotonic()
        while monotonic() - started < limit_s:
            if self.deployment.failure() is not None:
                return monotonic() - started
            sleep(0.02)
        return None

    def stop(self) -> None:
        """End what is left of it."""
        self.deployment.stop()


class Launcher:
    """Knows how `abserve serve KIND` is called; at most one server of a launcher is meant to run at a time."""

    def __init__(
        self, kind: str, model: str, options: Mapping[str, str], folder: Path, abserve: Sequence[str] = ABSERVE
    ) -> None:
        self.kind = kind
        self.model = model
        self._options = dict(options)
        self._folder = folder
        self._abserve = tuple(abserve)
        self._started = 0

    def start(self, setting: Setting) -> LaunchedServer:
        """A new process on fresh ports with a log of its own. Raises `LaunchError`."""
        wanted = setting.options(self.kind)
        if isinstance(wanted, str):
            raise LaunchError(wanted)
        self._started += 1
        log_path = self._folder / f"{self.kind}-{self._started}.log"
        options = {"model": self.model, **self._options, **wanted}
        deployment = EmbeddedDeployment(self.kind, options, log_path, abserve=self._abserve)
        try:
            deployment.start()
        except DeploymentError as exc:
            raise LaunchError(str(exc)) from exc
        return LaunchedServer(deployment, self.model, log_path)
