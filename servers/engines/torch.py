"""PyTorch: FP32 on the CPU; FP32, TF32, FP16 and BF16 on CUDA, eagerly, by TorchScript, compiled or in CUDA graphs.

Inputs are FP32, or UINT8 which is normalised on the device; outputs are FP32 in every precision. FP32 on CUDA means no
TF32 anywhere.

Modes: `eager` is the model's own module; `traced` and `scripted` are the same through torch.jit, compared with it at
load in its precision. On CUDA only: `graph` (and `auto`) is one CUDA graph per batch bucket of the fastest tower that
covers the model and the precision, `compile` one of torch.compile's code. On CUDA every mode is compared at load with
the model's own module in FP32 on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch

from servers.contract.tensors import Array
from servers.engines.batches import bucket_sizes, random_inputs
from servers.engines.interface import EngineDescription, EngineError, first_line
from servers.engines.processors import thread_count
from servers.engines.torch_device import (
    RunnerEngine,
    device_details,
    fp32_products,
    resolve_device,
    set_fp32_products,
)
from servers.engines.torch_towers import DeviceTower, fast_tower, own_tower
from servers.models.uint8_module import executed_module
from servers.models.weights import WeightsError

PARAMETER_TYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}

MIN_COSINE = 0.9995
"""The lowest cosine of a row with the model's own module in FP32 on the CPU."""

GRAPH_MODES = ("graph", "compile")
"""One CUDA graph per batch bucket; the other modes enqueue every batch anew, at its own size."""

PROOF_ROWS = 3
"""A batch that is padded, so that the padding is checked too."""


class TorchEngine(RunnerEngine):
    """Executes a model by torch. The number of CPU threads applies to torch in the whole process."""

    _mode = ""
    _tower: DeviceTower | None = None
    _cosine = 0.0

    def load(self) -> None:
        """Build the executable module on the device, in the precision; check it there; set torch's threads."""
        settings, specification = self._settings, self._specification
        device = resolve_device(settings.device)
        self._mode = settings.mode_on(device.type)
        on_cpu = device.type == "cpu"
        if on_cpu:
            torch.set_num_threads(thread_count(settings.threads))
        assert self._weights is not None
        try:
            module = specification.load_module(self._weights)
        except WeightsError as exc:
            raise EngineError(str(exc)) from exc
        if on_cpu:
            self._tower = own_tower(
                module, specification, device, torch.float32, settings.max_batch_size, mode=self._mode
            )
            return
        set_fp32_products(tf32=settings.precision == "tf32")
        try:
            self._load_on_cuda(module, device, getattr(torch, PARAMETER_TYPES[settings.precision]))
        except RuntimeError as exc:  # torch.OutOfMemoryError is one
            raise EngineError(f"the model cannot be loaded on {device}: {first_line(exc)}") from exc

    def _load_on_cuda(self, module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        specification, mode = self._specification, self._mode
        largest, graphs = self._settings.max_batch_size, mode in GRAPH_MODES
        (pixels,) = random_inputs(specification, min(PROOF_ROWS, largest), seed=1).values()
        with torch.inference_mode():
            expected = executed_module(specification, module)(torch.from_numpy(pixels)).clone()
        if graphs:
            tower = fast_tower(module, specification, device, dtype, largest, compiled=mode == "compile")
        else:
            tower = own_tower(module, specification, device, dtype, largest, mode=mode)
        runner = self._start(tower.build, bucket_sizes(largest, halves=mode == "graph"), device, graphs=graphs)
        self._tower = tower
        answer = torch.from_numpy(runner.infer(pixels))
        self._cosine = float(torch.nn.functional.cosine_similarity(answer, expected).min())
        if not self._cosine >= MIN_COSINE:
            raise EngineError(
                f"{tower.kernels} on {device} does not compute the model: its cosine with its own module in FP32 is "
                f"{self._cosine:.6f}, below {MIN_COSINE}; use mode eager"
            )

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch. On the CPU torch reads the caller's arrays and the answer is its own: no copies."""
        if self._runner is not None:
            return super().infer(inputs)
        if self._tower is None:
            raise self._not_loaded()
        given = [_as_tensor(inputs[tensor.name]) for tensor in self._specification.inputs]
        try:
            with torch.inference_mode():
                output: torch.Tensor = self._tower.module(*given)
                return {self._specification.outputs[0].name: output.contiguous().numpy()}
        except RuntimeError as exc:
            raise EngineError(f"torch failed to execute the batch: {first_line(exc)}") from exc

    def describe(self) -> EngineDescription:
        """Read back from the parameters, torch's own settings and the captured graphs."""
        if (tower := self._tower) is None:
            raise self._not_loaded()
        parameters = tower.parameters
        device, dtype = parameters[-1].device, parameters[-1].dtype
        details: dict[str, object] = {
            "parameters": sum(p.numel() for p in parameters),
            "parameters_by_device": dict(Counter(str(p.device) for p in parameters)),
            "parameters_by_dtype": dict(Counter(str(p.dtype).removeprefix("torch.") for p in parameters)),
            **device_details(device),
            "kernels": tower.kernels,
        }
        if (runner := self._runner) is not None:
            graphs = self._mode in GRAPH_MODES
            details |= {
                "gelu": tower.gelu,
                "compiled": self._mode == "compile",
                "cuda_graphs": graphs,
                "buckets": list(runner.buckets) if graphs else None,
                "plans": dict(tower.plans()),
                "fp32_products": fp32_products(),
                "cosine_to_fp32": round(self._cosine, 7),
            }
        return self._description(
            version=torch.__version__,
            precision=_precision_in_effect(device, dtype),
            mode=self._mode,
            device=str(device),
            threads=torch.get_num_threads() if device.type == "cpu" else None,
            details=details,
        )

    def close(self) -> None:
        self._tower = None
        super().close()


class _WritableView:
    """Makes NumPy show a read-only buffer as writable: torch warns about the others, and a forward pass only reads."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        self._array = array  # keeps the memory alive


def _as_tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_WritableView(array)))


def _precision_in_effect(device: torch.device, dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return "tf32" if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
