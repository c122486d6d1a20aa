"""The tile of every matrix product by batch size: data, measured on the card that it names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from servers.engines.vit.tower import TowerShape


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of the product kernel: [rows, columns] of the result per program, `depth` of K per step.

    `split` programs share one block's K. `columns` divides N and `depth · split` divides K.
    """

    rows: int
    columns: int
    depth: int = 64
    stages: int = 3
    split: int = 1
    descriptors: bool = False  # tensor memory accelerator instead of pointer loads

    def divides(self, n: int, k: int) -> bool:
        """Whether a product of [rows, k] with [n, k]ᵀ falls into whole tiles."""
        return n % self.columns == 0 and k % (self.depth * self.split) == 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of one batch size; None means cuBLAS. The `class_` products run on the class token's rows alone."""

    patch: Tile | None = None
    qkv: Tile | None = None
    attention_out: Tile | None = None
    mlp_in: Tile | None = None
    mlp_out: Tile | None = None
    class_attention_out: Tile | None = None
    class_mlp_in: Tile | None = None
    class_mlp_out: Tile | None = None
    head: Tile | None = None
    row_warps: int = 4

    def fits(self, shape: TowerShape) -> bool:
        """Whether every tile divides its product for a tower of that shape."""
        tiles = {name: getattr(self, name) for name in product_sizes(shape)}
        return all(tile is None or tile.divides(*product_sizes(shape)[name]) for name, tile in tiles.items())

    @property
    def gelu(self) -> str:
        """The form of GELU in all blocks except the last."""
        return "tanh" if self.mlp_in is None else "erf"


def product_sizes(shape: TowerShape) -> dict[str, tuple[int, int]]:
    """(N, K) of every product, by its name in `Plan`."""
    width, mlp = shape.width, shape.mlp_width
    return {
        "patch": (width, shape.patch_elements),
        "qkv": (3 * width, width),
        "attention_out": (width, width),
        "mlp_in": (mlp, width),
        "mlp_out": (width, mlp),
        "class_attention_out": (width, width),
        "class_mlp_in": (mlp, width),
        "class_mlp_out": (width, mlp),
        "head": (shape.output_width, width),
    }


CUBLAS = Plan()
"""Every product by cuBLAS, which works on any card."""


def library_plan(images: int) -> Plan:
    """cuBLAS for the products over all tokens, the Triton kernel for the few rows of class tokens at the end."""
    rows, split = (16, 6) if images <= 16 else (64, 4)
    return Plan(
        class_attention_out=Tile(rows, 32, 64, split=4 if images <= 16 else 2),
        class_mlp_in=Tile(rows, 32, 128, stages=4),
        class_mlp_out=Tile(rows, 32, 128, stages=4, split=split),
        head=Tile(rows, 16, 128 if images <= 16 else 64, stages=4),
        row_warps=4 if images < 32 else 1,
    )


SINGLE_IMAGE = replace(
    library_plan(1),
    qkv=Tile(64, 32, 128, stages=5, descriptors=True),
    attention_out=Tile(64, 32, 128, stages=4, descriptors=True),
    mlp_in=Tile(64, 32, 128, stages=5, descriptors=True),
    mlp_out=Tile(64, 32, 128, stages=4, split=4, descriptors=True),
)
"""50 rows: small tiles keep more of the card busy than cuBLAS does, and LayerNorm needs no separate kernel."""

IMAGE_PAIR = replace(
    library_plan(2),
    qkv=Tile(64, 64, 128, stages=4, descriptors=True),
    attention_out=Tile(64, 32, 256, stages=3, descriptors=True),
    mlp_in=Tile(64, 64, 128, stages=4, descriptors=True),
    mlp_out=Tile(64, 64, 128, stages=4, split=4, descriptors=True),
)
"""100 rows: 362 µs against 383 µs by cuBLAS."""


def hopper_plan(images: int) -> Plan:
    """The fastest plan measured on an H200 for ViT-B-32 at 224 pixels (see docs/engines.md)."""
    return {1: SINGLE_IMAGE, 2: IMAGE_PAIR}.get(images) or library_plan(images)


def portable_plans(images: int) -> tuple[Plan, ...]:
    """Plans to time on a card without a table; the first one always works."""
    return (CUBLAS, library_plan(images))
