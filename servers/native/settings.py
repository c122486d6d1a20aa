"""What one native server process is asked to be; every field is also `ABSERVE_NATIVE_<FIELD>` in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "ABSERVE_NATIVE_"

MAX_TIMEOUT_US = 3_600_000_000
"""Longest wait in the queue that the server or a request may ask for."""


class NativeSettings(BaseSettings):
    """Built once, in the entry point, and passed on. Unknown arguments are refused."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    model: str = Field("openclip_vit_b32", description="Name of a registered model.")
    payloads: str = Field(
        "", description="Which of the model's variants to serve: any of fp32,uint8,jpeg; empty: the one named."
    )
    weights: str = Field("random:0", description="random:SEED, a pretrained tag or a checkpoint file.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    http_port: int = Field(8100, ge=1, le=65535, description="Port of the HTTP door.")
    grpc_port: int = Field(8101, ge=0, le=65535, description="Port of the gRPC door; 0: no gRPC door.")
    engine: Literal["torch", "onnxruntime", "tensorrt", "null"] = Field("torch", description="What executes the model.")
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = Field("fp32", description="Precision of the computation.")
    mode: str = Field(
        "auto", description="How the engine executes: auto, or one it offers (eager, traced, scripted, graph, ...)."
    )
    device: str = Field("auto", description="auto, cpu or cuda:N.")
    threads: int = Field(0, ge=0, description="Intra-op threads on the CPU; 0: all cores this process may use.")
    artefact: Path | None = Field(None, description="The exported file of FP32 input, for engines that execute one.")
    artefact_uint8: Path | None = Field(None, description="The exported file of UINT8 input, likewise.")
    max_batch_size: int = Field(32, ge=1, le=4096, description="Largest batch that is executed or accepted.")
    max_queue_delay_us: int = Field(
        2000, ge=0, le=10_000_000, description="How long the oldest request waits for others to join its batch."
    )
    queue_size: int = Field(512, ge=1, description="Requests that may wait; the next one is answered 503 at once.")
    queue_timeout_us: int = Field(
        0,
        ge=0,
        le=MAX_TIMEOUT_US,
        description="Longest wait in the queue where a request names no timeout of its own; 0: no limit.",
    )
    pipeline: bool = Field(
        False, description="Gather one batch while another is executed, with an engine that has two slots."
    )
    max_body_bytes: int = Field(64 * 2**20, ge=1, description="Largest request body, also after decompression.")
    max_json_bytes: int = Field(
        32 * 2**20, ge=1024, description="Longest JSON of one request; cutting it up delays others 1 ms for each MiB."
    )
    max_header_bytes: int = Field(
        16 * 1024, ge=1024, le=64 * 1024, description="Longest HTTP head: the request line and all headers."
    )
    max_headers: int = Field(100, ge=10, le=10_000, description="Most HTTP headers of one request.")
    max_chunks: int = Field(65_536, ge=1, description="Most chunks of one body with Transfer-Encoding: chunked.")
    max_held_bytes: int = Field(
        2 * 2**30, ge=1, description="Bodies that arrive, wait and are executed, together; beyond it 503 at once."
    )
    read_timeout_s: float = Field(
        30, gt=0, le=3600, description="Longest time for a head, and for a body with a second more for each MiB."
    )
    keep_alive_timeout_s: float = Field(75, gt=0, description="How long an idle HTTP connection stays open.")
    decode_threads: int = Field(
        0, ge=0, le=256, description="Threads that decode JPEG files; 0: one a core, at most four."
    )
    max_image_pixels: int = Field(40_000_000, ge=1, description="Largest JPEG that is decoded; read from its header.")
    allow_shared_memory: bool = Field(False, description="Let clients register shared memory of this machine.")
    allow_model_control: bool = Field(False, description="Let clients unload and load models.")
    shutdown_timeout_s: float = Field(
        30, gt=0, le=3600, description="Longest time to finish accepted work after SIGTERM."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severity logged.")
    added_delay_ms: float = Field(
        0, ge=0, le=60_000, description="Test option: added to every answer without blocking anything."
    )

    @field_validator("grpc_port")
    @classmethod
    def _own_port(cls, port: int, info: ValidationInfo) -> int:
        """Neither door listens yet when both ports are tried, so that trying finds nothing."""
        if port == info.data.get("http_port"):
            raise ValueError("each door needs a port of its own, and this is --http-port")
        return port
