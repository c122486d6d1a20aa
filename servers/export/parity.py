"""Compares an exported file with the model's own answers: on photographs, or on random items, alone and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from servers.engines.agreement import Answer, Proof, disagreement
from servers.engines.batches import random_inputs
from servers.engines.interface import Engine
from servers.export.manifest import ExportError, ParityMeasurement
from servers.models.images import normalise
from servers.models.items import valid_items
from servers.models.samples import corpus_pixels
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array, Axis

BATCHES = (1, 2, 7)
"""One, the size of the exporter's example, and a size for which nothing was tuned."""

LONGEST_IN_DEFAULTS = 4
"""Batches along an axis are compared up to this many times its default size: a longer one takes minutes on a CPU."""


ParityBatch = tuple[Mapping[str, Array], Proof, dict[str, int]]
"""One batch for the reference and the same for the engine, which differ for UINT8 pixels; and the sizes of the axes."""


def measure_parity(
    specification: ModelSpecification, reference: Answer, engine: Engine, precision: str = "fp32"
) -> tuple[ParityMeasurement, ...]:
    """Compare a loaded engine with `reference`, whose answers are the model's in FP32, on `parity_batches`. The
    reference of an image model always gets normalised pixels and the engine its payload, so for UINT8 this compares the
    payloads too. Places of an answer that belong to an item's padding are not compared."""
    measurements = []
    for inputs, sent, sizes in parity_batches(specification):
        expected = sent.without_padding(reference(inputs))
        answers = sent.without_padding(engine.infer(sent.inputs))
        agreement = disagreement(specification, expected, answers, precision)
        measurements.append(
            ParityMeasurement(
                batch=len(next(iter(inputs.values()))),
                sizes=sizes,
                padded=bool(sent.lengths),
                cosine_min=agreement.cosine_min,
                relative_error=agreement.relative_error,
                max_abs=max((output.max_abs for output in agreement.outputs.values()), default=None),
                top1=agreement.top1,
                fault=agreement.fault,
            )
        )
    return tuple(measurements)


def assert_parity(measurements: Sequence[ParityMeasurement]) -> None:
    """Raise `ExportError` for a batch whose answers are not the model's."""
    for measured in measurements:
        if measured.fault is not None:
            along = "".join(f", {name} {size}" for name, size in measured.sizes.items())
            raise ExportError(
                f"the exported file differs from the model at batch {measured.batch}{along}"
                f"{', padded' if measured.padded else ''}: {measured.fault}; no artefact was kept"
            )


def parity_batches(specification: ModelSpecification) -> Iterator[ParityBatch]:
    """Batches of each of `BATCHES`: of other photographs, or of random items at several sizes of the axes. With a
    padded axis, one more whose items have different lengths."""
    if specification.image is not None:
        pixels, name = corpus_pixels(specification, sum(BATCHES)), specification.inputs[0].name
        images = normalise(pixels, specification.preprocessing)
        for end, rows in zip(np.cumsum(BATCHES), BATCHES, strict=True):
            part = slice(int(end) - rows, int(end))
            sent = (pixels if specification.payload == "uint8" else images)[part]
            yield {name: images[part]}, Proof(specification, {name: sent}), {}
        return
    axes = specification.axes
    for seed, rows in enumerate(BATCHES):
        sizes = {axis.name: _sizes(specification, axis)[seed] for axis in axes}
        inputs = random_inputs(specification, rows, seed, sizes)
        yield inputs, Proof(specification, inputs), sizes
    if (padded := specification.padded_axis) is not None:
        lengths = tuple(int(length) for length in np.linspace(1, padded.default, BATCHES[-1]))
        inputs = valid_items(specification, len(BATCHES), lengths)
        yield inputs, Proof(specification, inputs, lengths), {padded.name: padded.default}


def _sizes(specification: ModelSpecification, axis: Axis) -> tuple[int, int, int]:
    """The axis's sizes in the batches. Random bits for an unknown model may be a mask, and few of them may hide a whole
    item."""
    short = 2 if specification.make_items is not None else max(2, axis.default // 2)
    return axis.default, min(axis.largest, LONGEST_IN_DEFAULTS * axis.default), min(axis.largest, short)
