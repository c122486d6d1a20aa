"""The number of a model's parameters and of its floating-point operations, counted without its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from servers.models.items import valid_items
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights, WeightsError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters, and operations per item at the axes' default sizes; None: they cannot be counted."""

    parameters: int
    flops_per_item: int | None


def measure_size(specification: ModelSpecification) -> ModelSize:
    """Count parameters and operations on tensors without memory; the specification's operations come first.

    A module that torch cannot build or run so is built and run. The operations of an ONNX file are not counted.
    """
    if specification.file is not None:
        return ModelSize(_parameters_of_file(specification.file), None)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    items = valid_items(specification, 0, [getattr(specification.main_axis, "default", 1)])
    given = [torch.from_numpy(items[tensor.name]) for tensor in specification.inputs]
    try:
        with torch.device("meta"):
            module = specification.load_module(RandomWeights(0))
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            module._apply(fake.from_tensor)  # type: ignore[no-untyped-call]
            with next(module.parameters(), torch.empty(())).device as device:
                counted = count_flops(module, [one.to(device) for one in given])
    except (RuntimeError, ValueError, TypeError, NotImplementedError, WeightsError):
        module = specification.load_module(RandomWeights(0))
        counted = count_flops(module, given)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return ModelSize(parameters, specification.flops_per_item or counted)


def count_flops(module: torch.nn.Module, given: Sequence[torch.Tensor]) -> int | None:
    """The operations of a batch in matrix products, convolutions and attention; None if torch counts none.

    A multiply-add counts as two. `module` is one that is `ready`.
    """
    from torch.utils.flop_counter import FlopCounterMode

    for parameter in module.parameters():  # without gradients torch runs whole blocks as one operator: not counted
        parameter.requires_grad_(parameter.is_floating_point())
    with FlopCounterMode(display=False) as counter:
        module(*given)
    module.requires_grad_(False)
    return counter.get_total_flops() or None


@cache
def _parameters_of_file(path: Path) -> int:
    import onnx

    weights = onnx.load(path, load_external_data=False).graph.initializer
    return sum(math.prod(one.dims) for one in weights)
