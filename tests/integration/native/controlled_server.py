"""A native server whose engine does what a test tells it: `controlled_server.py PORT FOLDER [--option value …]`.

Loading lasts until the file FOLDER/load exists, each batch until FOLDER/infer exists. A first value of 666 makes the
engine raise, 13 makes it answer NaN for that row alone; otherwise a row is answered with itself. If FOLDER/pipeline
exists the engine takes a second batch while it executes one, and notes in FOLDER/events what happened in which order.
From the moment that FOLDER/dead exists it raises for everything, as after the loss of its device.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        self._assert_alive()

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self._wait("infer")
        self._assert_alive()
        outputs = dict(self._null.infer(inputs))
        if (outputs["y"] == 666).any():
            raise RuntimeError("planted failure with /a/secret/path")
        outputs["y"][(outputs["y"][:, 0] == 13)] = np.nan
        return outputs

    def describe(self) -> EngineDescription:
        return self._null.describe()

    def close(self) -> None:
        (self._folder / "closed").touch()

    def _assert_alive(self) -> None:
        if (self._folder / "dead").exists():
            raise RuntimeError("planted: the device is lost")

    def _wait(self, name: str) -> None:
        (self._folder / f"{name}-reached").touch()
        while not (self._folder / name).exists():
            time.sleep(POLL_S)


class PipelinedEngine(ControlledEngine):
    """Two slots, executed one after the other by a thread, as a device would."""

    slots = 2

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        super().__init__(folder, settings)
        self._memory = [np.zeros((settings.max_batch_size, 4), np.float32) for _ in range(self.slots)]
        self._jobs: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._done: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(self.slots)]
        threading.Thread(target=self._execute, daemon=True).start()
        self.pipeline = self

    def staging(self, slot: int) -> Mapping[str, Array]:
        return {"x": self._memory[slot]}

    def submit(self, slot: int, count: int) -> None:
        self._note(f"submit {count}")
        self._jobs.put((slot, count))

    def collect(self, slot: int) -> Mapping[str, Array]:
        result = self._done[slot].get()
        self._memory[slot][:] = np.nan
        self._note("collect")
        if isinstance(result, Exception):
            raise EngineError("planted") from result
        return result

    def _execute(self) -> None:
        while True:
            slot, count = self._jobs.get()
            try:
                self._done[slot].put(self.infer({"x": self._memory[slot][:count]}))
            except RuntimeError as error:
                self._done[slot].put(error)

    def _note(self, event: str) -> None:
        with (self._folder / "events").open("a") as file:
            file.write(f"{event}\n")


def main() -> int:
    folder = Path(sys.argv[2])
    settings = from_argv(["--http-port", sys.argv[1], *sys.argv[3:]])
    configure(settings.log_level)
    kind = PipelinedEngine if (folder / "pipeline").exists() else ControlledEngine
    service = InferenceService(
        SPECIFICATION,
        lambda: kind(folder, EngineSettings(kind="null", max_batch_size=settings.max_batch_size)),
        BatchingSettings(
            settings.max_batch_size,
            settings.max_queue_delay_us,
            settings.queue_size,
            settings.queue_timeout_us,
            settings.pipeline,
        ),
        added_delay_ms=settings.added_delay_ms,
    )
    return serve(settings, ServedModels([service]), bind("127.0.0.1", settings.http_port))


if __name__ == "__main__":
    import os

    status = main()
    sys.stderr.flush()
    os._exit(status)
