"""An engine without a model: it measures the cost of serving and exposes mixed-up rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from zlib import crc32

import numpy as np

from servers.engines.interface import Engine, EngineDescription
from servers.engines.settings import EngineSettings
from servers.models.images import UInt8Array, normalise
from servers.models.specification import ModelSpecification, Preprocessing
from servers.models.weights import WeightsSource
from servers.protocol.tensors import Array


class NullEngine(Engine):
    """Answers each row with that row's own first values, so an answer identifies its row. An output's dynamic dimension
    has the size of an input along the same axis, without an axis 1. UINT8 pixels are normalised first, as the model
    would do, so that an image has one answer whatever its payload. BYTES count as the CRC-32 of each element."""

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
        fixed = not any(-1 in tensor.item_shape for tensor in specification.outputs)
        self._fixed_shapes = {tensor.name: tensor.item_shape for tensor in specification.outputs} if fixed else None

    def load(self) -> None:
        """Raises `EngineError` for a GPU: there is nothing to execute on it."""
        self._settings.mode_on("cpu" if self._settings.device == "auto" else self._settings.device.partition(":")[0])

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Nothing to compile or to allocate."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Each output's row holds the first values of the same row of the first input, then zeros."""
        source = inputs[self._input]
        shapes = self._fixed_shapes or self._shapes_of(inputs)
        if self._preprocessing is not None:
            least = max(map(prod, shapes.values()), default=0)
            source = _first_pixels(source.astype(np.uint8, copy=False), self._preprocessing, least)
        elif source.dtype.hasobject:
            source = np.array([crc32(value) for value in source.ravel().tolist()], np.uint32).reshape(source.shape)
        rows = source.reshape(len(source), -1)
        return {
            tensor.name: _first_values(rows, shapes[tensor.name], tensor.dtype)
            for tensor in self._specification.outputs
        }

    def _shapes_of(self, inputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
        """The shape of one item of each output."""
        specification = self._specification
        sizes = {axis.name: axis.size_of(inputs) for axis in specification.axes}
        shapes = {tensor.name: specification.item_shape(tensor, sizes) for tensor in specification.outputs}
        return {name: tuple(1 if size == -1 else size for size in shape) for name, shape in shapes.items()}

    def describe(self) -> EngineDescription:
        """The settings of an engine without a model."""
        precision = self._settings.precision
        return self._description(version="1", precision=precision, mode="eager", device="cpu", threads=1, details={})


def _first_pixels(images: UInt8Array, preprocessing: Preprocessing, least: int) -> Array:
    """uint8 (n, h, w, 3) → the start of the normalised (n, 3, h, w), at least `least` values per image."""
    lines = -(-least // images.shape[2])
    if lines <= images.shape[1]:  # all of it in the first channel
        return normalise(images[:, :lines, :, :1], preprocessing)
    return normalise(images, preprocessing)


def _first_values(rows: Array, item_shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    size = prod(item_shape)
    taken = min(size, rows.shape[1])
    if dtype.hasobject:  # BYTES: each value as text
        texts = [str(value).encode() for value in rows[:, :taken].flat]
        values = np.full((len(rows), size), b"", object)
        values[:, :taken] = np.array(texts, object).reshape(len(rows), taken)
    else:
        with np.errstate(invalid="ignore"):  # a negative float as an unsigned integer
            if taken == size:
                return rows[:, :size].astype(dtype).reshape(len(rows), *item_shape)
            values = np.zeros((len(rows), size), dtype)
            values[:, :taken] = rows[:, :taken]
    return values.reshape(len(rows), *item_shape)
