"""The Triton kernel for what follows a convolution: bias, residual and activation in one pass over its output.

torch executes each of them as a kernel of its own, which reads and writes every value.
"""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def"
# ruff: noqa: N803 - compile-time constants are upper case in Triton

from __future__ import annotations

import triton
import triton.language as tl

NONE, RELU, RELU6, SILU, HARDSWISH, SIGMOID, HARDSIGMOID = (tl.constexpr(place) for place in range(7))
"""Places in `servers.engines.torch.epilogues.ACTIVATIONS`."""
BLOCK = 2048
"""Values per program: 8 per thread, which are 16 bytes of halves."""


@triton.jit
def epilogue_kernel(
    values, bias, residual, count, channels, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + places % channels, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == RELU:
        value = tl.where(value < 0.0, 0.0, value)  # tl.maximum would make a number of NaN
    elif ACTIVATION == RELU6:
        value = tl.where(value < 0.0, 0.0, tl.where(value > 6.0, 6.0, value))
    elif ACTIVATION == SILU:
        value = value * tl.sigmoid(value)
    elif ACTIVATION == HARDSWISH:
        gate = value + 3.0
        value = value * tl.where(gate < 0.0, 0.0, tl.where(gate > 6.0, 6.0, gate)) / 6.0
    elif ACTIVATION == SIGMOID:
        value = tl.sigmoid(value)
    elif ACTIVATION == HARDSIGMOID:
        gate = value + 3.0
        value = tl.where(gate < 0.0, 0.0, tl.where(gate > 6.0, 6.0, gate)) / 6.0
    tl.store(values + places, value.to(values.dtype.element_ty), mask=inside)


def epilogue_in_place(values, bias, residual, activation: int) -> None:
    """`values`, `residual` [n, channels, h, w], channels-last, at most `epilogues.MOST_VALUES`; `bias` [channels]."""
    count = values.numel()
    epilogue_kernel[(triton.cdiv(count, BLOCK),)](
        values, values if bias is None else bias, values if residual is None else residual, count, values.shape[1],
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ACTIVATION=activation,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
