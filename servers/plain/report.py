"""What abserve adds to the plain servers: its models, the limits of their inputs, and the settings in effect."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version

import numpy as np
import torch

from servers.gpu.cuda_library import device_uuid
from servers.gpu.info import Runtime, gpu_info
from servers.gpu.kernel_probe import probe_kernels
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import executed_module, to_precision
from servers.models.weights import parse_weights
from servers.options.stages import stage, start_line
from servers.plain.settings import PlainSettings
from servers.protocol.tensors import Array, TensorSpec

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # the module only reads a request's bytes


def module_of(settings: PlainSettings) -> torch.nn.Module:
    """The model with its weights in its precision, on the CPU. Sets TF32 and the number of threads of the process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision == "tf32"
    if settings.threads:
        torch.set_num_threads(settings.threads)
    specification = settings.specification()
    with stage("build"):
        module = specification.load_module(parse_weights(settings.weights, specification.default_weights))
        return to_precision(executed_module(specification, module), DTYPES[settings.precision])


def log_start() -> None:
    """Say where the seconds of the start went."""
    sys.stderr.write(f"{start_line()}\n")


def check_input(spec: ModelSpecification, name: str, datatype: str, shape: Sequence[int]) -> TensorSpec:
    """The input of this name. Raises `ValueError` or another error of Python's own for what the model does not take."""
    tensor = next((candidate for candidate in spec.inputs if candidate.name == name), None)
    if tensor is None:
        raise ValueError(f"the model has no input {name}")
    fits = all(size == fixed or (fixed == -1 and size >= 0) for size, fixed in zip(shape, tensor.shape, strict=True))
    ranged = all(axis.padded <= shape[axis.places[name]] <= axis.largest for axis in spec.axes if name in axis.places)
    if datatype != tensor.datatype or not (fits and ranged and 1 <= shape[0] <= spec.max_batch_size):
        raise ValueError(f"the model takes {tensor}, at most {spec.max_batch_size} rows")
    return tensor


def check_values(spec: ModelSpecification, name: str, array: Array, size: int) -> None:
    """Raise `ValueError` for another size than the header's, and for ids that the model's tables do not have."""
    if size != array.nbytes:
        raise ValueError(f"{name} needs a binary_data_size of {array.nbytes}")
    if (ids := spec.id_counts.get(name)) and array.size and not 0 <= array.min() <= array.max() < ids:
        raise ValueError(f"{name} must be from 0 to {ids - 1}")


def read_runtime(
    settings: PlainSettings, module: torch.nn.Module, infer: Callable[[Sequence[list[Array]]], object]
) -> Runtime:
    """Read everything back from torch; `infer` executes one batch, which the profiler watches on a GPU."""
    spec = settings.specification()
    zeros = [np.zeros((1, *spec.item_shape(tensor)), tensor.dtype) for tensor in spec.inputs]
    return runtime_of(settings.device, module, lambda: infer([zeros]))


def runtime_of(device_name: str, module: torch.nn.Module, execute: Callable[[], object]) -> Runtime:
    """What torch says about a module on a device; on a GPU the profiler watches `execute`."""
    parameters, device = list(module.parameters()), torch.device(device_name)
    floating = [parameter for parameter in parameters if parameter.is_floating_point()]
    dtype = max(floating, key=torch.Tensor.numel).dtype if floating else torch.float32
    tf32 = dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    details: dict[str, object] = {
        "precision": "tf32" if tf32 else PRECISIONS[dtype],
        "threads": torch.get_num_threads(),
        "cuda_build": torch.version.cuda,
        "cuda_available": device.type == "cuda" or torch.cuda.is_available(),
        "parameters_by_device": dict(Counter(str(parameter.device) for parameter in parameters)),
    }
    if device.type == "cuda":
        details |= {
            "device_uuid": device_uuid(device.index or 0) or str(torch.cuda.get_device_properties(device).uuid),
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
            "kernel_probe": probe_kernels(execute, device),
        }
    return Runtime("torch", torch.__version__, str(device), details)


def server_document(name: str) -> dict[str, object]:
    """The server's name and version."""
    extensions = ("binary_tensor_data", "model_configuration")
    return {"name": name, "version": version("abserve"), "extensions": extensions}


def model_document(spec: ModelSpecification) -> dict[str, object]:
    """The model's tensors."""
    inputs, outputs = (
        [{"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape} for tensor in tensors]
        for tensors in (spec.inputs, spec.outputs)
    )
    return {"name": spec.name, "versions": [spec.version], "platform": "torch", "inputs": inputs, "outputs": outputs}


def config_document(settings: PlainSettings, runtime: Runtime) -> dict[str, object]:
    """The model's configuration in Triton's form, with the parameters in effect."""
    spec = settings.specification()
    parameters = {
        "engine": runtime.kind,
        "engine_version": runtime.version,
        "precision": runtime.details["precision"],
        "mode": "eager",
        "device": runtime.device,
        "weights": parse_weights(settings.weights, spec.default_weights).label,
        "model": spec.label,
        "payload": spec.payload,
    }
    if runtime.device == "cpu":
        parameters["threads"] = runtime.details["threads"]
    kind = "KIND_CPU" if runtime.device == "cpu" else "KIND_GPU"
    return {
        "name": spec.name,
        "platform": "",
        "backend": runtime.kind,
        "max_batch_size": spec.max_batch_size,
        "input": [_tensor(tensor) for tensor in spec.inputs],
        "output": [_tensor(tensor) for tensor in spec.outputs],
        "dynamic_batching": {"max_queue_delay_microseconds": settings.max_queue_delay_us},
        "instance_group": [{"name": f"{spec.name}_0", "kind": kind, "count": settings.workers}],
        "parameters": {name: {"string_value": str(value)} for name, value in parameters.items()},
        "model_warmup": [{"name": f"{count} rows", "batch_size": count} for count in settings.warm_rows()],
    }


def documents(
    name: str, settings: PlainSettings, runtime: Callable[[], Runtime]
) -> dict[str, Callable[[], dict[str, object]]]:
    """By path, what makes each document of a server; `runtime` is what it has read back from torch."""
    spec = settings.specification()
    model = f"/v2/models/{spec.name}"
    return {
        "/v2": lambda: server_document(name),
        model: lambda: model_document(spec),
        f"{model}/config": lambda: config_document(settings, runtime()),
        "/gpu-info": lambda: dict(gpu_info(runtime())),
    }


def _tensor(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(spec.item_shape)}
