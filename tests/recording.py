"""A recorder in a process of its own, before a real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.records.traffic import RecordedTraffic


@dataclass
class RecorderProcess:
    """`abserve record`, running; its folder is read at any time."""

    process: subprocess.Popen[str]
    folder: Path
    ports: list[int] = field(default_factory=list)
    """Where it listens: for HTTP, for gRPC, as far as asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def end(self) -> RecordedTraffic:
        """Stop it; what it has recorded."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.process.stderr and self.process.stderr.read()
        return self.read()

    def read(self) -> RecordedTraffic:
        return RecordedTraffic(self.folder)


@contextmanager
def recorder(
    folder: Path, *options: str, to: str | None = None, grpc_to: str | None = None
) -> Iterator[RecorderProcess]:
    """Before these servers, until the end of the block."""
    given = [("to", "listen", to), ("grpc-to", "grpc-listen", grpc_to)]
    ways = [
        f"--{name}={value}" for way, place, to in given if to for name, value in ((way, to), (place, "127.0.0.1:0"))
    ]
    command = [sys.executable, "-m", "loadgen.entry", "record", "--out", str(folder), *ways, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    running = RecorderProcess(process, folder)
    try:
        for _, _, place in given:
            if place:
                line = process.stdout.readline()
                assert line, process.stderr and process.stderr.read()
                running.ports.append(int(line.split(" ")[0].rpartition(":")[2]))
        yield running
    finally:
        process.kill()
        process.communicate()
