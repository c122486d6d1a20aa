"""All settings of a tuning: the keys of its file, which are also the options of `abserve tune`, and the comparisons
that follow from them.

What a comparison has too is declared once, in `ExperimentSettings`, and has the same meaning here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import (
    LOAD,
    MAIN,
    MEASUREMENT,
    TARGET,
    TOKEN_LIMITS,
    ArmSettings,
    Buckets,
    ExperimentSettings,
    Lengths,
    Settings,
    in_panel,
    limits_of,
    read_limits,
    shared,
    text_of,
)
from loadgen.records.payloads import Payload, kind_of_model
from loadgen.records.run import Label
from loadgen.records.targets import TARGET_NAMES, Kind, TargetName, Transport

Goal = Literal["throughput", "latency", "cost", "energy"]
USERS = 16
AT_ONCE = 5
AT_ONCE_ON_GPU = {Kind.TENSORS: AT_ONCE, Kind.TOKENS: 2}
"""Contenders measured side by side on a GPU, where servers of language models share its memory."""
MOST_AT_ONCE = 7
"""A comparison has eight arms at most, and the anchor is one of them."""
LIMITED: Mapping[str, str] = {
    "p50": "latency_p50", "p95": "latency_p95", "p99": "latency_p99",
    "ttft": "ttft_p99", "tpot": "tpot_p99", "gap": "worst_gap_p99",
}  # fmt: skip
"""The metric of each limit by its name; those of tokens are the p99 over the answers."""
_main, _target, _load, _measurement = map(in_panel, (MAIN, TARGET, LOAD, MEASUREMENT))


def _targets(value: object) -> object:
    parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and len(set(map(str, parts))) < len(parts):
        raise ValueError("give each server once")
    return parts


def _values(value: object) -> object:
    """A file may hold a number, a truth value or a list in place of a text with commas."""
    if not isinstance(value, dict):
        return value
    several = {str(name): given if isinstance(given, list) else [given] for name, given in value.items()}
    return {name: ",".join(str(text_of(each)) for each in given) for name, given in several.items()}


Targets = Annotated[tuple[TargetName, ...], BeforeValidator(_targets), Field(min_length=1)]
LimitsText = Annotated[str, limits_of((*LIMITED,))]
Chosen = Annotated[dict[str, str], BeforeValidator(_values)]


class TuneSettings(Settings):
    """One tuning as asked for, with every default filled in."""

    arms: Targets = _main(
        ("native", "triton"), description=f"Servers to tune: {TARGET_NAMES}; the first is named first."
    )
    model: str = shared("model", description="Model: SOURCE:NAME (see `abserve models`), a file or a folder.")
    concurrency: int | None = _main(
        None, ge=1, le=100_000, description=f"Load: this many users at once, each with one request (default: {USERS})."
    )
    rate: float | None = _main(
        None, gt=0.0, le=100_000.0, description="Load: this many requests/s that arrive at random, in place of users."
    )
    traffic: str | None = _main(
        None,
        min_length=1,
        description="Load: the traffic in this folder, recorded by `abserve record`, in place of users.",
    )
    goal: Goal | None = _main(
        None,
        description="What is best (default: throughput, with --rate and --traffic latency): energy is the GPU's "
        "joules per item, cost needs --price.",
    )
    limit: LimitsText | None = _main(
        None,
        description="Limits that the best must keep, such as p99=50ms: of p50, p95, p99; of a language model also "
        "ttft, tpot and gap (their p99).",
    )
    minutes: float = _main(30.0, gt=0.0, le=1440.0, description="Minutes of the whole, with the final comparison.")
    tune: Chosen = _main(
        {},
        description="Try only these values of a setting: max-batch-size=8,16,32, or for one server triton.NAME=8; "
        "repeatable.",
    )
    fix: Chosen = _main(
        {}, description="Give a setting one value everywhere: fronts=4, or for one server native.NAME=4; repeatable."
    )
    at_once: int | None = _measurement(
        None,
        ge=1,
        le=MOST_AT_ONCE,
        description=f"Servers measured side by side, besides the one they are compared with (default: {AT_ONCE}, of a "
        f"language model on a GPU {AT_ONCE_ON_GPU[Kind.TOKENS]}); fewer need less memory.",
    )
    transport: Transport | None = _main(
        None,
        description="http, grpc or shm (default: http); of a language model completions or generate_stream (default: "
        "the first of these that all servers speak).",
    )
    payload: Payload | None = _load(
        None, description="fp32, uint8 or jpeg for images (default: fp32), tensors for other models."
    )
    inputs: str | None = shared("inputs")
    sequence_length: Lengths | None = _load(
        None, description="Length of the inputs of a model of text: text (the default) or N."
    )
    prompt_tokens: int | None = _load(
        None, ge=1, le=1_000_000, description="Tokens per prompt of a language model (default: 32, on a GPU 256)."
    )
    output_tokens: int | None = _load(
        None, ge=1, le=1_000_000, description="Tokens per answer of a language model (default: 64, on a GPU 256)."
    )
    arrivals: Literal["poisson", "constant"] = shared("arrivals")
    connections: int = shared("connections")
    processes: int = shared("processes")
    price: float | None = shared(
        "price", description="Price of the machine per hour, in any currency, for --goal cost."
    )
    weights: str | None = shared("weights")
    precision: Literal["fp32", "tf32", "fp16"] | None = shared("precision")
    tritonserver: str | None = shared("tritonserver")
    pad_to: Buckets | None = shared("pad_to")
    request_timeout: float = shared("request_timeout")
    seed: int = shared("seed", description="Seed of the search, the order of the blocks, the inputs and the arrivals.")
    margin: float = shared("margin")
    strict: bool = shared("strict")
    gpu_control: bool = shared("gpu_control")

    @property
    def kind(self) -> Kind:
        return kind_of_model(self.model)

    @property
    def aim(self) -> Goal:
        """The goal in effect."""
        return self.goal or ("latency" if self.is_open else "throughput")

    @property
    def is_open(self) -> bool:
        """Whether requests fall due at a rate or at recorded times, in place of users."""
        return self.rate is not None or self.traffic is not None

    @property
    def users(self) -> int:
        """The users of the closed loop, or the most requests of an open one that can be under way at once."""
        return self.connections if self.is_open else self.concurrency or USERS

    @property
    def limits(self) -> dict[str, float]:
        """The limits in ms by the names of their metrics."""
        given = {} if self.limit is None else read_limits(self.limit, (*LIMITED,))
        return {LIMITED[name]: limit for name, limit in given.items()}

    def side_by_side(self, *, gpu: bool) -> int:
        """Contenders of a screening."""
        return self.at_once or (AT_ONCE_ON_GPU[self.kind] if gpu else AT_ONCE)


_NO_LIMITS: Mapping[Kind, tuple[str, ...]] = {Kind.TENSORS: TOKEN_LIMITS, Kind.TOKENS: ()}
ROUNDS = 4
"""Rounds of a screening: the scatter is estimated from all its arms together."""
OPEN_SECONDS, LEAST_ARRIVALS = 5.0, 64
"""The longest block of an open loop in a screening, and how many requests are enough for a shorter one."""


def screening_settings(settings: TuneSettings, arms: Mapping[Label, ArmSettings]) -> ExperimentSettings:
    """The comparison of a screening. Raises `PlanError`."""
    due = 0.0 if settings.rate is None else min(OPEN_SECONDS, max(1.0, LEAST_ARRIVALS / settings.rate))
    return _experiment(settings, arms, rounds=ROUNDS, gpu_control=False, **({"open_seconds": due} if due else {}))


def final_settings(
    settings: TuneSettings, arms: Mapping[Label, ArmSettings], minutes: float, restarts: int = 1
) -> ExperimentSettings:
    """The comparison whose verdict is the answer, which takes so many minutes and starts its servers so often. Raises
    `PlanError`."""
    rounded = max(0.1, math.floor(minutes * 10.0) / 10.0)
    more = {"minutes": rounded, "restarts": restarts, "gpu_control": settings.gpu_control}
    return _experiment(settings, arms, **more)


_COMMON: tuple[str, ...] = (
    "model", "inputs", "sequence_length", "output_tokens", "arrivals", "connections", "processes", "weights",
    "precision", "tritonserver", "pad_to", "request_timeout", "seed", "margin",
    "strict",
)  # fmt: skip
_OF_KIND: Mapping[Kind, tuple[str, ...]] = {Kind.TENSORS: (), Kind.TOKENS: ("price",)}


def _experiment(settings: TuneSettings, arms: Mapping[Label, ArmSettings], **more: Any) -> ExperimentSettings:
    names = settings.model_fields_set.intersection(_COMMON + _OF_KIND[settings.kind])
    content: dict[str, Any] = {name: getattr(settings, name) for name in names}
    content["model"] = settings.model
    for name in ("transport", "payload", "prompt_tokens"):
        if (value := getattr(settings, name)) is not None:
            content[name] = (value,)
    if settings.traffic is not None:
        content |= {"scenarios": ("traffic",), "traffic": settings.traffic}
    elif settings.rate is not None:
        content |= {"scenarios": ("open",), "rates": (settings.rate,)}
    else:
        content |= {"scenarios": ("concurrent",), "concurrency": (settings.users,)}
    if all(arm.target != "triton" for arm in arms.values()):
        content.pop("tritonserver", None)
    return ExperimentSettings(arms=dict(arms), handicap_check=False, **content, **more)


def check_tuning(settings: TuneSettings, *, gpu: bool) -> None:
    """Raises `PlanError` for settings that contradict each other or cannot be measured. `gpu`: there may be one."""
    loads = [name for name in ("rate", "traffic", "concurrency") if getattr(settings, name) is not None]
    if len(loads) > 1:
        raise PlanError(f"--{loads[0]} and --{loads[1]} are two loads; give one of them")
    if settings.is_open and settings.aim in ("throughput", "cost"):
        raise PlanError(f"--goal {settings.aim}: --{loads[0]} sets the throughput of every server; use --goal latency")
    if settings.aim == "cost" and settings.price is None:
        raise PlanError("--goal cost needs --price, the price of the machine per hour")
    if settings.aim == "energy" and not gpu:
        raise PlanError("--goal energy needs an NVIDIA GPU, and this machine has none; use --goal throughput")
    if settings.sequence_length is not None and "," in settings.sequence_length:
        raise PlanError("--sequence-length: a tuning has one load; give one length, or text")
    for name in _NO_LIMITS[settings.kind]:
        if LIMITED[name] in settings.limits:
            raise PlanError(f"--limit {name} is for language models, and {settings.model} is not one; use p99")
