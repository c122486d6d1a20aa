"""torch → a package of machine code, by torch.export and AOTInductor, whose batch and axes are free dimensions.

A package runs only with the torch that made it, on a CPU with the instructions that it was compiled for (`target`).
"""

from __future__ import annotations

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

CONFIGURATION = {"cpp.dynamic_threads": True}
"""Else the number of threads at compilation would be a constant of the machine code."""


def target() -> str:
    """This kind of CPU, by its vector instructions."""
    import torch

    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}-{_instructions()}"


def _instructions() -> str:
    """A short hash of the processor's instruction sets: the compiler uses all of them (-march=native)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.partition(":")[2].split())).encode()).hexdigest()[:8]


def write_package(specification: ModelSpecification, module: torch.nn.Module, path: Path) -> float:
    """Compile `module`, FP32 on the CPU as from `specification.load_module`, and write it to `path`, a .pt2 file.

    Returns the seconds taken. Raises `ExportError` where torch cannot export or compile it.
    """
    import torch
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    from servers.models.uint8_module import executed_module

    started_ns = time.perf_counter_ns()
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as exc:
        raise ExportError(
            "AOTInductor needs a C++ compiler, and none was found; run: sudo apt-get install g++, or name one in CXX"
        ) from exc
    executed = executed_module(specification, module)
    arrays = random_inputs(specification, EXAMPLE_BATCH, 0, example_sizes(specification))
    given = tuple(torch.from_numpy(arrays[tensor.name]) for tensor in specification.inputs)
    try:
        with quiet_exporter(), torch.no_grad():
            program = torch.export.export(executed, given, dynamic_shapes=(*dynamic_shapes(specification),))
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(CONFIGURATION))
    except Exception as exc:  # the model's own code runs here, and the compiler's errors share no base class
        raise ExportError(
            f"torch cannot compile {specification.name} to a package: {first_line(exc)}; use the engine torch"
        ) from exc
    return (time.perf_counter_ns() - started_ns) / 1e9
