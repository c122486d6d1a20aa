"""torch → a package of machine code, by torch.export and AOTInductor, whose batch and axes are free dimensions.

A package runs only with the torch that made it, on the kind of processor that it was compiled for (`target_of`).
"""

from __future__ import annotations

import copy
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from servers.engines.batches import random_inputs
from servers.engines.interface import first_line
from servers.export.errors import ExportError
from servers.export.onnx import EXAMPLE_BATCH, dynamic_shapes, example_sizes, quiet_exporter
from servers.models.specification import ModelSpecification

if TYPE_CHECKING:
    import torch

CONFIGURATION = {"cpp.dynamic_threads": True, "aot_inductor.weight_use_caching_allocator": True}
"""Else the number of threads at compilation would be a constant of the machine code, and the weights would lie beside
torch's allocator, so that no figure of memory would include them."""


def target_of(device: str) -> str:
    """The kind of processor: the CPU with its vector instructions, or the GPU with its compute capability.

    Raises `EngineError` for a device that torch does not find.
    """
    import torch

    from servers.engines.torch_device import resolve_device

    found = resolve_device(device)
    if found.type == "cpu":
        return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}-{_instructions()}"
    major, minor = torch.cuda.get_device_capability(found)
    return f"cuda-{major}.{minor}"


def _instructions() -> str:
    """A short hash of the processor's instruction sets: the compiler uses all of them (-march=native)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.partition(":")[2].split())).encode()).hexdigest()[:8]


def _check_cuda_headers() -> None:
    from torch.utils.cpp_extension import CUDA_HOME

    if not Path(CUDA_HOME or "/", "include", "cuda.h").is_file():
        raise ExportError(
            f"AOTInductor needs the headers of a CUDA toolkit, and {CUDA_HOME or 'the environment'} has no "
            "include/cuda.h; install the toolkit, and set CUDA_HOME to its folder"
        )


def write_package(
    specification: ModelSpecification, module: torch.nn.Module, path: Path, precision: str, device: str
) -> float:
    """Compile `module`, FP32 on the CPU as from `specification.load_module`, and write it to `path`, a .pt2 file.

    `device` is cpu or cuda. Returns the seconds taken. Raises `ExportError` where torch cannot export or compile it.
    """
    import torch
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from servers.engines.torch import PARAMETER_TYPES
    from servers.engines.torch_device import set_fp32_products
    from servers.models.uint8_module import executed_module, to_precision

    started_ns = time.perf_counter_ns()
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as exc:
        raise ExportError(
            "AOTInductor needs a C++ compiler, and none was found; run: sudo apt-get install g++, or name one in CXX"
        ) from exc
    dtype = getattr(torch, PARAMETER_TYPES[precision])
    if device != "cpu":
        _check_cuda_headers()
        set_fp32_products(tf32=precision == "tf32")
        module = copy.deepcopy(module)  # the original still gives the expected answers
    executed = to_precision(executed_module(specification, module).to(device), dtype)
    arrays = random_inputs(specification, EXAMPLE_BATCH, 0, example_sizes(specification))
    example = [torch.from_numpy(arrays[tensor.name]).to(device) for tensor in specification.inputs]
    given = tuple(one.to(dtype) if one.is_floating_point() else one for one in example)
    try:
        with quiet_exporter(), torch.no_grad():
            # On a GPU a fused attention pads its mask to a multiple of 8, which export takes for a condition of the
            # axis. The program keeps the operator, and the compiler chooses how to compute it.
            with sdpa_kernel(SDPBackend.MATH):
                program = torch.export.export(executed, given, dynamic_shapes=(*dynamic_shapes(specification),))
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(CONFIGURATION))
    except Exception as exc:  # the model's own code runs here, and the compiler's errors share no base class
        raise ExportError(
            f"torch cannot compile {specification.name} to a package: {first_line(exc)}; use the engine torch"
        ) from exc
    return (time.perf_counter_ns() - started_ns) / 1e9
