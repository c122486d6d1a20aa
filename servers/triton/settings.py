"""What the embedded Triton is asked to be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from servers.engines.processors import nvidia_device_present, thread_count
from servers.engines.settings import EngineSettings
from servers.models.image_decoder import DecodingSettings


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """One embedded tritonserver. Times are in microseconds, the queue is counted in requests."""

    model: str
    payloads: str = ""
    """Which of the model's variants to serve, as `fp32,uint8,jpeg`; empty: the one named."""
    weights: str = "random:0"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(kind="onnxruntime"))
    max_queue_delay_us: int = 2000
    queue_size: int = 512
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    artefacts: Path = Path(".artefacts")
    work_dir: Path | None = None
    """Folder for the model repository; None: one a port inside `artefacts`."""

    @property
    def folder(self) -> Path:
        """The working folder, absolute: the server is started from wherever its supervisor stands."""
        return (self.work_dir or self.artefacts / "triton" / str(self.http_port)).absolute()


def resolve_engine(asked_for: EngineSettings) -> EngineSettings:
    """The same settings with nothing left to choose, since Triton's config must name the device before the engine runs.

    `auto` takes the GPU that the kernel shows and then insists on it. Engines with a single mode have it named.
    """
    if asked_for.kind == "null":
        return replace(asked_for, device="cpu", threads=1, mode="eager")
    device = asked_for.device
    if device == "auto":
        device = "cuda:0" if nvidia_device_present() else "cpu"
    mode = asked_for.mode
    if asked_for.kind == "onnxruntime" and mode == "auto":
        mode = "session" if device == "cpu" else "graph"
    threads = thread_count(asked_for.threads) if device == "cpu" else asked_for.threads
    return replace(asked_for, device=device, mode=mode, threads=threads)
