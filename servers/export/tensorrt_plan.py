"""ONNX → TensorRT plan, here if TensorRT is installed, and the container command that does it anywhere.

A plan runs only with the TensorRT release that built it, on the kind of GPU on which it was built. The release must be
that of the Triton image that will serve it, so the command names the TensorRT image of the same month. Networks are
strongly typed, in release 10 by a flag and in 11 always: FP16 comes from an FP16 ONNX file, not from a builder flag.
This project's tests never execute it, for want of the libraries.
"""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from servers.export.errors import ExportError
from servers.models.specification import ModelSpecification

TENSORRT_IMAGE = (
    "nvcr.io/nvidia/tensorrt:26.08-py3@sha256:3b127f45630cd56bf43d2ef70d7f50a7ee37e42bda4ba11adaaa069af2098125"
)
"""The image in .env.example, from the same month as its Triton image: both carry TensorRT 11.2.1."""

TIMING_CACHE = "timing.cache"
WORKSPACE_BYTES = 4 * 2**30


def plan_path(onnx: Path) -> Path:
    """The path of the plan for an ONNX artefact: in its own folder beside the artefact's."""
    return onnx.parent.with_name(f"{onnx.parent.name}-tensorrt") / onnx.with_suffix(".plan").name


def profile_shapes(specification: ModelSpecification, max_batch_size: int) -> dict[str, list[list[int]]]:
    """By input, the smallest, best and largest shape of the one profile.

    It is tuned for the largest batch, which determines throughput, at the axes' default sizes.
    """
    axes = specification.axes
    sizes = [
        (1, {axis.name: 1 for axis in axes}),
        (max_batch_size, {axis.name: axis.default for axis in axes}),
        (max_batch_size, {axis.name: axis.largest for axis in axes}),
    ]
    return {
        tensor.name: [[rows, *specification.item_shape(tensor, along)] for rows, along in sizes]
        for tensor in specification.inputs
    }


def is_current(specification: ModelSpecification, onnx: Path, plan: Path, max_batch_size: int) -> bool:
    """Whether the plan is newer than its ONNX file and than the last change of its profile.

    Notes the profile beside the plan, which a container may build that leaves no note.
    """
    noted, profile = plan.with_suffix(".profile.json"), json.dumps(profile_shapes(specification, max_batch_size))
    if not noted.is_file() or noted.read_text(encoding="utf-8") != profile:
        noted.write_text(profile, encoding="utf-8")
    made_ns = plan.stat().st_mtime_ns if plan.is_file() else 0
    return made_ns >= max(onnx.stat().st_mtime_ns, noted.stat().st_mtime_ns)


def container_command(specification: ModelSpecification, onnx: Path, plan: Path, max_batch_size: int) -> str:
    """The command that builds the plan with the release of `TENSORRT_IMAGE`; both folders must exist."""
    profile = profile_shapes(specification, max_batch_size)
    smallest, best, largest = (
        ",".join(f"{name}:{'x'.join(map(str, shapes[which]))}" for name, shapes in profile.items())
        for which in range(3)
    )
    words = [
        *("docker", "run", "--rm", "--gpus", "device=0"),
        *("-v", f"{onnx.parent.absolute()}:/onnx:ro", "-v", f"{plan.parent.absolute()}:/plan", TENSORRT_IMAGE),
        *("trtexec", f"--onnx=/onnx/{onnx.name}", f"--saveEngine=/plan/{plan.name}"),
        *(f"--minShapes={smallest}", f"--optShapes={best}", f"--maxShapes={largest}"),
        *(f"--timingCacheFile=/plan/{TIMING_CACHE}", "--skipInference"),
    ]
    return shlex.join(words)


def build_plan(specification: ModelSpecification, onnx: Path, plan: Path, max_batch_size: int) -> tuple[str, float]:
    """Build `plan` from `onnx` on this machine's GPU, with a timing cache beside it: the release and the seconds.

    Raises `EngineError` where TensorRT is missing, `ExportError` where it cannot build the model.
    """
    from servers.engines.tensorrt import import_tensorrt  # not above: it imports torch

    trt = import_tensorrt()
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        reasons = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise ExportError(f"TensorRT {trt.__version__} cannot read {onnx.name}: {reasons.partition(chr(10))[0]}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    plan.parent.mkdir(parents=True, exist_ok=True)
    cache_path = plan.parent / TIMING_CACHE
    cache = config.create_timing_cache(cache_path.read_bytes() if cache_path.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    profile = builder.create_optimization_profile()
    for name, shapes in profile_shapes(specification, max_batch_size).items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    started_ns = time.perf_counter_ns()
    serialised = builder.build_serialized_network(network, config)
    if serialised is None:
        raise ExportError(f"TensorRT {trt.__version__} cannot build a plan from {onnx.name}; see its log above")
    fresh = plan.with_name(f".{plan.name}.partial")
    fresh.write_bytes(memoryview(serialised))
    fresh.replace(plan)
    cache_path.write_bytes(memoryview(config.get_timing_cache().serialize()))
    return str(trt.__version__), (time.perf_counter_ns() - started_ns) / 1e9


def _strongly_typed(trt: Any) -> int:
    """The flag for a strongly typed network; release 11 has only those and may drop the flag's name."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)
