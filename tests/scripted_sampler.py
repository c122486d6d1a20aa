"""The GPU sampler over a GPU that exists only on paper: it is busy from each "block I before" to its "after".

Only the first `--blocks` blocks make it so; with 0 it idles throughout, as beside servers that compute on the CPU, and
the block of a negative control, which comes after those of the run, leaves it idle too. Its processes are the servers.
With `--others N` the machine has N more GPUs, which other people keep busy, and `--gpu` says which are read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns, time_ns

import psutil
from scripted_reader import Fault, Phase, ScriptedMachine, ScriptedReader  # type: ignore[import-not-found]

from servers.gpu.readings import EdgeReading, GpuProcess, GpuReader
from servers.gpu.sampler import INTERVALS_S, Line, Recording, SamplerProcess

END_OF_TIME = 2**62


class ObedientReader(ScriptedReader):  # type: ignore[misc]
    """Busy on command, used by every sibling process that is a server."""

    def __init__(self, strangers: Sequence[int] = ()) -> None:
        self.strangers = strangers
        self.phases: list[Phase] = []
        self.faults: list[Fault] = []
        super().__init__(monotonic_ns, time_ns, self.phases, self.faults)

    def edge(self, index: int) -> EdgeReading:
        found = super().edge(index)
        pids = []
        for process in psutil.Process(os.getppid()).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ended just now
                if process.pid != os.getpid() and "fake_server.py" in " ".join(process.cmdline()):
                    pids.append(process.pid)
        return EdgeReading(
            processes=tuple(GpuProcess(pid, 2**29) for pid in (*pids, *self.strangers)),
            ecc_errors=found.ecc_errors,
            failed=found.failed,
            lost=found.lost,
        )


class ObedientRecording(Recording):
    """Reads the runner's own labels."""

    def __init__(
        self, reader: ObedientReader, blocks: int, lose_in_block: int | None, machine: GpuReader | None = None
    ) -> None:
        super().__init__(machine or reader, INTERVALS_S, monotonic_ns, time_ns)
        self._lose_in = lose_in_block
        self._gpu = reader
        self._left = blocks

    def edge(self, label: str) -> list[Line]:
        now_ns = monotonic_ns()
        if label == f"block {self._lose_in} before":
            self._gpu.faults.append(Fault(now_ns, END_OF_TIME, "*", "GPU_IS_LOST"))
        if label.startswith("block") and label.endswith("before"):
            if self._left > 0:
                self._gpu.phases.append(Phase(now_ns, END_OF_TIME, 0.9, 600.0))
            self._left -= 1
        elif label.startswith("block") and self._gpu.phases and self._gpu.phases[-1].end_ns == END_OF_TIME:
            last = self._gpu.phases.pop()
            self._gpu.phases.append(Phase(last.start_ns, now_ns, last.busy, last.watts))
        return super().edge(label)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", action="append")
    parser.add_argument("--others", type=int, default=0, help="GPUs of other people, numbered before this one")
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--lose-in-block", type=int, help="the driver loses the GPU when that block begins")
    parser.add_argument("--stranger", type=int, action="append", default=[], help="PID of another process on it")
    options = parser.parse_args()
    with options.out.open("w") as file:
        gpu = ObedientReader(options.stranger)
        others = [
            ScriptedReader(
                monotonic_ns, time_ns, idle_watts=650.0, idle_busy=0.97, pids=(1,), uuid=f"GPU-other-{number}"
            )
            for number in range(options.others)
        ]
        machine = ScriptedMachine([*others, gpu], None if options.gpu == ["all"] else options.gpu)
        recording = ObedientRecording(gpu, options.blocks, options.lose_in_block, machine)
        SamplerProcess(recording, file, sys.stdout).run(0)


if __name__ == "__main__":
    main()
