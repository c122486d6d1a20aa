"""A native server whose engine is driven as one on a GPU is: `runner_server.py PORT FOLDER [--option value …]`.

Two batches in flight, inputs by their addresses; a row is answered with twice itself. A first value of 666 makes the
batch fail. Each batch makes a file FOLDER/started-TIME-PROCESS-ROWS and then waits until the file FOLDER/infer exists,
in process PID also while FOLDER/hold-PID exists.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from servers.contract.tensors import Array, TensorSpec
from servers.engines.batches import Bucket
from servers.engines.interface import EngineDescription, Finish, Request
from servers.engines.settings import EngineSettings
from servers.engines.torch_device import RunnerEngine
from servers.listener import bind
from servers.models.specification import ModelSpecification
from servers.native.server import configure_logs, serve
from servers.native.settings import from_argv

SPECIFICATION = ModelSpecification(
    name="rows",
    title="rows",
    version="1",
    inputs=(TensorSpec("x", "FP32", (-1, 4)),),
    outputs=(TensorSpec("y", "FP32", (-1, 4)),),
    max_batch_size=16,
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
)


class Doubling(RunnerEngine):
    """A runner on the CPU, without a model."""

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        super().__init__(SPECIFICATION, settings)
        self._folder = folder

    def load(self) -> None:
        self._start(self._build, (1, 2, 4, 8, 16), torch.device("cpu"))

    def _build(self, _bucket: Bucket) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]:
        def execute(given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
            out[0].copy_(given[0] * 2)

        return execute

    def start(self, requests: Sequence[Request], *others: object) -> Finish:
        finish = super().start(requests)
        rows = sum(len(request["x"]) for request in requests)
        (self._folder / f"started-{time.monotonic_ns()}-{os.getpid()}-{rows}").touch()
        finishes = [finish]

        def check() -> list[dict[str, Array]]:
            answers = finishes.pop()()
            if any((answer["y"][:, 0] == 2 * 666).any() for answer in answers):
                raise RuntimeError("planted failure")
            return answers

        return check

    def ready(self) -> bool:
        return (self._folder / "infer").exists() and not (self._folder / f"hold-{os.getpid()}").exists()

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Nothing to prepare."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return self.start([inputs])()[0]

    def describe(self) -> EngineDescription:
        return self._description(version="1", precision="fp32", mode="graph", device="cpu", threads=1, details={})


def main() -> int:
    folder = Path(sys.argv[2])
    settings = from_argv(["--http-port", sys.argv[1], "--max-batch-size", "16", *sys.argv[3:]])
    configure_logs(settings.log_level)

    def build(_settings: EngineSettings) -> Doubling:
        return Doubling(folder, EngineSettings(kind="torch", max_batch_size=settings.max_batch_size))

    return serve(settings, [(SPECIFICATION, build)], bind("127.0.0.1", settings.http_port))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
