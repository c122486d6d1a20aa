"""A server as our own child process: `abserve serve … --print-launch` says how, we run that and nothing between."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from loadgen.invocation import ABSERVE
from loadgen.targets.interface import DeploymentError, StartTimes, poll_ready
from loadgen.targets.ports import PortReservation
from loadgen.targets.process import ChildProcess, ProcessError

_PLAN_SECONDS = 300.0
_STOP_SECONDS = 15.0


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The line that `--print-launch` prints. Fields that are not listed here are ignored."""

    argv: tuple[str, ...]
    env: dict[str, str]
    http_url: str
    grpc_address: str | None = None
    metrics_url: str | None = None
    model: str
    title: str
    artefact: dict[str, object] | None = None


class EmbeddedDeployment:
    """One server of ours. Every `start` takes fresh ports, its own until `stop`, and appends to the same log."""

    launched = True

    def __init__(
        self,
        kind: str,
        options: Mapping[str, str],
        log_path: Path,
        *,
        abserve: Sequence[str] = ABSERVE,
    ) -> None:
        self._kind = kind
        self._options = dict(options)
        self._log_path = log_path
        self.environment: dict[str, str] = {}
        """Added to the server's own at the next start."""
        self._serve_command = (*abserve, "serve")
        self._plan: LaunchPlan | None = None
        self._process: ChildProcess | None = None
        self._ports: PortReservation | None = None

    @property
    def url(self) -> str:
        """Where it answers HTTP; valid after `start`."""
        return self._planned().http_url

    @property
    def grpc_address(self) -> str | None:
        """Where it answers gRPC, None where it does not; valid after `start`."""
        return self._planned().grpc_address

    @property
    def metrics_url(self) -> str | None:
        """Where its Prometheus metrics are; valid after `start`."""
        return self._planned().metrics_url

    @property
    def title(self) -> str | None:
        """As the launch plan names it."""
        return self._planned().title

    @property
    def argv(self) -> tuple[str, ...] | None:
        """The server's own command line."""
        return self._planned().argv

    @property
    def artefact(self) -> dict[str, object] | None:
        """The manifest in the launch plan."""
        return self._planned().artefact

    def start(self) -> None:
        """Plan, then create the process. The plan's own time is not the server's."""
        self.stop()
        self._plan = self._make_plan()
        try:
            self._process = ChildProcess(
                self._plan.argv, log_path=self._log_path, env=self._plan.env | self.environment
            )
        except ProcessError as exc:
            raise DeploymentError(str(exc)) from exc

    def check(self) -> None:
        """Plan a launch and start nothing. Raises `DeploymentError` for options that the server refuses."""
        try:
            self._make_plan()
        finally:
            self.stop()

    def wait_ready(self, model: str, timeout_s: float) -> StartTimes:
        """Poll until the model can be asked."""
        if self._process is None:
            raise DeploymentError(f"{self._kind} was not started")
        return poll_ready(self, self._process.started_ns, model, timeout_s)

    def failure(self) -> str | None:
        """Why the process is gone; None while it runs."""
        return None if self._process is None else self._process.failure()

    def pids(self) -> tuple[int, ...]:
        """The server's process and its children."""
        return () if self._process is None else tuple(process.pid for process in self._process.tree())

    def cpu_ns(self) -> int | None:
        """CPU time of the process tree."""
        return None if self._process is None else self._process.cpu_ns()

    def stop(self) -> None:
        """End the process tree and give its ports back."""
        if self._process is not None:
            self._process.stop(timeout_s=_STOP_SECONDS)
            self._process = None
        if self._ports is not None:
            self._ports.release()
            self._ports = None

    def _planned(self) -> LaunchPlan:
        if self._plan is None:
            raise DeploymentError(f"{self._kind} was not started")
        return self._plan

    def _make_plan(self) -> LaunchPlan:
        try:
            self._ports = PortReservation(3)
        except OSError as exc:
            raise DeploymentError(f"serve {self._kind} cannot be given ports: {exc}; end what listens there") from exc
        http, grpc, metrics = self._ports.ports
        options = {**self._options, "http-port": str(http), "grpc-port": str(grpc)}
        if self._kind == "triton":
            options["metrics-port"] = str(metrics)
        arguments = [part for name, value in options.items() for part in _option(name, value)]
        command = [*self._serve_command, self._kind, *arguments, "--print-launch"]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=_PLAN_SECONDS)
        except subprocess.TimeoutExpired:
            raise DeploymentError(f"serve {self._kind} made no launch plan within {_PLAN_SECONDS:g} s") from None
        if done.returncode != 0:
            raise DeploymentError(f"serve {self._kind} cannot be launched: {_sentence(done.stderr or done.stdout)}")
        try:
            return msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=LaunchPlan)
        except ValueError as exc:
            raise DeploymentError(f"serve {self._kind} --print-launch printed no launch plan ({exc})") from exc


def _option(name: str, value: str) -> tuple[str, ...]:
    """`--name value`; `true` and an empty value make a flag."""
    return (f"--{name}",) if value in {"", "true"} else (f"--{name}", value)


def _sentence(output: bytes) -> str:
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("Error: ").removeprefix("error: ") if lines else "it said nothing"
