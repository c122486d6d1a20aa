"""Everything that can be asked of a comparison: the keys of an experiment file, which are the command's options too.

To add a setting, add one field to `ExperimentSettings`. From it come the key of the file, the option
`--the-name` with its help and default, the variable ABSERVE_COMPARE_THE_NAME and the line in the effective file; what
is left is to read it in `loadgen.cli.assembly`. The limits (`ge`, `le`) hold wherever the value comes from. A
field that is a tuple is written with commas on the command line, or once for each value where it is `REPEATED`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from keyword import iskeyword
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from loadgen.experiment.plan import BATCH_SIZES, CONCURRENCY, CONNECTIONS, OPEN_SECONDS, SCENARIOS
from loadgen.experiment.search_plan import RAMP_USERS
from loadgen.experiment.stack_request import DEFAULT_PROJECT, DEFAULT_WEIGHTS


@dataclass(frozen=True, slots=True)
class Flag:
    """Where an option is not called as its field is. Of an arm's fields it is what follows `--a`."""

    name: str
    variable: str | None = None
    """What follows ABSERVE_COMPARE_, where that differs too; empty for none."""
    repeated: bool = False


REPEATED = Flag("", variable="", repeated=True)
"""A tuple whose values hold commas or spaces: the option is given once for each, and there is no variable."""


def _separated(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int | float) else value


def _text_of(value: object) -> object:
    """YAML's true, 0 and 0.5 as `abserve serve` takes them."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_separated)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_separated)]
Rates = Annotated[tuple[float, ...], BeforeValidator(_separated)]
Lines = Annotated[tuple[str, ...], BeforeValidator(_one_or_more), REPEATED]
"""For a setting whose option is repeatable."""


class Settings(BaseModel):
    """Immutable, and unknown keys are refused, and numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ArmSettings(Settings):
    """One arm; in a file also just its target. `--a`, `--a-option`, `--a-payload`, `--a-grpc`, and likewise b to h."""

    target: Annotated[str, Flag("")] = Field(description="native, triton or the URL of a server.")
    options: Annotated[dict[str, Annotated[str, BeforeValidator(_text_of)]], Flag("option", "OPTIONS")] = Field(
        default={}, description="KEY=VALUE for `abserve serve` of this arm; repeatable."
    )
    payload: str | None = Field(None, description="For this arm alone; then no server is called the faster one.")
    grpc: str | None = Field(None, description="HOST:PORT of the gRPC door where the target is a URL.")

    @model_validator(mode="before")
    @classmethod
    def _target_alone(cls, value: Any) -> Any:
        return {"target": value} if isinstance(value, str) else value


LETTERS = "abcdefgh"
"""What the command line calls arms, and an experiment file where it gives them no names. There are no more."""
DEFAULT_TARGETS = {"a": "native", "b": "triton"}
ARM_NAME = re.compile(r"[a-h]|[a-z][a-z0-9_-]{1,23}")


def gather_arms(content: dict[str, Any]) -> dict[str, Any]:
    """The same with every arm below `arms`, also those that stand beside it by their letters; and the two that are
    compared where nothing else is said."""
    own = content.get("arms")
    if own is not None and not isinstance(own, dict):
        return content
    arms = {name: _as_mapping(arm) for name, arm in (own or DEFAULT_TARGETS).items()}
    for letter in LETTERS:
        if letter in content:
            given = _as_mapping(content[letter])
            arms[letter] = {**(arms.get(letter) or {}), **given} if isinstance(given, dict) else given
    return {"arms": arms} | {key: value for key, value in content.items() if key not in {"arms", *LETTERS}}


def _as_mapping(arm: object) -> Any:
    return {"target": arm} if isinstance(arm, str) else arm


class ExperimentSettings(Settings):
    """One experiment as asked for, with everything that a default has filled in."""

    arms: dict[str, ArmSettings] = Field(description="The arms by their names, the baseline first.")
    model: str = Field("openclip_vit_b32", description="A registered model, or one that all URLs serve.")
    weights: str = Field(DEFAULT_WEIGHTS, description="random:SEED, a pretrained tag or a checkpoint file.")
    scenarios: Names = Field(SCENARIOS, description="Which, separated by commas.")
    preset: str = Field(
        "quick",
        description="quick (5 minutes with two arms) or full (about 25, narrower intervals; then up to 10 for causes).",
    )
    batch_sizes: Numbers = Field(BATCH_SIZES, description="Of the batched scenario, separated by commas.")
    concurrency: Numbers = Field(CONCURRENCY, description="Users of the concurrent scenario, separated by commas.")
    requests: int = Field(1, ge=1, description="Requests of one block of the concurrent scenario, at least.")
    rates: Rates = Field(
        (), description="Open loop: requests a second that fall due, separated by commas, each a cell."
    )
    arrivals: str = Field("poisson", description="At these rates: poisson (independent clients) or constant.")
    processes: int = Field(1, ge=1, le=64, description="Of the load generator, which share users or rate.")
    connections: int = Field(CONNECTIONS, ge=1, description="Of an open loop, at most; a request without one waits.")
    open_seconds: float = Field(OPEN_SECONDS, ge=0.1, description="Of a block of an open loop.")
    slo_p99_ms: Rates = Field(
        (), description="Search the highest Poisson rate with p99 within so many ms; several, separated by commas."
    )
    slo_queries: int | None = Field(
        None, ge=1, description="Requests of a trial of that search, at least; default: the preset's (838 or 2,010)."
    )
    ramp_users: int = Field(RAMP_USERS, ge=1, description="Of the scenario ramp, which adds users until saturation.")
    minutes: float | None = Field(
        None,
        gt=0.0,
        le=1440.0,
        description="For the comparison, which runs as many rounds as fit; default: the preset's.",
    )
    rounds: int | None = Field(
        None, ge=1, description="Rounds of blocks per cell instead of a time; the least with --until decided."
    )
    restarts: int = Field(
        1, ge=1, description="Fresh starts of the servers over which the rounds are spread; 5 or more cover them."
    )
    until: str = Field(
        "planned",
        description="planned (as many rounds as asked for) or decided (until every scenario is, see --rounds).",
    )
    time_limit: float = Field(30.0, gt=0.0, description="Minutes of load after which --until decided ends undecided.")
    threads: int = Field(0, ge=0, description="Engine threads, the same for every arm; 0: all cores.")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Decides the order of the blocks.")
    margin: float = Field(0.05, ge=0.001, le=1.0, description="Differences within it are equivalence.")
    gpu_control: bool = Field(
        True, description="With a GPU: run an arm on the CPU too, which must not pass for a GPU server."
    )
    transport: Names | None = Field(None, description="http (default), grpc, shm; several make a matrix.")
    payload: Names | None = Field(None, description="fp32 (default), uint8, jpeg; several make a matrix.")
    matrix: bool = Field(False, description="Every transport with every payload, each a run.")
    deployment: str = Field("embedded", description="embedded (we start the servers) or compose (the running stack's).")
    compose_project: str | None = Field(None, description=f"Name of the stack; default {DEFAULT_PROJECT}.")
    explain: bool | None = Field(
        None,
        description="Take causes away one at a time to see what each makes of the difference; default: full yes, "
        "quick no.",
    )
    explain_minutes: float = Field(10.0, gt=0.0, description="The longest time for that.")
    ceiling: bool | None = Field(
        None,
        description="Measure each engine alone after the load, which is what its server is divided by; default: full "
        "yes, quick no.",
    )
    fail_if: Lines = Field((), description="A condition that fails the run, as in b.p99 > 1.05 * a.p99; repeatable.")

    @model_validator(mode="before")
    @classmethod
    def _arms_together(cls, value: Any) -> Any:
        return gather_arms(value) if isinstance(value, dict) else value

    @field_validator("arms", mode="before")
    @classmethod
    def _check_names(cls, arms: Any) -> Any:
        """Before the arms themselves: an option for --b beside named arms is told as that, and not as half an arm."""
        if not isinstance(arms, dict):
            return arms
        names = [str(name) for name in arms]
        for name in names:
            if not ARM_NAME.fullmatch(name):
                raise ValueError(
                    f"{name} cannot be the name of an arm: use 2 to 24 of a to z, 0 to 9, - and _, or one letter from "
                    f"{LETTERS[0]} to {LETTERS[-1]}"
                )
            if name == "ratio" or iskeyword(name):
                raise ValueError(f"an arm cannot be called {name}, which means something else in --fail-if")
        if len({len(name) == 1 for name in names}) > 1:
            raise ValueError(
                f"letters and names do not mix, and there are {', '.join(names)}; --a and --a-option are for arms "
                "without names"
            )
        if not 2 <= len(names) <= len(LETTERS):
            raise ValueError(f"a comparison has 2 to {len(LETTERS)} arms, not {len(names)}")
        return arms

    def content(self) -> dict[str, Any]:
        """What a file would hold, with the defaults and without what is not set; plain values, in the fields' order."""
        return self.model_dump(mode="json", exclude_none=True)

    def sha256(self) -> str:
        """Of the canonical content: JSON with sorted keys and no spaces. Comments, order and notation of a file do
        not change it, a setting does, wherever it comes from."""
        canonical = json.dumps(self.content(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()
