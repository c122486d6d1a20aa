"""The settings of a vLLM server: each field is an option and the variable `ABSERVE_VLLM_<FIELD>`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from servers.engines.options import ModelOptions
from servers.language.options import ServingOptions
from servers.options import defaults, search
from servers.options.command_line import settings_of

SEARCHED_PREFILL_CHUNK = search.Searched(
    search.by_device((0, 512, 4096), (0, 512, 2048, 8192), language=True), by_load=True
)
"""0 is vLLM's default, which depends on its release and on the GPU."""


class VllmSettings(ModelOptions, ServingOptions):
    """One `vllm serve` for one language model. What is not set here is vLLM's default."""

    model_config = settings_of("ABSERVE_VLLM_")

    http_port: int = Field(8200, ge=1, le=65535, title="Target", description="Port of HTTP.")
    python: Path | None = Field(
        None,
        title="Target",
        description="The Python of an environment that has vLLM; default: the one that runs abserve.",
    )
    precision: Annotated[str, search.PRECISION] = Field(
        defaults.PRECISION, title="Engine", description="auto (bf16 on a GPU, fp32 on a CPU), fp32, bf16 or fp16."
    )
    device: str = Field(defaults.DEVICE, title="Engine", description="auto, cpu or cuda:N.")
    fronts: Annotated[
        int, search.Searched(lambda here: [count for count in (1, 2, 4) if count < max(2, here.cores)], ordered=True)
    ] = Field(
        0,
        ge=0,
        le=64,
        title="Access and process",
        description="Processes of vLLM that speak HTTP, its --api-server-count; 0: vLLM's default, which is 1.",
    )
    prefill_chunk: Annotated[int, SEARCHED_PREFILL_CHUNK] = Field(
        0,
        ge=0,
        le=2**24,
        title="Language models",
        description="Most tokens per step, of prompts and of running answers, its --max-num-batched-tokens; 0: vLLM's "
        "default.",
    )
    graphs: Annotated[bool, search.GRAPHS] = Field(
        True, title="Language models", description="Replay CUDA graphs on a GPU; without them --enforce-eager."
    )
    threads: Annotated[int, search.THREADS] = Field(
        0, ge=0, title="Engine", description="Threads on the CPU; 0: vLLM's default."
    )
    gpu_memory_utilization: float = Field(
        0.4,
        gt=0,
        le=1,
        title="Limits",
        description="Share of the GPU's memory that vLLM takes, on a CPU of the machine's; with its own default, 0.92, "
        "no other server fits.",
    )
