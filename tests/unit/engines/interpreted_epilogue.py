"""Runs the kernel of fused convolutions in Triton's interpreter on the CPU and writes the errors; a script of tests.

A process of its own, because a kernel is bound to the interpreter or the compiler when its module is imported.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import torch

from servers.engines.torch.epilogue_kernels import epilogue_in_place
from servers.engines.torch.epilogues import ACTIVATIONS, FUNCTIONS

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 16, 16, 16), (3, 24, 9, 11)]
"""Less than a block, exactly two blocks, and several with a part."""
GUARD = 4096
"""Values behind a tensor's that nothing may touch: more than a block."""


def error(shape: tuple[int, ...], activation: str, dtype: torch.dtype, has_bias: bool, has_residual: bool) -> float:
    """Largest difference to torch in FP32, where that is rounded to `dtype`; infinite if memory behind was written."""
    generator = torch.Generator().manual_seed(0)
    count = torch.Size(shape).numel()
    memory = torch.full((count + GUARD,), 7.0, dtype=dtype)
    rows, channels, height, width = shape
    values = memory[:count].view(rows, height, width, channels).permute(0, 3, 1, 2)  # channels-last
    values.copy_(4 * torch.randn(shape, generator=generator))
    bias = torch.randn(channels, generator=generator).to(dtype) if has_bias else None
    residual = None
    if has_residual:
        residual = torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=torch.channels_last)
    expected = values.float()
    if bias is not None:
        expected = expected + bias.float().view(-1, 1, 1)
    if residual is not None:
        expected = expected + residual.float()
    expected = FUNCTIONS[activation](expected).to(dtype).float()
    epilogue_in_place(values, bias, residual, ACTIVATIONS.index(activation))
    if not bool((memory[count:] == 7.0).all()):
        return float("inf")
    return float((values.float() - expected).abs().max())


def main() -> None:
    cases = product(SHAPES, ACTIVATIONS, (torch.float32, torch.float16), (True, False), (True, False))
    errors = {
        f"{shape} {activation} {dtype} bias={has_bias} residual={has_residual}": error(
            shape, activation, dtype, has_bias, has_residual
        )
        for shape, activation, dtype, has_bias, has_residual in cases
    }
    values = torch.tensor([float("nan"), 1.0]).view(1, 2, 1, 1)
    epilogue_in_place(values, None, None, ACTIVATIONS.index("relu"))
    sys.stdout.write(json.dumps({"errors": errors, "nan": bool(values.isnan().any())}))


if __name__ == "__main__":
    main()
