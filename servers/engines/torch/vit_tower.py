"""The lean vision tower in plain torch: any device, any floating dtype, and the reference for the fused kernels.

Exact algebra rearranges the weights of an open_clip tower so that less is left to execute. Everything is FP32 here;
cast once, at the end. With γ, β a LayerNorm's gain and bias and W, b the linear layer behind:

    linear(LN(x)) = (x̂ γ + β) Wᵀ + b = x̂ (W γ)ᵀ + (b + W β),   x̂ = (x - mean) / sqrt(variance + ε)

The attention's 1/√d goes into the query rows, and the normalisation of 8-bit pixels into the patch embedding: a byte u
enters as (u - 128)/64, which every 16-bit float holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from servers.models.specification import Preprocessing

BYTE_CENTRE = 128.0
BYTE_SCALE = 64.0
"""A byte u is fed to the patch embedding as (u - BYTE_CENTRE) / BYTE_SCALE."""


class UnsupportedTowerError(Exception):
    """The vision tower has a feature that only its own module executes."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The sizes of one tower. A row has `width` elements; an image has `tokens` rows, the class token first."""

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

    Raises `UnsupportedTowerError` for features that the lean module does not execute: pooling other than the class
    token, layer scale, patch dropout, custom blocks, a missing `ln_pre` or projection, more than one embedding
    returned; and for a module that is not a tower of open_clip's kind.
    """
    try:
        return _shape_of(visual)
    except AttributeError as exc:
        raise UnsupportedTowerError(f"not a vision transformer of open_clip ({exc}): use mode eager") from exc


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


def fold_attention(block: Any, head_width: int) -> tuple[Tensor, Tensor]:
    """The packed QKV weight [3·width, width] and bias of a block, on x̂, the queries scaled by 1/√head_width."""
    attention: nn.MultiheadAttention = block.attn
    weight, bias = fold_norm(block.ln_1, attention.in_proj_weight, attention.in_proj_bias)
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


class LeanBlock(nn.Module):
    """One residual block: packed QKV, scaled dot-product attention, MLP. Its LayerNorms have no parameters left."""

    def __init__(self, shape: TowerShape, block: Any) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = _linear(*fold_attention(block, shape.head_width))
        self.attention_out = _linear(block.attn.out_proj.weight, block.attn.out_proj.bias)
        self.mlp_in = _linear(*fold_norm(block.ln_2, block.mlp.c_fc.weight, block.mlp.c_fc.bias))
        self.mlp_out = _linear(block.mlp.c_proj.weight, block.mlp.c_proj.bias)

    def forward(self, x: Tensor, class_only: bool = False) -> Tensor:
        """Tokens [n, tokens, width] in; the same out, or [n, 1, width], the class token alone, if `class_only`."""
        shape = self.shape
        images, tokens, _ = x.shape
        packed = self.qkv(_normalise(x, shape)).view(images, tokens, 3, shape.heads, shape.head_width)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        if class_only:
            query, x = query[:, :, :1], x[:, :1]
        mixed = F.scaled_dot_product_attention(query, key, value, scale=1.0)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(images, -1, shape.width))
        hidden = self.mlp_in(_normalise(x, shape))
        hidden = hidden * torch.sigmoid(1.702 * hidden) if shape.quick_gelu else F.gelu(hidden)
        result: Tensor = x + self.mlp_out(hidden)
        return result


class LeanVisionTower(nn.Module):
    """Computes open_clip's `visual` up to rounding; in eval mode, on the CPU in FP32, with its own memory.

    Input: floats [n, 3, s, s], normalised, of any float dtype; with `byte_input` bytes [n, s, s, 3], RGB 0–255, which
    are normalised here by its values. Output [n, output_width] in the dtype of the weights, not of unit length, as
    open_clip's. Raises `UnsupportedTowerError` for a tower that computes something else.
    """

    patch_weight: Tensor
    position: Tensor
    class_row: Tensor

    @torch.no_grad()
    def __init__(self, visual: Any, byte_input: Preprocessing | None = None) -> None:
        super().__init__()
        shape = self.shape = read_shape(visual)
        self.bytes_in = byte_input is not None
        weight, positions = (t.detach().float().cpu() for t in (visual.conv1.weight, visual.positional_embedding))
        bias = torch.zeros(shape.width)
        if byte_input is not None:
            weight, bias = fold_bytes(weight, byte_input.mean, byte_input.std)
            weight = weight.permute(0, 2, 3, 1)  # the columns in the order of the bytes
        self.register_buffer("patch_weight", weight.flatten(1).clone())
        self.register_buffer("position", positions[1:] + bias)
        # The class token enters every image alike, so its row after ln_pre is a constant.
        self.register_buffer("class_row", visual.ln_pre(visual.class_embedding + positions[0]))
        self.norm_pre = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.norm_pre.load_state_dict(visual.ln_pre.state_dict())
        self.blocks = nn.ModuleList(LeanBlock(shape, block) for block in visual.transformer.resblocks)
        projection = visual.proj.detach().t()
        self.head = _linear(*fold_norm(visual.ln_post, projection, torch.zeros_like(projection[:, 0])))
        self.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """See the class."""
        shape = self.shape
        embedded = F.linear(self._patches(pixels), self.patch_weight) + self.position
        classes = self.class_row.expand(pixels.shape[0], 1, shape.width)
        x = torch.cat([classes, self.norm_pre(embedded)], dim=1)
        for index, block in enumerate(self.blocks):
            # Only the class token is read from the last block; keys and values still come from every token.
            x = block(x, class_only=index == shape.layers - 1)
        result: Tensor = self.head(_normalise(x[:, 0], shape))
        return result

    def _patches(self, pixels: Tensor) -> Tensor:
        """Pixels → [n, patches, 3·p·p] in the dtype of the weights: floats channel by channel, bytes pixel by pixel."""
        grid, side = self.shape.grid, self.shape.patch_size
        if self.bytes_in:
            cut = pixels.reshape(-1, grid, side, grid, side, 3).permute(0, 1, 3, 2, 4, 5)
        else:
            cut = pixels.reshape(-1, 3, grid, side, grid, side).permute(0, 2, 4, 1, 3, 5)
        patches = cut.reshape(-1, grid * grid, self.shape.patch_elements).to(self.patch_weight.dtype)
        return (patches - BYTE_CENTRE) / BYTE_SCALE if self.bytes_in else patches


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = (nn.Parameter(t.detach().float().cpu().contiguous().clone()) for t in (weight, bias))
    return linear


def _normalise(x: Tensor, shape: TowerShape) -> Tensor:
    return F.layer_norm(x, (shape.width,), eps=shape.epsilon)
