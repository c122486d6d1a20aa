"""What a batch on a CUDA device is executed by: the model's own module, the lean tower, or our fused kernels.

The lean and the fused tower compute the same function from the same weights (see `servers.engines.vit`); a model that
they do not cover runs as its own module, and the description says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from servers.engines.torch_script import APIS, examples_of, to_torchscript
from servers.engines.vit.graph_runner import Enqueue
from servers.engines.vit.tower import LeanVisionTower
from servers.engines.vit.weights import UnsupportedTowerError
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images, to_precision

OWN_MODULE = "the model's own module"


@dataclass(frozen=True, slots=True)
class DeviceTower:
    """`build(n)` gives what enqueues a batch of n; the rest is for the description."""

    build: Callable[[int], Enqueue]
    parameters: Sequence[Tensor]
    kernels: str
    gelu: str
    plans: Callable[[], Mapping[str, str]] = field(default=dict)
    """By batch, known once built."""


def own_tower(
    module: nn.Module,
    specification: ModelSpecification,
    device: torch.device,
    dtype: torch.dtype,
    max_batch_size: int = 1,
    *,
    mode: str = "eager",
) -> DeviceTower:
    """`module` (FP32, taking normalised pixels) as it is, executed eagerly or, `traced` or `scripted`, by TorchScript.

    Raises `EngineError` for a module that TorchScript does not take.
    """
    executed = module if specification.payload == "fp32" else UInt8Images(module, specification.preprocessing).eval()
    to_precision(executed.to(device), dtype)
    own = _module_tower(executed, dtype, OWN_MODULE, "as in the model")
    if mode not in APIS:
        return own
    examples = examples_of(specification, device, dtype)
    script = to_torchscript(executed, mode, examples, max_batch_size, title=OWN_MODULE)
    run = _Run(script.module, dtype)
    # A frozen module has no parameters left: they are its constants, in the same memory.
    return DeviceTower(lambda _images: run, own.parameters, script.kernels, own.gelu)


def fast_tower(
    module: nn.Module,
    specification: ModelSpecification,
    device: torch.device,
    dtype: torch.dtype,
    max_batch_size: int,
    *,
    compiled: bool,
) -> DeviceTower:
    """The fastest that covers this model and precision; with `compiled`, torch.compile of the lean tower."""
    preprocessing = specification.preprocessing
    try:
        lean = LeanVisionTower.from_open_clip(module, preprocessing.mean, preprocessing.std)
    except UnsupportedTowerError:
        own = own_tower(module, specification, device, dtype)
        return _compiled(own, dtype, max_batch_size) if compiled else own
    gelu = "x·sigmoid(1.702·x)" if lean.shape.quick_gelu else "erf"
    if not compiled and dtype == torch.float16 and find_spec("triton") is not None:
        try:
            return _fused_tower(lean, specification, device, max_batch_size)
        except UnsupportedTowerError:
            pass
    tower = _module_tower(lean.to(device=device, dtype=dtype), dtype, "lean tower, scaled dot-product attention", gelu)
    return _compiled(tower, dtype, max_batch_size) if compiled else tower


class _Run:
    """One module as what enqueues a batch of any size."""

    def __init__(self, module: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        self.module, self._dtype = module, dtype

    def __call__(self, pixels: Tensor, out: Tensor) -> None:
        out.copy_(self.module(pixels.to(self._dtype) if pixels.is_floating_point() else pixels))


def _module_tower(module: nn.Module, dtype: torch.dtype, kernels: str, gelu: str) -> DeviceTower:
    run = _Run(module, dtype)
    return DeviceTower(lambda _images: run, tuple(module.parameters()), kernels, gelu)


def _compiled(tower: DeviceTower, dtype: torch.dtype, max_batch_size: int) -> DeviceTower:
    import torch._dynamo

    run = tower.build(max_batch_size)
    assert isinstance(run, _Run)
    # One specialised version a batch size; beyond its limit dynamo would quietly execute the module eagerly.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    compiled = _Run(torch.compile(run.module, dynamic=False), dtype)
    kernels = f"torch.compile of {tower.kernels}"
    return DeviceTower(lambda _images: compiled, tower.parameters, kernels, tower.gelu, tower.plans)


def _fused_tower(
    lean: LeanVisionTower, specification: ModelSpecification, device: torch.device, max_batch_size: int
) -> DeviceTower:
    from servers.engines.vit.device_weights import FusedWeights
    from servers.engines.vit.fused import FusedVisionTower, Workspace
    from servers.engines.vit.plan_choice import Choice, PlanChooser
    from servers.engines.vit.plans import Plan

    weights = FusedWeights(lean, device)
    workspace = Workspace(lean.shape, max_batch_size, device)
    pixels = specification.inputs[0]
    dtype = torch.uint8 if specification.payload == "uint8" else torch.float32
    chooser = PlanChooser(weights, workspace, dtype, pixels.item_shape)
    chosen: dict[int, Choice] = {}

    def build(images: int) -> Enqueue:
        chosen[images] = chooser.choose(images)
        return FusedVisionTower(weights, workspace, images, chosen[images].plan).run

    def plans() -> Mapping[str, str]:
        return {str(images): _sentence(choice.plan, choice.origin) for images, choice in sorted(chosen.items())}

    def _sentence(plan: Plan, origin: str) -> str:
        products = "cuBLAS products" if plan.qkv is None else "Triton products"
        form = "" if lean.shape.quick_gelu else f", GELU in its {plan.gelu} form"
        return f"{products}{form} ({origin})"

    gelu = "x·sigmoid(1.702·x)" if lean.shape.quick_gelu else "erf or tanh, as the plans say"
    return DeviceTower(build, weights.tensors, "fused Triton kernels and cuBLAS", gelu, plans)
