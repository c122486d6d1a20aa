"""The settings of a plain server process: each field is an option and the variable `ABSERVE_PLAIN_<FIELD>`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from servers.language.options import ServingOptions
from servers.models.registry import DEFAULT_MODEL, UnknownModelError, get_variants
from servers.models.specification import ModelSpecification
from servers.options import defaults, search
from servers.options.command_line import OptionTraits, Tuning, from_argument, settings_of
from servers.options.defaults import ALL

SEARCHED_QUEUE_DELAY = search.Searched(search.by_device((0, 1000, 5000, 20_000), (0, 200, 1000, 5000)), ordered=True)
SEARCHED_WORKERS = search.Searched(
    lambda here: [count for count in (1, 2, 4) if here.device == "cuda" and count <= here.cores // 2],
    ordered=True,
    by_load=True,
)
"""On a CPU they take cores from each other's torch."""


class PlainSettings(ServingOptions):
    """One FastAPI or LitServe server; it serves one model with one payload, over HTTP."""

    model_config = settings_of("ABSERVE_PLAIN_")

    model: str = Field(DEFAULT_MODEL, title="Model", description="SOURCE:NAME, a path, or a registered name.")
    payloads: str = Field("", title="Model", description="fp32 or uint8, one of them; default: the model's.")
    weights: str | None = Field(
        None, title="Model", description="random:SEED, a pretrained tag or a checkpoint file; default: the model's."
    )
    http_port: int = Field(8100, ge=1, le=65535, title="Target", description="HTTP port; this server has no gRPC.")
    precision: Annotated[str, search.PRECISION] = Field(
        defaults.PRECISION, title="Engine", description="auto (fp16 on a GPU, fp32 on a CPU), fp32, tf32, fp16 or bf16."
    )
    device: str = Field(defaults.DEVICE, title="Engine", description="auto, cpu or cuda:N.")
    threads: Annotated[int, search.THREADS] = Field(
        0, ge=0, title="Engine", description="Intra-op threads on the CPU; 0: torch's default."
    )
    max_batch_size: Annotated[int | None, search.MAX_BATCH_SIZE] = Field(
        None, ge=1, le=4096, title="Batching", description="Largest batch; default: the model's."
    )
    workers: Annotated[int, OptionTraits(tunes=True), SEARCHED_WORKERS] = Field(
        1,
        ge=1,
        le=64,
        title="Access and process",
        description="Processes of FastAPI with a model of tensors, each with the model and its own batches.",
    )
    slots: Annotated[int, OptionTraits(hidden=True)] = Field(
        0, ge=0, title="Language models", description="Without effect: generate() runs every request at once."
    )
    tuning: Tuning = ALL
    max_queue_delay_us: Annotated[int, OptionTraits(tunes=True), SEARCHED_QUEUE_DELAY] = Field(
        defaults.MAX_QUEUE_DELAY_US,
        ge=0,
        le=10_000_000,
        title="Batching",
        description="Maximum time a batch waits for more requests (µs).",
    )

    def specification(self) -> ModelSpecification:
        """The one model with its largest batch. Raises `UnknownModelError` for what a plain server does not serve."""
        variants = get_variants(self.model, self.payloads)
        if len(variants) > 1:
            raise UnknownModelError(f"--payloads {self.payloads}: a plain server serves one payload; give one of them")
        if variants[0].payload == "jpeg":
            raise UnknownModelError("a plain server decodes no JPEG files; use --payloads uint8, or serve native")
        if variants[0].file is not None:
            raise UnknownModelError(f"a plain server executes torch modules, and {variants[0].label} is a file")
        return replace(variants[0], max_batch_size=self.max_batch_size or variants[0].max_batch_size)

    def warm_rows(self) -> list[int]:
        """The batches that are executed before a server is ready, on a CPU no larger ones than other servers' are."""
        most = self.specification().max_batch_size
        return sorted({1, min(most, defaults.MOST_WARM_ON_CPU) if self.device == "cpu" else most})


def of_process() -> PlainSettings:
    """The settings of this process, from its argument."""
    return from_argument(PlainSettings, sys.argv[1:])
