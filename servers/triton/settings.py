"""What the embedded Triton is asked to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from servers import defaults
from servers.engines.processors import nvidia_device_present, thread_count
from servers.engines.settings import EngineSettings
from servers.models.image_decoder import DecodingSettings
from servers.models.registry import get_variants
from servers.options import EngineOptions, settings_of

DECODING = DecodingSettings()


class TritonSettings(EngineOptions):
    """One embedded tritonserver; every field is an option of `abserve serve triton` and a variable ABSERVE_TRITON_…"""

    model_config = settings_of("ABSERVE_TRITON_")

    payloads: str = Field("", description="Variants to serve, of fp32,uint8,jpeg; default: the model named.")
    host: str = Field(defaults.HOST, description="Address to listen on; this old a Triton belongs on loopback.")
    http_port: int = Field(8000, ge=1, le=65535, description="Port of HTTP.")
    grpc_port: int = Field(8001, ge=1, le=65535, description="Port of gRPC.")
    metrics_port: int = Field(8002, ge=1, le=65535, description="Port of the Prometheus metrics.")
    engine: str = Field("onnxruntime", description="What executes the model inside Triton's python backend.")
    max_batch_size: int | None = Field(None, ge=1, description="Default: the model's own.")
    max_queue_delay_us: int = Field(
        defaults.MAX_QUEUE_DELAY_US, ge=0, description="Maximum time a batch waits for more requests (µs)."
    )
    queue_size: int = Field(defaults.QUEUE_SIZE, ge=1, description="Requests that may wait; more get 503.")
    decode_threads: int = Field(DECODING.threads, ge=0, description="Threads that decode JPEGs; 0: up to 4.")
    max_image_pixels: int = Field(DECODING.max_pixels, ge=1, description="Largest JPEG that is decoded.")
    work_dir: Path | None = Field(None, description="Model repository. Default: ARTEFACTS/triton/HTTP_PORT.")
    log_file: Path | None = Field(None, description="Default: tritonserver.log in the working folder.")

    @property
    def folder(self) -> Path:
        """The working folder, absolute: the server is started from wherever its supervisor stands."""
        return (self.work_dir or self.artefacts / "triton" / str(self.http_port)).absolute()

    @property
    def decoding(self) -> DecodingSettings:
        """How JPEG files are decoded."""
        return DecodingSettings(self.decode_threads, self.max_image_pixels)

    def resolved_engine(self) -> EngineSettings:
        """The engine's settings with nothing left to choose: Triton's config must name the device before it runs."""
        batch = self.max_batch_size or get_variants(self.model, self.payloads)[0].max_batch_size
        return resolve_engine(self.engine_settings(batch))


def resolve_engine(asked_for: EngineSettings) -> EngineSettings:
    """The same settings with nothing left to choose.

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
