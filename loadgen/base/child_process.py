"""A child process that ends with its parent: its own session, its output in a file, a bounded stop; the command lines
of this package's programs, which run with this interpreter; and the cores that all of them have."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import TypeVar

import msgspec
import psutil

from loadgen.base.documents import last_line, one_line

T = TypeVar("T")
OWN_MODULE: tuple[str, ...] = (sys.executable, "-P", "-m", "abserve", "-m")
"""-P: a file in the current folder that has the name of a module must not be imported instead of it. The
package abserve knows where its modules are."""
ABSERVE: tuple[str, ...] = (*OWN_MODULE, "loadgen.entry")
ENGINE_WORKER: tuple[str, ...] = (*OWN_MODULE, "servers.measuring.worker")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_LOG_TAIL_BYTES = 8192
_LOG_TAIL_LINES = 5
_LOG_START_BYTES = 1 << 20
"""The part of a log in which the cause of a failed start is looked for."""


class ProcessError(Exception):
    """A process cannot be started or has ended; the message holds the last lines of its log."""


def end_with(parent: int) -> bool:
    """Have this process terminated when `parent`, which started it, ends. False if that has happened already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent


def cause_in(log: str, causes: Sequence[str]) -> str | None:
    """Why a server ended, by its log and the `causes` of its launch plan; None if the log does not say."""
    matches = (re.search(pattern, log, re.MULTILINE) for pattern in causes)
    return next((match["cause"].strip() for match in matches if match), None)


def printed(
    command: Sequence[str],
    kind: type[T],
    seconds: float,
    name: str,
    *,
    before: str = "",
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> T:
    """The last line that a command prints, which is JSON. `env` is added to its environment. Raises `ProcessError`: the
    message calls the command `name`, or is the `error` in that line or the command's own last line, behind `before`, if
    it fails."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, check=False, timeout=seconds, env={**os.environ, **(env or {})}
        )
    except subprocess.TimeoutExpired:
        raise ProcessError(f"{name} did not answer within {seconds:g} s") from None
    line = done.stdout.strip().rpartition(b"\n")[2]
    if done.returncode != 0:
        why = last_line(done.stderr or done.stdout)
        with suppress(ValueError, KeyError):
            why = one_line(msgspec.json.decode(line, type=dict[str, str])["error"], 500)
        raise ProcessError(before + why)
    try:
        return msgspec.json.decode(line, type=kind)
    except ValueError as exc:
        raise ProcessError(f"{name} printed no valid line of JSON ({exc})") from exc


class ChildProcess:
    """One running program in its own session, so that Ctrl-C does not reach it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        pipes: bool = False,
        causes: Sequence[str] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start it. With `pipes` its standard input and output are pipes, else its output goes to
        the log with its errors. `causes` are those of its launch plan; it inherits the `descriptors` under their
        numbers. Raises `ProcessError`."""
        self.log_path = log_path
        self._causes = causes
        self._unread = b""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()

        def tie_to_parent() -> None:
            # Runs between fork and exec: nothing here may allocate a lock or import.
            if not end_with(parent):
                os._exit(127)

        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self.started_ns = perf_counter_ns()
            try:
                self.popen = subprocess.Popen(
                    list(argv),
                    env=None if env is None else {**os.environ, **env},
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipes else log,
                    stderr=log if pipes else subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=tie_to_parent,
                    pass_fds=descriptors,
                )
            except OSError as exc:
                raise ProcessError(f"cannot start {argv[0]}: {exc.strerror or exc}") from exc

    def send(self, line: bytes) -> bool:
        """Write one line to its standard input; False when the process no longer reads."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(line + b"\n")
            self.popen.stdin.flush()
        except OSError:
            return False
        return True

    def fileno(self) -> int:
        assert self.popen.stdout is not None
        return self.popen.stdout.fileno()

    def read_line(self, timeout_s: float) -> bytes | None:
        """The next line of its standard output without the line end: empty at the end of the output, None when the
        time is up."""
        deadline = monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([self], [], [], max(0.0, deadline - monotonic()))[0]:
                return None
            content = os.read(self.fileno(), 65536)
            if not content:
                return b""
            self._unread += content
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    @property
    def pid(self) -> int:
        """The process ID, which is also the ID of its group and session."""
        return self.popen.pid

    def failure(self) -> str | None:
        """How the process ended, with the end of its log; None while it runs."""
        code = self.popen.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"{how}; {self.last_words()}"

    def ended(self) -> str:
        """How the process ended, once its output is closed."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(5.0)
        return self.failure() or "closed its output"

    def last_words(self) -> str:
        """Where the log is, and the cause of the end if the log has it, else the log's end in one line. What earlier
        processes wrote to the same log is left out."""
        if cause := self.cause():
            return f"see {self.log_path}, which says: {cause}"
        tail: list[str] = []
        with suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(self._log_start, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            tail = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        if not tail:
            return f"it wrote nothing to its log {self.log_path}"
        return f"see {self.log_path}, which ends with: {' | '.join(tail[-_LOG_TAIL_LINES:])}"

    def cause(self) -> str | None:
        """Why the server ended or does not get ready, as far as the beginning of its log says."""
        return cause_in(self.log_of_start(), self._causes)

    def log_of_start(self) -> str:
        """The beginning of its log; empty if it cannot be read."""
        with suppress(OSError), self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read(_LOG_START_BYTES).decode("utf-8", "replace")
        return ""

    def tree(self) -> tuple[psutil.Process, ...]:
        """This process and all its descendants that are alive now."""
        try:
            return tree([psutil.Process(self.pid)])
        except psutil.NoSuchProcess:
            return ()

    def cpu_ns(self) -> int | None:
        """CPU time of the whole tree so far (kernel resolution: 10 ms); None when it is gone."""
        return cpu_ns(self.tree())

    def stop(self, *, timeout_s: float = 15.0) -> None:
        """SIGTERM, a bounded wait, SIGKILL for the rest of the tree. Idempotent."""
        tree = self.tree()
        if self.popen.poll() is None:
            self.popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in tree:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        psutil.wait_procs([process for process in tree if process.pid != self.pid], timeout=2.0)


def tree(roots: Iterable[psutil.Process]) -> tuple[psutil.Process, ...]:
    """The processes that are alive now with all their descendants."""
    processes: dict[int, psutil.Process] = {}
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return tuple(processes.values())


def cpu_ns(processes: Iterable[psutil.Process]) -> int | None:
    """CPU time of the processes so far (kernel resolution: 10 ms), with that of their children that have ended, so that
    it does not fall when one is restarted; None when they are gone."""
    seconds = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            seconds.append(times.user + times.system + times.children_user + times.children_system)
    return int(sum(seconds) * 1e9) if seconds else None


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use: those of its affinity, or fewer if a CPU quota of its cgroups gives it less
    time than that, as `docker run --cpus` and Kubernetes' limits do. A part of a core does not count: threads beyond
    the quota would all be stopped for the rest of each period."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _cpu_quotas(root))]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """The cores' worth of time that the cgroups of this process may use, those around them included."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names: tuple[str, ...] = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            mounts = ("cpu", "cpu,cpuacct")
            if not controllers:
                mounts, names = ("", "unified"), ("cpu.max",)
            elif "cpu" not in controllers.split(","):
                continue
            parts = [part for part in path.split("/") if part not in ("", "..")]
            # In a container the root of what is mounted may be its own cgroup, whatever its path.
            for depth in range(len(parts) + 1):
                for folder in (root.joinpath("sys/fs/cgroup", mount, *parts[:depth]) for mount in mounts):
                    with suppress(OSError, ValueError, ZeroDivisionError):
                        quota, period = map(float, " ".join((folder / name).read_text() for name in names).split())
                        if quota > 0:
                            yield quota / period
