"""Compares an exported file with torch on photographs, alone and in mixed batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from servers.engines.batches import row_cosines
from servers.engines.interface import Engine
from servers.export.errors import ExportError, ParityError
from servers.export.manifest import ParityMeasurement
from servers.models.corpus import jpeg_paths
from servers.models.preprocessing import UInt8Array, decode_jpeg, normalise, resize_and_crop
from servers.models.specification import ModelSpecification

if TYPE_CHECKING:
    import torch

BATCHES = (1, 2, 7)
"""One, the exporter's own example size, and one that nothing was ever tuned for."""

COSINE_THRESHOLD = 0.9999
"""For FP32. Different photographs stay below 0.995 even with random weights, so a swapped row fails as well."""


def cosine_threshold(payload: str, precision: str) -> float:
    """The lowest cosine with torch in FP32 on pixels that the client has normalised."""
    if precision == "fp16":
        return 0.999
    return 0.99999 if payload == "uint8" else COSINE_THRESHOLD  # UINT8 input is exact, so it may cost nothing


def measure_parity(
    specification: ModelSpecification, module: torch.nn.Module, engine: Engine
) -> tuple[ParityMeasurement, ...]:
    """Compare a loaded engine with the FP32 module on the CPU, for each batch size on other photographs.

    `module` always gets normalised pixels, as from `specification.load_module`; the engine gets its payload. So for
    UINT8 this compares the payloads too. Raises `ExportError` for a model without exactly one input and one output.
    """
    import torch

    if len(specification.inputs) != 1 or len(specification.outputs) != 1:
        raise ExportError(f"{specification.name}: parity on photographs needs one input and one output")
    pixels = corpus_pixels(specification, sum(BATCHES))
    images = normalise(pixels, specification.preprocessing)
    sent = images if specification.payload == "fp32" else pixels
    source, target = specification.inputs[0].name, specification.outputs[0].name
    measurements, start = [], 0
    for size in BATCHES:
        rows = slice(start, start + size)
        start += size
        with torch.inference_mode():
            reference = module(torch.from_numpy(images[rows])).numpy()
        answer = engine.infer({source: sent[rows]})[target]
        if answer.shape != reference.shape:
            raise ParityError(f"the file answers batch {size} with shape {answer.shape}, torch with {reference.shape}")
        measurements.append(
            ParityMeasurement(
                batch=size,
                cosine_min=float(row_cosines(reference, answer).min()),
                max_abs=float(np.max(np.abs(reference - answer))),
            )
        )
    return tuple(measurements)


def assert_parity(measurements: Sequence[ParityMeasurement], threshold: float = COSINE_THRESHOLD) -> None:
    """Raise `ParityError` unless every cosine reaches `threshold`; NaN does not."""
    for measured in measurements:
        if not measured.cosine_min >= threshold:
            raise ParityError(
                f"the exported file differs from torch at batch {measured.batch}: cosine {measured.cosine_min:.6f} is "
                f"below {threshold}, largest difference {measured.max_abs:.3g}; no artefact was kept"
            )


def corpus_pixels(specification: ModelSpecification, count: int) -> UInt8Array:
    """`count` photographs of the corpus in order, resized and cropped; repeated when there are too few."""
    paths = jpeg_paths()
    needed = [decode_jpeg(paths[index % len(paths)].read_bytes()) for index in range(count)]
    return np.stack([resize_and_crop(pixels, specification.preprocessing) for pixels in needed])
