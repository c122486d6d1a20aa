"""The stored records: what a run writes, and all that analysis and report may read.

    DIR/experiment.json    Experiment     what was requested; written first
    DIR/environment.json   Environment    host, versions, GPU
    DIR/arms.json          list[ArmRecord]
    DIR/parity.json        ParityRecord
    DIR/blocks/NNNN.json   BlockRecord    written when the block is complete, after its samples
    DIR/samples/NNNN.npy   see `loadgen.records.samples`
    DIR/calibration.json   Calibration    of the load generator on this machine, if it was calibrated
    DIR/noise_floors.json  list[NoiseFloor]  of this machine, as far as they were measured
    DIR/run.json           RunState       "running", then "finished", "interrupted" or "failed"

Probes store more, see `loadgen.records.probes` and `loadgen.measure.probes`. `abserve report DIR` makes `result.json`,
`report.html` and `summary.md` from these records alone, at any time.
Times in ns are of the generator's monotonic clock, so only differences mean anything; `*_at` are labels in UTC, ISO
8601. A missing reading is None, never 0. Every file is written under a temporary name and renamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import msgspec

from loadgen.records.payloads import served_name
from loadgen.records.scenarios import SCENARIOS, Scenario
from loadgen.records.targets import ROUTES, TARGETS, Kind, TokenTransport, Transport

Label = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_-]{0,23}$")]
"""The name of an arm: a, b, c, …, or a name from an experiment file."""
Arrivals = Literal["closed", "constant", "poisson", "trace"]


DeploymentKind = Literal["embedded", "compose"]
MODEL_WEIGHTS = "the model's default"
"""Recorded as the weights when none were asked for."""


def shown(label: Label) -> str:
    """A label as sentences show it: A for a, and C2 for another configuration of it; longer names are unchanged."""
    return label.upper() if len(label) == 1 or (label[0] in "abcdefgh" and label[1:].isdecimal()) else label


def option_of(label: Label, setting: str = "") -> str:
    """The name of an arm's option or setting: --a-option, or its place in an experiment file."""
    if len(label) == 1:
        return f"--{label}-{setting}".rstrip("-")
    return f"arms.{label}.{'options' if setting == 'option' else setting}".rstrip(".")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything stored: immutable; unknown fields are refused."""

    FILE: ClassVar[str]
    """Path relative to DIR: of the record, of the list of all records of this kind, or of a folder with a numbered file
    for each."""


class Pairing(NamedTuple):
    """Two arms that are compared: ratios are `arm` over `baseline`."""

    baseline: Label
    arm: Label


class Figure(NamedTuple):
    """A metric's value of one arm in one round that a probe measured without blocks."""

    metric: str
    workload: str
    label: Label
    round: int
    restart: int
    value: float | None
    """In the metric's unit; None where the measurement failed."""


class Found(Record, frozen=True, kw_only=True):
    """What a probe found. Every field has a default: nothing was requested or found."""

    STUDY: ClassVar[str]
    """Its name below `studies` in result.json."""

    @classmethod
    def among(cls, findings: Mapping[str, object]) -> Self:
        """The findings of this kind, or empty ones."""
        finding = findings.get(cls.STUDY)
        return finding if isinstance(finding, cls) else cls()

    def figures(self) -> Sequence[Figure]:
        """The figures of metrics that it measured itself, to be compared like those of blocks."""
        return ()


def setting_key(option: str) -> str:
    """The key of a setting: --max-batch-size, max-batch-size and max_batch_size are the same."""
    return option.lstrip("-").replace("-", "_")


TOKENS_PLACE = "{output_tokens}"
"""Stands for the number of tokens of an answer in the value of a field."""


def body_in_words(body: Mapping[str, object]) -> str:
    """How the fields of a request differ from the usual ones: "without cache_salt, ignore_eos and with top_k=1"; empty
    if they do not."""
    left_out = [name for name, value in body.items() if value is None]
    given = [
        f"{name}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
        for name, value in body.items()
        if value is not None
    ]
    parts = [(word, names) for word, names in (("without", left_out), ("with", given)) if names]
    return " and ".join(f"{word} {', '.join(names)}" for word, names in parts)


def asked_for(settings: dict[str, str], key: str) -> str | None:
    """The requested value of a setting, whatever its spelling."""
    return next((value for name, value in settings.items() if setting_key(name) == key), None)


class Access(Record, frozen=True, kw_only=True):
    """How requests reach a server that abserve does not start. Paths are files in PEM form."""

    ca: str | None = None
    """Certificates of the authorities that are trusted; without it those of the system."""
    insecure: bool = False
    """Whether the server's certificate is not verified."""
    cert: str | None = None
    """The client's certificate."""
    key: str | None = None
    """The key of that certificate, if it is in another file."""
    version: str | None = None
    """Version of the model; without it the server chooses."""
    header: Mapping[str, str] = {}
    """Headers or gRPC metadata of every request. A value is stored as a reference such as $TOKEN, or as …."""


DEFAULT_ACCESS = Access()


class ArmRequest(Record, frozen=True, kw_only=True):
    """One arm as requested. `target` is one of `TARGETS` or the URL of a running server."""

    label: Label
    target: str
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    """Options for `abserve serve …` in addition to the shared ones, without the leading dashes."""
    payload: str | None = None
    """If it differs from the experiment's; such a pair does not compare servers."""
    grpc: str | None = None
    """Address of the gRPC endpoint of a server given by URL: HOST:PORT, grpc://… or grpcs://…."""
    access: Access = DEFAULT_ACCESS
    """How a server given by URL is reached."""
    model: str | None = None
    """If it differs from the experiment's: a reference for a server that abserve starts, the name on one at a URL."""
    transport: TokenTransport | None = None
    """If it differs from the experiment's, because the arms of a language model have no protocol in common."""
    body: dict[str, Any] = {}
    """Fields of the requests to its language model that differ from the usual ones; None: left out."""
    server: Label | None = None
    """The arm of the settings whose configuration this is, in a comparison at every load's best."""
    tried: tuple[str, ...] = ()
    """Of such a configuration the settings that were tried before, with their defaults among their values."""

    @property
    def tls_addresses(self) -> tuple[str, ...]:
        """Its addresses that are reached over TLS."""
        addresses = (self.target, self.grpc or "")
        return tuple(address for address in addresses if address.startswith(("https://", "grpcs://")))

    @property
    def embedded(self) -> bool:
        return self.target in TARGETS

    @property
    def own_repository(self) -> bool:
        """Whether it serves a model repository of the user, to which no other option applies."""
        return asked_for(self.settings, "triton_repository") is not None


def body_count(batch_size: int) -> int:
    """How many different requests a workload sends in turn: enough that no cache can hold one response, few enough to
    fit into memory."""
    return max(4, 32 // batch_size)


class TokenLimits(Record, frozen=True, kw_only=True):
    """The limits of a good answer of a language model; None: no limit."""

    ttft_ms: float | None = None
    """From the intended start to the first token."""
    tpot_ms: float | None = None
    """Mean time per token after the first chunk."""
    gap_ms: float | None = None
    """The longest gap between two chunks."""

    def __str__(self) -> str:
        """The limits as they are asked for: ttft=200ms,tpot=50ms; empty without any."""
        values = (("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("gap", self.gap_ms))
        return ",".join(f"{name}={value:g}ms" for name, value in values if value is not None)


class Workload(Record, frozen=True, kw_only=True):
    """A workload: one scenario at one load. A block of it ends after `requests` requests or `seconds`, whichever is
    later, and never after more than `max_seconds` (requests in flight are finished and counted). In an open loop that
    is the time during which requests fall due; see `loadgen.experiment.schedule` for overdue ones."""

    scenario: Scenario
    batch_size: int
    concurrency: int
    """Users of a closed loop; in an open loop the maximum number of connections, and so of requests in flight."""
    requests: int
    seconds: float
    max_seconds: float
    rounds: int
    """Planned rounds of blocks, cold starts or searches; the minimum if time or the decision ends the load."""
    arrivals: Arrivals = "closed"
    """closed: a user sends its next request when the last one is answered. constant, poisson: requests fall due at
    `rate_per_s`, whether or not earlier ones are answered (open loop). trace: they fall due as those of a trace or
    of recorded traffic did."""
    rate_per_s: float | None = None
    """Requests per second of an open loop; None in a closed one."""
    latency_bound_ms: float | None = None
    """X of a search for the highest Poisson rate with p99 ≤ X (the scenario slo)."""
    sequence_length: int | None = None
    """The length of all items; None: of the lengths that the samples have, or of a model without such an axis."""
    prompt_tokens: int | None = None
    """Tokens of every prompt of a language model; None for other models, like the rest."""
    output_tokens: int | None = None
    """Tokens that every answer must have."""
    shared_prefix: int = 0
    """The first tokens of every prompt, which are the same in all of them; the rest differs."""
    trace: str | None = None
    """The trace whose first `seconds` are replayed. Its requests have their own lengths; `prompt_tokens` and
    `output_tokens` are then those of the longest, and `rate_per_s` is their mean rate."""
    traffic: str | None = None
    """The folder of recorded traffic, of which each round replays a window; `rate_per_s` is its mean rate."""
    speed: float = 1.0
    """How many times as fast as recorded its requests fall due."""
    check_answers: bool = False
    """Whether answers to them are compared with the recorded ones."""
    rate_share: float | None = None
    """An open loop's rate as a share of the rate at which the slowest arm answers a closed loop; that is measured in
    the warm-up, and `rate_per_s` is None until then."""
    limits: TokenLimits | None = None
    """The limits of a good answer, of which goodput counts; without them every whole answer is good."""
    arms: tuple[Label, ...] = ()
    """The arms that are compared, the baseline first: of each server the configuration that is best here; empty: all
    arms of the experiment."""
    beside: tuple[Label, ...] = ()
    """Further arms that get its load and are not among those."""

    @property
    def replayed(self) -> str | None:
        """The trace or the recorded traffic that it replays, if it does."""
        return self.trace or self.traffic

    def loaded(self, labels: Sequence[Label]) -> tuple[Label, ...]:
        """The arms that get its load, of an experiment with these."""
        return (*self.arms, *self.beside) or tuple(labels)

    @property
    def has_blocks(self) -> bool:
        """Whether it consists of blocks at a planned load; cold starts and searches do not."""
        return SCENARIOS[self.scenario].has_blocks

    @property
    def is_search(self) -> bool:
        """Whether it searches for the highest rate that holds a bound, or the limits of good answers."""
        return SCENARIOS[self.scenario].is_search

    @property
    def is_open(self) -> bool:
        """Whether requests fall due by a schedule, so that latency is measured instead of throughput."""
        return self.arrivals != "closed"

    @property
    def kind(self) -> Kind:
        """Whether its answers are the tokens of a language model."""
        return Kind.TENSORS if self.output_tokens is None else Kind.TOKENS

    @property
    def name(self) -> str:
        """Its name: cold-start, single, batched(8), concurrent(16, length 128), poisson(50/s), slo(p99≤50ms);
        poisson(50 %) of the slower arm's rate; surface(16, batch 8) with 16 users."""
        entry = SCENARIOS[self.scenario]
        word = self.scenario if entry.word is None else entry.word(self)
        length = None if self.sequence_length is None else f"length {self.sequence_length}"
        details = ", ".join(str(detail) for detail in (*entry.details(self), length) if detail is not None)
        return f"{word}({details})" if details else word


REQUEST_TIMEOUT_S = 60.0
"""The default for a request of the load."""


class Experiment(Record, frozen=True, kw_only=True):
    """Everything requested. `seed` decides the order of the blocks, the inputs and the arrivals; `equivalence_margin`
    is δ of the verdict."""

    FILE = "experiment.json"
    schema: Literal["abserve.experiment/2"] = "abserve.experiment/2"
    arms: tuple[ArmRequest, ...]
    """At least two, the baseline first."""
    model: str
    weights: str
    payload: str
    transport: Transport
    workloads: tuple[Workload, ...]
    preset: str
    seed: int
    equivalence_margin: float
    threads: int
    gpu_control: bool = True
    """Whether an arm also runs on the CPU if there is a GPU: the negative control of the GPU verification."""
    deployment: DeploymentKind = "embedded"
    """Servers that abserve starts, or those of a running compose stack with its own settings."""
    compose_project: str | None = None
    """Name of the stack, with the deployment compose."""
    tls: bool = False
    """Whether the servers that abserve starts are reached over TLS, with a certificate made for the run."""
    settings: dict[str, object] | None = None
    """The settings in effect, as in an experiment file; None in runs from before there were such files."""
    settings_sha256: str | None = None
    """SHA-256 of the canonical content of `settings`."""
    processes: int = 1
    """Processes of the load generator, which share the users or the rate; 0 until the run has chosen their number."""
    restarts: int = 1
    """Fresh starts of the servers; each gets its share of the rounds."""
    until_decided: bool = False
    """Whether rounds are added until every leading comparison is decided; `Workload.rounds` is the minimum."""
    minutes: float | None = None
    """Time of the whole comparison, if it decides the number of rounds; `Workload.rounds` is the minimum."""
    time_limit_minutes: float | None = None
    """Limit of the load with `until_decided`: no round begins that would end later."""
    request_timeout_s: float = REQUEST_TIMEOUT_S
    """After which a request counts as failed."""
    explain: bool = False
    """Whether ablations test the causes of the differences after the load."""
    explain_seconds: float = 600.0
    """Time limit of the ablations."""
    strict: bool = False
    """Whether others that use the machine make a run INVALID instead of ROUGH."""
    handicap_check: bool = True
    """Whether every arm that abserve starts is compared with the same server at its own defaults."""
    ceiling: bool = False
    """Whether the engines of embedded servers are measured alone after the servers are stopped."""
    precision: str | None = None
    """The precision of all servers that abserve starts, unless an arm's settings have another; None: their default."""
    pad_to: tuple[int, ...] | None = None
    """Sizes to which they pad batches of items of different lengths; None: no such axis, or samples not read yet."""
    cannot_pad: dict[Label, str] = msgspec.field(default_factory=dict)
    """Why abserve cannot make these arms pad, so that no other arm pads by default; empty where that decided
    nothing."""
    inputs: str | None = None
    """The user's own inputs: a folder, a file, or random."""
    sequence_length: str | None = None
    """The lengths of the samples as asked for: text, or numbers."""
    left_out: tuple[str, ...] = ()
    """Workloads that were asked for and take too long for `minutes`, which the warm-up has shown."""
    price: float | None = None
    """Price of the machine per hour, in any currency, for the cost of a language model's tokens."""
    screening: bool = False
    """Whether the run only chooses what a later one compares: it goes on without an arm that fails before the load,
    unless that is the baseline, and leaves out what a choice does not need."""
    failed_arms: dict[Label, str] = msgspec.field(default_factory=dict)
    """The arms that a screening went on without, and why, in a sentence."""

    @property
    def kind(self) -> Kind:
        """Whether the arms serve a language model."""
        return ROUTES[self.transport].kind

    @property
    def is_surface(self) -> bool:
        """Whether its workloads are the points of a decision surface, which get rounds where the winner is uncertain;
        `minutes` then limits a run that is `until_decided`."""
        return any(workload.scenario == "surface" for workload in self.workloads)

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple(arm.label for arm in self.arms)

    @property
    def baseline(self) -> ArmRequest:
        return self.arms[0]

    @property
    def largest_batch(self) -> int:
        """The largest batch that is sent; 1 without workloads."""
        return max((workload.batch_size for workload in self.workloads), default=1)

    def arm(self, label: Label) -> ArmRequest:
        return next(arm for arm in self.arms if arm.label == label)

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        return tuple(Pairing(self.arms[0].label, arm.label) for arm in self.arms[1:])

    @property
    def by_name(self) -> dict[str, Workload]:
        """The workloads by their names."""
        return {workload.name: workload for workload in self.workloads}

    def loaded(self, workload: Workload) -> tuple[Label, ...]:
        """The arms that get the load of a workload."""
        return workload.loaded(self.labels)

    def pairings_in(self, workload: Workload) -> tuple[Pairing, ...]:
        """The baseline of a workload with each of the other arms."""
        baseline, *others = workload.arms or self.labels
        return tuple(Pairing(baseline, other) for other in others)

    def pairings_of_others(self, workload: Workload) -> tuple[Pairing, ...]:
        """The other arms of a workload among themselves, for the ranking."""
        return tuple(Pairing(*two) for two in combinations((workload.arms or self.labels)[1:], 2))

    @property
    def is_at_best(self) -> bool:
        """Whether it compares every server at its best for each load, of the configurations that were tried."""
        return any(arm.server is not None for arm in self.arms)

    @property
    def servers(self) -> dict[Label, Label]:
        """By arm the one that the user named, of which it is a configuration: by default itself."""
        return {arm.label: arm.server or arm.label for arm in self.arms}

    def arm_of(self, server: Label, workload: str) -> Label:
        """The arm that stands for the one which the user named in the workload of this name."""
        servers = self.servers
        arms = (label for load in self.workloads if load.name == workload for label in load.arms)
        return next((label for label in arms if servers[label] == server), server)

    def baseline_in(self, workload: str) -> Label:
        """The baseline in the workload of this name."""
        return self.arm_of(self.baseline.server or self.baseline.label, workload)

    @property
    def payloads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.payload_of(arm) for arm in self.arms))

    def payload_of(self, arm: ArmRequest) -> str:
        return arm.payload or self.payload

    def transport_of(self, arm: ArmRequest) -> Transport:
        return arm.transport or self.transport

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths for which there are workloads; empty without a list of them."""
        lengths = (workload.sequence_length for workload in self.workloads)
        return tuple(dict.fromkeys(length for length in lengths if length is not None))

    def reference_of(self, arm: ArmRequest) -> str:
        """The model that a server which abserve starts for the arm is asked to serve."""
        return asked_for(arm.settings, "model") or arm.model or self.model

    def model_of(self, arm: ArmRequest) -> str | None:
        """The arm's model on a server that abserve does not start, as far as the settings name it."""
        name = None if arm.embedded else arm.model
        return name or served_name(self.model, self.payload_of(arm))


class StageTotals(Record, frozen=True, kw_only=True):
    """A server's own statistics of a block: differences of its counters, summed over the block's requests.

    The names are Triton's. What a server does not report is None; a negative number means that its counters ran
    backwards. `receive` and `encode` are the native server's HTTP stages; `decode` is part of compute_input on Triton,
    except in an ensemble with a model that decodes.
    """

    requests: int | None
    items: int | None
    executions: int | None
    queue_ns: int | None
    compute_input_ns: int | None
    compute_infer_ns: int | None
    compute_output_ns: int | None
    receive_ns: int | None = None
    decode_ns: int | None = None
    encode_ns: int | None = None
    step_ns: int | None = None
    """Of an engine whose executions are steps of many requests each: the time of these steps together."""
    batches: dict[int, int] = msgspec.field(default_factory=dict)
    """Executed batch size → number of executions."""
    steps: tuple[StepTotals, ...] = ()
    """Of an ensemble: its models, whose times are summed here. `executions` and `batches` are those of the one that
    executes; with a model whose statistics cannot be read all these are unknown."""

    @property
    def executed_items(self) -> int | None:
        """Items in `executions`: of an ensemble those of the model that executes, which may get more or fewer."""
        executing = [step.totals for step in self.steps if step.executes and step.totals is not None]
        return executing[0].items if executing else self.items


class StepTotals(Record, frozen=True, kw_only=True):
    """The statistics of one model that an ensemble calls."""

    model: str
    calls: int
    """How often one request to the ensemble calls it."""
    decodes: bool
    """Whether its time is the stage `decode` of the ensemble."""
    executes: bool
    """Whether the ensemble's executions and batches are its own."""
    totals: StageTotals | None
    """None: its configuration or its statistics cannot be read. Includes requests that others sent to it."""


class StepRecord(Record, frozen=True, kw_only=True):
    """One model that an ensemble calls."""

    model: str
    version: str | None = None
    """None: the latest."""
    calls: int = 1
    """How often one request to the ensemble calls it."""
    config: dict[str, object] | None
    """None: it cannot be read."""


class WorkerRecord(Record, frozen=True, kw_only=True):
    """One process of a distributed generator in a block. Its times are on the clock of its machine."""

    index: int
    host: str
    pid: int
    requests: int
    cpu_ns: int
    window_start_ns: int
    window_end_ns: int
    spin_ns: int = 0
    """The part of `cpu_ns` in which users of an open loop only waited for the moment to send."""
    lost: str | None = None
    """How it was lost, if it was; `requests` are then those found in its file."""


class MachineLoad(Record, frozen=True, kw_only=True):
    """Use of the cores that the load generator may use, from just before a block's window to just after it, by the
    kernel's counters, whose step is 10 ms. None: unknown."""

    total_ns: int
    """Total time of these cores: idle, busy, stolen."""
    steal_ns: int | None
    """Time in which the hypervisor gave a core with work to another machine; 0 if it hides that."""
    busy_ns: int
    """Time in processes, without interrupts."""
    known_ns: int | None
    """CPU time of the servers, the load generator and abserve; None if a server on this machine cannot be told from
    other processes."""
    others: tuple[str, ...]
    """The busiest of the other programs: "PID 812 python3 train.py, 0.98 cores"."""
    runnable: int | None
    """Threads that ran or waited for a core just before the window, when nothing was sent."""
    waited_ns: int | None
    """Time in which at least one thread waited for a core (pressure stall information)."""

    @property
    def others_ns(self) -> int | None:
        """CPU time of processes other than the servers, the load generator and abserve."""
        return None if self.known_ns is None else self.busy_ns - self.known_ns


def programs_in_words(programs: Sequence[str]) -> str:
    """The busiest other programs, or why none is named."""
    unseen = "which ones is not known, because their processes belong to another container or user"
    return "; ".join(programs) or unseen


class BlockRecord(Record, frozen=True, kw_only=True):
    """One stretch of load on one arm."""

    index: int
    workload: str
    round: int
    label: Label
    position: int
    """0 if this arm came first in its round."""
    started_at: str
    window_start_ns: int
    window_end_ns: int
    samples: str
    """Path of the sample file, relative to DIR."""
    requests: int
    items: int
    errors: int
    error_messages: tuple[str, ...]
    generator_cpu_ns: int
    generator_spin_ns: int = 0
    """The part of it in which users of an open loop only waited for the moment to send."""
    server_cpu_ns: int | None
    stages: StageTotals | None
    complete: bool
    """False if the block was cut short, by a dead server or Ctrl-C. Such a block is not compared."""
    note: str | None = None
    transport: Transport = "http"
    body_payload_bytes: tuple[int, ...] = ()
    """Bytes of tensors in each prepared body, by its number in the samples. Part of the samples' request bytes, except
    with the transport shm."""
    restart: int = 0
    """Index of the server start in which the block ran, from 0."""
    offered: int | None = None
    """Requests that fell due in an open loop; those beyond `requests` could not be sent in time."""
    due_span_ns: int | None = None
    """Time from the first to the last due request."""
    cool_down: int = 0
    """Good responses after the measured requests, while the last of those were in flight; not among `requests`."""
    cool_down_ns: int | None = None
    """Sum of the latencies of the cool-down, which the server's own statistics include; None in older records."""
    cool_down_tokens: int = 0
    """Tokens in the answers of the cool-down, which `generator_cpu_ns` includes."""
    first_answer_ns: int | None = None
    """Time from the start of a connection to its first response, before the window: the median over the users of a
    process, and of several processes the largest."""
    reconnects: int | None = None
    """Requests that had to reconnect because the server had closed the connection; None in older records."""
    machine: MachineLoad | None = None
    """Use of the CPU cores during the block; None if /proc cannot be read, and in older records."""
    generator_waited_ns: int | None = None
    """Time in which the load generator could have run and had no core; None if the kernel does not say, and in older
    records."""
    workers: tuple[WorkerRecord, ...] = ()
    """Processes of a distributed generator; empty if one process sent everything."""

    @property
    def kind(self) -> Kind:
        """Of tokens the files beside `samples` describe the streams; see `loadgen.records.tokens`."""
        return ROUTES[self.transport].kind

    @property
    def executed_items(self) -> int:
        """Items in good responses, including the cool-down, for the window's energy and CPU time."""
        good = self.requests - self.errors
        return self.items if good <= 0 else self.items * (good + self.cool_down) // good


class Environment(Record, frozen=True, kw_only=True):
    """The machine and software of the load generator."""

    FILE = "environment.json"
    started_at: str
    command: str
    git_commit: str | None
    host: dict[str, str | int | float | None]
    """cpu_model, cpu_count, memory_bytes, kernel, glibc, os, virtualisation …"""
    packages: dict[str, str]
    gpu: dict[str, object]
    """The /gpu-info document of this machine, without processes; `status` says whether there is a GPU."""
    inputs: dict[str, str | int] = msgspec.field(default_factory=dict)
    """The inputs: kind, item (what one is called), count, seed, source, sha256, and of sequences length_min,
    length_median, length_max and length_sum; random values were once called synthetic."""

    def length_of(self, workload: Workload) -> int | None:
        """The length of every sequence that a workload sends; None if they differ, and for other inputs."""
        least, largest = self.inputs.get("length_min"), self.inputs.get("length_max")
        common = least if isinstance(least, int) and least == largest else None
        return common if workload.sequence_length is None else workload.sequence_length

    def is_mixed(self, workload: Workload) -> bool:
        """Whether the sequences that a workload sends differ in length."""
        return "length_max" in self.inputs and self.length_of(workload) is None

    def tokens_per_item(self, workload: Workload) -> float | None:
        """Mean length of the sequences that a workload sends, without padding; None for other inputs."""
        if (length := self.length_of(workload)) is not None:
            return float(length)
        total, count = self.inputs.get("length_sum"), self.inputs.get("count")
        return total / count if isinstance(total, int) and isinstance(count, int) and count else None


def item_of(environment: Environment | None) -> str:
    """What reports call one input of a run: image, sequence or item."""
    inputs = {} if environment is None else environment.inputs
    return str(inputs.get("item") or ("image" if inputs.get("kind", "photographs") == "photographs" else "item"))


class ArmRecord(Record, frozen=True, kw_only=True):
    """One arm as in effect. None: the server does not report it."""

    FILE = "arms.json"
    label: Label
    title: str
    """Name for reports: "native PyTorch 2.15.0 fp32 (cpu)"."""
    target: str
    url: str
    server_name: str | None
    server_version: str | None
    launched: bool
    argv: tuple[str, ...] | None
    settings: dict[str, str]
    in_effect: dict[str, object]
    """engine, precision, device, threads, max_batch_size, max_queue_delay_us, weights …"""
    model_config: dict[str, object] | None
    gpu_info: dict[str, object] | None
    artefact: dict[str, object] | None
    """The manifest of the exported file that the arm executes."""
    steps: tuple[StepRecord, ...] = ()
    """The models that an ensemble calls, in order; those of an ensemble among them in its place."""


class ParityCase(Record, frozen=True, kw_only=True):
    """Outputs for the same items. `reference` compares an arm with the baseline; `alone` an arm's mixed batch with its
    own single responses; `recorded` an arm with recorded answers."""

    name: str
    label: Label
    """The arm whose outputs are compared."""
    kind: Literal["reference", "alone", "recorded"]
    images: int
    """Items, also of other kinds than images."""
    cosine_min: float
    max_abs: float
    ok: bool
    relative_max: float | None = None
    """Largest relative error of an item: ‖answer − expected‖ over ‖expected‖; see `loadgen.stats.agreement`."""
    element_max: float | None = None
    """Largest relative error of an element, except elements that are small relative to the others."""
    output: str | None = None
    """The first output that differs by more than rounding, if it failed."""
    fault: str | None = None
    """How that output differs, in words that follow its name."""
    top1: float | None = None
    """Share of items with the same highest logit; None without logits."""
    top5: float | None = None
    """Share of items with the same five highest logits; None without logits, or with five classes or fewer."""


class ParityRecord(Record, frozen=True, kw_only=True):
    """Whether all arms compute the same function; if not, speed is not compared."""

    FILE = "parity.json"
    cases: tuple[ParityCase, ...]
    ok: bool
    error: str | None = None
    failed_arm: Label | None = None
    """The arm that the error is about, if it is about one."""
    refused_items: int | None = None
    """Items of the request that this arm refused; None if that is not the error."""
    answered: bool = True
    """False: this arm refused a request, or did not answer it."""
    precision: str | None = None
    """The coarsest precision of all arms, which decides the tolerance."""
    tolerance_relative: float | None = None
    """Largest relative error of an item that passes."""
    tolerance_element: float | None = None
    """Largest relative error of an element that passes."""
    threshold_cosine: float | None = None
    """Threshold in older runs, in which the cosine decided."""
    kinds: dict[str, str] = msgspec.field(default_factory=dict)
    """How each output was compared: embedding, logits, labels (equal), tensor; empty in older runs."""
    alike: dict[Label, tuple[str, ...]] | None = None
    """The outputs of each arm with the same values for every input; None with one input, and in older runs."""

    @property
    def lowest_cosine(self) -> float | None:
        return min((case.cosine_min for case in self.cases), default=None)

    @property
    def largest_relative_error(self) -> float | None:
        return max((case.relative_max for case in self.cases if case.relative_max is not None), default=None)

    def lowest_share(self, name: Literal["top1", "top5"]) -> float | None:
        """The lowest share of items with the same highest logits."""
        return min((share for case in self.cases if (share := getattr(case, name)) is not None), default=None)


class RunState(Record, frozen=True, kw_only=True):
    """The state of the run; "running" without a process means that it was killed."""

    FILE = "run.json"
    state: Literal["running", "finished", "interrupted", "failed"]
    phase: str
    error: str | None = None
    failed_arm: Label | None = None
    """The arm whose failure ended the run, if it is known."""
    finished_at: str | None = None
