"""A model as it is served: one immutable record that every server, exporter and test reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
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
    """Floating-point operations per item, a multiply-add counted as two."""
    preprocessing: Preprocessing
    default_weights: str
    load_module: Callable[[WeightsSource], torch.nn.Module]
    """Build the FP32 module in eval mode on the CPU. It takes normalised FP32 pixels, whatever the payload, and has
    one output. Imports torch itself, so that reading a specification stays cheap. Raises `WeightsError`."""
    pretrained_tags: Callable[[], tuple[str, ...]]
    """The tags that `--weights` accepts for this model."""
    find_pretrained: FindPretrained | None = None
    """Finds the file of a tag; None for a model without tags."""
    payload: Payload = "fp32"
    """The form of an image in a request: normalised values, RGB bytes, or a JPEG file."""
    base_name: str | None = None
    """For a variant, the name of its FP32 model."""
    decodes_to: ModelSpecification | None = None
    """For JPEG, the variant that gets the decoded pixels."""

    @property
    def base(self) -> str:
        """The name that all payload variants of one model share."""
        return self.base_name or self.name

    @property
    def executed(self) -> ModelSpecification:
        """The variant whose inputs the engine takes: the UINT8 one for JPEG, which no engine decodes."""
        return self.decodes_to or self


def choose_from(value: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown value: the closest known one, or all of them if none is close."""
    names, lower = list(known), value.lower()
    close = [name for name in names if lower and name.startswith(lower)] or get_close_matches(lower, names, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of: {', '.join(names)}"
