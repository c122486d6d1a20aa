"""A native server whose engine does what a test tells it: `controlled_server.py PORT FOLDER [--option value …]`.

Loading lasts until the file FOLDER/load exists, each batch until FOLDER/infer exists. A first value of 666 makes the
engine raise, 13 makes it answer NaN for that row alone; otherwise a row is answered with itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from servers.contract.tensors import Array, TensorSpec
from servers.engines.interface import EngineDescription, EngineError
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification, Preprocessing
from servers.native.arguments import from_argv
from servers.native.inference import BatchingSettings, InferenceService
from servers.native.listener import bind
from servers.native.logs import configure
from servers.native.served_models import ServedModels
from servers.native.server import serve

POLL_S = 0.002

SPECIFICATION = ModelSpecification(
    name="rows",
    title="rows",
    version="1",
    inputs=(TensorSpec("x", "FP32", (-1, 4)),),
    outputs=(TensorSpec("y", "FP32", (-1, 4)),),
    max_batch_size=64,
    flops_per_item=0,
    preprocessing=Preprocessing(1, (0, 0, 0), (1, 1, 1)),
    default_weights="random:0",
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
    pretrained_tags=tuple,
)


class ControlledEngine:
    """The null engine behind two gates."""

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        self._folder = folder
        self._null = NullEngine(SPECIFICATION, settings)

    def load(self) -> None:
        self._wait("load")
        if (self._folder / "load").read_text() == "fail":
            raise EngineError("the weights are missing: fetch them")

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        self._null.warm_up(batch_sizes)

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self._wait("infer")
        outputs = dict(self._null.infer(inputs))
        if (outputs["y"] == 666).any():
            raise RuntimeError("planted failure with /a/secret/path")
        outputs["y"][(outputs["y"][:, 0] == 13)] = np.nan
        return outputs

    def describe(self) -> EngineDescription:
        return self._null.describe()

    def close(self) -> None:
        (self._folder / "closed").touch()

    def _wait(self, name: str) -> None:
        (self._folder / f"{name}-reached").touch()
        while not (self._folder / name).exists():
            time.sleep(POLL_S)


def main() -> int:
    folder = Path(sys.argv[2])
    settings = from_argv(["--http-port", sys.argv[1], *sys.argv[3:]])
    configure(settings.log_level)
    service = InferenceService(
        SPECIFICATION,
        lambda: ControlledEngine(folder, EngineSettings(kind="null", max_batch_size=settings.max_batch_size)),
        BatchingSettings(
            settings.max_batch_size, settings.max_queue_delay_us, settings.queue_size, settings.queue_timeout_us
        ),
        added_delay_ms=settings.added_delay_ms,
    )
    return serve(settings, ServedModels([service]), bind("127.0.0.1", settings.http_port))


if __name__ == "__main__":
    import os

    status = main()
    sys.stderr.flush()
    os._exit(status)
