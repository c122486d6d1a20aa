"""Items to send to a model: photographs, or random values by datatype and range, padded to the longest item.

The photographs are in `corpus/`, JPEGs of several sizes and qualities; CREDITS.md there names source and licence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from servers.models.specification import ModelDescription, ModelSpecification
from servers.protocol.tensors import Array, TensorSpec

CORPUS = Path(__file__).resolve().parent / "corpus"
QUANTILES = {0.0: 5, 0.05: 10, 0.1: 13, 0.25: 22, 0.5: 38, 0.75: 69, 0.9: 108, 0.95: 148, 0.99: 265, 1.0: 2213}
"""Share of the paragraphs of real text with at most so many tokens; between them lengths are interpolated.

Measured in the 2,295 paragraphs with at least three words of `pydoc_data.topics` of Python 3.11.7, the reference manual
that comes with Python (PSF licence, version 2). A paragraph ends at a blank line. Its tokens were counted as a
WordPiece tokenizer would roughly make them: a run of letters and a run of digits count one for every 7 characters
begun, every other character that is not space counts one, and two special tokens frame the paragraph.
"""


def random_array(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    values: tuple[int, int] | None = None,
) -> Array:
    """Values in the given range, else uniform bytes for UINT8, 0 or 1 for other integers and booleans, short words for
    BYTES, and standard normal values drawn as FP32 for the rest."""
    if dtype.kind == "O":
        words = generator.integers(ord("a"), ord("z") + 1, (*shape, 8), np.uint8)
        array = np.empty(shape, object)
        array.reshape(-1)[:] = [bytes(word) for word in words.reshape(-1, 8)]
        return array
    if values is not None:
        drawn = generator.integers(*values, shape) if dtype.kind in "iub" else generator.uniform(*values, shape)
        return drawn.astype(dtype)
    if dtype == np.uint8:
        return generator.integers(0, 256, shape, np.uint8)
    if dtype.kind in "iub":
        return generator.integers(0, 2, shape, np.uint8).astype(dtype)
    normal: Array = generator.standard_normal(shape, np.float32).astype(dtype, copy=False)
    return normal


def random_tensor(
    specification: ModelDescription, tensor: TensorSpec, generator: np.random.Generator, shape: tuple[int, ...]
) -> Array:
    """Values for an input: of its range where the description knows it, else as `random_array` draws them."""
    if tensor.name not in specification.values:
        return random_array(generator, shape, tensor.dtype)
    values = specification.values[tensor.name]
    if values is None:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(tensor.dtype)
    return random_array(generator, shape, tensor.dtype, values)


def text_ids(vocabulary: int) -> tuple[int, int]:
    """The range of a text's token ids: without the first thousand, which are special or unused in BERT's vocabulary."""
    return min(1000, vocabulary // 2), vocabulary


def valid_items(specification: ModelSpecification, seed: int, lengths: Sequence[int]) -> Mapping[str, Array]:
    """One item per length, padded to the longest: the model's own items if it describes some, else random ones."""
    return (specification.make_items or partial(random_items, specification))(seed, lengths)


def random_items(specification: ModelDescription, seed: int, lengths: Sequence[int]) -> dict[str, Array]:
    """One item per length, the size along the first axis; where that is padded, items end with their padding. Lengths
    may differ only on a padded axis. Other axes have their default size."""
    items = random_batch(specification, len(lengths), seed, specification.along(max(lengths)))
    if (axis := specification.main_axis) is not None:
        for name, array in items.items():
            axis.pad(name, array, lengths)
    return items


def random_batch(
    specification: ModelDescription, rows: int, seed: int, sizes: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """Random values by input; axes without an entry in `sizes` have their default. No place is padding."""
    generator = np.random.default_rng(seed)
    return {
        tensor.name: random_tensor(specification, tensor, generator, (rows, *specification.item_shape(tensor, sizes)))
        for tensor in specification.inputs
    }


def item_bytes(specification: ModelSpecification, length: int | None) -> int:
    """The size of one item's inputs; a BYTES element counts as 8 bytes."""
    sizes = specification.along(length)
    return sum(prod(specification.item_shape(tensor, sizes)) * tensor.dtype.itemsize for tensor in specification.inputs)


def text_lengths(count: int, seed: int, largest: int) -> list[int]:
    """`count` lengths in random order, one from each of `count` equal parts of the distribution, cut at `largest`. So
    even a few lengths have nearly the distribution's mean."""
    generator = np.random.default_rng(seed)
    shares = (generator.permutation(count) + generator.random(count)) / count
    lengths = np.interp(shares, list(QUANTILES), list(QUANTILES.values()))
    return [min(largest, round(length)) for length in lengths]


def jpeg_paths() -> tuple[Path, ...]:
    """The corpus in its fixed order."""
    return tuple(sorted(CORPUS.glob("*.jpg")))


def credits_text() -> str:
    """Source, author and licence of every picture, as Markdown."""
    return (CORPUS / "CREDITS.md").read_text(encoding="utf-8")
