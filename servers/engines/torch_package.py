"""torch's AOTInductor: a model compiled beforehand to a package of machine code (.pt2), executed without its module.

`servers.export.torch_export` makes the package; its answers, as this engine gives them, are compared with the module's
own, and the manifest beside it holds the result. The batch and the axes are free, so nothing is compiled at load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from servers.engines.interface import EngineDescription, EngineError, export_command
from servers.engines.torch import TorchEngine
from servers.engines.torch_towers import FAILURES, DeviceTower, check_datatypes, reason_of
from servers.models.files import for_library


class AOTInductorEngine(TorchEngine):
    """Executes the package at `path`. The number of CPU threads applies to torch in the whole process."""

    def load(self) -> None:
        """Load the package."""
        path = self._path
        check_datatypes(self._specification)
        self._enter_device("cpu")
        assert path is not None  # see build_engine
        if not path.is_file():
            command = export_command(self._specification, self._settings.kind)
            raise EngineError(f"no package for {self._specification.name} at {path.name}; run: {command}")
        self._tower = _tower(path)

    def describe(self) -> EngineDescription:
        """As in the torch engine; the parameters are in the package, and its metadata is shown instead."""
        found = super().describe()
        assert self._tower is not None  # see TorchEngine.describe
        details = {name: value for name, value in found.details.items() if not name.startswith("parameters")}
        return replace(found, details={**details, "package": dict(self._tower.plans())})


def _tower(path: Path) -> DeviceTower:
    from torch._inductor import aoti_load_package, config

    try:
        # The check of instructions compiles a file per set of them, and serves a warning only.
        with config.patch({"cpp.vec_isa_ok": True}):
            package = aoti_load_package(for_library(path))
        metadata = package.get_metadata()
    except FAILURES as exc:
        raise EngineError(f"torch cannot load {path.name}: {reason_of(exc)}; delete it and export it again") from exc
    kernels = "AOTInductor package of the model's own module"
    return DeviceTower(package, (), torch.float32, kernels, plans=lambda: {**metadata})
