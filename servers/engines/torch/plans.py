"""The plans of a model in CUDA graphs, by which is fastest: layout, batch norms, fused convolutions, fused layers.

torch executes a model channels-first, and each batch norm, sum and activation as a kernel of its own. Tensor cores read
channels-last, a batch norm behind a convolution can be part of its weights, and what then follows can be one kernel.
Which plan is fastest depends on the GPU, the model, the precision and the batch size, so each batch size is measured at
load: all plans in turn, as CUDA graphs. A plan is only taken for a batch size if its answers there agree with the
model's own module in FP32. A plan that fails or does not fit into memory is not used.

A model with few convolutions has two plans, its own layers and `servers.engines.torch.fused_layers`, which are measured
in the same way.

The choice is stored (see `choice`): a later load compares answers, but measures nothing. The values of the weights
change no time, so they are not part of the key.
"""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from servers.engines.agreement import Proof, disagreement, proof_batch
from servers.engines.batches import Bucket
from servers.engines.choice import MOST_SECONDS, ChoiceCache, cache_key, graph_times_ms, makes_choices
from servers.engines.torch.compiling import compile_together
from servers.engines.torch.convolutions import fused_convolutions, layer_calls
from servers.engines.torch.exported_graphs import restored, stored
from servers.engines.torch.forms import FAILURES, OWN_MODULE, ModelForm, as_specified, converted, plain_form
from servers.engines.torch.fused_layers import HALVES, Product, dynamic_shapes, exported_module, fused_layers
from servers.engines.torch.norms import folded_norms, with_layers
from servers.engines.torch.runner import TORCH_TYPES
from servers.models.specification import ModelSpecification, reason_of
from servers.models.uint8_module import UInt8Images, executed_module
from servers.options.stages import stage
from servers.protocol.tensors import Array

MEASURING_SECONDS = MOST_SECONDS
"""For building and measuring the plans of a model; no batch size begins that would end later. One that is left over has
the plan of the nearest one, also at later starts."""
LEAST_CONVOLUTIONS = 4
"""A model with fewer, such as a vision transformer with its patches, has no plans of convolutions."""
LEAST_LAYERS = 4
"""Linear layers of a model that has plans of layers."""
EXAMPLE_ROWS, EXAMPLE_SHARE = 3, 0.34
"""With which a module is exported: sizes unlike each other and above 1, which torch.export would take for constants."""
MARGIN = 0.98
"""A plan is only preferred to a simpler one if it needs at most this share of its time."""


class ModulePlan(NamedTuple):
    """How a module executes."""

    title: str
    channels_last: bool = False
    folded: bool = False
    """Whether batch norms are in the weights of the convolutions before them."""
    fused: bool = False
    """Whether layers are one kernel with what surrounds them, see `convolutions` and `fused_layers`."""


PLANS = (
    ModulePlan("channels-first"),
    ModulePlan("channels-last", channels_last=True),
    ModulePlan("channels-first, batch norms folded", folded=True),
    ModulePlan("channels-last, batch norms folded", channels_last=True, folded=True),
    ModulePlan("channels-last, convolutions fused", channels_last=True, folded=True, fused=True),
)
"""Of a convolutional module, the simplest first."""
OWN_LAYERS, FUSED_LAYERS = ModulePlan("own layers"), ModulePlan("fused layers", fused=True)
LEAN_TOWER = ModulePlan("lean tower")
"""Of a module with few convolutions; the last one of open_clip's vision towers, see `vit_tower`."""


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
    lean: ModelForm | None = None,
) -> ModelForm | None:
    """The form of `module` (FP32, on the CPU, unchanged) that has the fastest plan for each batch of `rows`, `lean`
    among them. None for a model without plans, where no plan gives the model's answers to every batch, and where
    nothing is chosen."""
    if not makes_choices():
        return None
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in module.modules())
    with torch.no_grad():
        if convolutions >= LEAST_CONVOLUTIONS and specification.padded_axis is None:
            return ConvolutionalModule(PLANS, module, specification, device, dtype, answers).form(rows)
        if sum(isinstance(layer, nn.Linear) for layer in module.modules()) >= LEAST_LAYERS:
            plans = [OWN_LAYERS, FUSED_LAYERS] if lean is None else [OWN_LAYERS, FUSED_LAYERS, LEAN_TOWER]
            layered = LayeredModule(plans, module, specification, device, dtype, answers)
            layered.lean = lean
            return layered.form(rows)
    return None


class PlannedModule(ABC):
    """Builds the plans of one module on a device as they are needed, and chooses among them."""

    def __init__(
        self,
        plans: Sequence[ModulePlan],
        module: nn.Module,
        specification: ModelSpecification,
        device: torch.device,
        dtype: torch.dtype,
        answers: ComparedAnswers,
    ) -> None:
        self._module, self._specification, self._device, self._dtype = module, specification, device, dtype
        self._plans = plans
        self._answers = answers
        self._forms: dict[ModulePlan, ModelForm | None] = {}
        self._chosen: dict[int, tuple[ModulePlan, str]] = {}
        """By rows, the plan and where it comes from."""
        self._times_ms: dict[int, dict[str, float]] = {}
        self._seconds: dict[str, float] = {}
        """By plan, what building it and its first calls took."""
        self._left_out: dict[str, str] = {}
        """By plan, the reason why it is not used, for the last batch size for which it is not."""
        self._graph: list[Any] = []
        """The exported graph of the module, as `stored`, once there is one."""

    def form(self, rows: Sequence[int]) -> ModelForm | None:
        """Choose for each batch of `rows`; None if no plan gives the model's answers to one of them."""
        cache = ChoiceCache(cache_key(self._module, self._specification, self._device, self._answers.precision))
        with stage("choose"), cache.held():
            self._started = monotonic()  # without the wait for another start
            kept = self._kept(cache)
            if not kept:
                self._compile(rows)
            compared, longest = set[ModulePlan](), 0.0
            for count in measuring_order(rows):
                plan = kept.get(count)
                if plan is not None and (plan in compared or self._still_agrees(plan, count)):
                    self._chosen[count] = plan, "cached"
                    compared.add(plan)
                elif not self._times_ms or monotonic() - self._started + longest < MEASURING_SECONDS:
                    began = monotonic()
                    self._measure(count)
                    longest = max(longest, monotonic() - began)
            measured = {number: chosen for number, (chosen, _) in self._chosen.items()}
            for left in sorted(set(rows) - set(measured)):
                found = self._first_that_agrees([measured[other] for other in nearest(measured, left)], left)
                if found is None:
                    return None
                self._chosen[left] = found, "not measured"
            if self._times_ms:  # also what was not measured: the next start must choose the same
                plans = {**kept, **{count: plan for count, (plan, _) in self._chosen.items()}}
                titles = {str(count): plan.title for count, plan in sorted(plans.items())}
                cache.write({"plans": titles, "graph": self._graph})
        return self._form_of_choice(cache.trouble)

    def _first_that_agrees(self, preferred: Sequence[ModulePlan], count: int) -> ModulePlan | None:
        """The first of these plans, or of all, that gives the model's answers to so many rows."""
        for plan in (*preferred, *(plan for plan in self._plans if plan not in preferred)):
            if self._agrees(plan, count):
                return plan
        return None

    def _kept(self, cache: ChoiceCache) -> dict[int, ModulePlan]:
        """The plans that an earlier start chose, by rows."""
        titles = {plan.title: plan for plan in self._plans}
        choice = cache.read()
        self._graph = choice.get("graph", [])
        try:
            return {int(rows): titles[title] for rows, title in choice.get("plans", {}).items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            cache.reject()
            return {}

    def _form_of_choice(self, trouble: str) -> ModelForm:
        taken = {plan for plan, _ in self._chosen.values()}
        forms = {plan: form for plan in self._plans if plan in taken and (form := self._forms[plan]) is not None}
        others = len(self._forms) > len(forms)
        self._forms.clear()
        if others:
            gc.collect()  # a model may be part of a cycle; once, because it takes 0.1 s
        self._release()
        # The description reads the parameters of the largest batch.
        largest = forms[self._chosen[max(self._chosen)][0]]
        choice = {count: plan for count, (plan, _) in sorted(self._chosen.items())}
        plans = {str(count): plan.title for count, plan in choice.items()}
        origins = {count: self._chosen[count][1] for count in choice}
        details = plan_details(self._started, origins, self._times_ms, self._left_out)
        details["plan_seconds_each"] = {title: round(seconds, 2) for title, seconds in self._seconds.items()}
        if trouble:
            details["choice_trouble"] = trouble
        how, gelus = how_of(choice.values()), list(dict.fromkeys(form.gelu for form in forms.values()))
        return ModelForm(
            largest.module,
            largest.parameters,
            self._dtype,
            OWN_MODULE if how == OWN_LAYERS.title else f"{OWN_MODULE}, {how}",
            " or ".join(gelus) + (", as the plans say" if len(gelus) > 1 else ""),
            enqueue=lambda count: forms[choice[count]].build(Bucket(count)),
            plans=lambda: plans,
            details=details,
        )

    def _measure(self, rows: int) -> None:
        """Choose the fastest of the plans whose answers agree; nothing if none can be measured."""
        agreeing = [plan for plan in self._plans if self._agrees(plan, rows)]
        self._release()  # a graph has memory of its own
        try:
            inputs, outputs = self._example(rows)
            forms = {plan.title: form for plan in agreeing if (form := self._form(plan)) is not None}
            calls = [(title, partial(form.build(Bucket(rows)), inputs, outputs)) for title, form in forms.items()]
            times = graph_times_ms(calls, self._device, partial(self._leave_out, rows))
        except FAILURES as exc:
            self._left_out["all"] = f"batches of {rows} cannot be measured: {reason_of(exc)}"
            return
        finally:
            self._release()
        if times:
            self._times_ms[rows] = {title: round(time_ms, 4) for title, time_ms in times.items()}
            title = fastest(times)
            self._chosen[rows] = next(plan for plan in agreeing if plan.title == title), "measured"

    def _leave_out(self, rows: int, title: str, reason: Exception | str) -> None:
        text = reason if isinstance(reason, str) else reason_of(reason)
        self._left_out[title] = f"batches of {rows}: {text}"

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

    def _compile(self, rows: Sequence[int]) -> None:  # noqa: B027  most need a few kernels
        """Compile together what batches of `rows` need, which are about to be measured."""

    def _still_agrees(self, plan: ModulePlan, rows: int) -> bool:
        """Whether the answers of a plan that an earlier start chose, which compared every size, agree on one batch."""
        return self._agrees(plan, rows)

    @abstractmethod
    def _built(self, plan: ModulePlan) -> ModelForm:
        """The form with this plan. Raises anything for one that the module cannot have."""

    @abstractmethod
    def _fault(self, form: ModelForm, rows: int) -> str | None:
        """How its answers to a batch of `rows` differ. Raises anything that the module's own code raises."""

    @abstractmethod
    def _example(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs on the device for measuring, and memory for the outputs."""

    def _agrees(self, plan: ModulePlan, rows: int) -> bool:
        """Whether the answers to a batch of `rows` agree; also the first call, in which libraries choose kernels."""
        began = monotonic()
        if (form := self._form(plan)) is not None:
            try:
                fault = self._fault(form, rows)
            except Exception as exc:  # noqa: BLE001  the module's own code may raise anything
                fault = reason_of(exc)
            if fault is not None:  # not in the handler, where the exception holds what failed
                self._leave_out(rows, plan.title, fault)
                self._release()
        self._seconds[plan.title] = self._seconds.get(plan.title, 0.0) + monotonic() - began
        return form is not None and fault is None

    def _release(self) -> None:
        """Return unused memory to the device."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class ConvolutionalModule(PlannedModule):
    """A module with convolutions: their layout, their batch norms, and what is one kernel with them."""

    _folded: nn.Module | None = None

    def _built(self, plan: ModulePlan) -> ModelForm:
        own = self._module
        if plan.fused:
            own = self._fuse()
        elif plan.folded:
            own = self._fold()
        form = plain_form(deepcopy(own), self._specification, self._device, self._dtype)
        tower = _tower(form)
        layout = torch.channels_last if plan.channels_last else torch.contiguous_format
        tower.to(memory_format=layout)
        tower.register_forward_pre_hook(partial(_in_layout, layout))
        return form

    def _compile(self, rows: Sequence[int]) -> None:
        form = self._form(PLANS[-1])
        if form is not None and self._device.type == "cuda":
            compile_together(layer_calls(_tower(form), rows, self._dtype, self._device), self._device)
            self._release()

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

    def _fault(self, form: ModelForm, rows: int) -> str | None:
        inputs, outputs = self._example(rows)
        form.build(Bucket(rows))(inputs, outputs)
        named = zip(self._specification.outputs, outputs, strict=True)
        actual = {tensor.name: output.cpu().numpy() for tensor, output in named}
        expected = {name: array[_places(array, rows)] for name, array in self._answers.expected.items()}
        return disagreement(self._specification, expected, actual, self._answers.precision).fault

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


class LayeredModule(PlannedModule):
    """A module with linear layers: its own layers, or fused ones, or those of the lean tower."""

    lean: ModelForm | None = None

    def _built(self, plan: ModulePlan) -> ModelForm:
        if plan == OWN_LAYERS:
            return plain_form(deepcopy(self._module), self._specification, self._device, self._dtype)
        if plan == LEAN_TOWER:
            assert self.lean is not None
            return self._compared(self.lean)
        own = self._own()
        assert isinstance(own.module, nn.Module)  # see plain_form
        if nodes := self._graph:
            with suppress(Exception):  # a damaged one is exported again
                return self._fused(own, restored(nodes, own.module, self._device))
        arrays = proof_batch(self._specification, EXAMPLE_ROWS, 0, EXAMPLE_SHARE).inputs
        inputs = converted(self._tensors(arrays), own.dtype)
        graph = exported_module(own.module, inputs, dynamic_shapes(self._specification))
        self._graph = stored(graph, own.module)
        return self._fused(own, graph)

    def _fused(self, own: ModelForm, graph: fx.GraphModule) -> ModelForm:
        """The form that executes this graph with fused layers. Raises `ValueError` for other answers."""
        graph = fused_layers(graph)
        tanh = own.dtype in HALVES and any(isinstance(layer, Product) and layer.gelu for layer in graph.modules())
        return self._compared(
            replace(own, module=graph, parameters=tuple(graph.parameters()), gelu="tanh" if tanh else own.gelu)
        )

    def _compared(self, form: ModelForm) -> ModelForm:
        """This form. Raises `ValueError` for other answers than those of the model in FP32."""
        proof, expected, precision = self._answers
        fault = disagreement(self._specification, expected, self._answered(form, proof), precision).fault
        if fault is not None:
            raise ValueError(fault)
        return form

    def _still_agrees(self, plan: ModulePlan, rows: int) -> bool:  # noqa: ARG002
        return self._form(plan) is not None  # which has been compared with the model in FP32

    def _fault(self, form: ModelForm, rows: int) -> str | None:
        """At several lengths beside the module's own layers, which the engine compares with the module in FP32."""
        if form is self._own():
            return None
        axis = self._specification.padded_axis
        shares = {1.0} if axis is None else {EXAMPLE_SHARE, 1.0, axis.largest / axis.default}
        for share in sorted(shares):
            proof = proof_batch(self._specification, rows, 0, share)
            own, fused = self._answered(self._own(), proof), self._answered(form, proof)
            if fault := disagreement(self._specification, own, fused, self._answers.precision).fault:
                return fault
        return None

    def _example(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        inputs = self._tensors(proof_batch(self._specification, rows, 0).inputs)
        outputs = as_specified(self._specification, self._own().call(inputs))
        return inputs, [torch.empty_like(output) for output in outputs]

    def _own(self) -> ModelForm:
        form = self._form(OWN_LAYERS)
        if form is None:
            raise ValueError(self._left_out[OWN_LAYERS.title])
        return form

    def _answered(self, form: ModelForm, proof: Proof) -> dict[str, Array]:
        outputs = as_specified(self._specification, form.call(self._tensors(proof.inputs)))
        named = zip(self._specification.outputs, outputs, strict=True)
        return proof.without_padding({tensor.name: output.cpu().numpy() for tensor, output in named})

    def _tensors(self, arrays: Mapping[str, Array]) -> list[Tensor]:
        names = [tensor.name for tensor in self._specification.inputs]
        return [torch.from_numpy(arrays[name].copy()).to(self._device) for name in names]


def _tower(form: ModelForm) -> Any:
    """The module of a form that gets images in FP32 or halves."""
    return form.module.tower if isinstance(form.module, UInt8Images) else form.module


def _places(array: Array, rows: int) -> Array:
    return np.arange(rows) % len(array)


def _in_layout(layout: torch.memory_format, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a module with images in this layout: pixels that come as bytes are channels-last."""
    return tuple(
        value.contiguous(memory_format=layout) if isinstance(value, Tensor) and value.dim() == 4 else value
        for value in arguments
    )


def fastest(times_ms: Mapping[str, float]) -> str:
    """The title of the simplest plan, of which all come in that order, that no other beats by more than the margin."""
    least = min(times_ms.values()) / MARGIN
    return next(title for title, time_ms in times_ms.items() if time_ms <= least)


def nearest(measured: Iterable[int], rows: int) -> list[int]:
    """The batch sizes that were measured, the nearest by ratio first."""
    return sorted(measured, key=lambda other: abs(math.log(other / rows)))


def plan_details(
    started: float, origins: Mapping[int, str], times_ms: Mapping[int, Mapping[str, float]], left_out: Mapping[str, str]
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


def how_of(plans: Iterable[ModulePlan]) -> str:
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
