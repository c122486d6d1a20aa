"""An open_clip vision tower's weights, rearranged by exact algebra so that less is left to execute.

Everything is FP32 here; cast once, at the end. With γ, β a LayerNorm's gain and bias and W, b the linear layer behind:

    linear(LN(x)) = (x̂ γ + β) Wᵀ + b = x̂ (W γ)ᵀ + (b + W β),   x̂ = (x - mean) / sqrt(variance + ε)

The attention's 1/√d goes into the query rows, and the normalisation of 8-bit pixels into the patch embedding: a byte u
enters as (u - 128)/64, which every 16-bit float holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BYTE_CENTRE = 128.0
BYTE_SCALE = 64.0
"""A byte u is fed to the patch embedding as (u - BYTE_CENTRE) / BYTE_SCALE."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class UnsupportedTowerError(Exception):
    """The vision tower has a feature that the lean module does not execute; its own module does."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The sizes of one tower. A row has `width` elements; there are `tokens` rows an image, the class token first."""

    image_size: int
    patch_size: int
    width: int
    heads: int
    layers: int
    mlp_width: int
    output_width: int
    quick_gelu: bool
    epsilon: float

    @property
    def grid(self) -> int:
        """Patches along one side."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return self.grid**2 + 1

    @property
    def head_width(self) -> int:
        """Elements of one head's query."""
        return self.width // self.heads

    @property
    def patch_elements(self) -> int:
        """Values of one patch, all channels."""
        return 3 * self.patch_size**2


def read_shape(visual: nn.Module) -> TowerShape:
    """Read the sizes off an open_clip `VisionTransformer` (or a module with the same attributes).

    Raises `UnsupportedTowerError` for what the lean module does not execute: pooling other than the class token,
    layer scale, patch dropout, custom blocks, a missing `ln_pre` or projection, more than one embedding returned; and
    for a module that is not even a tower of open_clip's kind.
    """
    try:
        return _shape_of(visual)
    except AttributeError as exc:
        raise UnsupportedTowerError(f"not a vision transformer as open_clip builds it ({exc}): use mode eager") from exc


def _shape_of(visual: nn.Module) -> TowerShape:
    state = visual.state_dict()
    blocks = list(visual.transformer.resblocks)  # type: ignore[union-attr, arg-type]
    expected = {f"transformer.resblocks.{i}.{name}" for i in range(len(blocks)) for name in _BLOCK_NAMES} | _TOWER_NAMES
    if set(state) != expected:
        odd = sorted(set(state) ^ expected)[:3]
        raise UnsupportedTowerError(
            f"not a plain class-token vision transformer (see {', '.join(odd)}): use mode eager"
        )
    if getattr(visual, "pool_type", "tok") != "tok" or getattr(visual, "output_tokens", False):
        raise UnsupportedTowerError("the tower pools or returns more than the class token: use mode eager")
    width, _, patch, _ = state["conv1.weight"].shape
    grid = round((state["positional_embedding"].shape[0] - 1) ** 0.5)
    if grid**2 + 1 != state["positional_embedding"].shape[0]:
        raise UnsupportedTowerError("the image is not square: use mode eager")
    epsilons = {module.eps for module in visual.modules() if isinstance(module, nn.LayerNorm)}
    activation = type(blocks[0].mlp.gelu).__name__
    if len(epsilons) != 1 or activation not in ("GELU", "QuickGELU"):
        raise UnsupportedTowerError(f"activation {activation}, LayerNorm epsilons {epsilons}: use mode eager")
    return TowerShape(
        image_size=grid * patch,
        patch_size=patch,
        width=width,
        heads=blocks[0].attn.num_heads,
        layers=len(blocks),
        mlp_width=state["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        output_width=state["proj"].shape[1],
        quick_gelu=activation == "QuickGELU",
        epsilon=epsilons.pop(),
    )


def fold_norm(norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of linear(LN(x)) as a function of x̂; weight [out, in], bias [out]."""
    return weight * norm.weight, bias + weight @ norm.bias


def fold_attention(block: nn.Module, head_width: int) -> tuple[Tensor, Tensor]:
    """The packed QKV weight [3·width, width] and bias of a block, on x̂, the queries scaled by 1/√head_width."""
    attention: nn.MultiheadAttention = block.attn  # type: ignore[assignment]
    weight, bias = fold_norm(block.ln_1, attention.in_proj_weight, attention.in_proj_bias)  # type: ignore[arg-type]
    scale = torch.ones_like(bias)
    scale[: attention.embed_dim] = head_width**-0.5
    return weight * scale[:, None], bias * scale


def fold_bytes(weight: Tensor, mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Patch weight [width, 3, p, p] and bias [width] that take (u - 128)/64 instead of (u/255 - mean)/std."""
    means, stds = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    exact = weight.double()
    bias = (exact * ((BYTE_CENTRE / 255 - means) / stds)).sum((1, 2, 3))
    return (exact * (BYTE_SCALE / 255 / stds)).float(), bias.float()


_TOWER_NAMES = {
    "class_embedding",
    "positional_embedding",
    "proj",
    "conv1.weight",
    *(f"{norm}.{part}" for norm in ("ln_pre", "ln_post") for part in ("weight", "bias")),
}
_BLOCK_NAMES = {
    "attn.in_proj_weight",
    "attn.in_proj_bias",
    *(
        f"{layer}.{part}"
        for layer in ("ln_1", "ln_2", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
        for part in ("weight", "bias")
    ),
}
