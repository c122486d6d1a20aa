"""TensorRT executing a plan: one CUDA graph per batch bucket, over the same buffers as the torch engine.

This project's tests never execute it: the builder and runtime libraries come from NVIDIA's own index. The calls were
checked against the names that the bindings of 10.16 and 11.4 export. A plan runs only with the TensorRT release that
built it and on the kind of GPU on which it was built (`abserve export --to tensorrt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from servers.engines.batches import Bucket, axis_buckets, bucket_sizes, executed_mode
from servers.engines.interface import EngineDescription, EngineError, export_command
from servers.engines.torch.device import device_details, resolve_device
from servers.engines.torch.runner import Enqueue, RunnerEngine
from servers.models.specification import reason_of

ELEMENT_TYPES = {
    **{name: name for name in ("BOOL", "UINT8", "INT8", "INT32", "INT64")},
    "FP16": "HALF",
    "FP32": "FLOAT",
}
"""Protocol datatype → TensorRT's; it has no others of the protocol."""
INSTALL = "pip install tensorrt --extra-index-url https://pypi.nvidia.com"


class TensorRTEngine(RunnerEngine):
    """Executes the plan at `path`. A plan does not state its precision; the one it was built for is reported."""

    _version = _mode = ""
    _engine: Any = None

    def load(self) -> None:
        """Deserialise the plan, check that it is the model's, and capture a graph per bucket."""
        settings, path = self._settings, self._path
        self._mode, _ = executed_mode(self._specification, settings, "cuda")
        if path is None or not path.is_file():
            raise EngineError(
                f"no TensorRT plan at {'' if path is None else path.name}; run: "
                + self._command(f"--precision {'fp16' if settings.precision == 'fp16' else 'fp32'}")
            )
        trt = import_tensorrt()
        device = resolve_device(settings.device)
        settings.mode_on(device.type)
        self._version = str(trt.__version__)
        self._contexts: list[Any] = []
        with torch.cuda.device(device):
            self._engine = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(path.read_bytes())
            if self._engine is None:
                raise EngineError(
                    f"TensorRT {self._version} cannot read {path.name}: a plan needs the release and the kind of GPU "
                    f"that built it; run: {self._command('--force')}"
                )
            self._check(trt)
            try:
                axis = self._specification.padded_axis
                rows = bucket_sizes(settings.max_batch_size, settings.buckets, halves=False)
                sizes = () if axis is None else axis_buckets(axis, settings.pad_to, only=bool(settings.buckets))
                self._start(self._build, rows, device, sizes=sizes)
            except RuntimeError as exc:
                raise EngineError(f"the plan cannot be loaded on {device}: {reason_of(exc)}") from exc

    def describe(self) -> EngineDescription:
        """Read back from the plan and the runner; the precision is the one that the plan was built for."""
        if self._runner is None or self._path is None:
            raise self._not_loaded()
        return self._description(
            version=self._version,
            precision=self._settings.precision,
            mode=self._mode,
            device=str(self._device),
            threads=None,
            details={
                "plan_bytes": self._path.stat().st_size,
                "layers": self._engine.num_layers,
                "device_memory_bytes": self._engine.device_memory_size_v2,
                "buckets": list(self._runner.rows),
                "axis_buckets": list(self._runner.sizes),
                **device_details(self._device),
            },
        )

    def close(self) -> None:
        super().close()
        self._engine, self._contexts = None, []

    def _check(self, trt: Any) -> None:
        specification, engine = self._specification, self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for tensor in (*specification.inputs, *specification.outputs):
            if tensor.name not in names:
                raise EngineError(f"the plan has the tensors {', '.join(names)}, but the model needs {tensor.name}")
            shape, dtype = tuple(engine.get_tensor_shape(tensor.name)), engine.get_tensor_dtype(tensor.name)
            expected = getattr(trt.DataType, ELEMENT_TYPES.get(tensor.datatype, ""), None)
            if shape != (-1, *tensor.item_shape) or dtype != expected:
                raise EngineError(
                    f"the plan's {tensor.name} is {dtype} {list(shape)}, the model's {tensor.datatype} "
                    f"{[-1, *tensor.item_shape]}; run: {self._command('--force')}"
                )
        sizes = {axis.name: axis.largest for axis in specification.axes}
        for tensor in specification.inputs:
            largest = tuple(engine.get_tensor_profile_shape(tensor.name, 0)[2])
            needed = (self._settings.max_batch_size, *specification.item_shape(tensor, sizes))
            if any(has < needs for has, needs in zip(largest, needed, strict=True)):
                raise EngineError(
                    f"the plan takes {tensor.name} up to {list(largest)}, not {list(needed)}; lower --max-batch-size, "
                    f"or run: {self._command(f'--max-batch-size {needed[0]}')}"
                )

    def _command(self, options: str) -> str:
        return export_command(self._specification, self._settings.kind, options)

    def _build(self, bucket: Bucket) -> Enqueue:
        """Each bucket has its own context: a captured graph is valid only while its context keeps its shapes."""
        specification = self._specification
        context = self._engine.create_execution_context()
        if context is None:
            raise EngineError("TensorRT cannot create an execution context: the GPU's memory is exhausted")
        for tensor in specification.inputs:
            context.set_input_shape(tensor.name, bucket.shape_of(specification, tensor))
        self._contexts.append(context)
        names = [tensor.name for tensor in (*specification.inputs, *specification.outputs)]

        def enqueue(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
            for name, memory in zip(names, (*inputs, *outputs), strict=True):
                context.set_tensor_address(name, memory.data_ptr())
            if not context.execute_async_v3(torch.cuda.current_stream(inputs[0].device).cuda_stream):
                raise EngineError(f"TensorRT cannot execute a batch of {bucket.rows}")

        return enqueue


def import_tensorrt() -> Any:
    """The module `tensorrt`, release 10 or 11. Raises `EngineError` with the remedy."""
    try:
        trt = import_module("tensorrt")
    except ImportError as exc:
        raise EngineError(f"TensorRT is not installed; run: {INSTALL}") from exc
    if str(trt.__version__).partition(".")[0] not in ("10", "11"):
        raise EngineError(f"TensorRT {trt.__version__} is neither release 10 nor 11; run: {INSTALL}")
    return trt
