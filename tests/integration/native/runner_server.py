"""A native server whose engine is driven as one on a GPU is.

`python -m tests.integration.native.runner_server PORT FOLDER [--option value …]` serves the controlled server's model
with the buckets of CUDA graphs. Two batches in flight, inputs by their addresses; a row is answered with twice itself.
A first value of 666 makes the batch fail. Each batch makes a file FOLDER/started-TIME-PROCESS-ROWS and then waits until
the file FOLDER/infer exists, in process PID also while FOLDER/hold-PID exists. If FOLDER/paced exists executing takes
time, as on a GPU: one batch after the other, each a fixed time and one for each row of its bucket.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from servers.engines.batches import Bucket, bucket_sizes
from servers.engines.interface import EngineDescription, Finish, Request
from servers.engines.settings import EngineSettings
from servers.engines.torch.runner import RunnerEngine
from servers.native.server import configure_logs, serve
from servers.native.shared.settings import NativeSettings
from servers.options.launch import bind
from servers.protocol.tensors import Array
from tests.host_copies import HostCopies
from tests.integration.native.controlled_server import SPECIFICATION

BATCH_S, ROW_S = 0.032, 0.004
"""For a whole batch and for each row of its bucket, if executing takes time: about 230 times those of an H200."""


class Doubling(RunnerEngine):
    """A runner on the CPU, without a model."""

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        super().__init__(SPECIFICATION, settings)
        self._folder = folder
        self._paced = (folder / "paced").exists()
        self._ends: deque[float] = deque([0.0])  # of the last batch that is executed, and of those in flight

    def load(self) -> None:
        self._start(self._build, bucket_sizes(self._settings.max_batch_size), torch.device("cpu"), copies=HostCopies())

    def _build(self, _bucket: Bucket) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]:
        def execute(given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
            out[0].copy_(given[0] * 2)

        return execute

    def start(self, requests: Sequence[Request], *others: object) -> Finish:
        finish = super().start(requests)
        rows = sum(request["x"].shape[0] for request in requests)
        (self._folder / f"started-{time.monotonic_ns()}-{os.getpid()}-{rows}").touch()
        finishes = [finish]
        takes_s = BATCH_S + ROW_S * self.executed_rows(rows) if self._paced else 0.0
        self._ends.append(max(time.monotonic(), self._ends[-1]) + takes_s)

        def check() -> list[dict[str, Array]]:
            self._ends.popleft()
            answers = finishes.pop()()
            if any((answer["y"][:, 0] == 2 * 666).any() for answer in answers):
                raise RuntimeError("planted failure")
            return answers

        return check

    def ready(self) -> bool:
        held = (self._folder / f"hold-{os.getpid()}").exists() or not (self._folder / "infer").exists()
        return not held and time.monotonic() >= self._ends[1]

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Nothing to prepare."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return self.start([inputs])()[0]

    def describe(self) -> EngineDescription:
        return self._description(version="1", precision="fp32", mode="graph", device="cpu", threads=1, details={})


def main() -> int:
    folder = Path(sys.argv[2])
    settings = NativeSettings(**{"max_batch_size": 16, **json.loads(sys.argv[3])})
    configure_logs(settings.log_level)

    def build(_settings: EngineSettings) -> Doubling:
        return Doubling(folder, EngineSettings(kind="torch", max_batch_size=settings.max_batch_size))

    return serve(settings, [(SPECIFICATION, build)], bind("127.0.0.1", settings.http_port))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
