"""One tritonserver process: its log, readiness, early notice of its death, a bounded stop, and what it leaves behind.

tritonserver stays ready when the process that executes its model, the stub, dies: every request then fails after a
second, and nothing restarts it. So the stub is watched, too.

Why a server ended stands far above the end of its log: tables follow, then the lines of a shutdown. A line is
`TIME E PID FILE:LINE] "text"`, in older releases without quotation marks; line breaks in the text are written `\\n`.

Every request crosses the shared memory between tritonserver and its stub once each way. Triton would grow the region
on demand and stall that request, so it starts large enough. The backend also makes one folder per server in /tmp,
not in TMPDIR. It is for unpacked Python environments, which these models do not have, so the folders stay empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from servers.models.specification import ModelSpecification
from servers.options.defaults import OptionError
from servers.options.launch import LaunchPlan, cause_in
from servers.protocol.examples import in_path
from servers.triton.installation import STUB, TritonDiedError, TritonError

LOG_LINES = 12

CODE_OF_ERROR = r"(?:(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown|Already exists): )?"
_REST = r'(?P<cause>.+?)(?:\\n.*)?"?$'
CAUSES = (
    rf"failed to load '[^']+' version \d+: {CODE_OF_ERROR}{_REST}",
    rf"failed to load model '[^']+': {CODE_OF_ERROR}{_REST}",
    r'(?P<cause>Poll failed for model directory .+?)"?$',
    rf"Failed to (?:pre)?initialize Python stub(?: for auto-complete)?: {_REST}",
    r"(?P<cause>error while loading shared libraries: .+)$",
    r'(?P<cause>failed to start \w+ service: .+?)"?$',
    r"tritonserver: (?P<cause>unrecognized option .+)$",
    rf"^error: creating server: [\w ]+ - (?!failed to load all models){_REST}",
)
"""`LaunchPlan.causes` of a tritonserver. The first failure is the cause: dependent models fail after it."""

_SEVERE = re.compile(r"^\S+ [EF] \d+ |^[EF]\d{4} |^error: |Error\b|^Traceback ")
_HARMLESS = ("CudaDriverHelper has not been initialized", "Failed to initialize NVML")


def relevant_lines(log_file: Path, count: int = LOG_LINES) -> tuple[str, ...]:
    """The last lines of a log that report an error; without any, the last lines outside tables."""
    lines = read_log(log_file).splitlines()
    severe = [line for line in lines if _SEVERE.search(line) and not any(text in line for text in _HARMLESS)]
    return tuple((severe or [line for line in lines if line.strip() and line[0] not in "+|"])[-count:])


def read_log(log_file: Path) -> str:
    """The text of a log; empty if it cannot be read."""
    try:
        return log_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


SHARED_MEMORY = Path("/dev/shm")
PREFIX = "abserve_triton_"
MEBIBYTE = 1 << 20
SLACK_BYTES = 16 * MEBIBYTE
YOUNG_REGION_SECONDS = 60
FILE_BYTES = MEBIBYTE // 2
"""Assumed size of an element without a fixed size, an encoded image."""
FOLDER = Path("/tmp")
PATTERN = "python_env_??????"
LIBRARY = b"libtriton_python.so"
YOUNG_FOLDER_SECONDS = 3600
"""Younger ones stay: another container may share /tmp but not the list of processes."""


def region_bytes(specification: ModelSpecification, max_batch_size: int) -> int:
    """The size of shared memory: twice the largest batch with its outputs, and slack for fragmentation; whole MiB. An
    axis counts with its largest size, a dimension without an axis as nothing: its region grows on demand."""
    largest = {axis.name: axis.largest for axis in specification.axes}
    item_bytes = sum(
        (FILE_BYTES if tensor.dtype.hasobject else tensor.dtype.itemsize) * math.prod(shape)
        for tensor in (*specification.inputs, *specification.outputs)
        if min(shape := specification.item_shape(tensor, largest), default=1) > 0
    )
    return math.ceil((2 * max_batch_size * item_bytes + SLACK_BYTES) / MEBIBYTE) * MEBIBYTE


def assert_space(needed_bytes: int) -> None:
    """Raise `TritonError` if /dev/shm is too small: Triton would die with a bus error under load."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed_bytes:
        raise TritonError(
            f"{SHARED_MEMORY} has {free // MEBIBYTE} MiB free and Triton's python backend needs "
            f"{needed_bytes // MEBIBYTE} MiB; enlarge it (docker run --shm-size=1g) or lower --max-batch-size"
        )


def new_prefix() -> str:
    """A name for the regions of one launch, in its command line and in /dev/shm."""
    return f"{PREFIX}{secrets.token_hex(4)}_"


def remove_regions(prefix: str) -> None:
    """Remove the regions of a server that has ended; a killed one leaves tens of MB of memory behind."""
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def remove_abandoned_regions() -> None:
    """Remove this user's regions that no running process names in its command line. Young ones stay: a container may
    share /dev/shm but not the list of processes, and a server opens its region by name only once, at its start."""
    latest_s = time.time() - YOUNG_REGION_SECONDS
    regions = [path for path in SHARED_MEMORY.glob(f"{PREFIX}*") if _is_own(path, 0, latest_s)]
    command_lines = b"\0".join(_of_processes("cmdline")) if regions else b""
    for path in regions:
        prefix = "_".join(path.name.split("_")[:3]) + "_"
        if prefix.encode() not in command_lines:
            path.unlink(missing_ok=True)


def remove_folders(earliest_s: float, latest_s: float, folder: Path = FOLDER, library: bytes = LIBRARY) -> None:
    """Remove this user's empty folders last changed in that time (`time.time`), unless a running process has loaded
    the backend's library."""
    paths = [path for path in folder.glob(PATTERN) if _is_own(path, earliest_s, latest_s)]
    if not paths or any(library in mapped for mapped in _of_processes("maps")):
        return
    for path in paths:
        with suppress(OSError):  # not empty, or already gone
            path.rmdir()


def _is_own(path: Path, earliest_s: float, latest_s: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False  # already gone
    return status.st_uid == os.getuid() and earliest_s <= status.st_mtime <= latest_s


def _of_processes(name: str) -> Iterator[bytes]:
    """One file of /proc for every process that this user may read."""
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):  # the process ended, or belongs to another user
            yield path.read_bytes()


POLL_SECONDS = 0.02
STOP_SECONDS = 30.0
KILL_SECONDS = 5.0

_REGION_PREFIX = re.compile(r"--backend-config=python,shm-region-prefix-name=(.+)")
_PR_SET_PDEATHSIG = 1


class TritonProcess:
    """A tritonserver that this process started. Not thread-safe."""

    def __init__(self, plan: LaunchPlan, log_file: Path, *, needs_all: bool = True) -> None:
        """Start it, with all output to a new `log_file`. Raises `OptionError` if that cannot be written. Without
        `needs_all` it may go on after a stub has ended."""
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
        """True when the model is ready, False if `asked_to_end` is set before. Raises `TritonDiedError` if the server
        dies or takes too long."""
        ready = self._await(self.is_ready, timeout_seconds, asked_to_end or threading.Event())
        self._watches_stubs = self._watches_stubs or ready
        return ready

    def wait_live(self, timeout_seconds: float) -> None:
        """Wait until the server answers, which it does when it has tried to load every model. Raises `TritonDiedError`
        like `wait_ready`."""
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
        """Raise `TritonDiedError` if the server or one of its stubs has ended. Where Triton completes a config, a
        process runs for that and ends while the server starts."""
        stub_died = self._watches_stubs and any(map(_has_ended, self._find_stubs()))
        if stub_died:
            # A model that fails to load ends its server a moment later, with a better message.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
        code = self._process.poll()
        if code is not None:
            how = f"with status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            raise self._died(f"tritonserver ended {how}")
        if stub_died:
            raise self._died(
                "the process that executes the model in tritonserver died and is not restarted, so every request fails"
            )

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """SIGTERM, then SIGKILL after `timeout_seconds`; removes its processes, shared memory and folder. Idempotent.
        Returns the server's exit status in the form of `subprocess`."""
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
        """The error of an ended server: with the cause if the log has it, else with the lines that may show it."""
        cause = cause_in(read_log(self._log_file), self._plan.causes)
        if cause is not None:
            return TritonDiedError(f"{what}: {cause}")
        return TritonDiedError(f"{what}; its log is {self._log_file}", relevant_lines(self._log_file))

    def _find_stubs(self) -> list[psutil.Process]:
        """Every stub seen so far, including those that have ended."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.pid not in self._stubs and child.name().startswith(STUB[:15]):
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
        raise OptionError(
            f"cannot write {log_file}: {exc.strerror or exc}; choose another file with --log-file"
        ) from exc


def region_prefixes(argv: Sequence[str]) -> Iterator[str]:
    """The prefixes of the shared memory of a server with this command line."""
    return (match[1] for match in map(_REGION_PREFIX.fullmatch, argv) if match)
