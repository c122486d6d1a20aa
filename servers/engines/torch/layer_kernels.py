"""The Triton kernel for LayerNorm of a sum: reads both once, writes what it normalised and, if it is read, the sum."""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def"
# ruff: noqa: N803 - compile-time constants are upper case in Triton

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def sum_norm_kernel(
    one, other, weight, bias, total, normal, epsilon, WITH_SUM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program normalises one row. It takes the rounded sum, as torch's LayerNorm would."""
    column = tl.arange(0, BLOCK)
    known = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    values = tl.load(one + place, mask=known, other=0.0).to(tl.float32)
    values += tl.load(other + place, mask=known, other=0.0).to(tl.float32)
    rounded = values.to(normal.dtype.element_ty)
    if WITH_SUM:
        tl.store(total + place, rounded, mask=known)
    values = rounded.to(tl.float32)
    mean = tl.sum(values, 0) / WIDTH
    away = tl.where(known, values - mean, 0.0)
    deviation = tl.sqrt(tl.sum(away * away, 0) / WIDTH + epsilon)
    gain = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    tl.store(normal + place, (away / deviation * gain + offset).to(normal.dtype.element_ty), mask=known)


def sum_norm(one, other, weight, bias, epsilon: float, *, with_sum: bool):
    """Two contiguous tensors […, width]. Returns their sum, None without `with_sum`, and LayerNorm of it over the last
    axis."""
    normal = torch.empty_like(one)
    total = torch.empty_like(one) if with_sum else None
    width = len(weight)
    block = triton.next_power_of_2(width)
    sum_norm_kernel[(one.numel() // width,)](
        one, other, weight, bias, normal if total is None else total, normal, epsilon,
        WITH_SUM=with_sum, WIDTH=width, BLOCK=block, num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    return total, normal
