"""An image tower of the default model's kind with two layers, for what does not depend on the size of a tower."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.options.libraries import import_library
from servers.protocol.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

LAYERS, WIDTH, EMBEDDING = 2, 128, 16


def small_tower(*, quick_gelu: bool = False, seed: int = 0) -> torch.nn.Module:
    """With every bias and gain away from 0 and 1, where a forgotten one would not show."""
    import torch

    import_library("open_clip")  # without what no tower needs
    transformer = import_module("open_clip.transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tower = transformer.VisionTransformer(
            image_size=224, patch_size=32, width=WIDTH, layers=LAYERS, heads=2, mlp_ratio=4, output_dim=EMBEDDING,
            act_layer=transformer.QuickGELU if quick_gelu else torch.nn.GELU,
        )  # fmt: skip
        with torch.no_grad():
            for parameter in tower.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
    return tower.eval().requires_grad_(False)


def with_small_tower(specification: ModelSpecification) -> ModelSpecification:
    """The default model's specification, but for the tower and the length of the embedding."""

    def load(_source: WeightsSource) -> torch.nn.Module:
        return small_tower()

    outputs = (TensorSpec("embedding", "FP32", (-1, EMBEDDING)),)
    return replace(specification, name="small", outputs=outputs, load_module=load)
