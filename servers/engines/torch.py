"""PyTorch: FP32 on the CPU; FP32, TF32, FP16 and BF16 on CUDA, eagerly, by TorchScript, compiled or in CUDA graphs.

Numbers: inputs are FP32, or UINT8 which is normalised on the device; outputs are FP32 in every precision; half
precisions convert on the device. FP32 on CUDA means no TF32 anywhere.

Modes: `eager` is the model's own module as its library has it; `traced` and `scripted` are the same through torch.jit,
proven against it at load, in its precision. On CUDA only: `graph` (and `auto`) is one CUDA graph a batch
bucket of the fastest that covers the model and the precision, `compile` one of torch.compile's code; both are proven
against the own module in FP32 at load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from servers.contract.tensors import Array
from servers.engines.batches import bucket_sizes, random_array, zero_inputs
from servers.engines.interface import EngineDescription, EngineError, first_line
from servers.engines.processors import thread_count
from servers.engines.settings import EngineSettings
from servers.engines.torch_device import (
    Canary,
    device_details,
    fp32_products,
    resolve_device,
    run_canary,
    set_fp32_products,
)
from servers.engines.torch_towers import (
    APIS,
    OWN_MODULE,
    DeviceTower,
    examples_of,
    fast_tower,
    own_tower,
    to_torchscript,
)
from servers.engines.vit.graph_runner import GraphRunner
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images, load_executed_module
from servers.models.weights import WeightsError, WeightsSource

PARAMETER_TYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PRECISIONS = {"cpu": ("fp32",), "cuda": tuple(PARAMETER_TYPES)}
MODES = {"cpu": ("eager", "traced", "scripted"), "cuda": ("graph", "compile", "eager", "traced", "scripted")}
"""The first one is what `auto` takes."""

MIN_COSINE = 0.9995
"""Of every row with the model's own module in FP32 on the CPU."""

GRAPH_MODES = ("graph", "compile")
"""Captured a batch bucket; the other modes enqueue every batch anew, at its own size."""

PROOF_ROWS = 3
"""A batch that is padded, so that the padding is proven too."""


class TorchEngine:
    """See `servers.engines.interface.Engine`. The number of CPU threads is that of torch in the whole process."""

    def __init__(self, specification: ModelSpecification, weights: WeightsSource, settings: EngineSettings) -> None:
        self._specification = specification
        self._weights = weights
        self._settings = settings
        self._mode = ""
        self._module: torch.nn.Module | None = None  # on the CPU
        self._parameters: tuple[torch.Tensor, ...] = ()  # of the module, which has none left once it is frozen
        self._kernels = ""
        self._cuda: CudaExecution | None = None
        self._canary: Canary | None = None
        self._input_names = tuple(tensor.name for tensor in specification.inputs)
        self._output_name = specification.outputs[0].name

    @property
    def staging(self) -> Mapping[str, Array]:
        """See `servers.engines.interface.staging_of`; empty on a CPU."""
        return {} if self._cuda is None else self._cuda.staging

    def load(self) -> None:
        """Build what executes on the device, in the precision; prove it there; set torch's threads."""
        device = resolve_device(self._settings.device)
        self._mode = self._settings.mode_on(device.type, MODES, PRECISIONS)
        try:
            if device.type == "cpu":
                torch.set_num_threads(thread_count(self._settings.threads))
                self._load_on_cpu(load_executed_module(self._specification, self._weights), device)
                return
            module = self._specification.load_module(self._weights)
        except WeightsError as exc:
            raise EngineError(str(exc)) from exc
        precision = self._settings.precision
        set_fp32_products(tf32=precision == "tf32")
        try:
            self._cuda = CudaExecution(
                module,
                self._specification,
                device,
                getattr(torch, PARAMETER_TYPES[precision]),
                self._mode,
                bucket_sizes(self._settings.max_batch_size, halves=self._mode == "graph"),
            )
        except RuntimeError as exc:  # torch.OutOfMemoryError is one
            raise EngineError(f"the model cannot be put on {device}: {first_line(exc)}") from exc

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, on zeros."""
        for size in batch_sizes:
            self.infer(zero_inputs(self._specification.inputs, size))

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """One forward pass. On the CPU nothing is copied: torch reads the caller's arrays and the answer is its own."""
        try:
            if self._cuda is not None:
                return self._cuda.infer(inputs)
            module = self._require_module()
            with torch.inference_mode():
                output: torch.Tensor = module(*[_as_tensor(inputs[name]) for name in self._input_names])
                return {self._output_name: output.contiguous().numpy()}
        except RuntimeError as exc:
            raise EngineError(f"torch failed to execute the batch: {first_line(exc)}") from exc

    def execution_ns(self, count: int, repeats: int) -> list[int] | None:
        """Device time of `repeats` executions of `count` rows without any copy to or from the host; None on a CPU."""
        return None if self._cuda is None else self._cuda.execution_ns(count, repeats)

    def run_only(self, count: int) -> bool:
        """One execution of `count` rows, waited for, without copies from or to the host; False where there are none."""
        if self._cuda is not None:
            self._cuda.run_only(count)
        return self._cuda is not None

    def canary(self) -> Canary | None:
        """Profile one inference for the CUDA kernels that it runs; None on a CPU. Takes about a second."""
        if self._cuda is not None:
            self._canary = self._cuda.canary()
        return self._canary

    def describe(self) -> EngineDescription:
        """Read back from the parameters, torch's own settings and what was captured."""
        if self._cuda is None:
            self._require_module()
        parameters = self._parameters if self._cuda is None else self._cuda.parameters
        device, dtype = parameters[-1].device, parameters[-1].dtype
        details: dict[str, object] = {
            "parameters": sum(p.numel() for p in parameters),
            "parameters_by_device": dict(Counter(str(p.device) for p in parameters)),
            "parameters_by_dtype": dict(Counter(str(p.dtype).removeprefix("torch.") for p in parameters)),
            **device_details(device),
        }
        details |= {"kernels": self._kernels} if self._cuda is None else self._cuda.details()
        if self._canary is not None:
            details["canary"] = self._canary
        return EngineDescription(
            kind="torch",
            version=torch.__version__,
            precision=_precision_in_effect(device, dtype),
            mode=self._mode,
            device=str(device),
            threads=torch.get_num_threads() if device.type == "cpu" else None,
            max_batch_size=self._settings.max_batch_size,
            weights=self._weights.label,
            details=details,
        )

    def close(self) -> None:
        """Drop the module; on CUDA also return its memory to the driver."""
        self._module, self._parameters = None, ()
        if self._cuda is not None:
            self._cuda.close()
            self._cuda = None

    def _load_on_cpu(self, module: torch.nn.Module, device: torch.device) -> None:
        self._parameters, self._kernels = tuple(module.parameters()), OWN_MODULE
        if self._mode in APIS:
            examples = examples_of(self._specification, device, self._parameters[-1].dtype)
            script = to_torchscript(module, self._mode, examples, self._settings.max_batch_size, title=OWN_MODULE)
            module, self._kernels = script.module, script.kernels
        self._module = module

    def _require_module(self) -> torch.nn.Module:
        if self._module is None:
            raise EngineError("the torch engine is not loaded")
        return self._module


class CudaExecution:
    """One tower and its runner, proven to compute the model. Built at load; raises `EngineError` or `RuntimeError`."""

    def __init__(
        self,
        module: torch.nn.Module,
        specification: ModelSpecification,
        device: torch.device,
        dtype: torch.dtype,
        mode: str,
        buckets: Sequence[int],
    ) -> None:
        if len(specification.inputs) != 1 or len(specification.outputs) != 1:
            raise EngineError(
                f"{specification.name}: on CUDA the torch engine takes models of one input and one output"
            )
        self._input, self._output = specification.inputs[0], specification.outputs[0]
        self._device, self._mode = device, mode
        pixels, expected = _proof(module, specification, min(PROOF_ROWS, buckets[-1]))
        self._graphs = mode in GRAPH_MODES
        if not self._graphs:
            self._tower: DeviceTower = own_tower(module, specification, device, dtype, buckets[-1], mode=mode)
        else:
            self._tower = fast_tower(module, specification, device, dtype, buckets[-1], compiled=mode == "compile")
        self._runner = GraphRunner(
            self._tower.build,
            item=self._input.item_shape,
            dtype=torch.uint8 if self._input.datatype == "UINT8" else torch.float32,
            width=self._output.item_shape[0],
            buckets=buckets,
            device=device,
            graphs=self._graphs,
        )
        answer = torch.from_numpy(self._runner.infer(pixels))
        self._cosine = float(torch.nn.functional.cosine_similarity(answer, expected).min())
        if not self._cosine >= MIN_COSINE:
            raise EngineError(
                f"{self._tower.kernels} on {device} does not compute the model: cosine {self._cosine:.6f} to its own "
                f"module in FP32 is below {MIN_COSINE}; use mode eager"
            )

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The weights on the device."""
        return self._tower.parameters

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """One batch, start to end."""
        return {self._output.name: self._runner.infer(inputs[self._input.name])}

    @property
    def staging(self) -> Mapping[str, Array]:
        """The runner's pinned memory by input."""
        return {self._input.name: self._runner.staging}

    def execution_ns(self, count: int, repeats: int) -> list[int]:
        """Device times without copies, on random pixels."""
        staging = self._runner.staging
        self._runner.infer(random_array(np.random.default_rng(0), staging[:count].shape, staging.dtype))
        return [round(time_us * 1e3) for time_us in self._runner.replay_us(count, repeats)]

    def run_only(self, count: int) -> None:
        """One execution without copies, waited for."""
        self._runner.run_only(count)

    def canary(self) -> Canary:
        """Profile one inference of one row."""
        pixels = np.array(self._runner.staging[:1])
        return run_canary(lambda: self._runner.infer(pixels), self._device)

    def details(self) -> dict[str, object]:
        """For the description."""
        return {
            "kernels": self._tower.kernels,
            "gelu": self._tower.gelu,
            "compiled": self._mode == "compile",
            "cuda_graphs": self._graphs,
            "buckets": list(self._runner.buckets) if self._graphs else None,
            "plans": dict(self._tower.plans()),
            "fp32_products": fp32_products(),
            "cosine_to_fp32": round(self._cosine, 7),
        }

    def close(self) -> None:
        """Return the memory to the driver. Idempotent."""
        self._runner.close()
        torch.cuda.empty_cache()


def _proof(module: torch.nn.Module, specification: ModelSpecification, rows: int) -> tuple[Array, torch.Tensor]:
    """Random input as it arrives, and what the model's own module makes of it in FP32 on the CPU."""
    own = module if specification.payload == "fp32" else UInt8Images(module, specification.preprocessing).eval()
    tensor = specification.inputs[0]
    pixels = random_array(np.random.default_rng(1), (rows, *tensor.item_shape), tensor.dtype)
    with torch.inference_mode():
        return pixels, own(torch.from_numpy(pixels)).clone()


class _WritableView:
    """Makes NumPy show a read-only buffer as writable: torch warns about the others, and a forward pass only reads."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        self._array = array  # keeps the memory alive


def _as_tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_WritableView(array)))


def _precision_in_effect(device: torch.device, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name == "float32":
        return "tf32" if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
    return {value: key for key, value in PARAMETER_TYPES.items()}[name]
