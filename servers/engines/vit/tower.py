"""The lean vision tower in plain torch: any device, any floating dtype, and the reference for the fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from servers.engines.vit.weights import (
    BYTE_CENTRE,
    BYTE_SCALE,
    CLIP_MEAN,
    CLIP_STD,
    TowerShape,
    fold_attention,
    fold_bytes,
    fold_norm,
    read_shape,
)


class LeanBlock(nn.Module):
    """One residual block: packed QKV, scaled dot-product attention, MLP. Its LayerNorms have no parameters left."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = _linear(shape.width, 3 * shape.width)
        self.attention_out = _linear(shape.width, shape.width)
        self.mlp_in = _linear(shape.width, shape.mlp_width)
        self.mlp_out = _linear(shape.mlp_width, shape.width)

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
    """Pixels to embeddings, the same function as open_clip's `visual` up to rounding.

    Input: floats [n, 3, s, s], normalised, any float dtype; or bytes, [n, 3, s, s] or [n, s, s, 3], RGB 0–255, which
    are normalised here. Output [n, output_width] in the dtype of the weights, not of unit length, as open_clip's.
    """

    patch_weight: Tensor
    byte_weight: Tensor
    position: Tensor
    byte_position: Tensor
    class_row: Tensor

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("patch_weight", torch.empty(shape.width, shape.patch_elements))
        self.register_buffer("byte_weight", torch.empty(shape.width, shape.patch_elements))
        self.register_buffer("position", torch.empty(shape.tokens - 1, shape.width))
        self.register_buffer("byte_position", torch.empty(shape.tokens - 1, shape.width))
        self.register_buffer("class_row", torch.empty(shape.width))
        self.norm_pre = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.blocks = nn.ModuleList(LeanBlock(shape) for _ in range(shape.layers))
        self.head = _linear(shape.width, shape.output_width)

    @classmethod
    @torch.no_grad()
    def from_open_clip(
        cls, visual: nn.Module, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD
    ) -> Self:
        """Rearrange the FP32 weights of open_clip's `visual`; `mean` and `std` are those that bytes get.

        The result is in eval mode, on the CPU in FP32, and shares no memory with `visual`; `.to(...)` it afterwards.
        Raises `UnsupportedTowerError` for a tower that computes something else.
        """
        shape = read_shape(visual)
        tower = cls(shape)
        conv: Tensor = visual.conv1.weight.detach().float().cpu()  # type: ignore[union-attr, operator]
        byte_weight, byte_bias = fold_bytes(conv, mean, std)
        positions: Tensor = visual.positional_embedding.detach().float()  # type: ignore[operator]
        norm_pre: nn.LayerNorm = visual.ln_pre  # type: ignore[assignment]
        tower.patch_weight.copy_(conv.flatten(1))
        tower.byte_weight.copy_(byte_weight.flatten(1))
        tower.position.copy_(positions[1:])
        tower.byte_position.copy_(positions[1:].cpu() + byte_bias)
        # The class token enters every image alike, so its row after ln_pre is a constant.
        tower.class_row.copy_(norm_pre(visual.class_embedding + positions[0]))  # type: ignore[operator]
        tower.norm_pre.load_state_dict(norm_pre.state_dict())
        for lean, block in zip(tower.blocks, visual.transformer.resblocks, strict=True):  # type: ignore[union-attr, arg-type]
            assert isinstance(lean, LeanBlock)
            _set(lean.qkv, *fold_attention(block, shape.head_width))
            _set(lean.attention_out, block.attn.out_proj.weight, block.attn.out_proj.bias)
            _set(lean.mlp_in, *fold_norm(block.ln_2, block.mlp.c_fc.weight, block.mlp.c_fc.bias))
            _set(lean.mlp_out, block.mlp.c_proj.weight, block.mlp.c_proj.bias)
        projection: Tensor = visual.proj.detach().t()  # type: ignore[operator]
        norm_post: nn.LayerNorm = visual.ln_post  # type: ignore[assignment]
        _set(tower.head, *fold_norm(norm_post, projection, torch.zeros_like(projection[:, 0])))
        return tower.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """See the class."""
        shape = self.shape
        patches = self._patches(pixels)
        raw = pixels.dtype == torch.uint8
        weight, position = (self.byte_weight, self.byte_position) if raw else (self.patch_weight, self.position)
        embedded = F.linear(patches, weight) + position
        classes = self.class_row.expand(pixels.shape[0], 1, shape.width)
        x = torch.cat([classes, self.norm_pre(embedded)], dim=1)
        for index, block in enumerate(self.blocks):
            # Only the class token is read from the last block; keys and values still come from every token.
            x = block(x, class_only=index == shape.layers - 1)
        result: Tensor = self.head(_normalise(x[:, 0], shape))
        return result

    def _patches(self, pixels: Tensor) -> Tensor:
        """Pixels → [n, patches, 3·p·p], channel by channel, in the dtype of the weights."""
        shape = self.shape
        if pixels.dtype == torch.uint8 and pixels.shape[-1] == 3:
            pixels = pixels.permute(0, 3, 1, 2)
        grid, side = shape.grid, shape.patch_size
        cut = pixels.reshape(-1, 3, grid, side, grid, side).permute(0, 2, 4, 1, 3, 5)
        patches = cut.reshape(-1, grid * grid, shape.patch_elements).to(self.patch_weight.dtype)
        return (patches - BYTE_CENTRE) / BYTE_SCALE if pixels.dtype == torch.uint8 else patches


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")


def _normalise(x: Tensor, shape: TowerShape) -> Tensor:
    return F.layer_norm(x, (shape.width,), eps=shape.epsilon)


def _set(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
