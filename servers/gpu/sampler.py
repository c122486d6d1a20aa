"""The sampler process: `python -m servers.gpu.sampler --out FILE` writes GPU readings until it is stopped.

FILE gets one JSON object per line (docs/gpu-proof.md lists the fields), flushed at least every second. If standard
input is a pipe, it takes one command per line: `edge LABEL` or `stop`. Each gets one JSON object on standard output
once its readings are in the file. SIGUSR1 is an edge, too; SIGTERM, SIGINT and the end of standard input stop it.
Exit status 0 when stopped, also without a GPU; 1 if FILE cannot be written.
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
from dataclasses import asdict, astuple
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import TextIO

from servers.gpu.nvml import NvmlReader
from servers.gpu.recording import Intervals, Line, Recording
from servers.gpu.selection import ALL, visible

SIGNAL_LABEL = "signal"


class SamplerProcess:
    """Waits for the next due reading, a command or a signal."""

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
        """Run until stopped. `commands` is a file descriptor. Raises `OSError` if the file cannot be written."""
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
            self._answer({"error": f"unknown command {text!r}; use edge LABEL or stop"})

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
        except OSError:  # no process reads the answers any more; keep recording until the input ends
            self._answers = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sampler; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m servers.gpu.sampler", description="Record GPU readings.")
    parser.add_argument("--out", type=Path, required=True, help="file to write, one JSON object per line")
    parser.add_argument(
        "--gpu", action="append", metavar="UUID|INDEX|all",
        help="GPU to read, can be repeated; default: those in CUDA_VISIBLE_DEVICES, else all",
    )  # fmt: skip
    for name, seconds in asdict(Intervals()).items():
        parser.add_argument(f"--{name}-seconds", type=float, default=seconds, dest=name)
    options = parser.parse_args(arguments)
    intervals = Intervals(options.reading, options.drain, options.edge, options.reconnect)
    if min(astuple(intervals)) <= 0:
        parser.error("every interval must be longer than 0 seconds")
    names = visible(os.environ)
    if options.gpu:
        names = None if ALL in options.gpu else tuple(options.gpu)
    try:
        with options.out.open("w", encoding="utf-8") as file:
            recording = Recording(NvmlReader(names), intervals, monotonic_ns, time_ns)
            SamplerProcess(recording, file, sys.stdout).run(_command_input())
    except OSError as exc:
        sys.stderr.write(f"cannot write {options.out}: {exc.strerror or exc}; free some space or choose another file\n")
        return 1
    return 0


def _command_input() -> int | None:
    """Standard input if it is a pipe or a socket; a terminal or /dev/null gives no commands."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    return 0 if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


if __name__ == "__main__":
    sys.exit(main())
