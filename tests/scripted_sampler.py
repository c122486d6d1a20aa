"""The GPU sampler over a GPU that exists only on paper: it is busy from each "block I before" to its "after".

Only the first `--blocks` blocks make it so; with 0 it idles throughout, as beside servers that compute on the CPU, and
the block of a negative control, which comes after those of the run, leaves it idle too. Its processes are the servers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from time import monotonic_ns, time_ns

import psutil

from servers.gpu.reader import GpuProcess
from servers.gpu.recording import Intervals, Line, Recording
from servers.gpu.sampler import SamplerProcess
from servers.gpu.scripted import Fault, Phase, ScriptedReader
from servers.gpu.series import EdgeReading

END_OF_TIME = 2**62


class ObedientReader(ScriptedReader):
    """Busy on command, used by every sibling process that is a server."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.faults: list[Fault] = []
        super().__init__(monotonic_ns, time_ns, self.phases, self.faults)

    def edge(self, index: int) -> EdgeReading:
        found = super().edge(index)
        siblings = psutil.Process(os.getppid()).children(recursive=True)
        pids = [p.pid for p in siblings if p.pid != os.getpid() and "fake_server.py" in " ".join(p.cmdline())]
        return EdgeReading(
            processes=tuple(GpuProcess(pid, 2**29) for pid in pids),
            ecc_errors=found.ecc_errors,
            failed=found.failed,
            lost=found.lost,
        )


class ObedientRecording(Recording):
    """Reads the runner's own labels."""

    def __init__(self, reader: ObedientReader, blocks: int, lose_in_block: int | None) -> None:
        super().__init__(reader, Intervals(), monotonic_ns, time_ns)
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
    parser.add_argument("--gpu", action="append", help="accepted: there is only one")
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--lose-in-block", type=int, help="the driver loses the GPU when that block begins")
    options = parser.parse_args()
    with options.out.open("w") as file:
        SamplerProcess(
            ObedientRecording(ObedientReader(), options.blocks, options.lose_in_block), file, sys.stdout
        ).run(0)


if __name__ == "__main__":
    main()
