"""The batch with which an engine is compared with the model's own module: mixed sizes, each item also on its own.

Items of a model with a padded axis have different sizes. The module answers each alone, without padding, and the engine
the padded batch, so that the comparison also shows whether padding changes an answer. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from servers.engines.batches import random_inputs
from servers.models.items import valid_items
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array

Answer = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Answers a batch: arrays by input in, arrays by output out."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One batch; `lengths` holds each item's size along the padded axis, and is empty where no item is padded."""

    specification: ModelSpecification
    inputs: Mapping[str, Array]
    lengths: tuple[int, ...] = ()

    def expected(self, answer: Answer) -> dict[str, Array]:
        """The answers to each item alone, zero in the places of padding."""
        axis = self.specification.padded_axis
        if axis is None or not self.lengths:
            return dict(answer(self.inputs))
        alone = [
            answer({name: axis.cut(name, array[row : row + 1], length) for name, array in self.inputs.items()})
            for row, length in enumerate(self.lengths)
        ]
        stacked: dict[str, Array] = {}
        for name in alone[0]:
            shape = np.max([answers[name].shape for answers in alone], axis=0)
            stacked[name] = np.zeros((len(alone), *shape[1:]), alone[0][name].dtype)
            for row, answers in enumerate(alone):
                part = answers[name]
                place: tuple[Any, ...] = (row, *map(slice, part.shape[1:]))
                stacked[name][place] = part[0]
        return stacked

    def without_padding(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Answers to the batch with zeros in the places of padding, as in `expected`."""
        axis = self.specification.padded_axis
        if axis is None or not self.lengths:
            return dict(outputs)
        cleared = {name: array.copy() for name, array in outputs.items()}
        for name, array in cleared.items():
            axis.pad(name, array, self.lengths)
        return cleared


def proof_batch(specification: ModelSpecification, rows: int, seed: int, share: float = 1.0) -> Proof:
    """Random items; the largest has this share of the axes' default sizes, the others of a padded axis less."""
    sizes = {axis.name: min(max(1, round(share * axis.default)), axis.largest) for axis in specification.axes}
    if (axis := specification.padded_axis) is None:
        return Proof(specification, random_inputs(specification, rows, seed, sizes))
    lengths = tuple(max(1, sizes[axis.name] * (rows - row) // rows) for row in range(rows))
    return Proof(specification, valid_items(specification, seed, lengths), lengths)
