"""Starts servers in the states that cases want, and ends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from loadgen.conformance.records import SkippedError
from loadgen.conformance.settings import Setting
from loadgen.invocation import ABSERVE
from loadgen.targets.embedded import EmbeddedDeployment
from loadgen.targets.interface import DeploymentError

READY_SECONDS = 330.0


class LaunchedServer(EmbeddedDeployment):
    """One server process with a log of its own, started and perhaps not ready yet."""

    def __init__(self, kind: str, options: Mapping[str, str], log_path: Path, abserve: Sequence[str]) -> None:
        """Raises `SkippedError` when it cannot be started."""
        super().__init__(kind, options, log_path, abserve=abserve)
        self.log_path = log_path
        try:
            self.start()
        except DeploymentError as exc:
            raise SkippedError(str(exc)) from exc

    def await_model(self, model: str) -> None:
        """Raises `SkippedError` when it ends or does not get ready."""
        try:
            self.wait_ready(model, READY_SECONDS)
        except DeploymentError as exc:
            raise SkippedError(str(exc)) from exc


class Launcher:
    """Knows how `abserve serve KIND` is called; at most one server of a launcher is meant to run at a time."""

    def __init__(
        self, kind: str, model: str, options: Mapping[str, str], folder: Path, abserve: Sequence[str] = ABSERVE
    ) -> None:
        self.kind = kind
        self.model = model
        self._options = {"model": model, **options}
        self._folder = folder
        self._abserve = tuple(abserve)
        self._started = 0

    def start(self, setting: Setting) -> LaunchedServer:
        """A new process on fresh ports. Raises `SkippedError`."""
        options = {**self._options, **setting.options(self.kind)}
        self._started += 1
        log_path = self._folder / f"{self.kind}-{self._started}.log"
        return LaunchedServer(self.kind, options, log_path, self._abserve)
