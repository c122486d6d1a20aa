"""An engine without a model: it measures the cost of serving and exposes mixed-up rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from servers.contract.tensors import Array
from servers.engines.interface import Engine, EngineDescription
from servers.engines.settings import EngineSettings
from servers.models.preprocessing import UInt8Array, normalise
from servers.models.specification import ModelSpecification, Preprocessing
from servers.models.weights import WeightsSource


class NullEngine(Engine):
    """Answers each row with that row's own first values, so an answer identifies its row.

    Bytes are normalised first, as the model would do, so that an image has one answer whatever its payload.
    """

    def __init__(
        self,
        specification: ModelSpecification,
        settings: EngineSettings,
        _weights: WeightsSource | None = None,
        _path: Path | None = None,
    ) -> None:
        super().__init__(specification, settings)
        self._input = specification.inputs[0].name
        self._preprocessing = specification.preprocessing if specification.payload == "uint8" else None
        self._outputs = [
            (spec, tuple(1 if dimension == -1 else dimension for dimension in spec.item_shape))
            for spec in specification.outputs
        ]

    def load(self) -> None:
        """Raises `EngineError` for a GPU: there is nothing to execute on it."""
        self._settings.mode_on("cpu" if self._settings.device == "auto" else self._settings.device.partition(":")[0])

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Nothing to compile or to allocate."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Each output's row holds the first values of the same row of the first input, then zeros."""
        source = inputs[self._input]
        if self._preprocessing is not None:
            source = self._first_pixels(source.astype(np.uint8, copy=False), self._preprocessing)
        rows = source.reshape(len(source), -1)
        return {spec.name: _first_values(rows, shape, spec.dtype) for spec, shape in self._outputs}

    def _first_pixels(self, images: UInt8Array, preprocessing: Preprocessing) -> Array:
        """uint8 (n, h, w, 3) → the start of the normalised (n, 3, h, w), at least as long as an answer."""
        wanted = max((prod(shape) for _, shape in self._outputs), default=0)
        lines = -(-wanted // images.shape[2])
        if lines <= images.shape[1]:  # all of it in the first channel
            return normalise(images[:, :lines, :, :1], preprocessing)
        return normalise(images, preprocessing)

    def describe(self) -> EngineDescription:
        """The settings of an engine without a model."""
        precision = self._settings.precision
        return self._description(version="1", precision=precision, mode="eager", device="cpu", threads=1, details={})


def _first_values(rows: Array, item_shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    size = prod(item_shape)
    taken = min(size, rows.shape[1])
    if taken == size:
        return rows[:, :size].astype(dtype).reshape(len(rows), *item_shape)
    values = np.zeros((len(rows), size), dtype)
    values[:, :taken] = rows[:, :taken]
    return values.reshape(len(rows), *item_shape)
