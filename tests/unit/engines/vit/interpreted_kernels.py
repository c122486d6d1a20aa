"""Runs the Triton kernels in Triton's interpreter on the CPU and prints what the tests assert on; a script of theirs.

A process of its own, because a kernel is bound to the interpreter or the compiler when its module is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from servers.engines.torch.vit_fused import CUBLAS, FusedVisionTower, FusedWeights, Tile, TilePlan, Workspace
from servers.engines.torch.vit_kernels import gelu
from servers.engines.torch.vit_tower import LeanVisionTower
from servers.models.registry import DEFAULT_MODEL, get_specification
from servers.options.libraries import import_library

OURS = Tile(16, 64)


def everywhere(tile: Tile) -> TilePlan:
    """A plan that runs every product with one tile."""
    return TilePlan(tile, tile, tile, tile, tile, tile, tile, tile, tile)


PLANS = {
    "pointers": everywhere(OURS),
    "split": TilePlan(
        patch=Tile(32, 64, 128, split=4),
        qkv=OURS,
        attention_out=Tile(16, 32, split=2),
        mlp_in=OURS,
        mlp_out=Tile(16, 64, 128, split=4),
        class_attention_out=Tile(16, 32, split=2),
        class_mlp_in=Tile(16, 64, split=2),
        class_mlp_out=Tile(16, 32, split=4),
        head=OURS,
    ),
    "descriptors": everywhere(Tile(64, 64, descriptors=True)),
    "cublas": CUBLAS,
    "ours after cublas": TilePlan(None, OURS, None, OURS, None, None, OURS, None, OURS),
    "cublas after ours": TilePlan(OURS, None, OURS, None, OURS, OURS, None, OURS, None),
}


@triton.jit
def gelu_kernel(x, out, BLOCK: tl.constexpr):  # noqa: N803
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lane, gelu(tl.load(x + lane)))


def small_tower(quick: bool = False, bytes_in: bool = True, image_size: int = 160) -> LeanVisionTower:
    """Of 160 pixels: 26 tokens, two heads, two blocks; biases, gains and positions far from their initial values."""
    import_library("open_clip")  # without what no tower needs
    from open_clip.transformer import QuickGELU, VisionTransformer

    torch.manual_seed(0)
    visual = VisionTransformer(
        image_size=image_size,
        patch_size=32,
        width=128,
        layers=2,
        heads=2,
        mlp_ratio=4.0,
        output_dim=64,
        act_layer=QuickGELU if quick else torch.nn.GELU,
    )
    with torch.no_grad():
        for parameter in visual.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return LeanVisionTower(visual.eval(), get_specification(DEFAULT_MODEL).preprocessing if bytes_in else None)


def error(tower: LeanVisionTower, plan: TilePlan, images: int) -> float:
    """Relative error against the FP32 tower, the output poisoned before; NaN if a second run differs."""
    weights = FusedWeights(tower, "cpu")
    fused = FusedVisionTower(weights, Workspace(tower.shape, images + 1, weights.device), images, plan)
    side = tower.shape.image_size
    raw = torch.randint(0, 256, (images, side, side, 3), dtype=torch.uint8)
    pixels = raw if tower.bytes_in else torch.randn(images, 3, side, side)
    out = torch.full((images, tower.shape.output_width), float("nan"))
    fused.run(pixels, out)
    again = out
    if any(tile and tile.split > 1 for tile in (plan.patch, plan.mlp_out)):  # arrival counters must be zero again
        again = torch.full_like(out, float("nan"))
        fused.run(pixels, again)
    reference: Tensor = tower(pixels)
    return float((out - reference).norm() / reference.norm()) if torch.equal(out, again) else float("nan")


def gelu_error() -> float:
    x = torch.linspace(-12, 12, 1 << 16)
    out = torch.empty_like(x)
    gelu_kernel[(8,)](x, out, BLOCK=1 << 13)
    exact = torch.nn.functional.gelu(x.double())
    return float(((out - exact).abs() / x.abs().clamp(min=1)).max())


def broken_error() -> float:
    """Of a tower that lacks its last bias."""
    broken, tower = small_tower(bytes_in=False), small_tower(bytes_in=False)
    weights = FusedWeights(broken, "cpu")
    assert weights.head.bias is not None
    weights.head.bias.zero_()
    fused = FusedVisionTower(weights, Workspace(broken.shape, 1, weights.device), 1, PLANS["descriptors"])
    pixels, out = torch.randn(1, 3, 160, 160), torch.empty(1, 64)
    fused.run(pixels, out)
    reference = tower(pixels)
    return float((out - reference).norm() / reference.norm())


def main() -> None:
    """Print the errors of the cases that the arguments name, as a JSON object."""
    cases: dict[str, Callable[[], float]] = {
        "gelu": gelu_error,
        "split, small": lambda: error(small_tower(image_size=128), PLANS["split"], 1),
        **{name: partial(error, small_tower(), plan, 1) for name, plan in PLANS.items()},
        "bytes": lambda: error(small_tower(), PLANS["descriptors"], 2),
        "floats": lambda: error(small_tower(bytes_in=False), PLANS["descriptors"], 2),
        "quick GELU": lambda: error(small_tower(quick=True, bytes_in=False), PLANS["descriptors"], 1),
        "a missing bias": broken_error,
    }
    json.dump({name: cases[name]() for name in sys.argv[1:]}, sys.stdout)


if __name__ == "__main__":
    with torch.no_grad():
        main()
