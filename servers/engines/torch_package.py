"""torch's AOTInductor: a model compiled beforehand to a package of machine code (.pt2), executed without its module.

`servers.export.package` makes the package for one kind of device and compares its answers, as this engine gives them,
with the module's own in FP32; the manifest beside it holds the result. The batch and the axes are free, so nothing is
compiled or captured at load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from servers.engines.batches import bucket_sizes
from servers.engines.interface import EngineDescription, EngineError, export_command
from servers.engines.torch import PARAMETER_TYPES, TorchEngine
from servers.engines.torch_towers import FAILURES, DeviceTower, check_datatypes, reason_of


class AOTInductorEngine(TorchEngine):
    """Executes the package at `path`. The number of CPU threads applies to torch in the whole process."""

    def load(self) -> None:
        """Load the package on the device."""
        settings, path = self._settings, self._path
        check_datatypes(self._specification)
        device = self._enter_device()
        assert path is not None  # see build_engine
        if not path.is_file():
            command = export_command(self._specification, "--to aotinductor")
            raise EngineError(f"no package for {self._specification.name} at {path.name}; run: {command}")
        self._tower = tower = _tower(path, device, getattr(torch, PARAMETER_TYPES[settings.precision]))
        if device.type != "cpu":
            self._start(None, bucket_sizes(settings.max_batch_size), device, call=tower.call)

    def describe(self) -> EngineDescription:
        """As in the torch engine; the parameters are in the package, and its metadata is shown instead."""
        found = super().describe()
        assert self._tower is not None  # see TorchEngine.describe
        others = ("compiled", "plans")  # of a module that torch compiles at load
        details = {
            name: value
            for name, value in found.details.items()
            if name not in others and not name.startswith("parameters")
        }
        return replace(found, details={**details, "package": dict(self._tower.plans())})


def _tower(path: Path, device: torch.device, dtype: torch.dtype) -> DeviceTower:
    from torch._inductor import aoti_load_package, config

    try:
        # The check of instructions compiles a file per set of them, and serves a warning only.
        with config.patch({"cpp.vec_isa_ok": True}):
            package = aoti_load_package(
                str(path),
                # By default an execution waits on the host for the one before it. On a GPU the stream keeps the order
                # of executions, and one thread at a time starts them.
                run_single_threaded=device.type != "cpu",
                device_index=-1 if device.index is None else device.index,
            )
        metadata = package.get_metadata()
    except FAILURES as exc:
        raise EngineError(f"torch cannot load {path.name}: {reason_of(exc)}; delete it and export it again") from exc
    if (made_for := metadata.get("AOTI_DEVICE_KEY")) not in (None, device.type):
        raise EngineError(f"{path.name} was compiled for {made_for}, not for {device.type}; export it again")
    return DeviceTower(package, (), dtype, "AOTInductor package of the model's own module", plans=lambda: {**metadata})
