"""The executable forms of a model in the torch engine: its own module, the lean tower, or the fused kernels.

The lean and the fused tower compute the same function from the same weights (see `servers.engines.vit`); a model that
they do not cover runs as its own module, and the description says so.

TorchScript is a module traced or scripted, frozen, warmed up, and compared with the module at several batch sizes.
torch deprecates torch.jit in favour of torch.compile and torch.export; its warnings of that are hidden. torch.jit
optimises a function on its second call, for the shapes of the first. By default it then compiles two versions for fixed
sizes before one for any; here every version is for any size (`DYNAMIC`), so no request waits for a compilation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from servers.engines.batches import random_inputs
from servers.engines.interface import EngineError
from servers.engines.torch_device import Enqueue
from servers.engines.vit.tower import LeanVisionTower, UnsupportedTowerError
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import executed_module, to_precision

OWN_MODULE = "the model's own module"

APIS = {"traced": "torch.jit.trace", "scripted": "torch.jit.script"}
"""Functions of torch by mode."""

FUSED, UNFUSED = [("DYNAMIC", 10)], list[tuple[str, int]]()
"""Arguments of `torch.jit.set_fusion_strategy`, which applies to the whole process."""

PROOF_ROWS = (2, 1, 3)
"""Two first: the fuser takes a size of 1 as fixed, and 3 could be mistaken for the channels."""

CALLS = 3
"""torch.jit records a size in the first call and optimises it in the second, so requests get the third."""

MAX_ERROR = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.05}
"""Largest ‖answer - own answer‖ / ‖own answer‖ of a row, by the type of both: fused code rounds elsewhere."""

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError)
"""The exceptions of torch.jit's compiler and interpreter, which have no common base."""


@dataclass(frozen=True, slots=True)
class DeviceTower:
    """The executable form of a model on a device, and its description."""

    module: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    kernels: str
    gelu: str
    enqueue: Callable[[int], Enqueue] | None = None
    """Returns the function that enqueues n images; None: a function that calls `module`."""
    plans: Callable[[], Mapping[str, str]] = field(default=dict)
    """Plans by batch size, known once built."""

    def build(self, images: int) -> Enqueue:
        """The function that enqueues a batch of `images`."""
        if self.enqueue is not None:
            return self.enqueue(images)
        dtype = self.parameters[-1].dtype

        def run(pixels: Tensor, out: Tensor) -> None:
            out.copy_(self.module(pixels.to(dtype) if pixels.is_floating_point() else pixels))

        return run


def own_tower(
    module: nn.Module,
    specification: ModelSpecification,
    device: torch.device,
    dtype: torch.dtype,
    max_batch_size: int = 1,
    *,
    mode: str = "eager",
) -> DeviceTower:
    """`module` (FP32, taking normalised pixels), executed eagerly or by TorchScript (`traced`, `scripted`).

    Raises `EngineError` for a module that TorchScript does not take.
    """
    executed = to_precision(executed_module(specification, module).to(device), dtype)
    own = DeviceTower(executed, tuple(executed.parameters()), OWN_MODULE, "as in the model")
    if mode not in APIS:
        return own

    def examples(rows: int) -> Tensor:
        (given,) = random_inputs(specification, rows, seed=rows).values()
        pixels = torch.from_numpy(given).to(device)
        return pixels.to(dtype) if pixels.is_floating_point() else pixels

    script, kernels = to_torchscript(executed, mode, examples, max_batch_size, title=OWN_MODULE)
    # A frozen module has no parameters left: they are its constants, in the same memory.
    return replace(own, module=script, kernels=kernels)


def fast_tower(
    module: nn.Module,
    specification: ModelSpecification,
    device: torch.device,
    dtype: torch.dtype,
    max_batch_size: int,
    *,
    compiled: bool,
) -> DeviceTower:
    """The fastest tower that covers this model and precision; with `compiled`, torch.compile of the lean tower."""
    try:
        byte_input = specification.preprocessing if specification.payload == "uint8" else None
        lean = LeanVisionTower(module, byte_input)
    except UnsupportedTowerError:
        own = own_tower(module, specification, device, dtype)
        return _compiled(own) if compiled else own
    if not compiled and dtype == torch.float16 and find_spec("triton") is not None:
        try:
            return _fused_tower(lean, specification, device, max_batch_size)
        except UnsupportedTowerError:
            pass
    lean = lean.to(device=device, dtype=dtype)
    gelu = "x·sigmoid(1.702·x)" if lean.shape.quick_gelu else "erf"
    tower = DeviceTower(lean, tuple(lean.parameters()), "lean tower, scaled dot-product attention", gelu)
    return _compiled(tower) if compiled else tower


def _compiled(tower: DeviceTower) -> DeviceTower:
    import torch._dynamo

    # One specialised version per batch size; beyond its limit dynamo would quietly execute the module eagerly.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    module = torch.compile(tower.module, dynamic=False)
    return replace(tower, module=module, kernels=f"torch.compile of {tower.kernels}")


def _fused_tower(
    lean: LeanVisionTower, specification: ModelSpecification, device: torch.device, max_batch_size: int
) -> DeviceTower:
    from servers.engines.vit.fused import FusedVisionTower, FusedWeights, PlanChooser, Workspace
    from servers.engines.vit.plans import Plan

    weights = FusedWeights(lean, device)
    workspace = Workspace(lean.shape, max_batch_size, device)
    chooser = PlanChooser(weights, workspace, specification.inputs[0].item_shape)
    chosen: dict[int, tuple[Plan, str]] = {}

    def enqueue(images: int) -> Enqueue:
        chosen[images] = chooser.choose(images)
        return FusedVisionTower(weights, workspace, images, chosen[images][0]).run

    def plans() -> Mapping[str, str]:
        return {str(images): sentence(*choice) for images, choice in sorted(chosen.items())}

    def sentence(plan: Plan, origin: str) -> str:
        products = "cuBLAS products" if plan.qkv is None else "Triton products"
        form = "" if lean.shape.quick_gelu else f", GELU in its {plan.gelu} form"
        return f"{products}{form} ({origin})"

    gelu = "x·sigmoid(1.702·x)" if lean.shape.quick_gelu else "erf or tanh, as the plans say"
    return DeviceTower(lean, weights.tensors, "fused Triton kernels and cuBLAS", gelu, enqueue, plans)


def to_torchscript(
    module: nn.Module, mode: str, examples: Callable[[int], Tensor], max_batch_size: int, *, title: str
) -> tuple[nn.Module, str]:
    """`module` (eval mode, no gradients) as TorchScript, warm, and the description of it for `kernels`.

    Its parameters become constants that share their memory. `examples(n)` gives n rows of input where the module is;
    `title` names the module. If torch.jit's fuser fails on this device, the fuser is switched off, and the description
    says so. Raises `EngineError` if torch.jit does not take the module or computes other answers.
    """
    rows = [n for n in PROOF_ROWS if n <= max_batch_size]
    if max_batch_size not in rows and examples(1).is_cuda:
        rows.append(max_batch_size)  # allocates and selects kernels; on a CPU it would only take long
    with torch.no_grad():
        pairs = [(given, module(given)) for given in map(examples, rows)]
    kernels = f"{APIS[mode]} of {title}"
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
            f"{kernels} does not compute the model: for one of the batches {rows} its answer differs from the "
            f"module's own by {error:.2g}, more than {limit:g}; use mode eager"
        )
    return scripted, kernels


def reason_of(exc: BaseException) -> str:
    """The cause in one line; TorchScript's interpreter puts it at the end, after its own traceback."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
    return lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide deprecations, which the docs mention, and guesses about constants in a trace, which the comparison finds."""
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
    """The largest error of a row in the last call of each batch; NaN if one is NaN. Compiles every batch size."""
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
