"""What a batch on a CUDA device is executed by: the model's own module, the lean tower, or our fused kernels.

The lean and the fused tower compute the same function from the same weights (see `servers.engines.vit`); a model that
they do not cover runs as its own module, and the description says so.

TorchScript is a module traced or scripted, frozen, warmed up, and proven to answer as itself at several batch sizes.
torch calls torch.jit deprecated, in favour of torch.compile and torch.export; its warnings of that are not shown.
torch.jit optimises a function on its second call, for the shapes seen in the first. By default it then compiles two
versions for fixed sizes before one for any; here every version is for any size (`DYNAMIC`), so that what load has
executed is all there is to compile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from servers.engines.interface import EngineError
from servers.engines.vit.graph_runner import Enqueue
from servers.engines.vit.tower import LeanVisionTower, UnsupportedTowerError
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images, to_precision

OWN_MODULE = "the model's own module"

APIS = {"traced": "torch.jit.trace", "scripted": "torch.jit.script"}
"""By mode."""

FUSED, UNFUSED = [("DYNAMIC", 10)], list[tuple[str, int]]()
"""Arguments of `torch.jit.set_fusion_strategy`, which is the whole process's."""

PROOF_ROWS = (2, 1, 3)
"""Two first: a size of 1 is taken as fixed by the fuser, and 3 could be mistaken for the channels."""

CALLS = 3
"""A size is recorded in the first call and optimised in the second, so the third is what requests get."""

MAX_ERROR = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.05}
"""Largest ‖answer - own answer‖ / ‖own answer‖ of a row, by the type of both: fused code rounds elsewhere."""

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError)
"""What the compiler and the interpreter raise; neither has a tree of its own."""


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
    from servers.engines.vit.fused import Choice, FusedVisionTower, FusedWeights, PlanChooser, Workspace
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


@dataclass(frozen=True, slots=True)
class TorchScript:
    """What executes, warm, and how a description calls it."""

    module: nn.Module
    kernels: str


def to_torchscript(
    module: nn.Module,
    mode: str,
    examples: Callable[[int], Tensor],
    max_batch_size: int,
    *,
    title: str,
) -> TorchScript:
    """`module` (eval mode, no gradients) as one of `APIS`; its parameters become constants that share their memory.

    `examples(n)` gives n rows of input where the module is. `title` is what the description calls the module. If
    torch.jit's fuser fails on this device, the same is executed without it, and `kernels` says so. Raises `EngineError`
    if torch.jit does not take the module, or answers otherwise than it.
    """
    api = APIS[mode]
    rows = [n for n in PROOF_ROWS if n <= max_batch_size]
    if max_batch_size not in rows and examples(1).is_cuda:
        rows.append(max_batch_size)  # allocates and selects kernels, which takes long for a large batch on a CPU
    pairs = [_with_answer(module, examples(n)) for n in rows]
    kernels = f"{api} of {title}"
    try:
        scripted = _built(module, mode, pairs[0][0])
        try:
            error = _largest_error(scripted, pairs, FUSED)
        except FAILURES as exc:
            scripted = _built(module, mode, pairs[0][0])
            error = _largest_error(scripted, pairs, UNFUSED)
            kernels = f"{kernels}, without its fuser, which failed: {reason_of(exc)}"
    except FAILURES as exc:
        raise EngineError(f"{kernels} failed: {reason_of(exc)}; use mode eager") from exc
    limit = MAX_ERROR[pairs[0][1].dtype]
    if not error <= limit:
        raise EngineError(
            f"{kernels} does not compute the model: its answer to one of the batches {rows} is {error:.2g} off the "
            f"module's own, more than {limit:g}; use mode eager"
        )
    return TorchScript(scripted, kernels)


def examples_of(specification: ModelSpecification, device: torch.device, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Random rows as the executed module takes them: bytes, or pixels in its own precision."""
    tensor = specification.inputs[0]

    def examples(rows: int) -> Tensor:
        generator, shape = torch.Generator().manual_seed(rows), (rows, *tensor.item_shape)
        if tensor.datatype == "UINT8":
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    return examples


def reason_of(exc: BaseException) -> str:
    """One line. TorchScript's interpreter begins with a traceback of its own and puts the cause at the end."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
    return lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]


def _with_answer(module: nn.Module, given: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return given, module(given)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide deprecations, which the documents tell, and guesses at what a trace bakes in, which the proof finds."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, TracerWarning):
            warnings.simplefilter("ignore", category)
        yield


def _built(module: nn.Module, mode: str, example: Tensor) -> torch.jit.ScriptModule:
    with _quiet(), torch.no_grad():
        script: torch.jit.ScriptModule
        if mode == "traced":
            script = torch.jit.trace(module, (example,), check_trace=False)  # type: ignore[no-untyped-call]
        else:
            script = torch.jit.script(module)
        frozen: torch.jit.ScriptModule = torch.jit.freeze(script)
        return frozen


def _largest_error(
    scripted: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]], strategy: list[tuple[str, int]]
) -> float:
    """Of any row of the last call of each batch; NaN if one is NaN. Leaves every batch size compiled."""
    with _quiet():
        torch.jit.set_fusion_strategy(strategy)
    errors = []
    with torch.no_grad():
        for given, own in pairs:
            for _ in range(CALLS):
                answer = scripted(given)
            if answer.shape != own.shape:
                return float("inf")
            off = torch.linalg.vector_norm((answer - own).float(), dim=1)
            errors.append(off / torch.linalg.vector_norm(own.float(), dim=1))
    return float(torch.cat(errors).max())
