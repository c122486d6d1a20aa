"""The settings of the embedded Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from servers.engines.options import PAD_TO, EngineOptions, PadTo
from servers.engines.padding import parse_pad_to
from servers.engines.processors import check_devices, thread_count
from servers.engines.settings import EngineError, EngineSettings, resolved_device
from servers.language.engine import DEFAULT_ENGINE, GenerationSettings, generation_precision
from servers.language.options import GeneratingOptions
from servers.models.images import DecodingSettings
from servers.models.registry import get_variants
from servers.options import defaults, search
from servers.options.command_line import Tuning, is_chosen, settings_of
from servers.options.defaults import ALL
from servers.triton.config import HEURISTIC, NATIVE_BACKENDS

DECODING = DecodingSettings()
IN_PYTHON: dict[str, Callable[[search.SearchContext, str, str], bool]] = {
    "backend": lambda _here, _value, backend: backend == "python"
}
"""What applies to an engine behind the python backend alone."""
OF_BACKEND: dict[str, Callable[[search.SearchContext, str, str], bool]] = {
    "backend": lambda here, precision, backend: backend == "python" or precision in here.precisions.get(backend, ())
}
"""Which precisions apply to a backend; behind the python backend the engine may still refuse one."""
OF_ONNXRUNTIME: dict[str, Callable[[search.SearchContext, str, str], bool]] = {
    "backend": lambda _here, _value, backend: backend == "onnxruntime"
}
"""What applies to Triton's own onnxruntime backend."""
SEARCHED_QUEUE_DELAY = search.Searched(search.by_device((0, 5000), (0, 100, 500, 2000)), ordered=True)
SEARCHED_BATCH_MULTIPLE = search.Searched(
    search.by_device((), (1, 16, 32)),
    ordered=True,
    by_load=True,
    applies={
        **OF_ONNXRUNTIME,
        "batching": lambda _here, _multiple, batching: batching == "dynamic",
        "max_batch_size": lambda _here, multiple, largest: int(multiple) <= int(largest),
    },
)
SEARCHED_INSTANCES = search.Searched(
    search.by_device((1, 2, 4), (1, 2, 4)),
    ordered=True,
    by_load=True,
    applies={"threads": lambda here, count, threads: here.device == "cuda" or int(count) * int(threads) <= here.cores},
)


class TritonSettings(EngineOptions, GeneratingOptions):
    """One embedded tritonserver; every field is an option of `abserve serve triton` and a variable ABSERVE_TRITON_…"""

    model_config = settings_of("ABSERVE_TRITON_")

    engine: Annotated[str, replace(search.ENGINE, applies=IN_PYTHON)] = Field(
        "auto",
        title="Engine",
        description=f"Of the python backend: {defaults.ENGINES}; auto: torch on a GPU and onnxruntime on a CPU, "
        "the faster one of these.",
    )
    precision: Annotated[str, replace(search.PRECISION, applies=OF_BACKEND)] = Field(
        defaults.PRECISION, title="Engine", description=defaults.PRECISIONS
    )
    tritonserver: Path | None = Field(
        None,
        title="Target",
        description="Folder of an installed tritonserver; default: the one on PATH or in /opt/tritonserver, else the "
        "wheel's.",
    )
    backend: Annotated[
        Literal["auto", "tensorrt", "onnxruntime", "python", "vllm"], search.Searched(lambda here: here.backends)
    ] = Field(
        "auto",
        title="Engine",
        description="Triton's backend; auto: tensorrt if it is installed and its plan is there, else onnxruntime if it "
        "is installed, else python, which runs the engine. Language models: python or vllm.",
    )
    triton_repository: Path | None = Field(
        None, title="Model", description="Your own model repository, served unchanged; the model is one of its names."
    )
    payloads: str = Field("", title="Model", description="Any of fp32,uint8,jpeg; default: the model's.")
    host: str = Field(defaults.HOST, title="Target", description="Address to listen on; for trusted clients only.")
    http_port: int = Field(8000, ge=1, le=65535, title="Target", description="HTTP port.")
    grpc_port: int = Field(8001, ge=1, le=65535, title="Target", description="gRPC port.")
    metrics_port: int = Field(8002, ge=1, le=65535, title="Target", description="Port of the Prometheus metrics.")
    max_batch_size: Annotated[int | None, search.MAX_BATCH_SIZE] = Field(
        None, ge=1, title="Batching", description="Largest batch; default: the model's."
    )
    batching: Annotated[
        Literal["dynamic", "none"],
        search.Searched(
            search.by_device((), ("dynamic", "none")),
            applies={"backend": lambda _here, batching, backend: batching == "dynamic" or backend == "onnxruntime"},
            by_load=True,
        ),
    ] = Field(
        "dynamic",
        title="Batching",
        description="dynamic: Triton merges waiting requests into batches; none: it executes each request alone.",
    )
    batch_multiple: Annotated[int, SEARCHED_BATCH_MULTIPLE] = Field(
        1,
        ge=1,
        title="Batching",
        description="Of the onnxruntime backend: zeros fill each batch up to a multiple of this many items, so that a "
        "CNN's convolutions, which are planned anew for each new size on a GPU, keep one.",
    )
    cudnn_conv_algo_search: Annotated[
        int, search.Searched(search.by_device((), (0, 1, 2)), applies=OF_ONNXRUNTIME, by_load=True)
    ] = Field(
        HEURISTIC,
        ge=0,
        le=2,
        title="Engine",
        description="Of the onnxruntime backend on a GPU, how it finds a convolution's algorithm: 0 exhaustive, "
        "which is Triton's own default, 1 heuristic, 2 default.",
    )
    instances: Annotated[int | None, SEARCHED_INSTANCES] = Field(
        None,
        ge=1,
        le=64,
        title="Engine",
        description="Instances of the executed model on each device, each with its own engine and threads; default: 1, "
        "and on a GPU 2 of the python backend, so that one copies while the other executes.",
    )
    max_queue_delay_us: Annotated[int, SEARCHED_QUEUE_DELAY] = Field(
        defaults.MAX_QUEUE_DELAY_US,
        ge=0,
        title="Batching",
        description="Maximum time a batch waits for more requests (µs).",
    )
    pad_to: Annotated[PadTo, replace(PAD_TO, applies=IN_PYTHON)] = ""
    merge_config: str = Field(
        "",
        title="Batching",
        description="Text that is merged into the generated config.pbtxt of the executed model, such as "
        "'dynamic_batching { preferred_batch_size: 8 }'.",
    )
    tuning: Tuning = ALL
    queue_size: int = Field(
        0,
        ge=0,
        title="Limits",
        description="Most waiting requests, more get 503; 0: no limit, since a limit makes Triton's batcher slow.",
    )
    decode_threads: Annotated[int, search.DECODE_THREADS] = Field(
        DECODING.threads, ge=0, title="Limits", description="JPEG decoder threads; 0: up to 4."
    )
    max_image_pixels: int = Field(DECODING.max_pixels, ge=1, title="Limits", description="Largest JPEG, in pixels.")
    work_dir: Path | None = Field(
        None, title="Output", description="Folder for the model repository; default: ARTEFACTS/triton/HTTP_PORT."
    )
    traces: str = Field("", title="Output", description=defaults.TRACES)
    trace_share: float = Field(
        defaults.TRACE_SHARE, ge=0, le=1, title="Output", description=f"{defaults.TRACE_SHARES} 1 in a whole number."
    )
    log_file: Path | None = Field(
        None, title="Output", description="Triton's log; default: tritonserver.log in the working folder."
    )

    @field_validator("device")
    @classmethod
    def _instances_on_each(cls, device: str) -> str:
        check_devices(device)
        if device.startswith("cpu,"):
            raise ValueError("only GPUs can be listed; several instances on the CPU are --instances")
        return device

    @property
    def folder(self) -> Path:
        """The working folder; absolute, since a supervisor may start the server from another folder."""
        return (self.work_dir or self.artefacts / "triton" / str(self.http_port)).absolute()

    def instances_on(self, device: str, backend: str) -> int:
        """The instances on each device. One of the python backend copies and executes one batch after the other, so
        that a GPU waits."""
        return self.instances or (2 if device != "cpu" and backend == "python" else 1)

    @property
    def decoding(self) -> DecodingSettings:
        """Settings for decoding JPEG files."""
        return DecodingSettings(self.decode_threads, self.max_image_pixels)

    def resolved_generation(self) -> GenerationSettings:
        """The settings of a generating engine, with device and precision chosen. Raises `EngineError`."""
        engine = self.engine if is_chosen(self, "engine") else DEFAULT_ENGINE
        if "," in self.device:
            raise EngineError(f"device {self.device}: a language model runs on one device; choose one of them")
        device = resolved_device(self.device)
        threads = thread_count(self.threads) if device == "cpu" else 0
        return self.generation_settings(engine, device, generation_precision(self.precision, device), threads)

    def resolved_engine(self, backend: str = "python") -> EngineSettings:
        """The engine's settings without `auto`: Triton's config must name the device before the engine runs. `device`
        may be a list of GPUs, each with its own instances. A native backend is an engine of that name with one mode; it
        pads nothing. Raises `EngineError`."""
        variant = get_variants(self.model, self.payloads)[0]
        batch = self.max_batch_size or variant.max_batch_size
        if "," in self.device:
            engine = self.model_copy(update={"device": self.device.split(",")[0]}).resolved_engine(backend)
            return engine if engine.device == "cpu" else replace(engine, device=self.device)
        chosen = self if self.engine != "auto" else self.model_copy(update={"engine": "onnxruntime"})
        requested = chosen.engine_settings(batch)
        if backend == "python":
            if self.engine == "auto" and requested.device_here() != "cpu" and variant.executed.file is None:
                requested = self.model_copy(update={"engine": "torch"}).engine_settings(batch)
            return replace(resolve_engine(requested), pad_to=parse_pad_to(self.pad_to))
        if self.engine not in ("auto", "onnxruntime", backend):
            raise EngineError(f"the {backend} backend does not run the engine {self.engine}; use --backend python")
        mode = NATIVE_BACKENDS[backend].mode
        if self.mode not in ("auto", mode):
            raise EngineError(f"the {backend} backend has no mode {self.mode}; leave --mode out")
        if requested.spinning is not None:
            raise EngineError(f"the {backend} backend of Triton takes no setting for spinning; leave --spinning out")
        return resolve_engine(replace(requested, kind=backend, mode=mode))


def resolve_engine(requested: EngineSettings) -> EngineSettings:
    """Resolve `auto`: always for the device, and for the mode where the engine always has the device's first one."""
    if requested.kind == "null":
        return replace(requested, device="cpu", threads=1, mode="eager")
    device, mode = requested.device_here(), requested.mode
    if requested.kind == "onnxruntime" and mode == "auto":
        mode = "session" if device == "cpu" else "graph"
    if requested.kind == "torch" and device == "cpu":
        mode = requested.mode_on("cpu")
    threads = thread_count(requested.threads) if device == "cpu" else requested.threads
    return replace(requested, device=device, mode=mode, threads=threads)
