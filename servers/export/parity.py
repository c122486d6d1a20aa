"""Compares an exported file with the model's own answers: on photographs, or on random items, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from servers.contract.tensors import Array
from servers.engines.agreement import disagreement
from servers.engines.batches import random_inputs
from servers.engines.interface import Engine
from servers.export.errors import ParityError
from servers.export.manifest import ParityMeasurement
from servers.models.corpus import jpeg_paths
from servers.models.preprocessing import UInt8Array, decode_jpeg, normalise, resize_and_crop
from servers.models.specification import Axis, ModelSpecification

if TYPE_CHECKING:
    import torch

BATCHES = (1, 2, 7)
"""One, the exporter's own example size, and one that nothing was ever tuned for."""

LONGEST_IN_DEFAULTS = 4
"""Batches along an axis are compared up to this many times its default size: a longer one takes minutes on a CPU."""

Answers = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""From the inputs of one batch to the outputs, both by name."""


@dataclass(frozen=True, slots=True)
class ParityBatch:
    """One batch as the reference gets it and as it is sent to the engine; they differ for UINT8 pixels.

    `lengths` are the items' own sizes along the padded axis, None where no item is padded.
    """

    rows: int
    reference: Mapping[str, Array]
    sent: Mapping[str, Array]
    sizes: Mapping[str, int] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None


def measure_parity(
    specification: ModelSpecification, reference: Answers, engine: Engine, precision: str = "fp32"
) -> tuple[ParityMeasurement, ...]:
    """Compare a loaded engine with `reference`, whose answers are the model's in FP32, on `parity_batches`.

    The reference of an image model always gets normalised pixels and the engine its payload, so for UINT8 this compares
    the payloads too. Places of an answer that belong to an item's padding are not compared.
    """
    measurements = []
    for batch in parity_batches(specification):
        expected = _without_padding(specification, batch, reference(batch.reference))
        answers = _without_padding(specification, batch, engine.infer(batch.sent))
        found = disagreement(specification, expected, answers, precision)
        measurements.append(
            ParityMeasurement(
                batch=batch.rows,
                sizes=dict(batch.sizes),
                padded=batch.lengths is not None,
                cosine_min=found.cosine_min,
                relative_error=found.relative_error,
                max_abs=max((output.max_abs for output in found.outputs.values()), default=None),
                fault=found.fault,
            )
        )
    return tuple(measurements)


def assert_parity(measurements: Sequence[ParityMeasurement]) -> None:
    """Raise `ParityError` for a batch whose answers are not the model's."""
    for measured in measurements:
        if measured.fault is not None:
            along = "".join(f", {name} {size}" for name, size in measured.sizes.items())
            raise ParityError(
                f"the exported file differs from the model at batch {measured.batch}{along}"
                f"{', padded' if measured.padded else ''}: {measured.fault}; no artefact was kept"
            )


def torch_answers(specification: ModelSpecification, module: torch.nn.Module) -> Answers:
    """The answers of a module as `specification.load_module` returns it."""
    import torch

    def answers(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        with torch.inference_mode():
            found = module(*(torch.from_numpy(inputs[tensor.name]) for tensor in specification.inputs))
        outputs = found if isinstance(found, tuple | list) else (found,)
        return {tensor.name: out.numpy() for tensor, out in zip(specification.outputs, outputs, strict=True)}

    return answers


def parity_batches(specification: ModelSpecification) -> Iterator[ParityBatch]:
    """Batches of each of `BATCHES`: of other photographs, or of random items at several sizes of the axes.

    With a padded axis, one more whose items have different lengths.
    """
    if specification.image is not None:
        pixels, name = corpus_pixels(specification, sum(BATCHES)), specification.inputs[0].name
        images = normalise(pixels, specification.preprocessing)
        for end, rows in zip(np.cumsum(BATCHES), BATCHES, strict=True):
            part = slice(int(end) - rows, int(end))
            sent = (pixels if specification.payload == "uint8" else images)[part]
            yield ParityBatch(rows, {name: images[part]}, {name: sent})
        return
    axes = specification.axes
    for seed, rows in enumerate(BATCHES):
        sizes = {axis.name: (axis.default, _longest(axis), min(2, axis.largest))[seed] for axis in axes}
        inputs = random_inputs(specification, rows, seed, sizes)
        yield ParityBatch(rows, inputs, inputs, sizes)
    if (padded := specification.padded_axis) is not None:
        rows = BATCHES[-1]
        lengths = tuple(int(length) for length in np.linspace(1, padded.default, rows))
        inputs = padded_items(specification, padded, lengths)
        yield ParityBatch(rows, inputs, inputs, {padded.name: padded.default}, lengths)


def padded_items(specification: ModelSpecification, axis: Axis, lengths: Sequence[int]) -> Mapping[str, Array]:
    """One random item per length along the axis, padded to the longest."""
    if specification.make_items is not None:
        return specification.make_items(len(BATCHES), lengths)
    inputs = random_inputs(specification, len(lengths), len(BATCHES), {axis.name: max(lengths)})
    for name, place in axis.places.items():
        for row, length in enumerate(lengths):
            if name in inputs:
                _beyond(inputs[name], row, place, length)[...] = axis.padding.get(name, 0)
    return inputs


def corpus_pixels(specification: ModelSpecification, count: int) -> UInt8Array:
    """`count` photographs of the corpus in order, resized and cropped; repeated when there are too few."""
    paths = jpeg_paths()
    needed = [decode_jpeg(paths[index % len(paths)].read_bytes()) for index in range(count)]
    return np.stack([resize_and_crop(pixels, specification.preprocessing) for pixels in needed])


def _longest(axis: Axis) -> int:
    return min(axis.largest, LONGEST_IN_DEFAULTS * axis.default)


def _without_padding(
    specification: ModelSpecification, batch: ParityBatch, outputs: Mapping[str, Array]
) -> Mapping[str, Array]:
    """The outputs with zeros in the places of padding."""
    axis = specification.padded_axis
    if axis is None or batch.lengths is None:
        return outputs
    cleared = {name: array.copy() for name, array in outputs.items()}
    for name, array in cleared.items():
        if (place := axis.places.get(name)) is not None and array.ndim > place:
            for row, length in enumerate(batch.lengths):
                _beyond(array, row, place, length)[...] = 0
    return cleared


def _beyond(array: Array, row: int, place: int, length: int) -> Array:
    """The places of a row from `length` on along the dimension `place` of the whole array."""
    beyond: Array = np.moveaxis(array, place, 1)[row, length:]
    return beyond
