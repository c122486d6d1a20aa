"""The executable forms of a model in the torch engine: its own module, the lean tower, or the fused kernels.

The lean and the fused tower compute the same function from the same weights (see `vit_tower` and `vit_fused`), for a
specification that allows it. Every other model runs as its own module, and the description says so.

TorchScript is a module traced, frozen, warmed up, and compared with the module in several shapes.
torch deprecates torch.jit in favour of torch.compile and torch.export; its warnings of that are hidden. torch.jit
optimises a function on its second call, for the shapes of the first. By default it then compiles two versions for fixed
sizes before one for any; here every version is for any size (`DYNAMIC`), so no request waits for a compilation.

In FP8, torchao's linear layers multiply FP8 weights with inputs that are converted as they come, a scale per row, so
that an answer does not depend on the other items of its batch. Everything else stays in BF16. The products exist on
GPUs of compute capability 8.9 (Ada) and newer, for sizes that are multiples of 16; other layers stay in BF16.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from servers.engines.agreement import TOLERANCE, proof_batch
from servers.engines.batches import Bucket
from servers.engines.interface import EngineError
from servers.engines.settings import PARAMETER_TYPES
from servers.engines.torch.compiling import compile_together
from servers.engines.torch.runner import TORCH_TYPES, Enqueue
from servers.engines.torch.vit_tower import LeanVisionTower, UnsupportedTowerError
from servers.models.specification import ModelSpecification, reason_of
from servers.models.uint8_module import executed_module, to_precision
from servers.options.stages import stage
from servers.protocol.tensors import Array

OWN_MODULE = "the model's own module"

TRACE = "torch.jit.trace"
"""How the description names the API."""

FUSED, UNFUSED = [("DYNAMIC", 10)], list[tuple[str, int]]()
"""Arguments of `torch.jit.set_fusion_strategy`, which applies to the whole process."""

PROOF_SHARES = {2: 1.0, 1: 0.76, 3: 0.34}
"""Rows of the batches in which a script is compared, and the share of the axes' default sizes that they have.

Two first: the fuser takes a size of 1 as fixed, and 3 could be mistaken for the channels."""

CALLS = 3
"""torch.jit records a size in the first call and optimises it in the second, so requests get the third."""

MAX_ERROR = {getattr(torch, PARAMETER_TYPES[name]): TOLERANCE[name] for name in ("fp32", "fp16", "bf16")}
"""Largest ‖answer - module's answer‖ / ‖module's answer‖ of a row, by datatype: fused code rounds elsewhere."""

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, OSError)
"""The exceptions of torch.jit's compiler and interpreter, which share no base class. OSError: a function's source file
is missing."""


@dataclass(frozen=True, slots=True)
class ModelForm:
    """The executable form of a model on a device, and its description."""

    module: Callable[..., Any]
    parameters: Sequence[Tensor]
    dtype: torch.dtype
    """The type of the parameters, to which floating-point inputs are converted."""
    kernels: str
    gelu: str = "as in the model"
    enqueue: Callable[[int], Enqueue] | None = None
    """Returns the function that enqueues n items; None: a function that calls `module`."""
    plans: Callable[[], Mapping[str, str]] = field(default=dict)
    """Plans by batch size, known once built."""
    fp8_layers: int = 0
    """Linear layers whose weights are in FP8, read back from the module."""
    details: Mapping[str, object] = field(default_factory=dict)
    """What the description says besides."""

    def call(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of a batch in any shape, in the model's own datatypes."""
        return as_tuple(self.module(*converted(inputs, self.dtype)))

    def build(self, bucket: Bucket) -> Enqueue:
        """The function that enqueues batches of this bucket."""
        if self.enqueue is not None:
            return self.enqueue(bucket.rows)

        def run(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            for out, answer in zip(outputs, self.call(inputs), strict=True):
                out.copy_(answer)

        return run


def converted(tensors: Iterable[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors, those with a floating point in this datatype."""
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a module that returns one tensor or several."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def as_specified(specification: ModelSpecification, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in the datatypes of the specification; only floating-point ones are converted. Raises `EngineError`
    for another number of outputs, another shape or another kind of datatype."""
    tensors = specification.outputs
    if len(outputs) != len(tensors):
        raise EngineError(f"{specification.name}: the module returns {len(outputs)} outputs, expected {len(tensors)}")
    converted = []
    for tensor, output in zip(tensors, outputs, strict=True):
        dtype = TORCH_TYPES[tensor.datatype]
        both_floating = output.is_floating_point() and dtype.is_floating_point
        fits = len(output.shape) == len(tensor.shape) and all(
            expected in (-1, size) for expected, size in zip(tensor.shape, output.shape, strict=True)
        )
        if not fits or not (both_floating or output.dtype == dtype):
            returned = f"{str(output.dtype).removeprefix('torch.')} {list(output.shape)}"
            raise EngineError(
                f"{specification.name}: the module returns {tensor.name} as {returned}, the specification says "
                f"{tensor.datatype} {list(tensor.shape)}"
            )
        converted.append(output.to(dtype))
    return converted


def check_datatypes(specification: ModelSpecification) -> None:
    """Raise `EngineError` for a tensor that torch cannot hold."""
    for tensor in (*specification.inputs, *specification.outputs):
        if tensor.datatype not in TORCH_TYPES:
            raise EngineError(f"{specification.name}: torch has no datatype for {tensor.name}, {tensor.datatype}")


def expected_answers(
    specification: ModelSpecification, module: nn.Module, inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """The answers of a module on the CPU to a batch, by output. Raises `EngineError` for a module that does not return
    what the specification says."""
    tensors = [torch.from_numpy(inputs[tensor.name].copy()) for tensor in specification.inputs]
    with torch.no_grad():
        answers = as_specified(specification, as_tuple(module(*tensors)))
    return {tensor.name: answer.clone().numpy() for tensor, answer in zip(specification.outputs, answers, strict=True)}


def plain_form(
    module: nn.Module,
    specification: ModelSpecification,
    device: torch.device,
    dtype: torch.dtype,
    max_batch_size: int = 1,
    *,
    traced: bool = False,
    fp8: bool = False,
) -> ModelForm:
    """`module` (FP32, as from `load_module`), executed eagerly or `traced`. Raises `EngineError` for a module that
    TorchScript, or with `fp8` torchao, does not take."""
    executed = to_precision(executed_module(specification, module).to(device), dtype)
    if fp8:
        if traced:
            raise EngineError("TorchScript does not take FP8 weights; use mode graph, compile or eager, not traced")
        layers, kernels = to_fp8(executed, device, title=OWN_MODULE)
        return ModelForm(executed, tuple(executed.parameters()), dtype, kernels, fp8_layers=layers)
    form = ModelForm(executed, tuple(executed.parameters()), dtype, OWN_MODULE)
    if not traced:
        return form

    def examples(rows: int) -> tuple[Tensor, ...]:
        inputs = proof_batch(specification, rows, rows, PROOF_SHARES.get(rows, 1.0)).inputs
        return converted((torch.from_numpy(inputs[tensor.name]).to(device) for tensor in specification.inputs), dtype)

    script, kernels = to_torchscript(executed, examples, max_batch_size, title=OWN_MODULE)
    # A frozen module has no parameters left: they are its constants, in the same memory.
    return replace(form, module=script, kernels=kernels)


def fast_form(
    module: nn.Module,
    specification: ModelSpecification,
    device: torch.device,
    dtype: torch.dtype,
    rows: Sequence[int],
    *,
    compiled: bool,
    fp8: bool = False,
    planned: Callable[[ModelForm | None], ModelForm | None] = lambda _: None,
) -> ModelForm:
    """The fastest form that covers this model and precision, for batches of `rows`, ascending; with `compiled`,
    torch.compile of the lean tower. With `fp8` it is the model's own module, whose linear layers torchao knows.
    `planned` may give the form of a model without a fused tower, which is neither compiled nor in FP8; it takes the
    form with the lean tower, if there is one."""
    lean = None if fp8 else _lean_tower(module, specification)
    if lean is not None and not compiled and dtype == torch.float16 and find_spec("triton") is not None:
        try:
            return _fused_form(lean, specification, device, rows)
        except (UnsupportedTowerError, *FAILURES):  # on another card the kernels may fail
            pass
    form = None
    if lean is not None:
        lean = lean.to(device=device, dtype=dtype)
        gelu = "x·sigmoid(1.702·x)" if lean.shape.quick_gelu else "erf"
        form = ModelForm(lean, tuple(lean.parameters()), dtype, "lean tower, scaled dot-product attention", gelu)
    if not compiled and not fp8 and (chosen := planned(form)) is not None:
        return chosen
    form = form or plain_form(module, specification, device, dtype, fp8=fp8)
    return _compiled(form) if compiled else form


def _lean_tower(module: nn.Module, specification: ModelSpecification) -> LeanVisionTower | None:
    """The lean form of a model that the specification declares a vision tower; None for every other."""
    if not specification.fused_tower:
        return None
    try:
        return LeanVisionTower(module, specification.preprocessing if specification.payload == "uint8" else None)
    except UnsupportedTowerError:
        return None


def _compiled(form: ModelForm) -> ModelForm:
    import torch._dynamo

    # One specialised version per bucket; beyond its limit dynamo would quietly execute the module eagerly.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    module = torch.compile(form.module, dynamic=False)
    return replace(form, module=module, kernels=f"torch.compile of {form.kernels}")


def _fused_form(
    lean: LeanVisionTower, specification: ModelSpecification, device: torch.device, rows: Sequence[int]
) -> ModelForm:
    from servers.engines.torch.vit_fused import FusedVisionTower, FusedWeights, TilePlan, Workspace, chosen_plans

    weights = FusedWeights(lean, device)
    workspace = Workspace(lean.shape, rows[-1], device)
    item = specification.inputs[0].item_shape
    chosen = chosen_plans(weights, workspace, item, rows)
    towers = {images: FusedVisionTower(weights, workspace, images, plan) for images, (plan, _) in chosen.items()}
    pixels = torch.zeros(rows[-1], *item, dtype=torch.uint8 if lean.bytes_in else torch.float32, device=device)
    out = torch.empty(rows[-1], lean.shape.output_width, device=device)
    with stage("capture"):
        compile_together((partial(towers[n].run, pixels[:n], out[:n]) for n in rows), device)

    def enqueue(images: int) -> Enqueue:
        tower = towers[images]
        return lambda inputs, outputs: tower.run(inputs[0], outputs[0])

    def plans() -> Mapping[str, str]:
        return {str(images): sentence(*choice) for images, choice in sorted(chosen.items())}

    def sentence(plan: TilePlan, origin: str) -> str:
        products = "cuBLAS products" if plan.qkv is None else "Triton products"
        form = "" if lean.shape.quick_gelu else f", GELU in its {plan.gelu} form"
        return f"{products}{form} ({origin})"

    gelu = "x·sigmoid(1.702·x)" if lean.shape.quick_gelu else "erf or tanh, as the plans say"
    kernels = "fused Triton kernels and cuBLAS"
    return ModelForm(lean, weights.tensors, torch.float16, kernels, gelu, enqueue, plans)


def to_torchscript(
    module: nn.Module, examples: Callable[[int], tuple[Tensor, ...]], max_batch_size: int, *, title: str
) -> tuple[nn.Module, str]:
    """`module` (eval mode, no gradients) as TorchScript, warm, and the description of it for `kernels`.

    Its parameters become constants that share their memory. `examples(n)` gives a batch of n rows where the module is;
    `title` names the module. If torch.jit's fuser fails on this device, the fuser is switched off, and the description
    says so. Raises `EngineError` if torch.jit does not take the module or computes other answers.
    """
    rows = [n for n in PROOF_SHARES if n <= max_batch_size]
    if max_batch_size not in rows and examples(1)[0].is_cuda:
        rows.append(max_batch_size)  # allocates and selects kernels; on a CPU it would only take long
    with torch.no_grad():
        pairs = [(inputs, as_tuple(module(*inputs))) for inputs in map(examples, rows)]
    kernels = f"{TRACE} of {title}"
    try:
        script = _traced(module, pairs[0][0])
        try:
            error = _largest_error(script, pairs, FUSED)
        except FAILURES as exc:
            script = _traced(module, pairs[0][0])
            error = _largest_error(script, pairs, UNFUSED)
            kernels = f"{kernels}, without its fuser, which failed: {reason_of(exc)}"
    except FAILURES as exc:
        raise EngineError(f"{kernels} failed: {reason_of(exc)}; use mode eager") from exc
    limit = max(MAX_ERROR.get(output.dtype, 0) for output in pairs[0][1])
    if not error <= limit:
        shapes = ", ".join(str(list(inputs[0].shape)) for inputs, _ in pairs)
        raise EngineError(
            f"{kernels} does not compute the model: for one of the batches {shapes} its answer differs from the "
            f"module's own by {error:.2g}, more than {limit:g}; use mode eager"
        )
    return script, kernels


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide deprecations, which the docs mention, and guesses about constants in a trace, which the comparison finds."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, TracerWarning):
            warnings.simplefilter("ignore", category)
        yield


def _traced(module: nn.Module, example: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    with _quiet(), torch.no_grad():
        script: Any = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        frozen: torch.jit.ScriptModule = torch.jit.freeze(script)
        return frozen


def _largest_error(
    script: nn.Module, pairs: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]], strategy: list[tuple[str, int]]
) -> float:
    """The largest error of a row in the last call of each batch; NaN if one is NaN. Compiles every batch size."""
    with _quiet():
        torch.jit.set_fusion_strategy(strategy)
    errors = [0.0]
    with torch.no_grad():
        for inputs, expected in pairs:
            for _ in range(CALLS):
                answers = as_tuple(script(*inputs))
            errors += [largest_row_error(answer, output) for answer, output in zip(answers, expected, strict=True)]
    return max(errors, key=lambda error: (math.isnan(error), error))


def largest_row_error(answer: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row; infinity for another shape or datatype, or other integers."""
    if (answer.shape, answer.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    if not expected.is_floating_point() or not expected.numel():
        return 0.0 if torch.equal(answer, expected) else float("inf")
    difference, norm = (
        torch.linalg.vector_norm(rows.reshape(len(expected), -1).float(), dim=1)
        for rows in (answer - expected, expected)
    )
    return float(torch.where(difference == 0, 0, difference / norm).max())


def refuse_other_answers(module: nn.Module, changed: nn.Module, inputs: Sequence[Tensor], change: str) -> None:
    """Raise `ValueError` if the FP32 answers of a changed module are not those of `module`; `change` names it."""
    expected, actual = (as_tuple(each(*inputs)) for each in (module, changed))
    error, limit = max(map(largest_row_error, actual, expected)), MAX_ERROR[torch.float32]
    if not error <= limit:
        raise ValueError(f"with {change} its answer differs by {error:.2g}, more than {limit:g}")


MIN_CAPABILITY = (8, 9)
FP8_MULTIPLE = 16
INSTALL_FP8 = "pip install 'abserve[fp8]'"


def to_fp8(module: nn.Module, device: torch.device, *, title: str) -> tuple[int, str]:
    """Convert the linear layers of `module`, which is in BF16 on `device`, in place. Returns how many are in FP8, and
    the description for `kernels`; `title` names the module. Raises `EngineError` where the device, the packages or the
    model have no FP8 products."""
    check_capability(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    try:
        import torchao
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    except ImportError as exc:
        raise EngineError(f"precision fp8 needs torchao, and {reason_of(exc)}; run: {INSTALL_FP8}") from exc
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not any(map(has_fp8_product, linear)):
        raise EngineError(
            f"none of the {len(linear)} linear layers has sizes that are multiples of {FP8_MULTIPLE}, which FP8 "
            "products need; use precision bf16"
        )
    # torchao would also change how torch multiplies FP32 and how torch.compile tunes, for the whole process.
    configuration = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(module, configuration, filter_fn=lambda layer, _: isinstance(layer, nn.Linear) and has_fp8_product(layer))
    converted = sum(type(layer.weight) is not nn.Parameter for layer in linear)  # torchao's weights have their own type
    if not converted:
        raise EngineError(f"torchao {torchao.__version__} left every linear layer in BF16; use precision bf16")
    return converted, f"{title}, {converted} of {len(linear)} linear layers in FP8 by torchao {torchao.__version__}"


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Raise `EngineError` for a GPU without FP8 products."""
    if capability < MIN_CAPABILITY:
        raise EngineError(
            f"precision fp8 needs a GPU of compute capability 8.9 or newer, and {name} has "
            f"{capability[0]}.{capability[1]}; use precision bf16"
        )


def has_fp8_product(layer: nn.Linear) -> bool:
    """Whether FP8 products exist for the layer; torchao has none for the last product of nn.MultiheadAttention."""
    of_attention = isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return not of_attention and layer.in_features % FP8_MULTIPLE == 0 and layer.out_features % FP8_MULTIPLE == 0
