"""An engine without a model: it measures what serving costs, and makes a mixed-up row visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from servers.contract.tensors import Array, TensorSpec
from servers.engines.interface import EngineDescription, EngineError
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification


class NullEngine:
    """Answers each row with that row's own first values, so an answer tells which row it belongs to."""

    def __init__(self, specification: ModelSpecification, settings: EngineSettings) -> None:
        self._specification = specification
        self._settings = settings

    def load(self) -> None:
        """Raises `EngineError` for a device or a mode that an engine without a model cannot honour."""
        if self._settings.device not in ("auto", "cpu"):
            raise EngineError(f"the null engine runs on the CPU only: --device {self._settings.device} is refused")
        if self._settings.mode not in ("auto", "eager"):
            raise EngineError(f"the null engine knows only the mode eager: --mode {self._settings.mode} is refused")

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Nothing to compile or to allocate."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Each output's row holds the first values of the same row of the first input, zeros after its end."""
        source = inputs[self._specification.inputs[0].name]
        rows = source.reshape(len(source), -1)
        return {spec.name: _first_values(rows, spec) for spec in self._specification.outputs}

    def describe(self) -> EngineDescription:
        """The settings that an engine without a model can be said to have."""
        return EngineDescription(
            kind="null",
            version="1",
            precision=self._settings.precision,
            mode="eager",
            device="cpu",
            threads=1,
            max_batch_size=self._settings.max_batch_size,
            weights="none",
        )

    def close(self) -> None:
        """Nothing to free."""


def _first_values(rows: Array, spec: TensorSpec) -> Array:
    shape = tuple(1 if dimension == -1 else dimension for dimension in spec.item_shape)
    size = int(np.prod(shape))
    values = np.zeros((len(rows), size), spec.dtype)
    taken = min(size, rows.shape[1])
    values[:, :taken] = rows[:, :taken]
    return values.reshape(len(rows), *shape)
