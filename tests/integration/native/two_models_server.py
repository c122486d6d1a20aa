"""A native server of two models on one loop, of which one needs long to prepare a length.

`python -m tests.integration.native.two_models_server PORT [--option value …]` serves `rows`, as `runner_server` does,
and `lengths`, which is prepared for 16 and takes `PREPARED_S` for every other length, as a compiler does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch

from servers.engines.batches import Bucket
from servers.engines.interface import EngineDescription
from servers.engines.settings import EngineSettings
from servers.engines.torch.runner import RunnerEngine
from servers.models.specification import ModelSpecification
from servers.native.server import configure_logs, serve
from servers.native.shared.settings import NativeSettings
from servers.options.launch import bind
from servers.protocol.tensors import Axis, TensorSpec
from tests.host_copies import HostCopies
from tests.integration.native.controlled_server import SPECIFICATION

PREPARED_S = 3.0
PREPARED = 16
LENGTHS = ModelSpecification(
    name="lengths",
    title="lengths",
    version="1",
    inputs=(TensorSpec("x", "FP32", (-1, -1)),),
    outputs=(TensorSpec("y", "FP32", (-1, -1)),),
    axes=(Axis("length", PREPARED, 64, {"x": 1, "y": 1}, {"x": 0}),),
    max_batch_size=4,
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
)


class Prepared(RunnerEngine):
    """Copies its input; a runner on the CPU, without a model."""

    def load(self) -> None:
        along = self._specification.padded_axis is not None
        sizes, at_load = ((PREPARED, 32, 64), (PREPARED,)) if along else ((), None)
        self._start(self._build, (1, 4), torch.device("cpu"), sizes=sizes, at_load=at_load, copies=HostCopies())

    def _build(self, bucket: Bucket) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]:
        if bucket.size not in (None, PREPARED):
            time.sleep(PREPARED_S)

        def execute(given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
            out[0].copy_(given[0])

        return execute

    def describe(self) -> EngineDescription:
        return self._description(version="1", precision="fp32", mode="graph", device="cpu", threads=1, details={})


def main() -> int:
    settings = NativeSettings(**{"max_batch_size": 4, **json.loads(sys.argv[2])})
    configure_logs(settings.log_level)
    given = EngineSettings(kind="torch", max_batch_size=4)
    offers = [(model, lambda _, model=model: Prepared(model, given)) for model in (SPECIFICATION, LENGTHS)]
    return serve(settings, offers, bind("127.0.0.1", settings.http_port))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
