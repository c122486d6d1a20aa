"""A model as it is served: one immutable record that every server, engine, exporter and test reads.

A user's file describes its module with `from servers.models import Input, Output, UserModel`. Shapes there begin with
"batch"; a string names a dimension of variable size, and `sizes` gives its default and its largest value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from servers.models.weights import FindPretrained, WeightsSource, parse_weights, pin
from servers.protocol.examples import infer_commands
from servers.protocol.tensors import Array, Axis, TensorSpec

if TYPE_CHECKING:
    import torch

Payload = Literal["tensors", "fp32", "uint8", "jpeg"]
PAYLOADS: tuple[Payload, ...] = get_args(Payload)

OutputKind = Literal["embedding", "logits", "labels", "tensor"]
"""How answers are compared: direction and length of a vector; scores and their order; equality; element by element."""


class UnknownModelError(Exception):
    """The model, or its variant for a payload, does not exist or cannot be described; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """From an image to the model's input: decode to RGB, resize the shorter side, centre crop, scale, normalise.

    `mean` and `std` are per RGB channel on values scaled to 0–1. `size` is the side after the crop in pixels, `resize`
    the shorter side before it; None is `size`. With `squash` both sides are resized to it, whatever the picture's
    proportions.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"
    resize: int | None = None
    squash: bool = False


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model without its library: everything that a server's command, its front ends and its clients
    need. `servers.models.descriptions` keeps it."""

    name: str
    """The name on a server."""
    title: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    reference: str = ""
    """The value of `--model`: open_clip:ViT-B-32, or an absolute path. `label` has no folders."""
    kinds: Mapping[str, OutputKind] = field(default_factory=dict)
    """How each output is compared; an output without an entry is a `tensor`."""
    axes: tuple[Axis, ...] = ()
    id_counts: Mapping[str, int] = field(default_factory=dict)
    """By input of ids, such as token ids, the number of valid ones: 0 to one less. Servers refuse others."""
    item: str = "item"
    """What one row of a batch is: image, sequence, item."""
    flops_per_item: int | None = None
    """Floating-point operations per item at the axes' default sizes, a multiply-add counted as two; None: unknown."""
    definition_sha256: str | None = None
    """SHA-256 of the user's file that defines the model: other content means another model, even with equal weights."""
    values: Mapping[str, tuple[int, int] | None] = field(default_factory=dict)
    """By input whose generated values have a range, that: from the first, below the second; None: counted from 0."""
    image: Preprocessing | None = None
    """How an image becomes the only input; None for a model that takes no image."""
    default_weights: str = "random:0"
    fused_tower: bool = False
    """Whether the module is a vision transformer that the fused kernels and operators may replace."""
    payload: Payload = "tensors"
    """What a request carries: the model's own tensors (`fp32` if they are normalised pixels), RGB bytes, or a JPEG
    file."""
    base_name: str | None = None
    """For a variant, the name of the model itself."""

    @property
    def label(self) -> str:
        """The reference without folders of this machine, for configurations that clients read and people publish."""
        if not self.reference.startswith("/"):
            return self.reference
        return ":".join(part.rpartition("/")[2] for part in self.reference.split(":"))

    @property
    def base(self) -> str:
        """The name that all payload variants of one model share."""
        return self.base_name or self.name

    @property
    def preprocessing(self) -> Preprocessing:
        """How an image becomes the only input. Raises `ValueError` for a model that takes no image."""
        if self.image is None:
            raise ValueError(f"{self.name} takes no image")
        return self.image

    @property
    def padded_axis(self) -> Axis | None:
        """The axis along which batches may be padded; None without one."""
        return next((axis for axis in self.axes if axis.padded), None)

    @property
    def cannot_pad(self) -> str | None:
        """Why its items cannot be padded to share a batch, as a clause; None: they can."""
        return f"items of {self.name} cannot be padded" if self.padded_axis is None else None

    @property
    def main_axis(self) -> Axis | None:
        """The axis along which items have their length: the padded one, else the first."""
        return self.padded_axis or next(iter(self.axes), None)

    def along(self, size: int | None) -> dict[str, int]:
        """Sizes by axis, with `size` for the main one; empty, which means the defaults, for None or without axes."""
        return {} if size is None or (axis := self.main_axis) is None else {axis.name: size}

    def kind_of(self, output: str) -> OutputKind:
        """How the answers of an output are compared."""
        return self.kinds.get(output, "tensor")

    def item_shape(self, tensor: TensorSpec, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape of one item with these sizes by axis; other axes have their default."""
        shape = list(tensor.item_shape)
        for axis in self.axes:
            if (place := axis.places.get(tensor.name)) is not None:
                shape[place - 1] = (sizes or {}).get(axis.name, axis.default)
        return tuple(shape)

    @property
    def described(self) -> ModelDescription:
        """The description alone."""
        return ModelDescription(**{known.name: getattr(self, known.name) for known in fields(ModelDescription)})


@dataclass(frozen=True, slots=True)
class ModelSpecification(ModelDescription):
    """One model as it is served, with the payload that reaches it (see `servers.models.registry`)."""

    _: KW_ONLY
    load_module: Callable[[WeightsSource], torch.nn.Module]
    """Build the FP32 module in eval mode on the CPU. It takes the inputs in order, for images the FP32 variant's,
    and returns the output, or a tuple of the outputs in order. Imports torch itself, so that reading a specification
    stays cheap. Raises `WeightsError`, always for a model that is only a `file`."""
    file: Path | None = None
    """The ONNX file of a model without a module; engines that execute files take it unchanged."""
    make_items: Callable[[int, Sequence[int]], Mapping[str, Array]] | None = None
    """`make_items(seed, lengths)` returns one item per length, padded to the longest, by input. A model without axes
    uses only the number of lengths. None: photographs for a model of images, else random values."""
    samples: Mapping[str, Array] | None = field(default=None, compare=False)
    """Items that the model's author supplies, by input, padded to the longest; None: items are generated."""
    pretrained_tags: Callable[[], tuple[str, ...]] = tuple
    """The tags that `--weights` accepts for this model."""
    find_pretrained: FindPretrained | None = None
    """Finds the file of a tag; None for a model without tags."""
    decodes_to: ModelSpecification | None = None
    """For JPEG, the variant that gets the decoded pixels."""

    def pinned(self, option: str | None) -> WeightsSource:
        """The weights of `--weights`, None for the model's own, with the hash of their file. Raises `WeightsError`."""
        return pin(parse_weights(option, self.default_weights), self.find_pretrained)

    def for_process(self, model: str, weights: str | None) -> dict[str, str]:
        """These options for a process in any folder: a path is absolute, weights are pinned. Raises `WeightsError`."""
        reference = self.reference if self.reference.startswith("/") else model
        return {"model": reference, "weights": self.pinned(weights).text}

    def examples(self, url: str) -> tuple[str, ...]:
        """Commands for a shell that send one request to a server at that URL."""
        return infer_commands(url, self.name, self.inputs)

    @property
    def executed(self) -> ModelSpecification:
        """The variant whose inputs the engine takes: the UINT8 one for JPEG, which no engine decodes."""
        return self.decodes_to or self


def image_specification(
    reference: str,
    preprocessing: Preprocessing,
    output: TensorSpec,
    kind: OutputKind,
    load_module: Callable[[WeightsSource], torch.nn.Module],
    **others: Any,
) -> ModelSpecification:
    """The specification of a model with one image as input; `others` add to the usual fields or replace them."""
    source, _, name = reference.partition(":")
    usual: dict[str, Any] = {
        "name": served_name(reference),
        "title": f"{source} {name}",
        "version": "1",
        "inputs": (TensorSpec("pixel_values", "FP32", (-1, 3, preprocessing.size, preprocessing.size)),),
        "kinds": {output.name: kind},
        "item": "image",
        "max_batch_size": 32,
        "payload": "fp32",
    }
    return ModelSpecification(
        reference=reference, outputs=(output,), image=preprocessing, load_module=load_module, **(usual | others)
    )


def served_name(text: str) -> str:
    """A name for servers and folders: lower-case letters, digits and underscores."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "model"


def refuse_tag(reference: str, tag: str, names: Iterable[str]) -> NoReturn:
    """Raises `UnknownModelError`: the library has the model, but not these weights of it."""
    raise UnknownModelError(f"{reference} has no weights {tag!r}; {choose_from(tag, names)}")


def choose_from(value: str, choices: Iterable[str]) -> str:
    """The end of a message about an unknown value: the closest known one, or all of them if none is close."""
    names = list(choices)
    close = closest(value, names)
    return f"did you mean {close[0]}?" if close else f"use one of: {', '.join(names)}"


def reason_of(exc: BaseException) -> str:
    """An exception's cause in one line; libraries may add pages. TorchScript's interpreter puts it at the end."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
    return lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]


def closest(value: str, choices: Iterable[str]) -> list[str]:
    """Up to three known names that begin with `value`, the shortest first, or else are most like it."""
    names, lower = list(choices), value.lower()
    close = sorted((name for name in names if lower and name.lower().startswith(lower)), key=len)
    return close[:3] or get_close_matches(value, names) or get_close_matches(lower, names)


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
