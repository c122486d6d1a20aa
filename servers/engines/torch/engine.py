"""PyTorch: FP32 on the CPU; FP32, TF32, FP16, BF16 and FP8 on CUDA, eagerly, traced, compiled or in graphs.

Any number of inputs and outputs in any datatype that torch has. Floating-point inputs are converted to the precision,
UINT8 pixels are normalised on the device, and outputs have their specified datatype in every precision. FP32 on CUDA
means no TF32 anywhere. FP8 is BF16 with torchao's FP8 products in the linear layers.

Modes: `eager` is the model's own module; `traced` is the same through torch.jit.trace, compared with it at load in its
precision. On the CPU only: `tuned` (and `auto`) is the module with the products that are fastest here (see
`products`). On CUDA only: `graph` (and `auto`) is one CUDA graph per bucket of the fastest form that covers
the model and the precision, `compile` one of torch.compile's code. A bucket is a batch size, for a model with a padded
axis times a size of that axis. Every mode is compared at load with the model's own module in FP32 on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from servers.engines.agreement import Disagreement, Proof, disagreement, proof_at_load, proof_batch
from servers.engines.batches import GRAPH_MODES, axis_buckets, bucket_of, bucket_sizes, check_sizes, executed_mode
from servers.engines.choice import ChoiceCache, cache_key, digest, makes_choices
from servers.engines.interface import EngineDescription, EngineError, export_command
from servers.engines.processors import openmp_spinning, thread_count
from servers.engines.settings import PARAMETER_TYPES
from servers.engines.torch.device import device_details, fp32_products, resolve_device, set_fp32_products
from servers.engines.torch.forms import (
    FAILURES,
    ModelForm,
    as_specified,
    check_datatypes,
    expected_answers,
    fast_form,
    plain_form,
)
from servers.engines.torch.plans import ComparedAnswers, planned_form
from servers.engines.torch.products import NO_SHAPES, TYPICAL_ITEMS, InputShapes, TunedProducts, noted_shapes
from servers.engines.torch.runner import RunnerEngine
from servers.models.files import for_library
from servers.models.specification import reason_of
from servers.models.uint8_module import executed_module
from servers.models.weights import WeightsError
from servers.options.stages import stage
from servers.protocol.tensors import Array

OWN_MODES = ("eager", "tuned")
"""The model's own module executes, in `tuned` with other products that have been compared."""


class TorchEngine(RunnerEngine):
    """Executes a model by torch. The number of CPU threads applies to torch in the whole process."""

    _mode = ""
    _mode_reason: str | None = None
    _form: ModelForm | None = None
    _shared_memory: frozenset[int] = frozenset()
    _checked: Disagreement | None = None
    _products: Sequence[Mapping[str, object]] = ()

    def load(self) -> None:
        """Build the executable module on the device, in the precision; check it there; set torch's threads."""
        settings, specification = self._settings, self._specification
        check_datatypes(specification)
        device = self._enter_device(settings.device)
        assert self._weights is not None
        try:
            with stage("build"):
                module = specification.load_module(self._weights)
        except WeightsError as exc:
            raise EngineError(str(exc)) from exc
        try:
            self._prepare(module, device, getattr(torch, PARAMETER_TYPES[settings.precision]))
        except FAILURES as exc:  # torch.OutOfMemoryError is a RuntimeError
            raise EngineError(f"the model cannot be loaded on {device}: {reason_of(exc)}") from exc

    def _enter_device(self, requested: str) -> torch.device:
        """Choose the device and the mode on it, and set torch's threads or how it multiplies."""
        self._device = device = resolve_device(requested)
        self._mode, self._mode_reason = executed_mode(self._specification, self._settings, device.type)
        if device.type == "cpu":
            torch.set_num_threads(thread_count(self._settings.threads))
        else:
            torch.cuda.set_device(device)  # else what names no device makes a context on the first GPU
            set_fp32_products(tf32=self._settings.precision == "tf32")
        return device

    def _prepare(self, module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Build what this mode executes from the FP32 module on the CPU, and compare it with that module."""
        specification, mode, largest = self._specification, self._mode, self._settings.max_batch_size
        # What executes in its own form is compared with its description, and shows that padding changes no answer.
        own = mode in OWN_MODES and device.type == "cpu"
        fewest, tunes = 1 if specification.padded_axis is None else 2, mode == "tuned" and makes_choices()
        proof = proof_at_load(specification, min(fewest, largest) if own else largest)
        # The module's outputs too, before it is converted.
        with self.checking(), noted_shapes(module) if tunes else nullcontext(NO_SHAPES) as shapes:
            reference = executed_module(specification, module)
            expected = proof.expected(partial(expected_answers, specification, reference))
        if mode in GRAPH_MODES:
            fp8, compiled = self._settings.precision == "fp8", mode == "compile"
            rows = bucket_sizes(largest, self._settings.buckets, halves=mode == "graph")
            answers = ComparedAnswers(proof, expected, self._settings.precision)
            planned = partial(planned_form, module, specification, device, dtype, rows, answers)
            form = fast_form(module, specification, device, dtype, rows, compiled=compiled, fp8=fp8, planned=planned)
            sizes, at_load = self._axis_buckets()
            self._start(form.build, rows, device, sizes=sizes, at_load=at_load)
        else:
            fp8 = self._settings.precision == "fp8"
            form = plain_form(module, specification, device, dtype, largest, traced=mode == "traced", fp8=fp8)
            if device.type != "cpu":
                self._start(None, bucket_sizes(largest, self._settings.buckets), device, call=form.call)
        self._form = form
        if tunes:
            self._form = form = self._tuned(form, proof, expected, NO_SHAPES if specification.axes else shapes)
        if device.type == "cpu":
            memory = (*form.parameters, *module.buffers())
            self._shared_memory = frozenset(tensor.untyped_storage().data_ptr() for tensor in memory)
        if self._checked is None and (not own or proof.lengths):  # else it is the module that gave these answers
            with self.checking():
                self._check(proof, expected)

    def _tuned(
        self,
        form: ModelForm,
        proof: Proof,
        expected: Mapping[str, Array],
        shapes: InputShapes,
    ) -> ModelForm:
        """The form with the products that are fastest here, or without them if the answers differ then. Those that an
        earlier start chose, and proved on more items, have to give the `expected` answers; `shapes` as for
        `TunedProducts`."""
        specification, several = self._specification, min(TYPICAL_ITEMS, self._settings.max_batch_size)
        batches = [proof_batch(specification, rows, 0).inputs for rows in (1, several)]
        examples = [[torch.from_numpy(batch[tensor.name]) for tensor in specification.inputs] for batch in batches]
        assert isinstance(form.module, torch.nn.Module)  # see plain_form
        cache = ChoiceCache(cache_key(form.module, specification, self._device, "fp32") | {"items": str(several)})
        try:
            with stage("choose"), cache.held():
                products = _products(form.module, examples, cache, shapes)
        except FAILURES as exc:
            return replace(form, kernels=f"{form.kernels}, untuned: {reason_of(exc)}")
        self._products = products.details
        kernels = f"{form.kernels}, {products.description}"
        trouble = {"choice_trouble": cache.trouble} if cache.trouble else {}
        tuned = replace(form, kernels=kernels, details={"choices": products.digest, **trouble})
        if not products.changed:
            return tuned
        with self.checking():
            if not products.stored:
                proof = proof_at_load(specification, self._settings.max_batch_size)
                with products.undone():
                    expected = proof.expected(partial(expected_answers, specification, form.module))
            compared = self._compared(proof, expected)
        if compared.fault is None:
            self._checked = compared
            return tuned
        products.restore()
        kernels = f"{form.kernels}, untuned: with {products.description} {compared.fault}"
        return replace(tuned, kernels=kernels, details={"choices": products.digest, **trouble})

    def _axis_buckets(self) -> tuple[Sequence[int], Sequence[int]]:
        """Sizes of the padded axis: all buckets, and those that are prepared at load. torch.compile takes long for
        each, so without `pad_to` it prepares only the one of the default size."""
        axis, pad_to = self._specification.padded_axis, self._settings.pad_to
        if axis is None:
            return (), ()
        sizes = axis_buckets(axis, pad_to)
        at_load = [size for size in pad_to if size <= axis.largest] or sizes
        if not pad_to and self._mode == "compile":
            at_load = [bucket_of(sizes, axis.default)]
        return sizes, at_load

    def _check(self, proof: Proof, expected: Mapping[str, Array]) -> None:
        """Raise `EngineError` if the answers are not those of the model's own module."""
        assert self._form is not None
        self._checked = self._compared(proof, expected)
        if self._checked.fault is None:
            return
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in proof.inputs.items())
        remedy = "use precision fp32" if self._mode in OWN_MODES else "use mode eager"
        if self._settings.precision == "fp32" and self._mode in OWN_MODES:
            remedy = "check the padding values of its axis" if proof.lengths else "use device cpu"
        raise EngineError(
            f"{self._form.kernels} on {self._device} does not compute the model: {self._checked.fault}, for {shapes}, "
            f"compared with its own module in FP32 on each item alone; {remedy}"
        )

    def _compared(self, proof: Proof, expected: Mapping[str, Array]) -> Disagreement:
        answers = proof.without_padding(self.infer(proof.inputs))
        return disagreement(self._specification, expected, answers, self._settings.precision)

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch. On the CPU there are no copies: torch reads the caller's arrays, and answers in its own.
        Raises `ValueError` for a batch beyond the largest bucket or the largest size of an axis."""
        if self._runner is not None:
            return super().infer(inputs)
        if self._form is None:
            raise self._not_loaded()
        check_sizes(self._specification, inputs)
        tensors = [_as_tensor(inputs[tensor.name]) for tensor in self._specification.inputs]
        shared = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        answers: dict[str, Array] = {}
        try:
            with torch.inference_mode():
                outputs = as_specified(self._specification, self._form.call(tensors))
                for tensor, output in zip(self._specification.outputs, outputs, strict=True):
                    answer = output.contiguous()
                    if (address := answer.untyped_storage().data_ptr()) in shared or address in self._shared_memory:
                        answer = answer.clone()  # the module returned an input, a constant, or one tensor twice
                    shared.add(address)
                    answers[tensor.name] = answer.numpy()
        except (RuntimeError, IndexError) as exc:
            raise EngineError(f"torch failed to execute the batch: {reason_of(exc)}") from exc
        return answers

    def describe(self) -> EngineDescription:
        """Read back from the parameters, torch's own settings and the captured graphs."""
        if (form := self._form) is None:
            raise self._not_loaded()
        parameters = form.parameters
        floating = [p for p in parameters if p.is_floating_point()]
        # Of the largest: a vision tower in FP16 may keep a few small parameters in FP32.
        dtype = max(floating, key=torch.Tensor.numel).dtype if floating else form.dtype
        details: dict[str, object] = {
            "parameters": sum(p.numel() for p in parameters),
            "parameters_by_device": dict(Counter(str(p.device) for p in parameters)),
            "parameters_by_dtype": dict(Counter(str(p.dtype).removeprefix("torch.") for p in parameters)),
            **device_details(self._device),
            "kernels": form.kernels,
        }
        details |= form.details
        if form.fp8_layers:
            details["fp8_layers"] = form.fp8_layers
        if self._products:
            details["products"] = list(self._products)
        if self._mode_reason is not None:
            details["mode_reason"] = self._mode_reason
        if self._checked is not None:
            details |= self._checked.details("fp32")
        if (runner := self._runner) is not None:
            graphs, axis = self._mode in GRAPH_MODES, self._specification.padded_axis
            details |= {
                "batches_in_flight": self.flights,
                "gelu": form.gelu,
                "compiled": self._mode == "compile",
                "cuda_graphs": graphs,
                "buckets": list(runner.rows) if graphs else None,
                "plans": dict(form.plans()),
                "fp32_products": fp32_products(),
            }
            if plans := form.plans():
                details["choices"] = digest(plans)
            if graphs and axis is not None:
                details |= {f"{axis.name}_buckets": list(runner.sizes), "captured_graphs": runner.captured}
        threads = torch.get_num_threads() if self._device.type == "cpu" else None
        return self._description(
            version=torch.__version__,
            precision="fp8" if form.fp8_layers else _precision_in_effect(self._device, dtype),
            mode=self._mode,
            device=str(self._device),
            threads=threads,
            details=details,
            spinning=None if threads is None else openmp_spinning(threads),
        )

    def close(self) -> None:
        self._form = None
        super().close()


def _products(
    module: torch.nn.Module,
    examples: Sequence[Sequence[torch.Tensor]],
    cache: ChoiceCache,
    shapes: InputShapes,
) -> TunedProducts:
    """The products that an earlier start chose, or those that are measured and stored now."""
    single, several = examples
    if stored := cache.read():
        try:
            return TunedProducts(module, single, several, stored, shapes)
        except ValueError:
            cache.reject()
    products = TunedProducts(module, single, several, shapes=shapes)
    cache.write(products.choice, decided=products.decided)
    return products


class _WritableView:
    """Makes NumPy show a read-only buffer as writable: torch warns about others, and a forward pass only reads."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        self._array = array  # keeps the memory alive


def _as_tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_WritableView(array)))


def _precision_in_effect(device: torch.device, dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return "tf32" if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


class AOTInductorEngine(TorchEngine):
    """Executes the package at `path`. The number of CPU threads applies to torch in the whole process."""

    def load(self) -> None:
        """Load the package."""
        path = self._path
        check_datatypes(self._specification)
        self._enter_device("cpu")
        assert path is not None  # see build_engine
        if not path.is_file():
            command = export_command(self._specification, self._settings.kind)
            raise EngineError(f"no package for {self._specification.name} at {path.name}; run: {command}")
        self._form = _package_form(path)

    def describe(self) -> EngineDescription:
        """As in the torch engine; the parameters are in the package, and its metadata is shown instead."""
        description = super().describe()
        assert self._form is not None  # see TorchEngine.describe
        details = {name: value for name, value in description.details.items() if not name.startswith("parameters")}
        return replace(description, details={**details, "package": dict(self._form.plans())})


def _package_form(path: Path) -> ModelForm:
    from torch._inductor import aoti_load_package, config

    try:
        # The check of instructions compiles a file per set of them, and serves a warning only.
        with config.patch({"cpp.vec_isa_ok": True}):
            package = aoti_load_package(for_library(path))
        metadata = package.get_metadata()
    except FAILURES as exc:
        raise EngineError(f"torch cannot load {path.name}: {reason_of(exc)}; delete it and export it again") from exc
    kernels = "AOTInductor package of the model's own module"
    return ModelForm(package, (), torch.float32, kernels, plans=lambda: {**metadata})
