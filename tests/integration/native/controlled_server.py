"""A native server whose engine does what a test tells it: `controlled_server.py PORT FOLDER [--option value …]`.

Loading lasts until the file FOLDER/load exists, and fails with "fail" or "fail PID" in it; each batch lasts until
FOLDER/infer exists. A first value of 666 makes the engine raise, 13 makes it answer NaN for that
row alone; otherwise a row is answered with itself. If FOLDER/wide exists
rows have any number of values, of which the first four are answered; if FOLDER/large exists a row is answered with
LARGE_VALUES values, the first of which are its own. From the moment that FOLDER/dead exists it raises
for everything, as after the loss of its device. If FOLDER/two exists the engine has room for two batches in flight;
from the moment that FOLDER/unready exists it raises where it must not, when it is asked whether a batch is executed.
In process PID the gates are closed while FOLDER/hold-PID exists. FOLDER/closed has a line for each engine's end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from servers.engines.interface import Engine, EngineDescription, EngineError
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.native.server import configure_logs, serve
from servers.native.shared.settings import NativeSettings
from servers.options.command_line import from_argument
from servers.options.launch import bind
from servers.protocol.tensors import Array, TensorSpec

POLL_S = 0.002
LARGE_VALUES = 8 * 2**20

SPECIFICATION = ModelSpecification(
    name="rows",
    title="rows",
    version="1",
    inputs=(TensorSpec("x", "FP32", (-1, 4)),),
    outputs=(TensorSpec("y", "FP32", (-1, 4)),),
    max_batch_size=64,
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
)


class ControlledEngine(Engine):
    """The null engine behind two gates."""

    def __init__(self, folder: Path, specification: ModelSpecification, settings: EngineSettings) -> None:
        super().__init__(specification, settings)
        self._folder = folder
        self._null = NullEngine(specification, settings)
        self._large = np.arange(LARGE_VALUES, dtype="<f4") / 7 if (folder / "large").exists() else None
        self.flights = 2 if (folder / "two").exists() else 1

    def load(self) -> None:
        self._wait("load")
        if (self._folder / "load").read_text() in ("fail", f"fail {os.getpid()}"):
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
        if self._large is not None:
            outputs["y"][:, 4:] = self._large[4:]
        return outputs

    def ready(self) -> bool:
        if (self._folder / "unready").exists():
            raise RuntimeError("planted: not even whether it is ready is known")
        return True

    def describe(self) -> EngineDescription:
        return self._null.describe()

    def close(self) -> None:
        with (self._folder / "closed").open("a") as closed:
            closed.write(f"{os.getpid()}\n")

    def _assert_alive(self) -> None:
        if (self._folder / "dead").exists():
            raise RuntimeError("planted: the device is lost")

    def _wait(self, name: str) -> None:
        (self._folder / f"{name}-reached").touch()
        while not (self._folder / name).exists() or (self._folder / f"hold-{os.getpid()}").exists():
            time.sleep(POLL_S)


def main() -> int:
    folder = Path(sys.argv[2])
    settings = from_argument(NativeSettings, sys.argv[3:])
    configure_logs(settings.log_level)
    wide = (folder / "wide").exists()
    specification = replace(SPECIFICATION, inputs=(TensorSpec("x", "FP32", (-1, -1)),)) if wide else SPECIFICATION
    if (folder / "large").exists():
        specification = replace(specification, outputs=(TensorSpec("y", "FP32", (-1, LARGE_VALUES)),))

    def build(_settings: EngineSettings) -> ControlledEngine:
        engine_settings = EngineSettings(kind="null", max_batch_size=settings.max_batch_size)
        return ControlledEngine(folder, specification, engine_settings)

    grpc = bind("127.0.0.1", settings.grpc_port) if settings.grpc_port else None
    return serve(settings, [(specification, build)], bind("127.0.0.1", settings.http_port), grpc)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
