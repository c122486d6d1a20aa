"""The sampler process: `python -m servers.gpu.sampler --out FILE` writes GPU readings until it is told to stop.

FILE gets one JSON object a line (see `servers.gpu.recording` for the schedule, docs/gpu-proof.md for the fields),
flushed at least every second, so that a killed sampler loses no more than that.
Commands, one a line on standard input where that is a pipe: `edge LABEL`, `stop`. Each is answered with one JSON
object on standard output when its readings are in the file. SIGUSR1 is an edge too; SIGTERM, SIGINT and the end of
standard input stop it. The GPUs read are those that `--gpu` names, else those of CUDA_VISIBLE_DEVICES, else all.
Exit status 0 when stopped, also on a machine without a GPU; 1 when FILE cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import TextIO

from servers.gpu.nvml import NvmlReader
from servers.gpu.recording import Intervals, Line, Recording
from servers.gpu.selection import ALL, visible

SIGNAL_LABEL = "signal"


class SamplerProcess:
    """Waits for what comes first: a reading that is due, a command, a signal."""

    def __init__(self, recording: Recording, file: TextIO, answers: TextIO) -> None:
        self._recording = recording
        self._file = file
        self._answers = answers
        self._stop_reason: str | None = None
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)

    def run(self, commands: int | None) -> None:
        """Until stopped. `commands`: a file descriptor. Raises `OSError` when the file cannot be written."""
        header = self._recording.header(os.getpid())
        self._write([header])
        self._answer({"ready": True, "status": header["status"], "message": header["message"]})
        pending = b""
        while self._stop_reason is None:
            self._write(self._recording.tick())
            wait_s = max(0.0, (self._recording.next_due_ns() - monotonic_ns()) / 1e9)
            watched = [self._wake_read] if commands is None else [self._wake_read, commands]
            readable, _, _ = select.select(watched, [], [], wait_s)
            if self._wake_read in readable:
                self._signals(os.read(self._wake_read, 64))
            if commands is not None and commands in readable:
                received = os.read(commands, 4096)
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    self._command(line.decode("utf-8", "replace").strip())
                if not received:
                    self._stop_reason = self._stop_reason or "end of input"
        self._write(self._recording.close())
        self._write([{"type": "end", "at_ns": monotonic_ns(), "reason": self._stop_reason}])
        self._answer({"stopped": self._stop_reason})

    def _signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGUSR1:
                self._edge(SIGNAL_LABEL)
            else:
                self._stop_reason = signal.Signals(number).name

    def _command(self, text: str) -> None:
        verb, _, label = text.partition(" ")
        if verb == "edge" and label:
            self._edge(label)
        elif verb == "stop":
            self._stop_reason = "stop"
        elif text:
            self._answer({"error": f"unknown command {text!r}; there are: edge LABEL, stop"})

    def _edge(self, label: str) -> None:
        lines = self._recording.edge(label)
        self._write(lines)
        self._answer({"edge": label, "at_ns": lines[-1]["at_ns"], "status": lines[-1]["status"]})

    def _write(self, lines: Sequence[Line]) -> None:
        if lines:
            self._file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            self._file.flush()

    def _answer(self, document: Line) -> None:
        try:
            self._answers.write(json.dumps(document) + "\n")
            self._answers.flush()
        except OSError:  # nobody reads answers any more: the readings matter, and the end of input will stop us
            self._answers = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (it lives as long as we do)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, wire, run."""
    parser = argparse.ArgumentParser(prog="python -m servers.gpu.sampler", description="Record GPU readings.")
    parser.add_argument("--out", type=Path, required=True, help="file to write, one JSON object a line")
    parser.add_argument(
        "--gpu", action="append", metavar="UUID|INDEX|all",
        help="read this one, also several times; default: what CUDA_VISIBLE_DEVICES names, else all",
    )  # fmt: skip
    defaults = Intervals()
    parser.add_argument("--reading-seconds", type=float, default=defaults.reading)
    parser.add_argument("--drain-seconds", type=float, default=defaults.drain)
    parser.add_argument("--edge-seconds", type=float, default=defaults.edge)
    parser.add_argument("--reconnect-seconds", type=float, default=defaults.reconnect)
    options = parser.parse_args(arguments)
    intervals = Intervals(
        options.reading_seconds, options.drain_seconds, options.edge_seconds, options.reconnect_seconds
    )
    if min(intervals.reading, intervals.drain, intervals.edge, intervals.reconnect) <= 0:
        parser.error("every interval must be longer than 0 seconds")
    try:
        with options.out.open("w", encoding="utf-8") as file:
            recording = Recording(NvmlReader(_named(options.gpu)), intervals, monotonic_ns, time_ns)
            SamplerProcess(recording, file, sys.stdout).run(_command_input())
    except OSError as exc:
        sys.stderr.write(f"cannot write {options.out}: {exc.strerror or exc}; free some space or choose another file\n")
        return 1
    return 0


def _named(given: Sequence[str] | None) -> Sequence[str] | None:
    """None: all of them."""
    if not given:
        return visible(os.environ)
    return None if ALL in given else given


def _command_input() -> int | None:
    """Standard input where it is a pipe or a socket; a terminal or /dev/null commands nothing."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    return 0 if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


if __name__ == "__main__":
    sys.exit(main())
