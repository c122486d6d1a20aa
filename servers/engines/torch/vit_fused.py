"""The lean tower executed by Triton kernels on an NVIDIA GPU, five kernels per block, into fixed buffers.

Each batch size runs with a plan: from the table on the card on which it was measured, by a quick measurement on others.
"""

from __future__ import annotations

# mypy: disable-error-code="import-untyped"
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from servers.engines.choice import MOST_SECONDS, ChoiceCache, graph_times_ms, machine_key, makes_choices
from servers.engines.torch import vit_kernels as kernels
from servers.engines.torch.vit_tower import LeanVisionTower, TowerShape, UnsupportedTowerError
from servers.options.stages import stage


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of the product kernel: [rows, columns] of the result per program, `depth` of K per step.
    `split` programs share one block's K. `columns` divides N and `depth · split` divides K."""

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
class TilePlan:
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
    """(N, K) of every product, by its name in `TilePlan`."""
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


CUBLAS = TilePlan()
"""Every product by cuBLAS, which works on any card."""


def library_plan(images: int) -> TilePlan:
    """cuBLAS for the products over all tokens, the Triton kernel for the few rows of class tokens at the end."""
    rows, split = (16, 6) if images <= 16 else (64, 4)
    return TilePlan(
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


def hopper_plan(images: int) -> TilePlan:
    """The fastest plan measured on an H200 for ViT-B-32 at 224 pixels (see docs/engines.md)."""
    return {1: SINGLE_IMAGE, 2: IMAGE_PAIR}.get(images) or library_plan(images)


def portable_plans(images: int) -> tuple[TilePlan, ...]:
    """Plans to time on a card without a table; the first one always works."""
    return (CUBLAS, library_plan(images))


MAX_CHUNKS = 64

HOPPER = (9, 0)


class ProductWeights:
    """One linear layer on the device: weight [N, K] and bias [N] in FP16, row sums [N] of that weight in FP32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
        self.weight = weight.to(device, torch.float16).contiguous()
        self.bias = None if bias is None else bias.to(device, torch.float16).contiguous()
        # Sums of the rounded weight: the mean's share must cancel exactly what the product added.
        self.row_sums = self.weight.float().sum(1)

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, K)"""
        return self.weight.shape[0], self.weight.shape[1]


class FusedWeights:
    """All weights of a tower on one device in FP16, shared by every batch size."""

    def __init__(self, tower: LeanVisionTower, device: torch.device | str) -> None:
        device = torch.device(device)
        shape = self.shape = tower.shape
        if shape.width % 128 or shape.head_width not in (32, 64, 128) or shape.tokens > 128 or shape.tokens < 17:
            raise UnsupportedTowerError(f"the fused kernels do not cover {shape}: use mode compile or graph")
        self.device, self.bytes_in = device, tower.bytes_in

        def product(linear: nn.Linear) -> ProductWeights:
            return ProductWeights(linear.weight, linear.bias, device)

        self.patch = ProductWeights(tower.patch_weight, None, device)
        self.position, self.class_row, self.gain, self.offset = (
            t.to(device, torch.float32)
            for t in (tower.position, tower.class_row, tower.norm_pre.weight, tower.norm_pre.bias)
        )
        self.blocks = [
            tuple(product(getattr(block, name)) for name in ("qkv", "attention_out", "mlp_in", "mlp_out"))
            for block in tower.blocks
        ]
        self.head = product(tower.head)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the kernels read, except the patch embedding."""
        products = [product for block in self.blocks for product in block] + [self.head]
        rows = (self.class_row, self.gain, self.offset)
        return (*rows, *(t for p in products for t in (p.weight, p.bias) if t is not None))


class Workspace:
    """Activations for up to `images` images; every batch size may use it, one at a time."""

    def __init__(self, shape: TowerShape, images: int, device: torch.device) -> None:
        def half(rows: int, columns: int) -> Tensor:
            return torch.zeros(rows, columns, device=device, dtype=torch.float16)

        rows = self.capacity = images * shape.tokens
        self.images = images
        self.x = half(rows, shape.width)
        self.packed = half(rows, 3 * shape.width)
        self.mixed = half(rows, shape.width)
        self.normalised = half(rows, shape.width)
        self.hidden = half(rows, max(shape.mlp_width, shape.patch_elements))
        self.class_x = half(images, shape.width)
        self.statistics = torch.zeros(2 * MAX_CHUNKS * rows, device=device)
        self.arrivals = torch.zeros(4096, device=device, dtype=torch.int32)


class FusedVisionTower:
    """One batch size of the fused tower. `run` only enqueues kernels: it can be captured in a CUDA graph. Capture needs
    one call before, which compiles kernels and sums biases. Not thread-safe; two of these must not run at once on one
    workspace."""

    def __init__(self, weights: FusedWeights, workspace: Workspace, images: int, plan: TilePlan) -> None:
        if images > workspace.images:
            raise ValueError(f"{images} images do not fit a workspace for {workspace.images}")
        self.weights, self.space, self.images, self.plan = weights, workspace, images, plan
        shape = weights.shape
        for tile, n in ((plan.attention_out, shape.width), (plan.mlp_out, shape.width)):
            if tile is not None and n // tile.columns > MAX_CHUNKS:
                raise ValueError(f"{tile} leaves more than {MAX_CHUNKS} chunks of statistics per row")
        self._chunks = 0
        # A cuBLAS product adds itself to the residual but not its bias. The bias is one row for all tokens, so it is
        # carried: the next kernel that reads the tokens adds it, and the tokens need not be written again.
        self._carried: Tensor | None = None
        self._carried_after: dict[ProductWeights, Tensor] = {}  # by residual product, [width] FP32
        self.partial = torch.zeros(self._partial_elements(), device=weights.device)

    def run(self, pixels: Tensor, out: Tensor) -> None:
        """Pixels (see `LeanVisionTower`), n = `images`, to `out` [n, output_width], FP32 or FP16."""
        shape, space, plan = self.weights.shape, self.space, self.plan
        tokens = self.images * shape.tokens
        x = space.x[:tokens]
        normalised = self._first_tokens(pixels, x)
        last = len(self.weights.blocks) - 1
        for index, (qkv, attention_out, mlp_in, mlp_out) in enumerate(self.weights.blocks):
            packed = space.packed[:tokens]
            self._product(x, qkv, packed, plan.qkv, norm=True, normalised=normalised if index == 0 else None)
            if index < last:
                mixed, stride = space.mixed[:tokens], shape.width
                tiles = (plan.attention_out, plan.mlp_in, plan.mlp_out)
                self._attention(kernels.attention_kernel, packed, mixed)
                residual = x
            else:
                # Only the class token is read from the last block.
                mixed, stride = space.mixed[: self.images], shape.width * shape.tokens
                tiles = (plan.class_attention_out, plan.class_mlp_in, plan.class_mlp_out)
                self._attention(kernels.class_attention_kernel, packed, mixed)
                residual, x = x, space.class_x[: self.images]
            hidden = space.hidden.view(-1)[: x.shape[0] * shape.mlp_width].view(-1, shape.mlp_width)
            self._product(mixed, attention_out, x, tiles[0], residual=residual, residual_stride=stride)
            self._product(x, mlp_in, hidden, tiles[1], norm=True, activation=2 if shape.quick_gelu else 1)
            self._product(hidden, mlp_out, x, tiles[2], residual=x, residual_stride=shape.width)
        self._product(x, self.weights.head, out, plan.head, norm=True)

    def _first_tokens(self, pixels: Tensor, x: Tensor) -> Tensor | None:
        """Write the tokens that enter the first block; return them normalised too if its product is cuBLAS's."""
        shape, space, weights = self.weights.shape, self.space, self.weights
        rows = self.images * (shape.tokens - 1)
        patches = space.hidden.view(-1)[: rows * shape.patch_elements].view(rows, -1)
        kernels.patches_kernel[(3 * shape.grid * self.images,)](
            pixels, patches, IMAGE=shape.image_size, PATCH=shape.patch_size, BYTES=weights.bytes_in, num_warps=8
        )
        embedded = space.mixed[:rows]
        self._product(patches, weights.patch, embedded, self.plan.patch)
        foreign = self.plan.qkv is None
        self._chunks = 0 if foreign else shape.width // self.plan.mlp_out.columns if self.plan.mlp_out else 1
        self._carried = None
        normalised = space.normalised[: x.shape[0]]
        group = max(1, min(8, self.images // 8))
        kernels.first_tokens_kernel[(shape.tokens, triton.cdiv(self.images, group))](
            embedded,
            weights.position,
            weights.class_row,
            weights.gain,
            weights.offset,
            x,
            normalised,
            space.statistics,
            space.capacity,
            self.images,
            TOKENS=shape.tokens,
            WIDTH=shape.width,
            CHUNKS=self._chunks,
            NORMALISED=foreign,
            GROUP=group,
            EPSILON=shape.epsilon,
            num_warps=4,
        )
        return normalised if foreign else None

    def _attention(self, kernel: triton.JITFunction, packed: Tensor, mixed: Tensor) -> None:
        shape = self.weights.shape
        kernel[(self.images * shape.heads,)](
            packed,
            mixed,
            TOKENS=shape.tokens,
            PADDED=triton.next_power_of_2(shape.tokens),
            HEADS=shape.heads,
            WIDTH=shape.head_width,
            num_warps=4,
        )

    def _product(
        self,
        a: Tensor,
        weights: ProductWeights,
        out: Tensor,
        tile: Tile | None,
        *,
        norm: bool = False,
        activation: int = 0,
        residual: Tensor | None = None,
        residual_stride: int = 0,
        normalised: Tensor | None = None,
    ) -> None:
        """out = activation(LN?(a) Wᵀ + bias) + residual; a residual leaves statistics, or a bias to be carried.
        `normalised`: LN(a), where it exists already."""
        if norm:
            a = self._normalised_or_raw(a, foreign=tile is None) if normalised is None else normalised
        if tile is None:
            self._foreign_product(a, weights, out, activation, residual)
            return
        space, (n, k) = self.space, weights.sizes
        rows = a.shape[0]
        descriptors = tile.descriptors
        tiles = triton.cdiv(rows, tile.rows) * (n // tile.columns)
        kernels.product_kernel[(tiles * tile.split,)](
            TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]) if descriptors else a,
            TensorDescriptor.from_tensor(weights.weight, [tile.columns, tile.depth]) if descriptors else weights.weight,
            weights.weight if weights.bias is None else weights.bias,
            weights.row_sums,
            space.statistics,
            out if residual is None else residual,
            out,
            space.statistics,
            self.partial,
            space.arrivals,
            rows,
            space.capacity,
            residual_stride,
            N=n,
            K=k,
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.depth,
            GROUP=8,  # blocks of rows that run side by side over the columns, for the L2 cache
            SPLIT=tile.split,
            BIAS=weights.bias is not None,
            NORM=norm,
            CHUNKS=self._chunks if norm else 1,
            EPSILON=self.weights.shape.epsilon,
            ACTIVATION=activation,
            RESIDUAL=residual is not None,
            STATISTICS=residual is not None,
            TMA=descriptors,
            num_warps=4,
            num_stages=tile.stages,
        )
        if residual is not None:
            self._chunks = n // tile.columns

    def _foreign_product(
        self, a: Tensor, weights: ProductWeights, out: Tensor, activation: int, residual: Tensor | None
    ) -> None:
        weight = weights.weight.t()
        if residual is not None:
            if residual is not out:
                out.copy_(residual[:: self.weights.shape.tokens])
            out.addmm_(a, weight)
            self._chunks = 0
            if weights not in self._carried_after:
                assert weights.bias is not None
                carried = 0.0 if self._carried is None else self._carried
                self._carried_after[weights] = weights.bias.float() + carried
            self._carried = self._carried_after[weights]
        elif weights.bias is None:
            torch.mm(a, weight, out=out)
        elif out.dtype != a.dtype:
            out.copy_(torch.addmm(weights.bias, a, weight))
        elif activation == 1:
            # cuBLASLt's epilogue: bias and GELU in its tanh form at no cost; a separate kernel would take half as long
            # as the product.
            torch.ops.aten._addmm_activation(weights.bias, a, weight, use_gelu=True, out=out)
        else:
            torch.addmm(weights.bias, a, weight, out=out)
            if activation == 2:
                out.mul_(torch.sigmoid(1.702 * out))

    def _normalised_or_raw(self, x: Tensor, *, foreign: bool) -> Tensor:
        """The next product's input: normalised rows for cuBLAS, rows and their statistics for a Triton product."""
        if not foreign and self._carried is None:
            return x
        space, width = self.space, self.weights.shape.width
        out = space.normalised[: x.shape[0]] if foreign else x
        kernels.row_kernel[(x.shape[0],)](
            x,
            x if self._carried is None else self._carried,
            out,
            space.statistics,
            space.capacity,
            WIDTH=width,
            EPSILON=self.weights.shape.epsilon,
            CARRIED=self._carried is not None,
            NORMALISED=foreign,
            num_warps=self.plan.row_warps,
        )
        if not foreign:
            self._carried, self._chunks = None, 1
        return out

    def _partial_elements(self) -> int:
        """Scratch of the largest split product, FP32 elements."""
        sizes = [0]
        for name, (n, _) in product_sizes(self.weights.shape).items():
            tile: Tile | None = getattr(self.plan, name)
            if tile is not None and tile.split > 1:
                images_only = name.startswith("class_") or name == "head"
                rows = self.images if images_only else self.images * self.weights.shape.tokens
                sizes.append(triton.cdiv(rows, tile.rows) * tile.rows * n * tile.split)
        return max(sizes)


def chosen_plans(
    weights: FusedWeights, workspace: Workspace, item: tuple[int, ...], rows: Sequence[int]
) -> dict[int, tuple[TilePlan, str]]:
    """By batch size, the plan of a tower and its origin: "table", "measured" or "default"."""
    shape, device = weights.shape, torch.device(weights.device)
    chosen = dict[int, tuple[TilePlan, str]]()
    if torch.cuda.get_device_capability(device) == HOPPER:
        chosen = {images: (plan, "table") for images in rows if (plan := hopper_plan(images)).fits(shape)}
    others = [images for images in rows if images not in chosen]
    if not makes_choices():
        return chosen | dict.fromkeys(others, (CUBLAS, "default"))
    if not others:
        return chosen
    key = {"tower": repr(shape), "item": str(item), "bytes": str(weights.bytes_in)}
    kept = ChoiceCache(machine_key(device) | key)
    with stage("choose"), kept.held():
        # For all sizes together, kernel compilation included; sizes left over run entirely on cuBLAS.
        deadline, stored = time.monotonic() + MOST_SECONDS, kept.read()
        measured = dict[str, tuple[int, str]]()
        for images in others:
            candidates = [plan for plan in portable_plans(images) if plan.fits(shape)]
            try:
                place, origin = stored[str(images)]
                chosen[images] = candidates[place], str(origin)
            except (KeyError, TypeError, ValueError, IndexError):
                plan, origin = _fastest(weights, workspace, item, images, candidates, deadline)
                chosen[images], measured[str(images)] = (plan, origin), (candidates.index(plan), origin)
        if measured:
            kept.write({**stored, **measured})
    return chosen


def _fastest(
    weights: FusedWeights,
    workspace: Workspace,
    item: tuple[int, ...],
    images: int,
    candidates: Sequence[TilePlan],
    deadline: float,
) -> tuple[TilePlan, str]:
    device = weights.device
    # Random pixels: on zeros a matrix product draws less power and runs faster.
    pixels = torch.randint(0, 256, (images, *item), device=device, dtype=torch.uint8)
    pixels = pixels if weights.bytes_in else pixels.float()
    out = torch.empty(images, weights.shape.output_width, device=device)

    @cache
    def tower(place: int) -> FusedVisionTower:
        return FusedVisionTower(weights, workspace, images, candidates[place])

    calls = (
        (str(place), lambda place=place: tower(place).run(pixels, out))
        for place in range(len(candidates))
        if time.monotonic() <= deadline
    )
    # A card may have less shared memory than a plan needs.
    times = graph_times_ms(calls, torch.device(device), lambda _title, _error: None)
    return (candidates[int(min(times, key=times.__getitem__))], "measured") if times else (CUBLAS, "default")
