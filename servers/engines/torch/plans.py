"""The plans of a model in CUDA graphs, by which is fastest: layout, batch norms, fused convolutions, fused layers.

torch executes a model channels-first, and each batch norm, sum and activation as a kernel of its own. Tensor cores read
channels-last, a batch norm behind a convolution can be part of its weights, and what then follows can be one kernel.
Which plan is fastest depends on the GPU, the model, the precision and the batch size, so each batch size is measured at
load: all plans in turn, as CUDA graphs. A plan is only taken for a batch size if its answers there agree with the
model's own module in FP32. A plan that fails or does not fit into memory is not used.

A model with few convolutions has two plans, its own layers and `servers.engines.torch.fused_layers`, which are measured
in the same way. Fused layers are compared once, in the batch of the check at load.

The choice of a convolutional model is kept in $XDG_CACHE_HOME/abserve/plans for the GPU, the versions, the model's
structure and the precision: a later load compares answers, but measures nothing. The values of the weights change no
time, so they are not part of the key.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson
import torch
from torch import Tensor, nn

from servers.engines.agreement import Proof, disagreement, proof_batch
from servers.engines.batches import Bucket
from servers.engines.interface import PLANS_FOLDER
from servers.engines.torch.convolutions import fused_convolutions
from servers.engines.torch.copies import capture
from servers.engines.torch.device import event_pair
from servers.engines.torch.forms import FAILURES, OWN_MODULE, ModelForm, as_specified, converted, plain_form, reason_of
from servers.engines.torch.fused_layers import HALVES, Product, dynamic_shapes, fused_layers
from servers.engines.torch.norms import folded_norms, with_layers
from servers.engines.torch.runner import TORCH_TYPES, Enqueue
from servers.models.files import keep_file, user_cache
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images, executed_module
from servers.protocol.tensors import Array

MEASURING_SECONDS = 10.0
"""For building and measuring the plans of a model. A batch size that is left over has the plan of the nearest one."""
LEAST_CONVOLUTIONS = 4
"""A model with fewer, such as a vision transformer with its patches, has no plans of convolutions."""
LEAST_LAYERS = 4
"""Linear layers of a model that has plans of layers."""
EXAMPLE_ROWS, EXAMPLE_SHARE = 3, 0.34
"""With which a module is exported: sizes unlike each other and above 1, which torch.export would take for constants."""
MARGIN = 0.98
"""A plan is only preferred to a simpler one if it needs at most this share of its time."""
TURNS, REPLAYS = 9, 3
"""Each plan is measured in that many turns, the first of which does not count, and is replayed that often in each."""


class ModulePlan(NamedTuple):
    """How a convolutional module executes."""

    channels_last: bool
    folded: bool
    """Whether batch norms are in the weights of the convolutions before them."""
    fused: bool = False
    """Whether convolutions are one kernel with what surrounds them, see `servers.engines.torch.convolutions`."""

    @property
    def title(self) -> str:
        more = ", convolutions fused" if self.fused else ", batch norms folded" if self.folded else ""
        return f"channels-{'last' if self.channels_last else 'first'}{more}"


P = TypeVar("P", ModulePlan, "LayerPlan")

PLANS = (
    *(ModulePlan(channels_last, folded) for folded in (False, True) for channels_last in (False, True)),
    ModulePlan(channels_last=True, folded=True, fused=True),
)
"""The simplest first."""


class ComparedAnswers(NamedTuple):
    """A batch, the answers of the model's own module in FP32, and the precision that says how near others must be."""

    proof: Proof
    expected: Mapping[str, Array]
    precision: str


def planned_form(
    module: nn.Module,
    specification: ModelSpecification,
    device: torch.device,
    dtype: torch.dtype,
    rows: Sequence[int],
    answers: ComparedAnswers,
) -> ModelForm | None:
    """The form of `module` (FP32, on the CPU, unchanged) that has the fastest plan for each batch of `rows`.

    None for a model without plans, and where no plan gives the model's answers to every batch.
    """
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in module.modules())
    with torch.no_grad():
        if convolutions >= LEAST_CONVOLUTIONS and specification.padded_axis is None:
            return PlannedModule(module, specification, device, dtype, answers).form(rows)
        if sum(isinstance(layer, nn.Linear) for layer in module.modules()) >= LEAST_LAYERS:
            return layered_form(module, specification, device, dtype, rows, answers)
    return None


class LayerPlan(NamedTuple):
    """How a module with few convolutions executes."""

    title: str


OWN_LAYERS, FUSED_LAYERS = LayerPlan("own layers"), LayerPlan("fused layers")


def layered_form(
    module: nn.Module,
    specification: ModelSpecification,
    device: torch.device,
    dtype: torch.dtype,
    rows: Sequence[int],
    answers: ComparedAnswers,
) -> ModelForm:
    """The form of `module` that has fused layers for the batches for which they are faster, if their answers agree."""
    started, left_out = monotonic(), dict[str, str]()
    own = fused = plain_form(deepcopy(module), specification, device, dtype)
    measured, times_ms = dict[int, LayerPlan](), dict[int, dict[str, float]]()
    try:
        fused = _with_fused_layers(own, specification, device, answers)
        for count in measuring_order(rows):
            if not times_ms or monotonic() - started < MEASURING_SECONDS:
                inputs = _tensors(specification, proof_batch(specification, count, 0).inputs, device)
                outputs = [torch.empty_like(output) for output in as_specified(specification, own.call(inputs))]
                enqueues = {OWN_LAYERS: own.build(Bucket(count)), FUSED_LAYERS: fused.build(Bucket(count))}
                times = graph_times_ms(enqueues, inputs, outputs, device, left_out)
                times_ms[count] = by_title(times)
                if OWN_LAYERS in times:
                    measured[count] = fastest(times)
    except Exception as exc:  # noqa: BLE001  a module that is exported may raise anything
        left_out[FUSED_LAYERS.title] = reason_of(exc)
        measured.clear()
        times_ms.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the graphs
    measured = measured or {max(rows): OWN_LAYERS}
    chosen = {count: measured[nearest(measured, count)[0]] for count in sorted({*rows})}
    origins = {count: "measured" if count in times_ms else "not measured" for count in chosen}
    details = plan_details(started, origins, times_ms, left_out)
    form = fused if FUSED_LAYERS in chosen.values() else own
    if len(set(chosen.values())) > 1:
        form = replace(
            form,
            kernels=f"{OWN_MODULE}, {how_of(chosen.values())}",
            gelu=form.gelu if form.gelu == own.gelu else f"{own.gelu} or {form.gelu}, as the plans say",
            enqueue=lambda count: (fused if chosen[count] == FUSED_LAYERS else own).build(Bucket(count)),
        )
    return replace(form, plans=lambda: {str(count): plan.title for count, plan in chosen.items()}, details=details)


def _with_fused_layers(
    own: ModelForm, specification: ModelSpecification, device: torch.device, answers: ComparedAnswers
) -> ModelForm:
    """Raises `ValueError` if its answers differ from those that are expected, and as `fused_layers`."""
    assert isinstance(own.module, nn.Module)  # see plain_form
    arrays = proof_batch(specification, EXAMPLE_ROWS, 0, EXAMPLE_SHARE).inputs
    inputs = converted(_tensors(specification, arrays, device), own.dtype)
    graph = fused_layers(own.module, inputs, dynamic_shapes(specification))
    tanh = own.dtype in HALVES and any(isinstance(layer, Product) and layer.gelu for layer in graph.modules())
    form = replace(
        own,
        module=graph,
        parameters=tuple(graph.parameters()),
        kernels=f"{OWN_MODULE}, {FUSED_LAYERS.title}",
        gelu="tanh" if tanh else own.gelu,
    )
    outputs = as_specified(specification, form.call(_tensors(specification, answers.proof.inputs, device)))
    arrays = {tensor.name: output.cpu().numpy() for tensor, output in zip(specification.outputs, outputs, strict=True)}
    actual = answers.proof.without_padding(arrays)
    if (fault := disagreement(specification, answers.expected, actual, answers.precision).fault) is not None:
        raise ValueError(fault)
    return form


def _tensors(specification: ModelSpecification, arrays: Mapping[str, Array], device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(arrays[tensor.name].copy()).to(device) for tensor in specification.inputs]


class PlannedModule:
    """Builds the plans of one module on a device as they are needed, and chooses among them."""

    def __init__(
        self,
        module: nn.Module,
        specification: ModelSpecification,
        device: torch.device,
        dtype: torch.dtype,
        answers: ComparedAnswers,
    ) -> None:
        self._module, self._specification, self._device, self._dtype = module, specification, device, dtype
        self._answers = answers
        self._started = monotonic()
        self._folded: nn.Module | None = None
        self._forms: dict[ModulePlan, ModelForm | None] = {}
        self._chosen: dict[int, tuple[ModulePlan, str]] = {}
        """By rows, the plan and where it comes from."""
        self._times_ms: dict[int, dict[str, float]] = {}
        self._seconds: dict[str, float] = {}
        """By plan, what building it and its first calls took."""
        self._left_out: dict[str, str] = {}
        """By plan, the reason why it is not used, for the last batch size for which it is not."""

    def form(self, rows: Sequence[int]) -> ModelForm | None:
        """Choose for each batch of `rows`; None if no plan gives the model's answers to one of them."""
        cache = PlanCache(cache_key(self._module, self._specification, self._device, self._answers.precision))
        kept = cache.read()
        for count in measuring_order(rows):
            if (plan := kept.get(count)) is not None and self._agrees(plan, count):
                self._chosen[count] = plan, "cached"
            elif monotonic() - self._started < MEASURING_SECONDS:
                self._measure(count)
        measured = {count: plan for count, (plan, _) in self._chosen.items()}
        for count in sorted({*rows} - {*measured}):
            candidates = dict.fromkeys([*(measured[other] for other in nearest(measured, count)), *PLANS])
            plan = next((plan for plan in candidates if self._agrees(plan, count)), None)
            if plan is None:
                return None
            self._chosen[count] = plan, "not measured"
        if self._times_ms:
            cache.write({**kept, **measured})
        return self._form_of_choice()

    def _form_of_choice(self) -> ModelForm:
        taken = {plan for plan, _ in self._chosen.values()}
        forms = {plan: form for plan, form in self._forms.items() if plan in taken and form is not None}
        self._forms.clear()
        gc.collect()  # a model may be part of a cycle; once, because it takes 0.1 s
        self._release()
        # The description reads the parameters of the largest batch.
        largest = forms[self._chosen[max(self._chosen)][0]]
        choice = {count: plan for count, (plan, _) in sorted(self._chosen.items())}
        plans = {str(count): plan.title for count, plan in choice.items()}
        origins = {count: self._chosen[count][1] for count in choice}
        details = plan_details(self._started, origins, self._times_ms, self._left_out)
        details["plan_seconds_each"] = {title: round(seconds, 2) for title, seconds in self._seconds.items()}
        return ModelForm(
            largest.module,
            largest.parameters,
            self._dtype,
            f"{OWN_MODULE}, {how_of(choice.values())}",
            enqueue=lambda count: forms[choice[count]].build(Bucket(count)),
            plans=lambda: plans,
            details=details,
        )

    def _measure(self, rows: int) -> None:
        """Choose the fastest of the plans whose answers agree; nothing if none can be measured."""
        agreeing = [plan for plan in PLANS if self._agrees(plan, rows)]
        self._release()  # a graph has memory of its own
        try:
            inputs, outputs = self._example(rows)
            enqueues = {plan: form.build(Bucket(rows)) for plan in agreeing if (form := self._form(plan)) is not None}
            times = graph_times_ms(enqueues, inputs, outputs, self._device, self._left_out)
        except FAILURES as exc:
            self._left_out["all"] = f"batches of {rows} cannot be measured: {reason_of(exc)}"
            return
        finally:
            self._release()
        if times:
            self._times_ms[rows] = by_title(times)
            self._chosen[rows] = fastest(times), "measured"

    def _form(self, plan: ModulePlan) -> ModelForm | None:
        """The form with this plan, built when it is first needed; None if it cannot be built."""
        if plan not in self._forms:
            try:
                self._forms[plan] = self._built(plan)
            except Exception as exc:  # noqa: BLE001  a module that is traced may raise anything
                self._forms[plan] = None
                self._left_out[plan.title] = reason_of(exc)
            if self._forms[plan] is None:  # not in the handler, where the exception holds what failed
                self._release()
        return self._forms[plan]

    def _built(self, plan: ModulePlan) -> ModelForm:
        own = self._module
        if plan.fused:
            own = self._fuse()
        elif plan.folded:
            own = self._fold()
        form = plain_form(deepcopy(own), self._specification, self._device, self._dtype)
        assert isinstance(form.module, nn.Module)  # see plain_form
        tower = form.module.tower if isinstance(form.module, UInt8Images) else form.module
        layout = torch.channels_last if plan.channels_last else torch.contiguous_format
        tower.to(memory_format=layout)
        tower.register_forward_pre_hook(partial(_in_layout, layout))
        return form

    def _fold(self) -> nn.Module:
        """The module with folded batch norms, made once. Raises as `folded_norms`."""
        if self._folded is None:
            self._folded = with_layers(self._module, folded_norms(self._module, self._images()))
        return self._folded

    def _fuse(self) -> nn.Module:
        """The module with folded batch norms, if it has any, and fused convolutions. Raises as `fused_convolutions`."""
        own = self._module
        with suppress(ValueError):
            own = self._fold()
        return fused_convolutions(own, self._images())

    def _images(self) -> list[Tensor]:
        """What the model's own module gets of the proof, in FP32 on the CPU."""
        arrays = self._answers.proof.inputs
        inputs = [torch.from_numpy(arrays[tensor.name]) for tensor in self._specification.inputs]
        executed = executed_module(self._specification, self._module)
        return [executed.normalised(*inputs)] if isinstance(executed, UInt8Images) else inputs

    def _agrees(self, plan: ModulePlan, rows: int) -> bool:
        """Whether the answers to a batch of `rows` agree; also the first call, in which libraries choose kernels."""
        began = monotonic()
        agrees = self._compared(plan, rows)
        self._seconds[plan.title] = self._seconds.get(plan.title, 0.0) + monotonic() - began
        return agrees

    def _compared(self, plan: ModulePlan, rows: int) -> bool:
        if (form := self._form(plan)) is None:
            return False
        actual: dict[str, Array] | None = None
        try:
            inputs, outputs = self._example(rows)
            form.build(Bucket(rows))(inputs, outputs)
            actual = {
                tensor.name: output.cpu().numpy()
                for tensor, output in zip(self._specification.outputs, outputs, strict=True)
            }
        except Exception as exc:  # noqa: BLE001  the module's own code may raise anything
            self._left_out[plan.title] = f"batches of {rows}: {reason_of(exc)}"
        if actual is None:
            self._release()
            return False
        expected = {name: array[_places(array, rows)] for name, array in self._answers.expected.items()}
        fault = disagreement(self._specification, expected, actual, self._answers.precision).fault
        if fault is not None:
            self._left_out[plan.title] = f"batches of {rows}: {fault}"
        return fault is None

    def _example(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs on the device, which repeat those of the proof, and memory for the outputs that holds zeros."""
        specification, proof = self._specification, self._answers.proof.inputs
        arrays = [proof[tensor.name] for tensor in specification.inputs]
        inputs = [torch.from_numpy(array[_places(array, rows)]).to(self._device) for array in arrays]
        outputs = [
            torch.zeros(
                Bucket(rows).shape_of(specification, tensor), dtype=TORCH_TYPES[tensor.datatype], device=self._device
            )
            for tensor in specification.outputs
        ]
        return inputs, outputs

    def _release(self) -> None:
        """Return unused memory to the device."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _places(array: Array, rows: int) -> Array:
    return np.arange(rows) % len(array)


def _in_layout(layout: torch.memory_format, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a module with images in this layout: pixels that come as bytes are channels-last."""
    return tuple(
        value.contiguous(memory_format=layout) if isinstance(value, Tensor) and value.dim() == 4 else value
        for value in arguments
    )


def fastest(times_ms: Mapping[P, float]) -> P:
    """The simplest plan, of which all come in that order, that no other one beats by more than the margin."""
    least = min(times_ms.values()) / MARGIN
    return next(plan for plan, time_ms in times_ms.items() if time_ms <= least)


def nearest(measured: Iterable[int], rows: int) -> list[int]:
    """The batch sizes that were measured, the nearest by ratio first."""
    return sorted(measured, key=lambda other: abs(math.log(other / rows)))


def by_title(times_ms: Mapping[P, float]) -> dict[str, float]:
    """The times as the description of an engine shows them."""
    return {plan.title: round(time_ms, 4) for plan, time_ms in times_ms.items()}


def plan_details(
    started: float,
    origins: Mapping[int, str],
    times_ms: Mapping[int, Mapping[str, float]],
    left_out: Mapping[str, str],
) -> dict[str, object]:
    """How the plans were chosen since `started`: by batch size where each comes from and what was measured, and by plan
    why it is not used."""
    details: dict[str, object] = {
        "plan_seconds": round(monotonic() - started, 2),
        "plan_origins": {str(count): origin for count, origin in origins.items()},
    }
    if times_ms:
        details["plan_times_ms"] = {str(count): times for count, times in sorted(times_ms.items())}
    if left_out:
        details["plans_left_out"] = left_out
    return details


def how_of(plans: Iterable[P]) -> str:
    """The plans of all batch sizes in a few words."""
    taken = list(dict.fromkeys(plans))
    return taken[0].title if len(taken) == 1 else f"{len(taken)} plans by batch size"


def measuring_order(rows: Sequence[int]) -> list[int]:
    """The largest, the smallest, then the middle of each gap, so that whatever is left over is near to another one."""
    ascending = sorted({*rows})
    order, gaps = [ascending[-1], ascending[0]], deque([(0, len(ascending) - 1)])
    while gaps:
        low, high = gaps.popleft()
        if low < (middle := (low + high) // 2):
            order.append(ascending[middle])
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(order))


def graph_times_ms(
    enqueues: Mapping[P, Enqueue],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    device: torch.device,
    left_out: dict[str, str],
) -> dict[P, float]:
    """The median device time of one batch by each plan, as CUDA graphs that are replayed in turn.

    A plan that cannot be captured or replayed has none, and its reason is in `left_out`.
    """
    graphs: dict[P, torch.cuda.CUDAGraph] = {}
    times: dict[P, list[float]] = {}
    for plan, enqueue in enqueues.items():
        try:
            graphs[plan] = capture(partial(enqueue, inputs, outputs), device)
            times[plan] = []
        except FAILURES as exc:
            left_out[plan.title] = f"batches of {len(inputs[0])}: {reason_of(exc)}"
        if plan not in graphs:
            torch.cuda.empty_cache()
    for _ in range(TURNS):
        for plan, graph in graphs.items():
            begin, end = event_pair()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times[plan].append(begin.elapsed_time(end) / REPLAYS)
    return {plan: statistics.median(turns[1:]) for plan, turns in times.items()}


def cache_key(
    module: nn.Module, specification: ModelSpecification, device: torch.device, precision: str
) -> dict[str, str]:
    """All on which the times depend."""
    described = re.sub(r" at 0x[0-9a-f]+", "", repr(module))  # of a function, which has another address in each process
    structure = [described, *(f"{name} {list(value.shape)}" for name, value in module.state_dict().items())]
    shapes = [f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in specification.inputs]
    text = "\n".join([*structure, *shapes, str(specification.definition_sha256)])
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": f"{torch.__version__} {torch.version.cuda}",
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "abserve": version("abserve"),
        "model": specification.label,
        "structure": hashlib.sha256(text.encode()).hexdigest(),
        "precision": precision,
        "code": code_sha256(),
    }


@cache
def code_sha256() -> str:
    """Of the files that say what the plans execute."""
    names = ("plans.py", "norms.py", "convolutions.py", "convolution_kernels.py")
    return hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in names)).hexdigest()


class PlanCache:
    """The plans that were chosen under one key, in a file of their own; one that cannot be used is left out."""

    def __init__(self, key: Mapping[str, str]) -> None:
        self._key = dict(key)
        name = hashlib.sha256(orjson.dumps(self._key, option=orjson.OPT_SORT_KEYS)).hexdigest()
        folder = os.environ.get(PLANS_FOLDER) or user_cache() / "plans"
        self._path = Path(folder) / f"{name}.json"

    def read(self) -> dict[int, ModulePlan]:
        """The plan by rows; empty without a file of this key."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            document = orjson.loads(self._path.read_bytes())
            titles = {plan.title: plan for plan in PLANS}
            return {int(rows): titles[title] for rows, title in document["plans"].items()}
        return {}

    def write(self, plans: Mapping[int, ModulePlan]) -> None:
        """Keep these plans instead of the earlier ones."""
        document = {"key": self._key, "plans": {str(rows): plan.title for rows, plan in sorted(plans.items())}}
        keep_file(self._path, orjson.dumps(document))
