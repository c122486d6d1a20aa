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
from typing import TYPE_CHECKING

import numpy as np

from servers.contract.tensors import Array
from servers.engines.buckets import bucket_sizes
from servers.engines.interface import EngineDescription, EngineError, Pipeline
from servers.engines.processors import thread_count
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, WeightsSource

if TYPE_CHECKING:
    import torch

    from servers.engines.canary import Canary
    from servers.engines.torch_cuda import CudaExecution

PARAMETER_TYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PRECISIONS = {"cpu": ("fp32",), "cuda": tuple(PARAMETER_TYPES)}
MODES = {"cpu": ("eager", "traced", "scripted"), "cuda": ("graph", "compile", "eager", "traced", "scripted")}
"""The first one is what `auto` takes."""


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
    def pipeline(self) -> Pipeline | None:
        """On CUDA: two slots whose copies run beside the other's computation."""
        return self._cuda

    def load(self) -> None:
        """Build what executes on the device, in the precision; prove it there; set torch's threads."""
        import torch

        from servers.engines.torch_device import resolve_device, set_fp32_products
        from servers.models.uint8_module import load_executed_module

        device = resolve_device(self._settings.device)
        offered, precision = MODES[device.type], self._settings.precision
        self._mode = offered[0] if self._settings.mode == "auto" else self._settings.mode
        if self._mode not in offered:
            raise EngineError(
                f"the torch engine does not offer mode {self._mode} on {device.type}; "
                f"use one of: auto, {', '.join(offered)}"
            )
        if precision not in PRECISIONS[device.type]:
            raise EngineError(
                f"the torch engine does not offer {precision} on {device.type}; "
                f"use one of: {', '.join(PRECISIONS[device.type])}"
            )
        try:
            if device.type == "cpu":
                torch.set_num_threads(thread_count(self._settings.threads))
                self._load_on_cpu(load_executed_module(self._specification, self._weights), device)
                return
            module = self._specification.load_module(self._weights)
        except WeightsError as exc:
            raise EngineError(str(exc)) from exc
        from servers.engines.torch_cuda import CudaExecution

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
            raise EngineError(f"the model cannot be put on {device}: {_first_line(exc)}") from exc

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, on zeros."""
        for size in batch_sizes:
            self.infer({t.name: np.zeros((size, *t.item_shape), t.dtype) for t in self._specification.inputs})

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """One forward pass. On the CPU nothing is copied: torch reads the caller's arrays and the answer is its own."""
        import torch

        try:
            if self._cuda is not None:
                return self._cuda.infer(inputs)
            module = self._require_module()
            with torch.inference_mode():
                output: torch.Tensor = module(*[_as_tensor(inputs[name]) for name in self._input_names])
                return {self._output_name: output.contiguous().numpy()}
        except RuntimeError as exc:
            raise EngineError(f"torch failed to execute the batch: {_first_line(exc)}") from exc

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
        import torch

        from servers.engines.torch_device import device_details

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
        from servers.engines.torch_script import APIS, examples_of, to_torchscript
        from servers.engines.torch_towers import OWN_MODULE

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


class _WritableView:
    """Makes NumPy show a read-only buffer as writable: torch warns about the others, and a forward pass only reads."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        self._array = array  # keeps the memory alive


def _as_tensor(array: Array) -> torch.Tensor:
    import torch

    return torch.from_numpy(array if array.flags.writeable else np.asarray(_WritableView(array)))


def _precision_in_effect(device: torch.device, dtype: torch.dtype) -> str:
    import torch

    name = str(dtype).removeprefix("torch.")
    if name == "float32":
        return "tf32" if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
    return {value: key for key, value in PARAMETER_TYPES.items()}[name]


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0]
