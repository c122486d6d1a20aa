"""The engines with their modes and precisions on each device, and the settings that a server passes to one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from servers.engines.processors import cuda_index, nvidia_device_present
from servers.models.specification import choose_from
from servers.options import defaults
from servers.options.defaults import SPINS


class EngineError(Exception):
    """An engine cannot be built or has failed; the message names the remedy where there is one."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The modes and precisions of one engine by device, "cpu" or "cuda"; `auto` selects the first mode of a device."""

    engine: str
    """"module:class"; the module is imported only for this engine."""
    modes: Mapping[str, tuple[str, ...]]
    precisions: Mapping[str, tuple[str, ...]]
    libraries: tuple[str, ...] = ()
    """The libraries that `load` imports first, besides the model's own. A server imports them earlier to time them
    separately."""
    executes: str | None = None
    """The operators of the exported file that it executes, or package (see `servers.export.manifest`); None: it
    executes the model's own module."""
    install: str = "pip install 'abserve[servers]'"
    """The command that installs its libraries."""
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By precision and device, a clause that says why the engine does not offer it there."""


ENTRY_POINTS = "abserve.engines"
"""Packages register an engine under this group: its name, and the place of its `EngineKind`."""
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
PARAMETER_TYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}
"""By precision, the type of the parameters of a module that torch or JAX executes."""
KINDS: Mapping[str, EngineKind] = {
    "torch": EngineKind(
        "servers.engines.torch.engine:TorchEngine",
        {"cpu": ("tuned", "eager", "traced"), "cuda": ("graph", "compile", "eager", "traced")},
        {"cpu": ("fp32",), "cuda": (*PRECISIONS, "fp8")},
        ("torch",),
        reasons={("fp8", "cpu"): "torchao multiplies FP8 on GPUs of compute capability 8.9 and newer"},
    ),
    "onnxruntime": EngineKind(
        "servers.engines.onnxruntime:OnnxRuntimeEngine",
        {"cpu": ("session",), "cuda": ("graph", "session")},
        {"cpu": ("fp32", "fp16", "int8"), "cuda": ("fp32", "tf32", "fp16")},
        ("onnxruntime",),
        executes="fused",
        reasons={("int8", "cuda"): "ONNX Runtime's CUDA kernels convert INT8 weights back and multiply in FP32"},
    ),
    "tensorrt": EngineKind(
        "servers.engines.tensorrt:TensorRTEngine",
        {"cuda": ("graph",)},
        {"cuda": ("fp16", "fp32", "tf32")},
        ("tensorrt",),
        executes="standard",
        install="pip install 'abserve[tensorrt]'",
    ),
    "null": EngineKind("servers.engines.null:NullEngine", {"cpu": ("eager",)}, {"cpu": (*PRECISIONS, "int8", "fp8")}),
    "aotinductor": EngineKind(
        "servers.engines.torch.engine:AOTInductorEngine",
        {"cpu": ("package",)},
        {"cpu": ("fp32",)},
        ("torch",),
        executes="package",
    ),
}


@cache
def _registered() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def engine_names() -> tuple[str, ...]:
    """Every engine: abserve's own, then those that packages register."""
    return (*KINDS, *(name for name in _registered() if name not in KINDS))


def engine_kind(name: str) -> EngineKind:
    """The engine of that name. Raises `EngineError` for an unknown one, and for one that cannot be imported."""
    if name in KINDS:
        return KINDS[name]
    if (point := _registered().get(name)) is None:
        raise EngineError(f"unknown engine {name!r}; {choose_from(name, engine_names())}")
    try:
        kind = point.load()
    except Exception as exc:  # the module may be anybody's
        raise EngineError(f"the engine {name} cannot be imported from {point.value}: {exc}") from exc
    if not isinstance(kind, EngineKind):
        raise EngineError(f"the entry point {point.value} of the engine {name} is not an EngineKind")
    return kind


def resolved_device(device: str) -> str:
    """cpu or cuda:N. Loads no library: `auto` is the first GPU if the kernel offers one, for every engine alike."""
    if device == "auto":
        return "cuda:0" if nvidia_device_present() else "cpu"
    index = cuda_index(device)
    return device if index is None else f"cuda:{index}"


def precision_on(device: str, requested: str) -> str:
    """The precision to compute in: `auto` is FP16 on a GPU and FP32 on a CPU, for every engine and server."""
    if requested != "auto":
        return requested
    return "fp32" if device == "cpu" else "fp16"


def parse_spinning(text: str) -> bool | None:
    """The value of an option auto, on or off: None, True or False."""
    return {"on": True, "off": False}.get(text)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The requested settings. `Engine.describe` returns those in effect; an engine refuses what it cannot honour. The
    precision `auto` becomes that of the device here, so nothing ever reports `auto`."""

    kind: str = "torch"
    precision: str = defaults.PRECISION
    mode: str = defaults.MODE
    device: str = defaults.DEVICE  # auto, cpu or cuda:N
    threads: int = 0  # intra-op threads on the CPU; 0: all cores that this process may use
    max_batch_size: int = defaults.MAX_BATCH_SIZE
    pad_to: tuple[int, ...] = ()
    """Sizes of the model's padded axis to prepare for, ascending; empty: the engine chooses. See `Axis`."""
    buckets: tuple[int, ...] = ()
    """Batch sizes to prepare besides `max_batch_size`; empty: the engine chooses."""
    spinning: bool | None = None
    """Whether intra-op threads spin while they wait for work, a choice of onnxruntime on the CPU; None: the engine's
    default."""

    def __post_init__(self) -> None:
        with suppress(EngineError):  # `check` refuses an unknown one
            kind = engine_kind(self.kind)
            device = self.device_here() if "cpu" in kind.modes else "cuda"
            object.__setattr__(self, "precision", precision_on(device, self.precision))

    def check(self) -> None:
        """Raise `EngineError` for a value that is wrong on every device."""
        kind = engine_kind(self.kind)
        if self.device not in ("auto", "cpu") and cuda_index(self.device) is None:
            raise EngineError(f"unknown device {self.device!r}; use auto, cpu or cuda:N")
        if self.device != "auto":
            self._check_runs_on("cpu" if self.device == "cpu" else "cuda")
        if self.max_batch_size < 1:
            raise EngineError(f"max_batch_size {self.max_batch_size}: it must be at least 1")
        if self.buckets and not 1 <= min(self.buckets) <= max(self.buckets) <= self.max_batch_size:
            raise EngineError(f"buckets {self.buckets}: they must be from 1 to max_batch_size {self.max_batch_size}")
        if self.spinning is not None and (self.kind not in SPINS or self.device_here() != "cpu"):
            raise EngineError(f"only {' and '.join(SPINS)} on the CPU have a choice of spinning; leave spinning out")
        if self.threads < 0:
            raise EngineError(f"threads {self.threads}: it must be 0 (all cores) or more")
        for name, value, offered in (
            ("mode", self.mode, {"auto": None, **dict.fromkeys(m for modes in kind.modes.values() for m in modes)}),
            ("precision", self.precision, dict.fromkeys(p for some in kind.precisions.values() for p in some)),
        ):
            if value not in offered:
                raise EngineError(f"the {self.kind} engine has no {name} {value!r}; {choose_from(value, offered)}")

    def on_first(self) -> EngineSettings:
        """These settings for the first of several devices, which Triton's and the native server's may be."""
        return replace(self, device=self.device.split(",")[0])

    def device_here(self) -> str:
        """The device, cpu or cuda:N, as `resolved_device`; of an engine that uses no GPU `auto` is the CPU."""
        if self.device == "auto" and "cuda" not in engine_kind(self.kind).modes:
            return "cpu"
        return resolved_device(self.device)

    def check_here(self) -> None:
        """Raise `EngineError` for a value that is wrong on this machine; loads no library."""
        self.check()
        device = self.device_here()
        if device != "cpu" and not nvidia_device_present():
            raise EngineError(f"device {device}: this machine has no NVIDIA GPU; use --device cpu or auto")
        self.mode_on("cpu" if device == "cpu" else "cuda")

    def mode_on(self, device: str) -> str:
        """The mode to execute in on "cpu" or "cuda". Raises `EngineError` if the engine does not offer it there."""
        self._check_runs_on(device)
        kind = engine_kind(self.kind)
        mode = kind.modes[device][0] if self.mode == "auto" else self.mode
        for name, value, offered in (
            ("mode", mode, ("auto", *kind.modes[device])),
            ("precision", self.precision, kind.precisions[device]),
        ):
            if value not in offered:
                listed = ", ".join(offered)
                reason = f": {why}" if (why := kind.reasons.get((value, device))) else ""
                raise EngineError(
                    f"the {self.kind} engine does not offer {name} {value} on {device}{reason}; use one of: {listed}"
                )
        return mode

    def _check_runs_on(self, device: str) -> None:
        if device not in (modes := engine_kind(self.kind).modes):
            raise EngineError(f"the {self.kind} engine does not run on {device}; use --device {' or '.join(modes)}")
