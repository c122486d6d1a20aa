"""What is served: one immutable record that every server, exporter and test reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from servers.contract.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    from servers.models.weights import FindPretrained, WeightsSource


Payload = Literal["fp32", "uint8", "jpeg"]
PAYLOADS: tuple[Payload, ...] = get_args(Payload)


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
    """One model as it is served, with the form in which an image reaches it (see `servers.models.registry`)."""

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
    """Build the FP32 module in eval mode on the CPU, with normalised FP32 pixels as its argument whatever the payload
    is, and one output. Imports torch itself, so that reading a specification stays cheap. Raises `WeightsError`."""
    pretrained_tags: Callable[[], tuple[str, ...]]
    """Tags that `--weights` accepts for this model."""
    find_pretrained: FindPretrained | None = None
    """Where the file of a tag is; None for a model that has no tags."""
    payload: Payload = "fp32"
    """How an image travels to this model: normalised values, RGB bytes, or a JPEG file."""
    base_name: str | None = None
    """For a variant, the name of the FP32 model that it was derived from."""
    decodes_to: ModelSpecification | None = None
    """For JPEG, the variant that gets the decoded pixels."""

    @property
    def base(self) -> str:
        """The name that all payload variants of one model share."""
        return self.base_name or self.name

    @property
    def executed(self) -> ModelSpecification:
        """The variant whose inputs the engine takes: itself, but for JPEG, which no engine decodes."""
        return self.decodes_to or self
