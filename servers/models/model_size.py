"""The number of a model's parameters and of its floating-point operations, counted without its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights, WeightsError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters, and operations per item at the axes' default sizes; None: they cannot be counted."""

    parameters: int
    flops_per_item: int | None


def count_flops(specification: ModelSpecification) -> int | None:
    """Operations per item at the axes' default sizes, a multiply-add counted as two.

    Those of the specification, else counted as for `measure_size`.
    """
    return specification.flops_per_item or measure_size(specification).flops_per_item


def measure_size(specification: ModelSpecification) -> ModelSize:
    """Count parameters and operations on tensors without memory.

    Only matrix products, convolutions and attention count, as is usual. A module that torch cannot build or run so is
    built as it is. An ONNX file has parameters, and its operations are not counted.
    """
    if specification.file is not None:
        return ModelSize(_parameters_of_file(specification.file), None)
    import torch

    count = partial(_count, specification)
    try:
        with torch.device("meta"):
            module = specification.load_module(RandomWeights(0))
        return count(module)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, WeightsError):
        return count(specification.load_module(RandomWeights(0)))


def _count(specification: ModelSpecification, module: torch.nn.Module) -> ModelSize:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    module.requires_grad_(True)  # without gradients torch runs whole blocks as one operator, which is not counted
    parameters = sum(parameter.numel() for parameter in module.parameters())
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        device = next(module.parameters(), torch.empty(())).device
        module._apply(fake.from_tensor)  # type: ignore[no-untyped-call]
        given = [
            torch.zeros((1, *specification.item_shape(tensor)), dtype=_torch_dtype(tensor.dtype.name), device=device)
            for tensor in specification.inputs
        ]
        with FlopCounterMode(display=False) as counter, device:
            module(*given)
    return ModelSize(parameters, specification.flops_per_item or counter.get_total_flops())


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


@cache
def _parameters_of_file(path: Path) -> int:
    import onnx

    weights = onnx.load(path, load_external_data=False).graph.initializer
    return sum(math.prod(one.dims) for one in weights)
