"""Supervises one tritonserver: its log, readiness, early notice of its death, a bounded stop.

tritonserver stays ready when the process that executes its model, the stub, dies: every request then fails after a
second, and nothing restarts it. So the stub is watched, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from servers.launch_plan import LaunchPlan, cause_in, in_path
from servers.triton.errors import TritonDiedError, TritonOptionError
from servers.triton.leftovers import remove_folders, remove_regions
from servers.triton.log import read_log, relevant_lines

STUB_NAME = "triton_python_backend_stub"
POLL_SECONDS = 0.02
STOP_SECONDS = 30.0
KILL_SECONDS = 5.0

_REGION_PREFIX = re.compile(r"--backend-config=python,shm-region-prefix-name=(.+)")
_PR_SET_PDEATHSIG = 1


class TritonProcess:
    """A tritonserver that this process started. Not thread-safe."""

    def __init__(self, plan: LaunchPlan, log_file: Path, *, needs_all: bool = True) -> None:
        """Start it, with all output to a new `log_file`. Raises `TritonOptionError` if that cannot be written.

        Without `needs_all` it may go on after a stub has ended.
        """
        self._plan = plan
        self._log_file = log_file
        libc = ctypes.CDLL(None)

        def end_with_parent() -> None:
            # A killed supervisor cannot stop its server, so the kernel does.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self._began_s = time.time()
        with _opened(log_file) as log:
            self._process = subprocess.Popen(
                plan.argv,
                env={**os.environ, **plan.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C reaches the supervisor alone, which then stops the server
                preexec_fn=end_with_parent,
            )
        self._stubs: dict[int, psutil.Process] = {}
        self._watches_stubs = needs_all and "--disable-auto-complete-config" in plan.argv

    @property
    def pid(self) -> int:
        """Process id of tritonserver."""
        return self._process.pid

    def wait_ready(self, timeout_seconds: float, asked_to_end: threading.Event | None = None) -> bool:
        """True when the model is ready, False if `asked_to_end` is set before.

        Raises `TritonDiedError` if the server dies or takes too long.
        """
        ready = self._await(self.is_ready, timeout_seconds, asked_to_end or threading.Event())
        self._watches_stubs = self._watches_stubs or ready
        return ready

    def wait_live(self, timeout_seconds: float) -> None:
        """Wait until the server answers, which it does when it has tried to load every model.

        Raises `TritonDiedError` like `wait_ready`.
        """
        self._await(lambda: self._answers("/v2/health/live"), timeout_seconds, threading.Event())

    def is_ready(self) -> bool:
        """Whether the model, not only the server, reports ready."""
        return self._answers(f"/v2/models/{in_path(self._plan.model)}/ready")

    def _await(self, condition: Callable[[], bool], timeout_seconds: float, asked_to_end: threading.Event) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            self.assert_alive()
            if condition():
                return True
            if asked_to_end.wait(POLL_SECONDS):
                return False
        raise self._died(f"tritonserver was not ready after {timeout_seconds:.0f} s")

    def _answers(self, path: str) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self._plan.http_url}{path}", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def assert_alive(self) -> None:
        """Raise `TritonDiedError` if the server or one of its stubs has ended.

        Where Triton completes a config, a process runs for that and ends while the server starts.
        """
        stub_died = self._watches_stubs and any(map(_has_ended, self._find_stubs()))
        if stub_died:
            # A model that fails to load ends its server a moment later, with a better message.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
        code = self._process.poll()
        if code is not None:
            raise self._died(f"tritonserver ended {_how(code)}")
        if stub_died:
            raise self._died(
                "the process that executes the model in tritonserver died and is not restarted, so every request fails"
            )

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """SIGTERM, then SIGKILL after `timeout_seconds`; removes its processes, shared memory and folder. Idempotent.

        Returns the server's exit status in the form of `subprocess`.
        """
        stubs = self._find_stubs()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(psutil.Error):
            # A stub ends by itself after its server, within seconds.
            _, alive = psutil.wait_procs(stubs, timeout=min(KILL_SECONDS, timeout_seconds))
            for stub in alive:
                stub.kill()
            psutil.wait_procs(alive, timeout=KILL_SECONDS)
        for prefix in region_prefixes(self._plan.argv):
            remove_regions(prefix)
        if self._process.returncode != 0:  # otherwise the server has removed its folder
            remove_folders(self._began_s, time.time())
        return self._process.returncode

    def __enter__(self) -> TritonProcess:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _died(self, what: str) -> TritonDiedError:
        """With the cause if the log has it, else with the lines that may show it."""
        cause = cause_in(read_log(self._log_file), self._plan.causes)
        if cause is not None:
            return TritonDiedError(f"{what}: {cause}")
        return TritonDiedError(f"{what}; its log is {self._log_file}", relevant_lines(self._log_file))

    def _find_stubs(self) -> list[psutil.Process]:
        """Every stub seen so far, including those that have ended."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.pid not in self._stubs and child.name().startswith(STUB_NAME[:15]):
                        self._stubs[child.pid] = child
        return list(self._stubs.values())


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two calls
        return True


def _opened(log_file: Path) -> BinaryIO:
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        return log_file.open("wb")
    except OSError as exc:
        raise TritonOptionError(
            f"cannot write {log_file}: {exc.strerror or exc}; choose another file with --log-file"
        ) from exc


def region_prefixes(argv: Sequence[str]) -> Iterator[str]:
    """The prefixes of the shared memory of a server with this command line."""
    return (match[1] for match in map(_REGION_PREFIX.fullmatch, argv) if match)


def _how(code: int) -> str:
    return f"with status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
