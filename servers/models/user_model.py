"""How a user's file describes its module: `from servers.models import Input, Output, UserModel`.

Shapes begin with "batch". A string names a dimension of variable size; `sizes` gives its default and its largest value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from servers.models.specification import OutputKind, Preprocessing

if TYPE_CHECKING:
    import torch

Shape = Sequence[int | str]


@dataclass(frozen=True, slots=True)
class Input:
    """One input: its name, a datatype of the protocol such as FP32 or INT64, and its shape."""

    name: str
    datatype: str
    shape: Shape
    values: tuple[int, int] | None = None
    """Generated values: from the first, below the second. Default: bytes for UINT8, 0 or 1 for other integers, else
    normally distributed. If an embedding of the module has as many rows as the second, servers refuse other ids."""
    padding: int | None = None
    """The value of places beyond an item's own length; None: items of different lengths share no batch."""


@dataclass(frozen=True, slots=True)
class Output:
    """One output. `kind` says how answers are compared: embedding, logits, labels or tensor."""

    name: str
    datatype: str
    shape: Shape
    kind: OutputKind = "tensor"


@dataclass(frozen=True, slots=True)
class UserModel:
    """A module with its description; the module takes the inputs in order and returns one tensor or a tuple."""

    module: torch.nn.Module
    inputs: Sequence[Input]
    outputs: Sequence[Output]
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Default and largest size of each dimension that a shape names, besides the batch."""
    title: str | None = None
    item: str = "item"
    """What one row of a batch is, for the report: image, sequence."""
    max_batch_size: int = 32
    samples: Mapping[str, Any] | None = None
    """Items to send, by input: arrays [items, …] of one length; default: generated ones."""
    image: Preprocessing | None = None
    """For a model whose only input is normalised pixels, FP32 [batch, 3, size, size]."""
