"""Batch norms as a part of the weights of the convolutions before them.

torch executes a batch norm as a kernel of its own, which reads and writes every value. In eval mode it multiplies each
channel and adds to it, and a convolution behind which it directly stands can do both. Which norms those are is read
from a trace by torch.fx; the model's own code still executes, with other layers in their places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from servers.engines.torch.forms import refuse_other_answers


class _NormTracer(fx.Tracer):
    """Traces through everything that is neither torch's own nor a batch norm."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


@torch.no_grad()
def folded_norms(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, nn.Module]:
    """Layers to take the places of others in `module` (FP32, eval mode), by name: convolutions with a batch norm in
    their weights, and what is left of those norms.

    Raises `ValueError` if no norm can be folded, or if the answers to `inputs` then differ. Tracing executes the module
    with symbols for values, so its own code may raise anything else.
    """
    graph, layers = _NormTracer().trace(module), dict(module.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    replaced: dict[str, nn.Module] = {}
    for node in graph.nodes:
        before = node.args[0] if len(node.args) == 1 else None
        if not isinstance(before, fx.Node) or {node.op, before.op} != {"call_module"} or node.kwargs:
            continue
        convolution, norm = layers[str(before.target)], layers[str(node.target)]
        alone = len(before.users) == calls[node.target] == calls[before.target] == 1
        rest = _rest_of(norm)
        if alone and type(convolution) in (nn.Conv1d, nn.Conv2d) and rest is not None:
            replaced[str(before.target)] = fuse_conv_bn_eval(convolution, norm)
            replaced[str(node.target)] = rest
    if not replaced:
        raise ValueError("no batch norm directly follows a convolution")
    refuse_other_answers(module, with_layers(module, replaced), inputs, "folded batch norms")
    return replaced


def with_layers(module: nn.Module, replaced: dict[str, nn.Module]) -> nn.Module:
    """A copy of the module with these layers."""
    copied = deepcopy(module)
    for name, layer in replaced.items():
        copied.set_submodule(name, deepcopy(layer))
    return copied


def _rest_of(norm: nn.Module) -> nn.Module | None:
    """The layer that replaces a folded batch norm. None if the module is not a batch norm in eval mode with statistics,
    or is of an unknown class."""
    if not isinstance(norm, _BatchNorm) or norm.running_mean is None or norm.training:
        return None
    if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d):
        return nn.Identity()
    if type(norm).__name__ == "BatchNormAct2d" and type(norm).__module__.startswith("timm."):
        return nn.Sequential(norm.get_submodule("drop"), norm.get_submodule("act"))
    return None
