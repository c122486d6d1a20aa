"""The Triton kernel for LayerNorm of a sum: reads both once, writes the sum and what it normalised."""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def"
# ruff: noqa: N803 - compile-time constants are upper case in Triton

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def sum_norm_kernel(
    one, other, weight, bias, total, normal, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has a row. It normalises the sum as it is rounded, which is what torch's LayerNorm would read."""
    column = tl.arange(0, BLOCK)
    known = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    values = tl.load(one + place, mask=known, other=0.0).to(tl.float32)
    values += tl.load(other + place, mask=known, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=known)
    values = rounded.to(tl.float32)
    mean = tl.sum(values, 0) / WIDTH
    away = tl.where(known, values - mean, 0.0)
    deviation = tl.sqrt(tl.sum(away * away, 0) / WIDTH + epsilon)
    gain = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    tl.store(normal + place, (away / deviation * gain + offset).to(normal.dtype.element_ty), mask=known)


def sum_norm(one, other, weight, bias, epsilon: float):
    """Two contiguous tensors […, width]. Returns their sum and LayerNorm of it over the last axis."""
    total, normal = torch.empty_like(one), torch.empty_like(one)
    width = len(weight)
    block = triton.next_power_of_2(width)
    sum_norm_kernel[(one.numel() // width,)](
        one, other, weight, bias, total, normal, epsilon, WIDTH=width, BLOCK=block, num_warps=4 if block <= 1024 else 8
    )
    return total, normal
