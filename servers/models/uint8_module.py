"""A module that takes RGB bytes and normalises them where it runs, in front of the one that takes normalised pixels.

The arithmetic is torchvision's, in FP32 and in its order, so on one device the answers equal those to pixels that
`servers.models.preprocessing.normalise` has made, bit for bit.

torch.jit.script takes the module as well as the trace does. It reads the annotations of the class as they are, so they
must not be postponed: no `from __future__ import annotations` here.
"""

import torch

from servers.models.specification import ModelSpecification, Preprocessing
from servers.models.weights import WeightsSource


class UInt8Images(torch.nn.Module):
    """uint8 (n, s, s, 3) → what `tower` makes of float (n, 3, s, s) in its own precision.

    `dtype` is that precision: a tower is converted by `to_precision`, which keeps it true.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, tower: torch.nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.tower = tower
        self.dtype = next((parameter.dtype for parameter in tower.parameters()), torch.float32)
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(preprocessing.std).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scaled = pixel_values.permute(0, 3, 1, 2).to(self.mean.dtype) / 255
        normalised = (scaled - self.mean) / self.std
        embedding: torch.Tensor = self.tower(normalised.to(self.dtype))
        return embedding


def load_executed_module(specification: ModelSpecification, weights: WeightsSource) -> torch.nn.Module:
    """The FP32 module that takes this variant's input, in eval mode on the CPU. Raises `WeightsError`.

    `specification` is one that an engine executes: FP32 or UINT8.
    """
    module = specification.load_module(weights)
    if specification.payload == "fp32":
        return module
    return UInt8Images(module, specification.preprocessing).eval()


def to_precision(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert the parameters; the normalisation of bytes stays FP32, since a half cannot hold every byte's value."""
    tower_of(module).to(dtype=dtype)
    if isinstance(module, UInt8Images):
        module.dtype = dtype
    return module


def tower_of(module: torch.nn.Module) -> torch.nn.Module:
    """The part of an executed module that takes normalised pixels."""
    return module.tower if isinstance(module, UInt8Images) else module
