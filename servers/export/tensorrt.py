"""ONNX → TensorRT plan with the tools of this machine, and the container command for one without them.

A plan runs only with the TensorRT release that built it, on the kind of GPU on which it was built. Its path names both,
with a hash of the ONNX file, the precision and the shapes: the plan at the requested path is up to date. Networks are
strongly typed, in release 10 by a flag and in 11 always: FP16 comes from an FP16 ONNX file, not from a builder flag.
This project's tests have no NVIDIA libraries and run a scripted trtexec only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.export.manifest import ExportError
from servers.models.files import exclusive
from servers.models.specification import ModelSpecification
from servers.options.libraries import installed_versions

TRTEXEC_FOLDERS = ("/usr/src/tensorrt/bin", "/opt/tensorrt/bin")
LIBRARY_FOLDERS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"))
PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


def library_version() -> str | None:
    """The TensorRT that Triton's backend loads, from the name of libnvinfer's file: "10.13.3"."""
    for path in _libraries():
        if match := re.search(r"\.so\.(\d+\.\d+\.\d+)", path.resolve().name):
            return match[1]
    return None


def find_trtexec() -> str | None:
    """The path of trtexec."""
    return shutil.which("trtexec", path=os.pathsep.join([os.environ.get("PATH", ""), *TRTEXEC_FOLDERS]))


def trtexec_version() -> str | None:
    """The version in trtexec's banner, where v101303 is 10.13.3; None without trtexec."""
    if (program := find_trtexec()) is None:
        return None
    match = re.search(r"\[TensorRT v(\d+)\]", _output([program, "--help"]))
    if match is None:
        return None
    number = int(match[1])
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def bindings_version() -> str | None:
    """The version of Python's package `tensorrt`, without the build number."""
    installed = next(iter(installed_versions(PACKAGES).values()), None)
    return installed and ".".join(installed.split(".")[:3])


def _libraries() -> Iterator[Path]:
    """Files of libnvinfer in the loader's order: LD_LIBRARY_PATH, its cache, the usual folders."""
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        yield from sorted(Path(folder).glob("libnvinfer.so.*"))
    loader = shutil.which("ldconfig", path=os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"]))
    if loader is not None:
        yield from map(Path, re.findall(r"libnvinfer\.so\.\S+ .*=> (\S+)", _output([loader, "-p"])))
    for usual in LIBRARY_FOLDERS:
        yield from sorted(usual.glob("libnvinfer.so.*"))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


TENSORRT_IMAGE = (
    "nvcr.io/nvidia/tensorrt:26.08-py3@sha256:3b127f45630cd56bf43d2ef70d7f50a7ee37e42bda4ba11adaaa069af2098125"
)
"""The image in docker-compose.yml, from the same month as its Triton image."""
TENSORRT_RELEASE = "11.2.1"
"""The TensorRT of both images."""

WORKSPACE_BYTES = 4 * 2**30
BUILD_SECONDS = 1500
"""Shorter than `abserve compare` waits for a server's preparation."""
SHOWN_LINES = 3


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything that determines a plan."""

    onnx: Path
    onnx_sha256: str
    folder: Path
    precision: str
    """As an engine names it: TF32 and FP32 share the ONNX file."""
    profile: Mapping[str, list[list[int]]]
    """See `profile_shapes`."""
    release: str
    """The TensorRT that will execute the plan: "10.13.3"."""
    gpu: str
    """See `gpu_kind`."""

    @property
    def path(self) -> Path:
        """The path of the plan."""
        built_from = json.dumps([self.onnx_sha256, self.precision, self.profile])
        digest = hashlib.sha256(built_from.encode()).hexdigest()[:12]
        return self.folder / f"{self.onnx.stem}-{self._tactics}-{digest}.plan"

    @property
    def timing_cache(self) -> Path:
        """Measured times of kernels, which TensorRT reuses for other plans of the same GPU and release."""
        return self.folder / f"{self._tactics}.cache"

    @property
    def _tactics(self) -> str:
        gpu = re.sub(r"[^a-z0-9.]+", "-", self.gpu.lower())
        return f"{gpu}-tensorrt-{self.release}"


def gpu_kind() -> str:
    """Name and compute capability of the first visible GPU, as in "NVIDIA H200 sm9.0", or "unknown GPU"."""
    from servers.gpu.nvml import NvmlReader  # not above: most exports need no driver
    from servers.gpu.readings import visible

    reader = NvmlReader(visible(os.environ))
    try:
        devices = reader.connect().devices
    finally:
        reader.close()
    return f"{devices[0].name} sm{devices[0].compute_capability}" if devices else "unknown GPU"


def profile_shapes(specification: ModelSpecification, max_batch_size: int) -> dict[str, list[list[int]]]:
    """By input, the smallest, best and largest shape of the one profile. It is tuned for the largest batch, which
    determines throughput, at the axes' default sizes."""
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


def container_command(request: PlanRequest) -> str:
    """The command that builds the plan with `TENSORRT_IMAGE`, of `TENSORRT_RELEASE`; both folders must exist."""
    plan, cache = Path("/plan") / request.path.name, Path("/plan") / request.timing_cache.name
    words = [
        *("docker", "run", "--rm", "--gpus", "device=0"),
        *("-v", f"{request.onnx.parent.absolute()}:/onnx:ro", "-v", f"{request.folder.absolute()}:/plan"),
        *(TENSORRT_IMAGE, "trtexec", *_arguments(request, Path("/onnx") / request.onnx.name, plan, cache)),
    ]
    return shlex.join(words)


def ensure_plan(request: PlanRequest, progress: Callable[[str], None], *, force: bool = False) -> float | None:
    """Build the plan if it is missing, or `force` is set; returns the seconds, or None for one that was there. Raises
    `ExportError` without a tool of the requested release or if it cannot build the model, and `FolderError`."""
    plan = request.path
    if plan.is_file() and not force:
        return None
    with exclusive(plan):
        if plan.is_file() and not force:  # another process built it
            return None
        if bindings_version() == request.release:
            tool, build = "Python's tensorrt", _build_with_bindings
        elif trtexec_version() == request.release:
            tool, build = "trtexec", _build_with_trtexec
        else:
            raise ExportError(_no_tool(request.release))
        progress(f"building a TensorRT plan for {request.gpu} with {tool} {request.release}, which takes minutes")
        fresh, started_ns = plan.with_name(f".{plan.name}.partial"), time.perf_counter_ns()
        try:
            build(request, fresh)
            fresh.replace(plan)
        except OSError as exc:
            raise ExportError(
                f"cannot write {plan}: {exc.strerror or exc}; free some space, or choose another folder"
            ) from exc
        finally:
            fresh.unlink(missing_ok=True)
        return (time.perf_counter_ns() - started_ns) / 1e9


def _no_tool(release: str) -> str:
    tools = {"Python's tensorrt": bindings_version(), "trtexec": trtexec_version()}
    present = " and ".join(f"{name} {has}" for name, has in tools.items() if has) or "no tool that builds them"
    container = "run the container command of abserve export --to tensorrt, " if release == TENSORRT_RELEASE else ""
    return (
        f"TensorRT {release} executes only plans that it built, and this machine has {present}; {container}install "
        f"trtexec {release}, or run: pip install 'tensorrt=={release}.*' --extra-index-url https://pypi.nvidia.com"
    )


def _arguments(request: PlanRequest, onnx: Path, plan: Path, cache: Path) -> list[str]:
    """The arguments of trtexec."""
    smallest, best, largest = (
        ",".join(f"{name}:{'x'.join(map(str, shapes[which]))}" for name, shapes in request.profile.items())
        for which in range(3)
    )
    return [
        *(f"--onnx={onnx}", f"--saveEngine={plan}"),
        *(f"--minShapes={smallest}", f"--optShapes={best}", f"--maxShapes={largest}"),
        *(["--stronglyTyped"] if request.release.startswith("10.") else []),
        *([] if request.precision == "tf32" else ["--noTF32"]),  # a builder flag that is set by default
        *(f"--timingCacheFile={cache}", "--skipInference"),
    ]


def _build_with_trtexec(request: PlanRequest, plan: Path) -> None:
    program = find_trtexec()
    assert program is not None
    command = [program, *_arguments(request, request.onnx.absolute(), plan.absolute(), request.timing_cache.absolute())]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=BUILD_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise ExportError(f"trtexec did not build {request.path.name} in {BUILD_SECONDS} s") from exc
    except OSError as exc:
        raise ExportError(f"{program} cannot be run: {exc.strerror or exc}") from exc
    if done.returncode != 0 or not plan.is_file():
        lines = list(filter(None, map(str.strip, done.stdout.splitlines())))
        lines = [line for line in lines if "[E]" in line] or lines
        reason = " / ".join(lines[-SHOWN_LINES:]) or f"exit status {done.returncode}"
        raise ExportError(f"trtexec {request.release} cannot build a plan from {request.onnx.name}: {reason}")


def _build_with_bindings(request: PlanRequest, plan: Path) -> None:
    from servers.engines.tensorrt import import_tensorrt  # not above: it imports torch

    trt = import_tensorrt()
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(request.onnx)):
        reasons = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise ExportError(
            f"TensorRT {trt.__version__} cannot read {request.onnx.name}: {reasons.partition(chr(10))[0]}"
        )
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    if request.precision != "tf32":  # a flag that is set by default
        config.clear_flag(trt.BuilderFlag.TF32)
    cache_path = request.timing_cache
    cache = config.create_timing_cache(cache_path.read_bytes() if cache_path.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    profile = builder.create_optimization_profile()
    for name, shapes in request.profile.items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    serialised = builder.build_serialized_network(network, config)
    if serialised is None:
        raise ExportError(f"TensorRT {trt.__version__} cannot build a plan from {request.onnx.name}; see its log above")
    plan.write_bytes(memoryview(serialised))
    cache_path.write_bytes(memoryview(config.get_timing_cache().serialize()))


def _strongly_typed(trt: Any) -> int:
    """The flag for a strongly typed network; release 11 has only those and may drop the flag's name."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)
