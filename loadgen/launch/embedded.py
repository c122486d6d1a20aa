"""A server as a child process: `abserve serve … --print-launch` prints the command, which is run without a wrapper.

Its ports are reserved, since it listens only seconds later, such as Triton after it has loaded its models. Until then
two things can take a port: another comparison, so each reserved port has a locked file that all comparisons of a user
check; and an outgoing connection, so ports come from below the kernel's range for those.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec

from loadgen.base.child_process import ABSERVE, ChildProcess, ProcessError, printed, usable_cores
from loadgen.launch.deployment import Deployment, DeploymentError, batch_sentence
from loadgen.records.run import asked_for
from loadgen.records.targets import TARGETS

PLAN_SECONDS = 1800.0
"""Includes an export and the building of a TensorRT plan."""
_STOP_SECONDS = 15.0

_START_LINE = re.compile(r"(?:^|[\s\"])start\s((?:\s*\w+=[^\s\"]+)+)", re.MULTILINE)
_STAGE = re.compile(r"\b([a-z_]+)_s=(\d+(?:\.\d+)?)(?=[\s\"]|$)")

T = TypeVar("T")

LOWEST = 20_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FEWEST = 1000


class PrintedLaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The line that `--print-launch` prints. Other fields in it are ignored."""

    argv: tuple[str, ...]
    env: dict[str, str]
    http_url: str
    grpc_address: str | None = None
    metrics_url: str | None = None
    model: str
    title: str
    max_batch_size: int | None = None
    cannot_pad: str | None = None
    cannot_measure: str | None = None
    artefact: dict[str, object] | None = None
    tuning: dict[str, str] = {}
    causes: tuple[str, ...] = ()
    """Regular expressions that find the cause in the log of a server that ended, as group `cause`."""


class EmbeddedDeployment(Deployment):
    """A server that `abserve serve` starts. Every `start` takes fresh ports until `stop` and appends to the same
    log."""

    launched = True

    def __init__(
        self, kind: str, options: Mapping[str, str], log_path: Path, *, abserve: Sequence[str] = ABSERVE
    ) -> None:
        self._kind = kind
        self.plan_seconds = PLAN_SECONDS
        """Time limit of planning a launch."""
        self.completions_only = not TARGETS[kind].describes_models
        self._options = dict(options)
        self._log_path = log_path
        self.environment: dict[str, str] = {}
        """Added to the environment of the planning and of the server at the next start."""
        self.metrics_url: str | None = None
        self._abserve = abserve
        self._process: ChildProcess | None = None
        self._ports: PortReservation | None = None
        self._plan: PrintedLaunchPlan | None = None
        """That of the next start."""

    def plan(self) -> None:
        """Stop the server, and ask `abserve serve` how the next one is started."""
        self.stop()
        self._plan = self._make_plan()

    def start(self) -> None:
        """Plan, if `plan` has not, then create the process. The clock starts after the planning."""
        if self._plan is None:
            self.plan()
        plan, self._plan = self._plan, None
        assert plan is not None
        self.url, self.grpc_address, self.metrics_url = plan.http_url, plan.grpc_address, plan.metrics_url
        self.model, self.title, self.argv, self.artefact = plan.model, plan.title, plan.argv, plan.artefact
        self.tuning = plan.tuning
        try:
            self._process = ChildProcess(
                plan.argv,
                log_path=self._log_path,
                env=self._thread_limit() | plan.env | self.environment,
                causes=plan.causes,
            )
        except ProcessError as exc:
            raise DeploymentError(str(exc)) from exc
        self.started_ns = self._process.started_ns

    def _thread_limit(self) -> dict[str, str]:
        """OMP_NUM_THREADS as `--threads` says, where the caller's environment has it: some servers would heed that and
        others not, and in some only the threads that Python starts."""
        if "OMP_NUM_THREADS" not in os.environ:
            return {}
        asked = asked_for(self._options, "threads")
        return {"OMP_NUM_THREADS": str(usable_cores()) if asked in (None, "0") else str(asked)}

    def check(self, model: str) -> None:  # noqa: ARG002 - the options name the model
        """Plan a launch and start nothing; then the model's name is known, and whether the server can pad."""
        try:
            plan = self._make_plan()
            self.model, self.cannot_pad = plan.model, plan.cannot_pad
        finally:
            self.stop()

    def stages_s(self) -> dict[str, float]:
        """The seconds of each stage of this start, by the server's log; empty if it does not say."""
        return {} if self._process is None else stages_in(self._process.log_of_start())

    def failure(self) -> str | None:
        return None if self._process is None else self._process.failure()

    def wait_until(self, condition: Callable[[], bool], deadline_s: float, problem: Callable[[], str]) -> None:
        """Like that of the base class; the problem at the deadline has what the log says."""

        def explained() -> str:
            cause = None if self._process is None else self._process.cause()
            return f"{problem()}; see {self._log_path}" + ("" if cause is None else f", which says: {cause}")

        super().wait_until(condition, deadline_s, explained)

    def pids(self) -> tuple[int, ...]:
        return () if self._process is None else tuple(process.pid for process in self._process.tree())

    def cpu_ns(self) -> int | None:
        return None if self._process is None else self._process.cpu_ns()

    def stop(self) -> None:
        self._plan = None
        if self._process is not None:
            self._process.stop(timeout_s=_STOP_SECONDS)
            self._process = None
        if self._ports is not None:
            self._ports.release()
            self._ports = None

    def _make_plan(self) -> PrintedLaunchPlan:
        """The plan of a server that accepts the largest batch of the load."""
        try:
            self._ports = PortReservation(len(TARGETS[self._kind].ports))
        except OSError as exc:
            raise DeploymentError(
                f"no free ports for abserve serve {self._kind}: {exc}; stop programs that listen there"
            ) from exc
        ports = zip(TARGETS[self._kind].ports, map(str, self._ports.ports), strict=True)
        options = {**self._options, **dict(ports)}
        plan = ask_server(
            "--print-launch", self._kind, options, PrintedLaunchPlan, self.plan_seconds,
            abserve=self._abserve, env=self.environment,
        )  # fmt: skip
        if plan.cannot_measure is not None:
            raise DeploymentError(plan.cannot_measure)
        if plan.max_batch_size is None or self.largest_batch <= plan.max_batch_size:
            return plan
        if {"max-batch-size", "triton-repository"} & set(self._options):
            raise DeploymentError(batch_sentence(plan.max_batch_size, self.largest_batch))
        self._options["max-batch-size"] = str(self.largest_batch)
        self._ports.release()
        return self._make_plan()


def make_certificate(folder: Path, name: str, host: str | None) -> str:
    """A new PEM file with a certificate for this machine, and for `host`, and its key. Raises `DeploymentError`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.pem"
    names = ["IP:127.0.0.1", "IP:::1", "DNS:localhost"]
    if host is not None:
        names.append(f"{'IP' if ':' in host or host.replace('.', '').isdigit() else 'DNS'}:{host}")
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", "/CN=abserve", "-days", "30", "-addext", f"subjectAltName={','.join(names)}", "-keyout", "-"),
    ]
    try:
        made = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        raise DeploymentError(f"--tls makes certificates with openssl, which failed: {exc}; install OpenSSL") from exc
    file.touch(0o600)
    file.write_bytes(made)
    return str(file)


def stages_in(log: str) -> dict[str, float]:
    """The seconds of each stage by the lines `start` of a log. Of several engines that start at once, each stage is
    the longest of its kind."""
    stages: dict[str, float] = {}
    for line in _START_LINE.findall(log):
        for name, seconds in _STAGE.findall(line):
            stages[name] = max(float(seconds), stages.get(name, 0.0))
    return stages


def ask_server(
    option: str,
    target: str,
    options: Mapping[str, str],
    kind: type[T],
    seconds: float,
    *,
    abserve: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> T:
    """What `abserve serve TARGET OPTION` prints with these options, as its last line of JSON. Raises
    `DeploymentError`."""
    # Before the options: the last one, without a value, would take it for its own, and a server would start.
    command = [*abserve, "serve", target, option, *to_arguments(options)]
    serve = f"abserve serve {target}"
    try:
        return printed(command, kind, seconds, f"{serve} {option}", before=f"{serve} cannot start: ", env=env)
    except ProcessError as exc:
        raise DeploymentError(str(exc)) from exc


def to_arguments(options: Mapping[str, str]) -> tuple[str, ...]:
    """`--name value` of each; `true` and an empty value make a flag, and `false` the one that switches it off."""
    flags = {"": "--{}", "true": "--{}", "false": "--no-{}"}
    return tuple(
        part
        for name, value in options.items()
        for part in ((flags[value].format(name),) if value in flags else (f"--{name}", value))
    )


class PortReservation:
    """Distinct free ports, which no other reservation of this user gets until `release`."""

    def __init__(self, count: int, candidates: range | None = None) -> None:
        """Raises `OSError` when too few are free."""
        self._locks: dict[int, int | None] = {}
        places = port_range() if candidates is None else candidates
        first = random.SystemRandom().randrange(len(places))
        for port in chain(places[first:], places[:first]):
            if len(self._locks) == count:
                break
            self._take(port)
        if len(self._locks) < count:
            self.release()
            raise OSError(f"fewer than {count} of the ports {places.start} to {places.stop - 1} are free")
        self.ports = tuple(self._locks)

    def release(self) -> None:
        """Release the ports. Idempotent."""
        for port, descriptor in self._locks.items():
            _unlock(port, descriptor)
        self._locks = {}

    def _take(self, port: int) -> None:
        try:
            descriptor = _lock(port)
        except BlockingIOError:
            return
        except OSError:  # no folder for lock files: then only ports in use are avoided
            descriptor = None
        if _is_free(port):
            self._locks[port] = descriptor
        else:
            _unlock(port, descriptor)


def port_range() -> range:
    """From 20000 to the kernel's range for outgoing connections; 20000 to 60000 when that range begins lower."""
    first = 32_768
    with suppress(OSError, ValueError, IndexError):
        first = int(EPHEMERAL.read_text().split()[0])
    return range(LOWEST, first if first - LOWEST >= _FEWEST else 60_000)


def _path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"abserve-ports-{os.getuid()}" / str(port)


def _lock(port: int) -> int:
    """The descriptor of the locked file, closed in children. Raises `BlockingIOError` when another process holds it."""
    path = _path(port)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:  # unlinked by its owner since it was opened
            raise BlockingIOError
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _unlock(port: int, descriptor: int | None) -> None:
    if descriptor is not None:
        _path(port).unlink(missing_ok=True)  # while locked, so that a process with the file open sees that it is gone
        os.close(descriptor)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
