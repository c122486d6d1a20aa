"""Runs the kernels of fused convolutions in Triton's interpreter on the CPU and writes the errors; a script of tests.

A process of its own, because a kernel is bound to the interpreter or the compiler when its module is imported.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from servers.engines.torch.convolution_kernels import depthwise, epilogue_in_place, mean_of_pixels, pointwise
from servers.engines.torch.convolutions import ACTIVATIONS, FUNCTIONS

SHAPES = [(1, 1, 1, 1), (1, 16, 16, 16), (3, 24, 9, 11)]
"""Less than a block, exactly two blocks, and several with a part."""
GUARD = 4096
"""Values behind a tensor's that nothing may touch: more than a block."""
DEPTHWISE = [(2, 16, 9, 11, 3, 1, 1, 1), (1, 72, 7, 9, 5, 2, 2, 1), (2, 5, 8, 8, 3, 2, 1, 1), (1, 24, 6, 6, 3, 1, 2, 2)]
"""Images, channels, height, width; taps, stride, padding, dilation."""
POINTWISE = [
    (2, 16, 24, 5, 7),
    (3, 72, 40, 3, 3),
    (2, 200, 16, 1, 1),
    (2, 10, 20, 1, 1),
    (1, 6, 4, 3, 2),
    (5, 8, 8, 13, 9),
]
"""Images, inputs, outputs, height, width."""


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory that ends with a guard of sevens, and the channels-last tensor before that."""
    count = math.prod(shape)
    memory = torch.full((count + GUARD,), 7.0, dtype=dtype)
    rows, channels, height, width = shape
    return memory, memory[:count].view(rows, height, width, channels).permute(0, 3, 1, 2)


def largest(actual: Tensor, expected: Tensor, memory: Tensor) -> float:
    """Largest difference to torch in FP32, where that is rounded; infinite if the memory behind was written."""
    if not bool((memory[-GUARD:] == 7.0).all()):
        return float("inf")
    return float((actual.float() - expected.to(actual.dtype).float()).abs().max())


def random(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last) if len(shape) == 4 else torch.randn(shape)


def epilogue(shape: tuple[int, ...], activation: str, dtype: torch.dtype, has_bias: bool, has_residual: bool) -> float:
    torch.manual_seed(0)
    memory, values = guarded(shape, dtype)
    values.copy_(4 * random(*shape))
    bias = random(shape[1]).to(dtype) if has_bias else None
    residual = random(*shape).to(dtype) if has_residual else None
    expected = values.float().clone()
    if bias is not None:
        expected = expected + bias.float().view(-1, 1, 1)
    if residual is not None:
        expected = expected + residual.float()
    epilogue_in_place(values, bias, residual, ACTIVATIONS.index(activation))
    return largest(values, FUNCTIONS[activation](expected), memory)


def depthwise_error(case: tuple[int, ...], columns: int, dtype: torch.dtype, more: bool) -> float:
    """`more`: a bias and a residual."""
    torch.manual_seed(0)
    rows, channels, height, width, taps, stride, padding, dilation = case
    images, weight = random(rows, channels, height, width).to(dtype), random(channels, 1, taps, taps).to(dtype)
    bias = random(channels).to(dtype) if more else None
    expected = functional.conv2d(
        images.float(), weight.float(), None if bias is None else bias.float(), stride, padding, dilation, channels
    )
    residual = random(*expected.shape).to(dtype) if more else None
    memory, values = guarded(tuple(expected.shape), dtype)
    ordered = weight[:, 0].permute(1, 2, 0).contiguous()
    activation = ACTIVATIONS.index("hardswish")
    depthwise(images, ordered, bias, residual, values, (stride, padding, dilation), activation, columns)
    expected = FUNCTIONS["hardswish"](expected if residual is None else expected + residual.float())
    return largest(values, expected, memory)


def pointwise_error(case: tuple[int, ...], more: bool) -> float:
    """`more`: a bias, a residual and gates."""
    torch.manual_seed(0)
    rows, ins, outs, height, width = case
    images, weight = random(rows, ins, height, width).half(), (random(outs, ins, 1, 1) / ins**0.5).half()
    bias = random(outs).half() if more else None
    gates = torch.rand(rows, ins, 1, 1).half() if more else None
    residual = random(rows, outs, height, width).half() if more else None
    read = images if gates is None else images * gates
    expected = functional.conv2d(read.float(), weight.float(), None if bias is None else bias.float())
    memory, values = guarded((rows, outs, height, width), torch.float16)
    pointwise(images, weight, bias, residual, gates, values, ACTIVATIONS.index("silu"))
    expected = FUNCTIONS["silu"](expected if residual is None else expected + residual.float())
    return largest(values, expected, memory)


def mean_error(shape: tuple[int, ...]) -> float:
    torch.manual_seed(0)
    images = random(*shape)
    memory, means = guarded((*shape[:2], 1, 1), torch.float32)
    mean_of_pixels(images, means)
    return largest(means, images.mean((2, 3), keepdim=True), memory)


def main() -> None:
    types = torch.float32, torch.float16
    both = True, False
    parts = [(has_bias, has_residual) for has_bias, has_residual in product(both, both)]
    forms = list(product((2, 4), types, both))
    if sys.argv[1] == "quick":
        parts = [(True, True), (False, False)]
        forms = [(2, torch.float32, True), (4, torch.float16, False)]
    cases = product(SHAPES, ACTIVATIONS, types, parts)
    errors = {
        f"{shape} {activation} {dtype} bias={has_bias} residual={has_residual}": epilogue(
            shape, activation, dtype, has_bias, has_residual
        )
        for shape, activation, dtype, (has_bias, has_residual) in cases
    }
    values = torch.tensor([float("nan"), 1.0]).view(1, 2, 1, 1)
    epilogue_in_place(values, None, None, ACTIVATIONS.index("relu"))
    report = {
        "errors": errors,
        "nan": bool(values.isnan().any()),
        "depthwise": {
            f"{case} columns={columns} {dtype} more={more}": depthwise_error(case, columns, dtype, more)
            for case, (columns, dtype, more) in product(DEPTHWISE, forms)
        },
        "means": {str(shape): mean_error(shape) for shape in [*SHAPES, (1, 20, 25, 30)]},
    }
    try:
        report["pointwise"] = {
            f"{case} more={more}": pointwise_error(case, more) for case, more in product(POINTWISE, both)
        }
    except Exception as exc:
        if "only 0-dimensional arrays" not in str(exc):
            raise
        report["pointwise"] = None
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
