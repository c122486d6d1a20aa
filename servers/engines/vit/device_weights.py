"""The tower's weights on the device as the fused kernels read them: FP16, with the row sums that LayerNorm needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from servers.engines.vit.plans import Plan
from servers.engines.vit.tower import LeanVisionTower
from servers.engines.vit.weights import UnsupportedTowerError


class ProductWeights:
    """One linear layer on the device: weight [N, K] and bias [N] in 16 bits, row sums [N] of that weight in FP32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
        self.weight = weight.to(device, torch.float16).contiguous()
        self.bias = None if bias is None else bias.to(device, torch.float16).contiguous()
        # Of the rounded weight: the mean's share must cancel what the product really added.
        self.row_sums = self.weight.float().sum(1)

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, K)"""
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Signature:
    """How pixels arrive: bytes or floats, interleaved (…, 3) or planar (3, …)."""

    raw: bool
    interleaved: bool = False

    @classmethod
    def of(cls, pixels: Tensor) -> Signature:
        """Read it off a batch."""
        raw = pixels.dtype == torch.uint8
        return cls(raw, raw and pixels.shape[-1] == 3)


class FusedWeights:
    """All weights of a tower on one device in FP16. Shared by every batch size and input signature."""

    def __init__(self, tower: LeanVisionTower, device: torch.device | str) -> None:
        device = torch.device(device)
        shape = self.shape = tower.shape
        if shape.width % 128 or shape.head_width not in (32, 64, 128) or shape.tokens > 128 or shape.tokens < 17:
            raise UnsupportedTowerError(f"the fused kernels do not cover {shape}: use mode compile or graph")
        self.device = device
        self._tower = tower
        self._patches: dict[Signature, tuple[ProductWeights, Tensor]] = {}
        self.class_row, self.gain, self.offset = (
            t.to(device, torch.float32) for t in (tower.class_row, tower.norm_pre.weight, tower.norm_pre.bias)
        )
        self.blocks = [
            tuple(self._take(getattr(block, name)) for name in ("qkv", "attention_out", "mlp_in", "mlp_out"))
            for block in tower.blocks
        ]
        self.head = self._take(tower.head)

    def patch(self, signature: Signature) -> tuple[ProductWeights, Tensor]:
        """The patch embedding's weight in the column order of that signature, and the positions to add."""
        if signature not in self._patches:
            tower = self._tower
            position = tower.byte_position if signature.raw else tower.position
            weight = tower.byte_weight if signature.raw else tower.patch_weight
            if signature.interleaved:
                side = self.shape.patch_size
                weight = weight.view(-1, 3, side, side).permute(0, 2, 3, 1).reshape(weight.shape)
            self._patches[signature] = (
                ProductWeights(weight, None, self.device),
                position.to(self.device, torch.float32),
            )
        return self._patches[signature]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is read but the patch embedding, of which each input signature has its own."""
        products = [product for block in self.blocks for product in block] + [self.head]
        rows = (self.class_row, self.gain, self.offset)
        return (*rows, *(t for p in products for t in (p.weight, p.bias) if t is not None))

    def _take(self, linear: nn.Linear) -> ProductWeights:
        return ProductWeights(linear.weight, linear.bias, self.device)


def carried_biases(weights: FusedWeights, plan: Plan) -> list[Tensor | None]:
    """What is carried after each residual product, two a block, [width] FP32; None where the product is ours."""
    carried: Tensor | None = None
    after: list[Tensor | None] = []
    last = len(weights.blocks) - 1
    for index, (_, attention_out, _, mlp_out) in enumerate(weights.blocks):
        own = (plan.class_attention_out, plan.class_mlp_in, plan.class_mlp_out)
        tiles = own if index == last else (plan.attention_out, plan.mlp_in, plan.mlp_out)
        readers = (plan.qkv, tiles[1])
        for product, reader, tile in ((attention_out, readers[0], tiles[0]), (mlp_out, readers[1], tiles[2])):
            if reader is not None:  # one of our products reads true rows: they were written out before it
                carried = None
            if tile is None and product.bias is not None:
                carried = product.bias.float() + (0.0 if carried is None else carried)
                after.append(carried)
            else:
                after.append(None)
    return after
