"""The torch module of the plain servers, and what they report about it: settings in effect, parameters, kernels."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from servers.contract.tensors import Array, TensorSpec
from servers.gpu.cuda_library import device_uuid
from servers.gpu.info import Runtime
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import executed_module, to_precision
from servers.models.weights import parse_weights
from servers.plain.settings import PlainSettings

EXTENSIONS = ("binary_tensor_data", "model_configuration")
PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # the module only reads a request's bytes


class Model:
    """The torch module in its precision on its device; warmed up as soon as it is made."""

    def __init__(self, settings: PlainSettings) -> None:
        self.spec = spec = settings.specification()
        self.device, self.dtype = torch.device(settings.device), DTYPES[settings.precision]
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision == "tf32"
        if settings.threads:
            torch.set_num_threads(settings.threads)
        own = spec.load_module(parse_weights(settings.weights, spec.default_weights))
        self.module = to_precision(executed_module(spec, own), self.dtype).to(self.device)
        for rows in (1, spec.max_batch_size, 1):
            zeros = [np.zeros((rows, *spec.item_shape(tensor)), tensor.dtype) for tensor in spec.inputs]
            self.infer(zeros)
        self.runtime = read_runtime(self.module, self.device, lambda: self.infer(zeros))

    @torch.inference_mode()
    def infer(self, arrays: list[Array]) -> list[Array]:
        """The outputs of one batch, in the specification's order and datatypes."""
        inputs = [torch.from_numpy(array).to(self.device, non_blocking=True) for array in arrays]
        answer = self.module(*(one.to(self.dtype) if one.is_floating_point() else one for one in inputs))
        outputs = answer if isinstance(answer, tuple | list) else [answer]
        arrays = [(one.float() if one.dtype == torch.bfloat16 else one).cpu().numpy() for one in outputs]
        return [array.astype(tensor.dtype, copy=False) for tensor, array in zip(self.spec.outputs, arrays, strict=True)]

    def infer_merged(self, requests: Sequence[list[Array]]) -> list[list[Array]]:
        """The answers to requests that are executed as one batch."""
        merged = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*requests, strict=True)]
        ends = np.cumsum([len(arrays[0]) for arrays in requests])[:-1]
        return [list(answer) for answer in zip(*(np.split(output, ends) for output in self.infer(merged)), strict=True)]


def read_runtime(module: torch.nn.Module, device: torch.device, infer: Callable[[], object]) -> Runtime:
    """Read everything back from torch; `infer` executes one batch, which the profiler watches on a GPU."""
    parameters = list(module.parameters())
    floating = [one for one in parameters if one.is_floating_point()]
    dtype = max(floating, key=torch.Tensor.numel).dtype if floating else torch.float32
    tf32 = dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    details: dict[str, object] = {
        "precision": "tf32" if tf32 else PRECISIONS[dtype],
        "threads": torch.get_num_threads(),
        "cuda_build": torch.version.cuda,
        "cuda_available": device.type == "cuda" or torch.cuda.is_available(),
        "parameters_by_device": dict(Counter(str(one.device) for one in parameters)),
    }
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            infer()
            torch.cuda.synchronize(device)
        names = [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]
        details |= {
            "device_uuid": device_uuid(device.index or 0) or str(torch.cuda.get_device_properties(device).uuid),
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
            "kernel_probe": {"kernel_count": sum(not name.startswith(("Memcpy", "Memset")) for name in names)},
        }
    return Runtime("torch", torch.__version__, str(device), details)


def model_metadata(specification: ModelSpecification) -> dict[str, object]:
    """The model's tensors."""
    inputs, outputs = (
        [{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in tensors]
        for tensors in (specification.inputs, specification.outputs)
    )
    name, versions = specification.name, [specification.version]
    return {"name": name, "versions": versions, "platform": "torch", "inputs": inputs, "outputs": outputs}


def model_config(settings: PlainSettings, specification: ModelSpecification, runtime: Runtime) -> dict[str, object]:
    """The model's configuration in Triton's form, with the parameters in effect."""
    parameters = {
        "engine": runtime.kind,
        "engine_version": runtime.version,
        "precision": runtime.details["precision"],
        "mode": "eager",
        "device": runtime.device,
        "weights": parse_weights(settings.weights, specification.default_weights).text,
        "model": specification.label,
        "payload": specification.payload,
    }
    if runtime.device == "cpu":
        parameters["threads"] = runtime.details["threads"]
    kind = "KIND_CPU" if runtime.device == "cpu" else "KIND_GPU"
    return {
        "name": specification.name,
        "platform": "",
        "backend": runtime.kind,
        "max_batch_size": specification.max_batch_size,
        "input": [_tensor(one) for one in specification.inputs],
        "output": [_tensor(one) for one in specification.outputs],
        "dynamic_batching": {"max_queue_delay_microseconds": settings.max_queue_delay_us},
        "instance_group": [{"name": f"{specification.name}_0", "kind": kind, "count": 1}],
        "parameters": {name: {"string_value": str(value)} for name, value in parameters.items()},
        "model_warmup": [
            {"name": f"{rows} rows", "batch_size": rows} for rows in sorted({1, specification.max_batch_size})
        ],
    }


def _tensor(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(spec.item_shape)}
