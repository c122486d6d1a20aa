"""Supervises the GPU sampler process beside a run: edges around blocks and the idle gaps that load is compared with.

The run goes on whatever becomes of the sampler: what it could not record makes the finding inconclusive, nothing else.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep
from typing import Any

import msgspec

from loadgen.invocation import OWN_MODULE
from loadgen.records.run import Label
from loadgen.studies.gpu_proof.records import DEFAULT_THRESHOLDS, Thresholds, Window
from loadgen.targets.process import ChildProcess, ProcessError

SAMPLER: tuple[str, ...] = (*OWN_MODULE, "servers.gpu.sampler")
"""As a process: the load generator imports nothing of the servers."""

READY_SECONDS = 30.0
ANSWER_SECONDS = 10.0
_SPARE_SECONDS = 0.5


def gap_seconds(thresholds: Thresholds = DEFAULT_THRESHOLDS) -> float:
    """An idle gap that is long enough after both its ends are cut off."""
    return thresholds.min_gap_s + thresholds.gap_settle_s + thresholds.gap_margin_s + _SPARE_SECONDS


class GpuRecording:
    """One sampler process, from construction to `stop`. `status` is its own word about the driver, `ok` with a GPU."""

    def __init__(
        self,
        directory: Path,
        log_path: Path,
        command: Sequence[str] = SAMPLER,
        *,
        gap_s: float | None = None,
    ) -> None:
        """Start it and wait for its first line. The readings go to DIR/gpu/0000.jsonl. A sampler that cannot be
        started has the status `error`."""
        self.file = "gpu/0000.jsonl"
        self.gaps: list[Window] = []
        self.pids: dict[Label, set[int]] = {}
        self.gap_s = gap_seconds() if gap_s is None else gap_s
        self._pending = b""
        self._process: ChildProcess | None = None
        path = directory / self.file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._process = ChildProcess([*command, "--out", str(path)], log_path=log_path, pipes=True)
        except (OSError, ProcessError):
            self.status = "error"
            return
        self.status = str((self._answer(READY_SECONDS) or {}).get("status", "error"))

    @property
    def ok(self) -> bool:
        """Whether there is a GPU to record."""
        return self.status == "ok"

    def edge(self, label: str) -> None:
        """Read everything now; returns when the readings are in the file, or when the sampler does not answer."""
        self._command(f"edge {label}")

    def gap(self) -> None:
        """Send nothing for a while."""
        number = len(self.gaps)
        self.edge(f"gap {number} start")
        start_ns = perf_counter_ns()
        sleep(self.gap_s)
        end_ns = perf_counter_ns()
        self.edge(f"gap {number} end")
        self.gaps.append(Window(start_ns=start_ns, end_ns=end_ns))

    def processes(self, label: Label, pids: Iterable[int]) -> None:
        """Remember the processes of an arm's server; they only ever grow, as children come and go."""
        self.pids.setdefault(label, set()).update(pids)

    def stop(self) -> None:
        """Let it write its last line and end it. Bounded and idempotent."""
        if self._process is None:
            return
        self._command("stop")
        self._process.stop(timeout_s=ANSWER_SECONDS)
        self._process = None

    def _command(self, text: str) -> Mapping[str, Any] | None:
        if self._process is None or self._process.popen.stdin is None:
            return None
        try:
            self._process.popen.stdin.write(f"{text}\n".encode())
            self._process.popen.stdin.flush()
        except OSError:
            return None
        return self._answer(ANSWER_SECONDS)

    def _answer(self, timeout_s: float) -> Mapping[str, Any] | None:
        """The next line of its standard output; None when it ends or the time is up."""
        assert self._process is not None
        assert self._process.popen.stdout is not None
        descriptor = self._process.popen.stdout.fileno()
        deadline = monotonic() + timeout_s
        while b"\n" not in self._pending:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - monotonic()))
            received = os.read(descriptor, 4096) if readable else b""
            if not received:
                return None
            self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        with suppress(msgspec.DecodeError):
            document = msgspec.json.decode(line)
            if isinstance(document, dict):
                return document
        return None
