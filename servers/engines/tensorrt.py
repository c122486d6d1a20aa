"""TensorRT executing a plan: CUDA graphs per batch bucket over the same buffers as the torch engine.

Never executed by this project's tests: the builder and runtime libraries come from NVIDIA's own index. The calls were
checked against the names that the bindings of 10.16 and 11.4 export. A plan runs only with the TensorRT release that
built it and on the kind of GPU it was built on (`abserve export --to tensorrt`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from servers.contract.tensors import Array
from servers.engines.batches import bucket_sizes, zero_inputs
from servers.engines.interface import EngineDescription, EngineError, first_line
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource

if TYPE_CHECKING:
    import torch

    from servers.engines.torch_device import Canary
    from servers.engines.vit.graph_runner import Enqueue, GraphRunner

ELEMENT_TYPES = {"FP32": "FLOAT", "FP16": "HALF", "UINT8": "UINT8", "INT64": "INT64"}
INSTALL = "pip install tensorrt --extra-index-url https://pypi.nvidia.com"
PRECISIONS = ("fp16", "fp32", "tf32")
"""A property of the plan, which does not tell it: what was asked for when it was built, by its file's name."""


class TensorRTEngine:
    """See `servers.engines.interface.Engine`. Executes the plan at `plan_path`; `weights` only labels it."""

    def __init__(
        self, specification: ModelSpecification, weights: WeightsSource, settings: EngineSettings, plan_path: Path
    ) -> None:
        self._specification = specification
        self._weights = weights
        self._settings = settings
        self._path = plan_path
        self._input, self._output = specification.inputs[0], specification.outputs[0]
        self._version = ""
        self._engine: Any = None
        self._contexts: list[Any] = []
        self._device: torch.device | None = None
        self._runner: GraphRunner | None = None
        self._canary: Canary | None = None

    def load(self) -> None:
        """Deserialise the plan, check that it is the model's, and capture a graph a bucket."""
        if self._settings.mode not in ("auto", "graph"):
            raise EngineError(f"the tensorrt engine knows only the mode graph: --mode {self._settings.mode} is refused")
        if self._settings.precision not in PRECISIONS:
            raise EngineError(
                f"the tensorrt engine does not offer {self._settings.precision}; use one of: {', '.join(PRECISIONS)}"
            )
        if not self._path.is_file():
            raise EngineError(
                f"no TensorRT plan at {self._path.name}; run: "
                f"abserve export --to tensorrt --model {self._specification.name} --precision "
                f"{'fp16' if self._settings.precision == 'fp16' else 'fp32'}"
            )
        trt = import_tensorrt()
        from servers.engines.torch_device import resolve_device
        from servers.engines.vit.graph_runner import GraphRunner

        device = resolve_device(self._settings.device)
        if device.type != "cuda":
            raise EngineError("the tensorrt engine runs on a GPU or not at all; use engine torch or onnxruntime")
        import torch

        self._version, self._device = str(trt.__version__), device
        with torch.cuda.device(device):
            logger = trt.Logger(trt.Logger.WARNING)
            self._engine = trt.Runtime(logger).deserialize_cuda_engine(self._path.read_bytes())
            if self._engine is None:
                raise EngineError(
                    f"TensorRT {self._version} cannot read {self._path.name}: a plan is bound to the release and the "
                    f"kind of GPU that built it; run: abserve export --to tensorrt --force"
                )
            self._check(trt)
            try:
                self._runner = GraphRunner(
                    self._build,
                    item=self._input.item_shape,
                    dtype=torch.uint8 if self._input.datatype == "UINT8" else torch.float32,
                    width=self._output.item_shape[0],
                    buckets=bucket_sizes(self._settings.max_batch_size, halves=False),
                    device=device,
                )
            except RuntimeError as exc:
                raise EngineError(f"the plan cannot be put on {device}: {first_line(exc)}") from exc

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, on zeros."""
        for size in batch_sizes:
            self.infer(zero_inputs([self._input], size))

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """One batch, padded to its bucket; the answer is a new array."""
        try:
            return {self._output.name: self._loaded().infer(inputs[self._input.name])}
        except RuntimeError as exc:
            raise EngineError(f"TensorRT failed to execute the batch: {first_line(exc)}") from exc

    def execution_ns(self, count: int, repeats: int) -> list[int]:
        """Device time of `repeats` executions of `count` rows without any copy to or from the host."""
        return [round(time_us * 1e3) for time_us in self._loaded().replay_us(count, repeats)]

    def run_only(self, count: int) -> bool:
        """One execution of `count` rows, waited for, without any copy to or from the host."""
        self._loaded().run_only(count)
        return True

    def canary(self) -> Canary:
        """Profile one inference for the CUDA kernels that it runs. Takes about a second."""
        from servers.engines.torch_device import run_canary

        runner = self._loaded()
        assert self._device is not None
        pixels = np.array(runner.staging[:1])
        self._canary = run_canary(lambda: runner.infer(pixels), self._device)
        return self._canary

    def describe(self) -> EngineDescription:
        """Read back from the plan and the runner; the precision is the plan's, as asked for when it was built."""
        from servers.engines.torch_device import device_details

        runner = self._loaded()
        assert self._device is not None
        return EngineDescription(
            kind="tensorrt",
            version=self._version,
            precision=self._settings.precision,
            mode="graph",
            device=str(self._device),
            threads=None,
            max_batch_size=self._settings.max_batch_size,
            weights=self._weights.label,
            details={
                "plan_bytes": self._path.stat().st_size,
                "layers": self._engine.num_layers,
                "device_memory_bytes": self._engine.device_memory_size_v2,
                "buckets": list(runner.buckets),
                **({} if self._canary is None else {"canary": self._canary}),
                **device_details(self._device),
            },
        )

    def close(self) -> None:
        """Drop graphs, contexts and the plan. Idempotent."""
        if self._runner is not None:
            self._runner.close()
        self._runner, self._engine = None, None
        self._contexts.clear()

    def _loaded(self) -> GraphRunner:
        if self._runner is None:
            raise EngineError("the tensorrt engine is not loaded")
        return self._runner

    def _check(self, trt: Any) -> None:
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        for tensor in (self._input, self._output):
            if tensor.name not in names:
                raise EngineError(f"the plan has the tensors {', '.join(names)}, the model needs {tensor.name}")
            shape, dtype = tuple(self._engine.get_tensor_shape(tensor.name)), self._engine.get_tensor_dtype(tensor.name)
            wanted = getattr(trt.DataType, ELEMENT_TYPES[tensor.datatype])
            if shape != (-1, *tensor.item_shape) or dtype != wanted:
                raise EngineError(
                    f"the plan's {tensor.name} is {dtype} {list(shape)}, the model's {tensor.datatype} "
                    f"{[-1, *tensor.item_shape]}; build the plan again"
                )
        largest = self._engine.get_tensor_profile_shape(self._input.name, 0)[2][0]
        if largest < self._settings.max_batch_size:
            raise EngineError(
                f"the plan takes batches up to {largest}, not {self._settings.max_batch_size}; lower --max-batch-size"
            )

    def _build(self, images: int) -> Enqueue:
        """A context of its own a bucket: a captured graph is valid only while its context keeps its shapes."""
        import torch

        context = self._engine.create_execution_context()
        if context is None:
            raise EngineError("TensorRT cannot create an execution context: the GPU's memory is exhausted")
        context.set_input_shape(self._input.name, (images, *self._input.item_shape))
        self._contexts.append(context)

        def enqueue(pixels: torch.Tensor, out: torch.Tensor) -> None:
            context.set_tensor_address(self._input.name, pixels.data_ptr())
            context.set_tensor_address(self._output.name, out.data_ptr())
            if not context.execute_async_v3(torch.cuda.current_stream(pixels.device).cuda_stream):
                raise EngineError(f"TensorRT cannot execute a batch of {images}")

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
