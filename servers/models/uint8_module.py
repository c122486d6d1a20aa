"""A module that takes RGB bytes and normalises them where it runs, in front of one that takes normalised pixels.

Every other payload is executed by the model's own module.

The arithmetic is torchvision's, in FP32 and in its order, so on one device the answers equal those to pixels from
`servers.models.images.normalise`, bit for bit.
"""

from __future__ import annotations

import torch

from servers.models.specification import ModelSpecification, Preprocessing


class UInt8Images(torch.nn.Module):
    """uint8 (n, s, s, 3) → the output of `tower` for float (n, 3, s, s) in its precision, `dtype`."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, tower: torch.nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.tower = tower
        self.dtype = next((parameter.dtype for parameter in tower.parameters()), torch.float32)
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(preprocessing.std).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Normalise the bytes and run the tower."""
        embedding: torch.Tensor = self.tower(self.normalised(pixel_values))
        return embedding

    def normalised(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """What the tower gets."""
        scaled = pixel_values.permute(0, 3, 1, 2).to(self.mean.dtype) / 255
        return ((scaled - self.mean) / self.std).to(self.dtype)


def executed_module(specification: ModelSpecification, tower: torch.nn.Module) -> torch.nn.Module:
    """The module that takes this variant's inputs; `tower` is the model's own, which takes normalised pixels."""
    return UInt8Images(tower, specification.preprocessing).eval() if specification.payload == "uint8" else tower


def to_precision(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert the parameters; bytes are still normalised in FP32, since a half cannot hold every byte's value."""
    if isinstance(module, UInt8Images):
        module.tower.to(dtype=dtype)
        module.dtype = dtype
        return module
    return module.to(dtype=dtype)
