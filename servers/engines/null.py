"""An engine without a model: it measures what serving costs, and makes a mixed-up row visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from servers.contract.tensors import Array
from servers.engines.interface import EngineDescription, EngineError
from servers.engines.settings import EngineSettings
from servers.models.preprocessing import UInt8Array, normalise
from servers.models.specification import ModelSpecification, Preprocessing


class NullEngine:
    """Answers each row with that row's own first values, so an answer tells which row it belongs to.

    Bytes are normalised first, as the model would, so that an image has one answer whatever its payload.
    """

    def __init__(self, specification: ModelSpecification, settings: EngineSettings) -> None:
        self._settings = settings
        self._input = specification.inputs[0].name
        self._preprocessing = specification.preprocessing if specification.payload == "uint8" else None
        self._outputs = [
            (spec, tuple(1 if dimension == -1 else dimension for dimension in spec.item_shape))
            for spec in specification.outputs
        ]

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
        source = inputs[self._input]
        if self._preprocessing is not None:
            source = self._first_pixels(source.astype(np.uint8, copy=False), self._preprocessing)
        rows = source.reshape(len(source), -1)
        return {spec.name: _first_values(rows, shape, spec.dtype) for spec, shape in self._outputs}

    def _first_pixels(self, images: UInt8Array, preprocessing: Preprocessing) -> Array:
        """uint8 (n, h, w, 3) → the normalised (n, 3, h, w), of which no more is made than the answers take."""
        wanted = max((prod(shape) for _, shape in self._outputs), default=0)
        lines = -(-wanted // images.shape[2])
        if lines <= images.shape[1]:  # all of it in the first channel
            return normalise(images[:, :lines, :, :1], preprocessing)
        return normalise(images, preprocessing)

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


def _first_values(rows: Array, item_shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    size = prod(item_shape)
    taken = min(size, rows.shape[1])
    if taken == size:
        return rows[:, :size].astype(dtype).reshape(len(rows), *item_shape)
    values = np.zeros((len(rows), size), dtype)
    values[:, :taken] = rows[:, :taken]
    return values.reshape(len(rows), *item_shape)
