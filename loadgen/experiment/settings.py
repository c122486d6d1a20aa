"""All settings of a comparison: the keys of an experiment file, which are also the options of the command.

To add a setting, add one field to `ExperimentSettings`. The key of the file, the option `--the-name` with its help and
default, the variable ABSERVE_COMPARE_THE_NAME, the line in the effective file and the stored content follow from it. A
field of the same name in the stored `Experiment` gets its value by `Settings.stored`. Limits (`ge`, `le`) and `Literal`
values hold wherever the value comes from. A tuple is written with commas on the command line, or given once per value
where it is `REPEATED`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SkipValidation,
    field_validator,
    model_validator,
)

from loadgen.base.headers import read_headers
from loadgen.base.quantities import join
from loadgen.experiment.schedule import RATE_LIMIT_PER_S
from loadgen.records.payloads import DEFAULT_MODEL, Payload, kind_of_model
from loadgen.records.run import REQUEST_TIMEOUT_S, DeploymentKind, Record
from loadgen.records.scenarios import PlannedScenario, scenarios_of
from loadgen.records.targets import ROUTES, TARGET_NAMES, Kind, TokenTransport, Transport
from loadgen.stats.percentiles import queries_needed

MAIN, TARGET, LOAD, MEASUREMENT, OUTPUT = PANELS = ("Main options", "Target", "Load", "Measurement", "Output")
"""The groups of the help, in their order."""
REPEATED = "repeated"
"""Marks a tuple whose values hold commas or spaces: the option is given once per value and has no variable."""
DEFAULT_SCENARIOS: tuple[PlannedScenario, ...] = ("cold-start", "single", "batched", "concurrent")
BATCH_SIZES, SMOKE_BATCH_SIZES = (8, 32), (8,)
SURFACE_SCENARIOS: tuple[PlannedScenario, ...] = ("surface",)
SURFACE_USERS, SURFACE_BATCH_SIZES = (16,), (1, 8)
LANGUAGE_SCENARIOS: tuple[PlannedScenario, ...] = ("single", "concurrent")
LANGUAGE_USERS, LANGUAGE_SMOKE_USERS = (4, 16), (4,)
DEFAULT_PROJECT = "abserve"
_MOST_LIMIT_MS = 3_600_000.0
MOST_USERS, _MOST_MINUTES = 100_000, 10_080.0
TOKEN_LIMITS = ("ttft", "tpot", "gap")
LIMITS = (*TOKEN_LIMITS, "p99")
"""The limits of a good answer of a language model, see `TokenLimits`."""


def _choices(kind: Kind, own: Mapping[str, str]) -> str:
    """The scenarios that --scenarios takes, with the option of those that have one of their `own`."""
    return join([name + own.get(name, "") for name in scenarios_of(kind) if (name,) != SURFACE_SCENARIOS])


def in_panel(panel: str) -> Callable[..., Any]:
    """Makes fields whose options the help shows in this group."""
    return partial(Field, json_schema_extra={"panel": panel})


_main, _target, _load, _measurement = map(in_panel, PANELS[:-1])


def _separated(value: object) -> object:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, int | float):
        return [value]
    if isinstance(value, list | tuple):  # of anything in a file, so not always of hashable values
        return [element for place, element in enumerate(value) if element not in value[:place]]
    return value


def text_of(value: object) -> object:
    """YAML's true, 0 and 0.5 as `abserve serve` takes them."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _sizes_or(word: str) -> BeforeValidator:
    """A text with this word or whole numbers separated by commas; a file may hold a number or a list."""

    def checked(value: object) -> str:
        values = value if isinstance(value, list | tuple) else [value]
        text = ",".join(map(str, values))
        if text != word and re.fullmatch(r"[1-9][0-9]{0,5}( *, *[1-9][0-9]{0,5})*", text) is None:
            raise ValueError(f"give {word}, or whole numbers of at least 1, as in 32,128")
        return text

    return BeforeValidator(checked)


def read_limits(text: str, names: Sequence[str] = LIMITS) -> dict[str, float]:
    """Limits such as ttft=200ms,tpot=0.05s in ms by their names, in the order of `names`. Raises `ValueError`."""
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        parsed = re.fullmatch(rf"({'|'.join(names)}) *= *([0-9]+(?:\.[0-9]+)?) *(ms|s)", part)
        if parsed is None:
            raise ValueError(f"{part!r} is no limit; write it as in {names[0]}=50ms, of {', '.join(names)}")
        if parsed[1] in limits:
            raise ValueError(f"{parsed[1]} is given twice; give each limit once")
        limits[parsed[1]] = value = float(parsed[2]) * (1000.0 if parsed[3] == "s" else 1.0)
        if not 0.0 < value <= _MOST_LIMIT_MS:
            raise ValueError(f"{part!r} must be above 0 and at most an hour")
    if not limits:
        raise ValueError(f"give at least one limit, as in {names[0]}=50ms")
    return {name: limits[name] for name in names if name in limits}


def limits_of(names: Sequence[str]) -> BeforeValidator:
    """Limits of these names as a text; in a file they may also be a mapping: {ttft: 200ms, tpot: 50ms}."""

    def checked(value: object) -> str:
        text = ",".join(f"{name}={limit}" for name, limit in value.items()) if isinstance(value, dict) else str(value)
        return ",".join(f"{name}={limit:g}ms" for name, limit in read_limits(text, names).items())

    return BeforeValidator(checked)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _read_headers(value: object) -> object:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("write headers as NAME: VALUE")
    return read_headers(value)


def _shown_headers(headers: dict[str, str]) -> dict[str, str]:
    return {name: str(value) for name, value in headers.items()}


SEPARATED = BeforeValidator(_separated)
Scenarios = Annotated[tuple[PlannedScenario, ...], SEPARATED, Field(min_length=1)]
Transports = Annotated[tuple[Transport, ...], SEPARATED, Field(min_length=1)]
Payloads = Annotated[tuple[Payload, ...], SEPARATED, Field(min_length=1)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], SEPARATED]
Users = Annotated[tuple[Annotated[int, Field(ge=1, le=MOST_USERS)], ...], SEPARATED]
Prompts = Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], SEPARATED, Field(min_length=1)]
Rates = Annotated[tuple[Annotated[float, Field(gt=0.0, le=RATE_LIMIT_PER_S)], ...], SEPARATED]
Speeds = Annotated[tuple[Annotated[float, Field(ge=0.01, le=1000.0)], ...], SEPARATED, Field(min_length=1)]
Bounds = Annotated[tuple[Annotated[float, Field(gt=0.0, le=60_000.0)], ...], SEPARATED]
Lengths = Annotated[str, _sizes_or("text")]
Buckets = Annotated[str, _sizes_or("none")]
Limits = Annotated[str, limits_of(LIMITS)]
Headers = Annotated[dict[str, SkipValidation[str]], BeforeValidator(_read_headers), PlainSerializer(_shown_headers)]
Lines = Annotated[tuple[str, ...], BeforeValidator(_listed), REPEATED]


R = TypeVar("R", bound=Record)


class Settings(BaseModel):
    """Immutable; unknown keys, infinity and NaN are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def content(self) -> dict[str, Any]:
        """The settings as plain values, as a file would hold them: with the defaults, without the settings not set."""
        return self.model_dump(mode="json", exclude_none=True)

    def sha256(self) -> str:
        """The hash of the content as JSON with sorted keys and no spaces; a file's comments and order do not matter."""
        canonical = json.dumps(self.content(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def stored(self, record: type[R], **decided: Any) -> R:
        """A record with every setting that it has a field of the same name for, and with what was `decided`."""
        common = set(record.__struct_fields__) & type(self).model_fields.keys() - decided.keys()
        return record(**{name: getattr(self, name) for name in common}, **decided)


class ArmSettings(Settings):
    """One arm; in a file its target is enough. On the command line --a, --a-option, --a-payload and so on."""

    target: str = Field(description=f"Server of arm {{arm}}: {TARGET_NAMES} or the URL of a running server.")
    options: dict[str, Annotated[str, BeforeValidator(text_of)]] = Field(
        default={}, description="Set an option of `abserve serve` for arm {arm}; repeatable."
    )
    payload: Payload | None = Field(None, description="Send arm {arm} another payload; then no winner is named.")
    transport: TokenTransport | None = Field(
        None, description="Protocol of arm {arm}, if it serves a language model and the arms have none in common."
    )
    body: dict[str, Any] | None = Field(
        None,
        description="Add or replace a field of the requests to the language model of arm {arm} (KEY=VALUE, JSON or "
        "text), or leave one out (-KEY); repeatable.",
    )
    grpc: str | None = Field(
        None, description="gRPC address of arm {arm}, if its target is a URL: HOST:PORT, or grpcs://HOST:PORT with TLS."
    )
    model: str | None = Field(
        None, min_length=1, description="Another model for arm {arm}, or its name on the server at a URL."
    )
    version: Annotated[str, BeforeValidator(text_of), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = (
        Field(None, description="Model version on arm {arm}, if its target is a URL.")
    )
    header: Headers = Field(
        default={},
        description="Send a header, or gRPC metadata, to arm {arm} if its target is a URL; the value may be $VARIABLE "
        "or 'Bearer $VARIABLE' and is never stored; repeatable.",
    )
    ca: str | None = Field(None, description="Trust the CA certificates in this PEM file for arm {arm} (TLS).")
    insecure: bool = Field(False, description="Do not verify the TLS certificate of arm {arm}.")
    cert: str | None = Field(None, description="Client certificate for arm {arm}, a PEM file (TLS).")
    key: str | None = Field(None, description="Key of that certificate, if it is in another PEM file.")

    @field_validator("body")
    @classmethod
    def _without_prompts(cls, fields: dict[str, Any] | None) -> dict[str, Any] | None:
        if made := next((name for name in ("prompt", "messages", "input_ids") if name in (fields or {})), None):
            raise ValueError(f"abserve makes the prompts; leave {made} out")
        return fields

    @model_validator(mode="before")
    @classmethod
    def _target_alone(cls, value: Any) -> Any:
        return {"target": value} if isinstance(value, str) else value


LETTERS = "abcdefgh"
"""The arms on the command line, and in an experiment file without names. There are no more than eight."""
DEFAULT_TARGETS = {"a": "native", "b": "triton"}
ARM_NAME = re.compile(r"[a-h]|[a-z][a-z0-9_-]{1,23}")


def gather_arms(content: dict[str, Any]) -> dict[str, Any]:
    """Move the arms given by letter to `arms`, and add the default arms if there are none."""
    named = content.get("arms")
    if named is not None and not isinstance(named, dict):
        return content
    arms = {name: _as_mapping(arm) for name, arm in (named or DEFAULT_TARGETS).items()}
    for letter in LETTERS:
        if letter in content:
            arm = _as_mapping(content[letter])
            arms[letter] = {**(arms.get(letter) or {}), **arm} if isinstance(arm, dict) else arm
    return {"arms": arms} | {key: value for key, value in content.items() if key not in {"arms", *LETTERS}}


def _as_mapping(arm: object) -> Any:
    return {"target": arm} if isinstance(arm, str) else arm


def defaults_of(kind: Kind, preset: object) -> dict[str, Any]:
    """The defaults that follow from what is compared. A batch of 32 takes longer than the whole rest of a smoke run."""
    is_smoke = preset == "smoke"
    users = LANGUAGE_SMOKE_USERS if is_smoke else LANGUAGE_USERS
    defaults: Mapping[Kind, dict[str, Any]] = {
        Kind.TENSORS: {"batch_sizes": SMOKE_BATCH_SIZES} if is_smoke else {},
        Kind.TOKENS: {"scenarios": LANGUAGE_SCENARIOS, "concurrency": users, "handicap_check": False},
    }
    return defaults[kind]


def _with_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """The content with the defaults that depend on it."""
    kind = kind_of_model(str(content.get("model", "")))
    defaults = defaults_of(kind, content.get("preset"))
    if content.get("surface"):
        sizes = (1,) if "," in str(content.get("sequence_length") or "") else SURFACE_BATCH_SIZES
        across: Mapping[Kind, dict[str, Any]] = {Kind.TENSORS: {"batch_sizes": sizes}, Kind.TOKENS: {}}
        defaults |= {"scenarios": SURFACE_SCENARIOS, "concurrency": SURFACE_USERS, **across[kind]}
    return gather_arms(defaults | content)


class ExperimentSettings(Settings):
    """One experiment as asked for, with every default filled in."""

    arms: dict[str, ArmSettings] = Field(description="The arms by their names, the baseline first.")
    model: str = _main(
        DEFAULT_MODEL,
        min_length=1,
        description="Model: SOURCE:NAME (see `abserve models`), a file or folder, or the name on the URLs.",
    )
    transport: Transports | None = _main(
        None,
        description="http, grpc or shm (default: http); several run one comparison each. Of a language model "
        "completions or generate_stream (default: the first of these that all arms speak).",
    )
    payload: Payloads | None = _load(
        None,
        description="fp32, uint8 or jpeg for images (default: fp32), tensors for other models; several run one "
        "comparison each.",
    )
    inputs: str | None = _main(
        None,
        min_length=1,
        description="Your inputs: DIR (JPEG or raw files), FILE.npz, perf_analyzer's FILE.json, FILE.jsonl, or random.",
    )
    sequence_length: Lengths | None = _load(
        None, description="Length of the inputs of a model of text: text (the default), N, or with --surface a list."
    )
    scenarios: Scenarios = _main(
        DEFAULT_SCENARIOS,
        description=f"Choose from {_choices(Kind.TENSORS, {'open': ' (see --rates)', 'slo': ' (see --slo-p99-ms)'})}; "
        f"of a language model from {_choices(Kind.TOKENS, {})} "
        "(default: single, concurrent).",
    )
    preset: Literal["smoke", "quick", "full"] = _main(
        "quick",
        description="smoke: 1 minute for two arms, to see that everything works; quick: 5; full: 25, and up to 10 more "
        "for --explain.",
    )
    explain: bool | None = _main(
        None, description="Find out why the arms differ by ablations (default: with --preset full)."
    )
    weights: str | None = _target(
        None, description="random:SEED, a pretrained tag or a checkpoint file (default: the model's)."
    )
    precision: Literal["fp32", "tf32", "fp16"] | None = _target(
        None, description="Precision of all arms that have no such option (default: fp16 on a GPU, fp32 on a CPU)."
    )
    tritonserver: str | None = _target(
        None,
        min_length=1,
        description="Folder of an installed tritonserver for the arms triton (default: on PATH or in "
        "/opt/tritonserver, else the wheel's).",
    )
    backend: Literal["auto", "tensorrt", "onnxruntime", "python"] | None = _target(
        None, description="Triton's backend (default: auto, the first of these that is installed and has its file)."
    )
    triton_repository: str | None = _target(
        None, min_length=1, description="Your own model repository for the arms triton, served unchanged."
    )
    pad_to: Buckets | None = _target(
        None,
        description="Pad batches of different lengths to these sizes, or none (default: 32,64,128,256,512 for text, if "
        "every arm can).",
    )
    threads: int = _target(0, ge=0, le=1024, description="Engine threads of each server; 0 uses all cores.")
    matrix: bool = _target(False, description="Run every transport with every payload.")
    deployment: DeploymentKind = _target(
        "embedded", description="embedded starts the servers; compose uses the running Docker Compose stack."
    )
    compose_project: str | None = _target(None, description=f"Name of that stack (default: {DEFAULT_PROJECT}).")
    tls: bool = _target(
        False, description="Reach the servers that abserve starts over TLS, with a certificate made for the run."
    )
    best: bool | None = _measurement(
        None,
        description="Compare every server at its best for each load: a third of --minutes chooses settings such as "
        "Triton's instances, the rest measures the chosen ones afresh.",
    )
    surface: bool | None = _load(
        None,
        description="Map which arm is best over users × batch sizes (--concurrency 16: 1, 2, 4, 8, 16), or lengths "
        "(--sequence-length) or prompts (--prompt-tokens); rounds go to where the winner is uncertain.",
    )
    batch_sizes: Sizes = _load(
        BATCH_SIZES,
        description="Batch sizes of the scenario batched (8 with --preset smoke) and of --surface (1,8); servers that "
        "are started accept at least the largest.",
    )
    concurrency: Users = _load(
        (16,),
        description="Numbers of users of the scenario concurrent (4, 16 and on a GPU 64 of a language model; 4 with "
        "--preset smoke).",
    )
    prompt_tokens: Prompts | None = _load(
        None,
        description="Tokens per prompt of a language model (default: 32, on a GPU 128 or 256; long-prompt: 2048); a "
        "list with --surface.",
    )
    output_tokens: int | None = _load(
        None,
        ge=1,
        le=1_000_000,
        description="Tokens per answer of a language model (default: 64, on a GPU 128 or 256, with --preset smoke 32; "
        "long-answer: 1024).",
    )
    limits: Limits | None = _load(
        None,
        json_schema_extra={"panel": LOAD, "also": "--limit"},
        description="Limits of a good answer of a language model, for goodput: ttft=200ms,tpot=50ms,gap=1s. With "
        "--traffic search the highest speed that keeps them, or p99=50ms of tensors.",
    )
    price: float | None = _load(
        None, gt=0.0, le=1e6, description="Price of the machine per hour, for the cost of a language model's tokens."
    )
    requests: int = _load(1, ge=1, le=1_000_000, description="Fewest requests per block of the scenario concurrent.")
    rates: Rates = _load(
        (), description="Open loop: send this many requests/s whatever the server does; one workload per rate."
    )
    traffic: str | None = _load(
        None,
        min_length=1,
        description="Replay windows of --open-seconds of the traffic in this folder of `abserve record`, HAR file, "
        "trace of AIPerf or data of perf_analyzer; of a trace with lengths alone, as Mooncake's, the first "
        "--open-seconds with made-up prompts.",
    )
    speed: Speeds | None = _load(
        None, description="Replay it so many times as fast, as in 1,2,4: one workload per speed (default: 1)."
    )
    check_answers: bool | None = _load(
        None, description="Compare the answers with those of `abserve record --answers`, before the load and under it."
    )
    arrivals: Literal["poisson", "constant"] = _load(
        "poisson", description="Gaps between open-loop requests: poisson (independent clients) or constant."
    )
    connections: int = _load(
        64, ge=1, le=MOST_USERS, description="Most connections of an open loop; a request without one waits."
    )
    open_seconds: float = _load(5.0, ge=0.1, le=86_400.0, description="Seconds per block of an open loop.")
    slo_p99_ms: Bounds = _load((), description="Search the highest Poisson rate whose p99 stays within this many ms.")
    slo_queries: int | None = _load(
        None,
        ge=queries_needed(0),
        le=1_000_000,
        description="Fewest requests per trial of that search (default: 459 smoke, 838 quick, 2010 full).",
    )
    processes: int = _load(
        0,
        ge=0,
        le=64,
        description="Processes of the load generator, which share users or rate; 0: as many as it needs.",
    )
    minutes: float | None = _measurement(
        None,
        gt=0.0,
        le=1440.0,
        description="Minutes of the comparison, for as many rounds as fit (default: the preset's).",
    )
    rounds: int | None = _measurement(
        None,
        ge=1,
        le=100_000,
        description="Rounds per workload, in place of --minutes; with --until decided the fewest.",
    )
    restarts: int = _measurement(
        1,
        ge=1,
        le=10_000,
        description="Spread the rounds over this many server starts; from 5 on the intervals cover restarts.",
    )
    until: Literal["planned", "decided"] = _measurement(
        "planned", description="decided adds rounds until every scenario has a verdict."
    )
    time_limit: float = _measurement(
        30.0, gt=0.0, le=_MOST_MINUTES, description="Most minutes of load with --until decided."
    )
    request_timeout: float = _measurement(
        REQUEST_TIMEOUT_S,
        gt=0.0,
        le=3600.0,
        description="Seconds after which a request counts as failed; of a streamed "
        "answer, seconds in which the server sends nothing.",
    )
    seed: int = _measurement(
        0, ge=0, le=2**63 - 1, description="Seed for the order of the blocks, the inputs and the arrivals."
    )
    margin: float = _measurement(
        0.05, ge=0.001, le=1.0, description="A difference within this share counts as no meaningful difference."
    )
    gpu_control: bool = _measurement(
        True, description="With a GPU, also run one arm on the CPU to prove that the GPU verification notices it."
    )
    strict: bool = _measurement(
        False,
        description="Wait up to a minute for a quiet machine, and call a run that others disturbed INVALID. Without it "
        "such a run is ROUGH: its intervals include what the others took, and its figures are not to be cited.",
    )
    handicap_check: bool = _measurement(
        True,
        description="Compare each arm that abserve starts with the same server at its own defaults; a slower one makes "
        "the run INVALID. Without it the arms are compared as configured.",
    )
    explain_minutes: float = _measurement(
        10.0, gt=0.0, le=_MOST_MINUTES, description="Most minutes for the ablations of --explain."
    )
    ceiling: bool | None = _measurement(
        None, description="Measure each engine alone, without its server (default: with --preset full)."
    )
    fail_if: Lines = _measurement(
        (), description="Exit with status 3 if this holds, such as 'ratio.p99.low > 1.05'; repeatable."
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        return _with_defaults(value) if isinstance(value, dict) else value

    @property
    def kind(self) -> Kind:
        """What its servers serve: by the model's reference, or by a transport of tokens."""
        own = (arm.transport for arm in self.arms.values() if arm.transport is not None)
        kinds = {kind_of_model(self.model), *(ROUTES[name].kind for name in (*(self.transport or ()), *own))}
        return Kind.TOKENS if Kind.TOKENS in kinds else Kind.TENSORS

    @field_validator("arms", mode="before")
    @classmethod
    def _check_names(cls, arms: Any) -> Any:
        """Runs before the arms are validated, so that --b beside named arms is not reported as half an arm."""
        if not isinstance(arms, dict):
            return arms
        names = [str(name) for name in arms]
        for name in names:
            if not ARM_NAME.fullmatch(name):
                raise ValueError(
                    f"{name} cannot name an arm; use one letter from a to h, or 2 to 24 of a to z, 0 to 9, - and _"
                )
            if name in ("and", "ratio"):
                raise ValueError(f"{name} cannot name an arm, because --fail-if gives it another meaning")
        if len({len(name) == 1 for name in names}) > 1:
            raise ValueError(
                f"the arms {', '.join(names)} mix letters and names; --a and --a-option are for arms without names"
            )
        if not 2 <= len(names) <= len(LETTERS):
            raise ValueError(f"a comparison has 2 to {len(LETTERS)} arms, not {len(names)}")
        return arms


def shared(name: str, **changes: Any) -> Any:
    """The declaration of a setting that a comparison has, for the settings of another command."""
    field = copy(ExperimentSettings.model_fields[name])
    for attribute, value in changes.items():
        setattr(field, attribute, value)
    return field
