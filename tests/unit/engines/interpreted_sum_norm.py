"""Runs the kernel of sums and norms in Triton's interpreter on the CPU and writes the errors; a script of tests."""

from __future__ import annotations

import json
import sys
from itertools import product

import torch
from torch.nn import functional

from servers.engines.torch.layer_kernels import sum_norm

SHAPES = [(1, 1), (3, 7), (2, 5, 16), (2, 3, 100), (4, 1030)]


def error(shape: tuple[int, ...], dtype: torch.dtype, with_sum: bool) -> float:
    """Largest difference to torch in FP32, of the sum or of what is normalised."""
    torch.manual_seed(0)
    one, other = (torch.randn(shape).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    total, normal = sum_norm(one, other, weight, bias, 1e-5, with_sum=with_sum)
    expected = (one.float() + other.float()).to(dtype).float()
    norm = functional.layer_norm(expected, shape[-1:], weight.float(), bias.float(), 1e-5)
    assert (total is not None) == with_sum
    wrong_sum = 0.0 if total is None else float((total.float() - expected).abs().max())
    return max(wrong_sum, float((normal.float() - norm).abs().max()))


def main() -> None:
    cases = product(SHAPES, (torch.float32, torch.float16), (True, False))
    errors = {f"{shape} {dtype} sum={with_sum}": error(shape, dtype, with_sum) for shape, dtype, with_sum in cases}
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    main()
