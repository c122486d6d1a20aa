"""The file of a model's own answers in FP32, which every engine process of a matrix is compared with.

It is made once per model, because the module costs the process that makes it time and memory that are not the engine's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from servers.engines.measurement import Reference, references_of
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.protocol.tensors import Array

ITEMS = 16
"""Random items of each size. One of them is a share of 6 % of the top-1 agreement."""
_ABOUT = "about"


def references(
    specification: ModelSpecification,
    weights: WeightsSource,
    sizes: Sequence[Mapping[str, int]],
    photographs: Callable[[], Mapping[str, Array] | None],
    path: Path | None,
) -> list[Reference]:
    """A reference per size, from the file if it holds those of this model, else computed and written there.
    `photographs` gives the items of a model of images; others get random ones.

    Raises `WeightsError`, `EngineError` and `OSError`.
    """
    about = {
        "model": specification.name,
        "model_sha256": specification.definition_sha256,
        "weights": weights.label,
        "sizes": [dict(one) for one in sizes],
    }
    if path is not None and (stored := _read(path, about)) is not None:
        return stored
    made = references_of(specification, weights, sizes, photographs(), ITEMS)
    if path is not None:
        _write(path, about, made)
    return made


def _read(path: Path, about: Mapping[str, object]) -> list[Reference] | None:
    """None for a file that is missing, unreadable or of something else."""
    try:
        with np.load(path, allow_pickle=False) as content:
            stored = json.loads(str(content[_ABOUT]))
            if {name: stored[name] for name in about} != about:
                return None
            arrays = {name: content[name] for name in content.files}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None

    def side(number: int, which: str) -> dict[str, Array]:
        start = f"{number}/{which}/"
        return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}

    return [
        Reference(
            side(number, "inputs"),
            side(number, "answers") if stored["answered"] else None,
            stored["flops"][number],
            sizes,
        )
        for number, sizes in enumerate(stored["sizes"])
    ]


def _write(path: Path, about: Mapping[str, object], made: Sequence[Reference]) -> None:
    """Write it whole or not at all; arrays of Python objects have no place in such a file, and are made again."""
    arrays = {
        f"{number}/{which}/{name}": array
        for number, one in enumerate(made)
        for which, side in (("inputs", one.inputs), ("answers", one.answers or {}))
        for name, array in side.items()
    }
    if any(array.dtype.hasobject for array in arrays.values()):
        return
    about = {**about, "flops": [one.flops_per_item for one in made], "answered": made[0].answers is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays, **{_ABOUT: np.array(json.dumps(about))})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
