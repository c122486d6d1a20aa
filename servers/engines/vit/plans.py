"""Which tile every matrix product runs with, by batch: data, measured on the card it names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of the product kernel: a [rows, columns] block of the result a program, `depth` of K a step.

    `split` programs share one block's K. `columns` divides N and `depth · split` divides K.
    """

    rows: int
    columns: int
    depth: int = 64
    warps: int = 4
    stages: int = 3
    split: int = 1
    descriptors: bool = False  # tensor memory accelerator instead of pointer loads
    group: int = 8  # blocks of rows that run side by side over the columns, for the L2 cache


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of one batch size; None means cuBLAS. The `class_` products run on the class token's rows alone."""

    patch: Tile | None
    qkv: Tile | None
    attention_out: Tile | None
    mlp_in: Tile | None
    mlp_out: Tile | None
    class_attention_out: Tile | None
    class_mlp_in: Tile | None
    class_mlp_out: Tile | None
    head: Tile | None
    attention_warps: int = 4
    row_warps: int = 4
    prefetch: bool = False  # ask for the next block's weights beside this block's kernels, in a branch of the graph


CUBLAS = Plan(None, None, None, None, None, None, None, None, None)
