"""PyTorch in eager mode: FP32 on the CPU; FP32, TF32, FP16 and BF16 on CUDA.

Numbers: inputs are FP32, or UINT8 which is normalised on the device; outputs are FP32 in every precision; half
precisions convert on the device. FP32 on CUDA means no
TF32 anywhere: torch's default lets cuDNN's convolutions use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from servers.contract.tensors import Array
from servers.engines.interface import EngineDescription, EngineError
from servers.engines.processors import cuda_index, thread_count
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, WeightsSource

if TYPE_CHECKING:
    import torch

PARAMETER_TYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PRECISIONS = {"cpu": ("fp32",), "cuda": tuple(PARAMETER_TYPES)}
MODES = ("eager",)


class TorchEngine:
    """See `servers.engines.interface.Engine`. The number of CPU threads is that of torch in the whole process."""

    def __init__(self, specification: ModelSpecification, weights: WeightsSource, settings: EngineSettings) -> None:
        self._specification = specification
        self._weights = weights
        self._settings = settings
        self._module: torch.nn.Module | None = None
        self._input_names = tuple(tensor.name for tensor in specification.inputs)
        self._output_name = specification.outputs[0].name

    def load(self) -> None:
        """Build the module, put it on its device in its precision and set torch's threads."""
        import torch

        device = self._resolve_device()
        mode = "eager" if self._settings.mode == "auto" else self._settings.mode
        if mode not in MODES:
            raise EngineError(f"the torch engine does not offer mode {mode}; use one of: auto, {', '.join(MODES)}")
        precision = self._settings.precision
        if precision not in PRECISIONS[device.type]:
            raise EngineError(
                f"the torch engine does not offer {precision} on {device.type}; "
                f"use one of: {', '.join(PRECISIONS[device.type])}"
            )
        from servers.models.uint8_module import load_executed_module, to_precision

        if device.type == "cpu":
            torch.set_num_threads(thread_count(self._settings.threads))
        else:
            reduced = "tf32" if precision == "tf32" else "ieee"
            torch.backends.cuda.matmul.fp32_precision = reduced
            torch.backends.cudnn.conv.fp32_precision = reduced  # type: ignore[attr-defined,unused-ignore]
        try:
            module = load_executed_module(self._specification, self._weights)
        except WeightsError as exc:
            raise EngineError(str(exc)) from exc
        try:
            self._module = to_precision(module.to(device), getattr(torch, PARAMETER_TYPES[precision])).eval()
        except RuntimeError as exc:
            raise EngineError(f"the model does not fit on {device}: {_first_line(exc)}") from exc

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, on zeros."""
        for size in batch_sizes:
            self.infer({t.name: np.zeros((size, *t.item_shape), t.dtype) for t in self._specification.inputs})

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """One forward pass. On the CPU nothing is copied: torch reads the caller's arrays and the answer is its own."""
        import torch

        module = self._require_loaded()
        parameter = next(module.parameters())
        try:
            with torch.inference_mode():
                tensors = [_as_tensor(inputs[name]) for name in self._input_names]
                if parameter.device.type != "cpu":
                    tensors = [tensor.to(parameter.device) for tensor in tensors]
                    tensors = [t.to(parameter.dtype) if t.is_floating_point() else t for t in tensors]
                output: torch.Tensor = module(*tensors)
                return {self._output_name: output.to(torch.float32).cpu().contiguous().numpy()}
        except RuntimeError as exc:  # torch.OutOfMemoryError is one
            raise EngineError(f"torch failed to execute the batch: {_first_line(exc)}") from exc

    def describe(self) -> EngineDescription:
        """Read back from the module's parameters and torch's own settings."""
        import torch

        module = self._require_loaded()
        parameters = list(module.parameters())
        parameter = parameters[0]
        on_cpu = parameter.device.type == "cpu"
        return EngineDescription(
            kind="torch",
            version=torch.__version__,
            precision=_precision_in_effect(parameter),
            mode="eager",
            device=str(parameter.device),
            threads=torch.get_num_threads() if on_cpu else None,
            max_batch_size=self._settings.max_batch_size,
            weights=self._weights.label,
            details={
                "parameters": sum(p.numel() for p in parameters),
                "parameters_by_device": dict(Counter(str(p.device) for p in parameters)),
                "parameters_by_dtype": dict(Counter(str(p.dtype).removeprefix("torch.") for p in parameters)),
                "cuda_build": torch.version.cuda,
                "cuda_available": torch.cuda.is_available(),
            },
        )

    def close(self) -> None:
        """Drop the module; on CUDA also return its memory to the driver."""
        if self._module is None:
            return
        on_cuda = next(self._module.parameters()).device.type == "cuda"
        self._module = None
        if on_cuda:
            import torch

            torch.cuda.empty_cache()

    def _resolve_device(self) -> torch.device:
        import torch

        asked_for = self._settings.device
        if asked_for == "cpu":
            return torch.device("cpu")
        if asked_for == "auto":
            return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        index = cuda_index(asked_for)
        if index is None:
            raise EngineError(f"unknown device {asked_for!r}; use auto, cpu or cuda:N")
        if not torch.cuda.is_available():
            raise EngineError(f"device {asked_for}: torch {torch.__version__} sees no CUDA device; use device cpu")
        if index >= torch.cuda.device_count():
            raise EngineError(f"device {asked_for}: torch sees {torch.cuda.device_count()} CUDA device(s)")
        return torch.device("cuda", index)

    def _require_loaded(self) -> torch.nn.Module:
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


def _precision_in_effect(parameter: torch.Tensor) -> str:
    import torch

    name = str(parameter.dtype).removeprefix("torch.")
    if name == "float32":
        on_cuda = parameter.device.type == "cuda"
        return "tf32" if on_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
    return {value: key for key, value in PARAMETER_TYPES.items()}[name]


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0]
