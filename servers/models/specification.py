"""What is served: one immutable record that every server, exporter and test reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servers.contract.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    from servers.models.weights import WeightsSource


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """From an image to the model's input: decode to RGB, resize the shorter side, centre crop, scale, normalise.

    `mean` and `std` are per RGB channel on values scaled to 0–1.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"


@dataclass(frozen=True, slots=True)
class ModelSpecification:
    """One model. Adding a model means adding one of these to the registry."""

    name: str
    title: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    flops_per_item: int
    """Floating-point operations of one item, a multiply-add counted as two; the model's module gives the count."""
    preprocessing: Preprocessing
    default_weights: str
    load_module: Callable[[WeightsSource], torch.nn.Module]
    """Build the FP32 module in eval mode on the CPU, one positional argument an input in `inputs` order, one output.
    Imports torch itself, so that reading a specification stays cheap. Raises `WeightsError`."""
    pretrained_tags: Callable[[], tuple[str, ...]]
    """Tags that `--weights` accepts for this model."""
