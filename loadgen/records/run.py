"""The stored records: what a run writes while it happens, and all that analysis and report may read.

    DIR/experiment.json    Experiment     what was asked for; written first
    DIR/environment.json   Environment    host, versions, GPU
    DIR/arms.json          list[ArmRecord]
    DIR/parity.json        ParityRecord
    DIR/blocks/NNNN.json   BlockRecord    written when the block is complete, after its samples
    DIR/samples/NNNN.npy   see `loadgen.records.samples`
    DIR/calibration.json   Calibration    of the load generator on this machine, where there is one
    DIR/run.json           RunState       "running", then "finished", "interrupted" or "failed"

Studies store more, see the `records` of each below `loadgen.studies`. `result.json`, `report.html` and `summary.md` are
made from all this alone, at any time, by `abserve report DIR`.
Times in ns are of the generator's monotonic clock and only differences mean anything; `*_at` are UTC, ISO 8601, and
only label. A missing reading is None, never 0. Every file is written to a temporary name and renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import msgspec

from loadgen.records.payloads import variant_name

Label = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_-]{0,23}$")]
"""What an arm is called: a, b, c, …, or a name of its own from an experiment file."""
Scenario = Literal["cold-start", "single", "batched", "concurrent", "open", "slo", "ramp"]
Arrivals = Literal["closed", "constant", "poisson"]
Transport = Literal["http", "grpc", "shm"]
DeploymentKind = Literal["embedded", "compose"]


EMBEDDED = ("native", "triton")
"""Targets whose servers are ours."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything stored: immutable, named fields, unknown fields refused."""

    FILE: ClassVar[str]
    """Where a run keeps it, relative to DIR: one, or all of a kind as a list."""


def shown(label: Label) -> str:
    """A label in a sentence: A for a, and a name as it is."""
    return label.upper() if len(label) == 1 else label


def option_of(label: Label, setting: str = "") -> str:
    """Where an arm, or a setting of it, is asked for: --a-option, or its place in an experiment file."""
    if len(label) == 1:
        return f"--{label}-{setting}".rstrip("-")
    return f"arms.{label}.{'options' if setting == 'option' else setting}".rstrip(".")


class Pairing(NamedTuple):
    """Two arms that are compared: ratios are `arm` over `baseline`."""

    baseline: Label
    arm: Label


class Found(Record, frozen=True, kw_only=True):
    """What a study found. Every field has a default, which says that nothing was asked for or found."""

    STUDY: ClassVar[str]
    """Its name below `studies` in result.json."""

    @classmethod
    def among(cls, findings: Mapping[str, object]) -> Self:
        """The one of this kind, by the names of the studies; an empty one where there is none."""
        found = findings.get(cls.STUDY)
        return found if isinstance(found, cls) else cls()


def setting_key(option: str) -> str:
    """A setting whatever its spelling: --max-batch-size, max-batch-size and max_batch_size are one."""
    return option.lstrip("-").replace("-", "_")


def asked_for(settings: dict[str, str], key: str) -> str | None:
    """A setting, whatever its spelling on the command line."""
    return next((value for name, value in settings.items() if setting_key(name) == key), None)


class ArmRequest(Record, frozen=True, kw_only=True):
    """One arm as asked for. `target` is native, triton or a URL (a server that somebody else started)."""

    label: Label
    target: str
    settings: dict[str, str] = {}
    """Options for `abserve serve …` beyond those that all arms share, without the leading dashes."""
    payload: str | None = None
    """Where it differs from the experiment's; such a pair is not a comparison of servers."""
    grpc: str | None = None
    """HOST:PORT of the gRPC door of a server that somebody else started."""

    @property
    def embedded(self) -> bool:
        """Whether this arm's server is one of ours, and no URL."""
        return self.target in EMBEDDED


class Cell(Record, frozen=True, kw_only=True):
    """One scenario at one load. A block of it ends after `requests` requests or `seconds`, whichever is later,
    and never after more than `max_seconds` (requests in flight then are finished and counted). In an open loop that
    is the time during which requests fall due; see `loadgen.experiment.arrivals` for how long overdue ones are
    still sent."""

    scenario: Scenario
    batch_size: int
    concurrency: int
    """Users of a closed loop; in an open loop the most connections, so the most requests under way."""
    requests: int
    seconds: float
    max_seconds: float
    rounds: int
    """Planned; of cold starts and searches, of those. The least, where time or the decision ends the load."""
    arrivals: Arrivals = "closed"
    """closed: a user's next request leaves when its last one is answered. constant, poisson: requests fall due at
    `rate_per_s` whatever becomes of the answers (open loop)."""
    rate_per_s: float | None = None
    """Requests a second of an open loop; None in a closed one."""
    latency_bound_ms: float | None = None
    """X of a search for the highest Poisson rate with p99 ≤ X (the scenario slo), whose rates the search chooses."""

    @property
    def has_blocks(self) -> bool:
        """Whether it is made of blocks at a load that is known beforehand; cold starts, searches and ramps are not."""
        return self.scenario not in ("cold-start", "slo", "ramp")

    @property
    def is_open(self) -> bool:
        """Whether requests fall due by a schedule, so that latency, and not throughput, is what is measured."""
        return self.arrivals != "closed"

    @property
    def name(self) -> str:
        """As shown: cold-start, single, batched(8), concurrent(16), open(50/s), poisson(50/s), slo(p99≤50ms), ramp."""
        if self.latency_bound_ms is not None:
            return f"slo(p99≤{self.latency_bound_ms:g}ms)"
        if self.is_open:
            size = f", batch {self.batch_size}" if self.batch_size > 1 else ""
            return f"{'poisson' if self.arrivals == 'poisson' else 'open'}({self.rate_per_s or 0.0:g}/s{size})"
        if self.scenario == "batched":
            return f"batched({self.batch_size})"
        if self.scenario == "concurrent":
            return f"concurrent({self.concurrency})"
        return self.scenario


class Experiment(Record, frozen=True, kw_only=True):
    """Everything asked for. `seed` decides the order of the blocks; `equivalence_margin` is δ of the verdict."""

    FILE = "experiment.json"
    schema: Literal["abserve.experiment/2"] = "abserve.experiment/2"
    arms: tuple[ArmRequest, ...]
    """The baseline first, and one more at least."""
    model: str
    weights: str
    payload: str
    transport: Transport
    cells: tuple[Cell, ...]
    preset: str
    seed: int
    equivalence_margin: float
    threads: int
    gpu_control: bool = True
    """Whether an arm is run on the CPU too where there is a GPU: the negative control of the evidence."""
    deployment: DeploymentKind = "embedded"
    """Servers as processes of ours, or those of a running compose stack, whose settings are its own."""
    compose_project: str | None = None
    """Of the stack, with the deployment compose."""
    settings: dict[str, object] | None = None
    """The settings in effect, as an experiment file holds them; None in runs of before there were such files."""
    settings_sha256: str | None = None
    """Of their canonical content."""
    processes: int = 1
    """Of the load generator, which share the users or the rate."""
    restarts: int = 1
    """How often the servers are started afresh; each restart gets its share of the rounds."""
    until_decided: bool = False
    """Whether rounds are added until the leading comparison of every cell is decided: `Cell.rounds` are the least."""
    minutes: float | None = None
    """For the whole comparison, where the number of rounds follows from the time: `Cell.rounds` are the least."""
    time_limit_minutes: float | None = None
    """Of load, with `until_decided`: no round begins that would end later."""
    explain: bool = False
    """Whether the causes of the differences are tested by counterfactual cells after the load."""
    explain_seconds: float = 600.0
    """The longest time for that."""
    ceiling: bool = False
    """Whether the engines of our own servers are measured alone when the servers are stopped."""

    @property
    def labels(self) -> tuple[Label, ...]:
        """Of the arms, the baseline's first."""
        return tuple(arm.label for arm in self.arms)

    @property
    def baseline(self) -> ArmRequest:
        """What the other arms are compared with."""
        return self.arms[0]

    def arm(self, label: Label) -> ArmRequest:
        """By its label."""
        return next(arm for arm in self.arms if arm.label == label)

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        """The baseline with each other arm."""
        return tuple(Pairing(self.arms[0].label, arm.label) for arm in self.arms[1:])

    @property
    def pairings_of_others(self) -> tuple[Pairing, ...]:
        """The other arms among themselves, which are ranked, too."""
        return tuple(Pairing(*two) for two in combinations(self.labels[1:], 2))

    @property
    def payloads(self) -> tuple[str, ...]:
        """What is sent, the baseline's first."""
        return tuple(dict.fromkeys(self.payload_of(arm) for arm in self.arms))

    def payload_of(self, arm: ArmRequest) -> str:
        """What an arm is sent."""
        return arm.payload or self.payload

    def model_of(self, arm: ArmRequest) -> str:
        """The name under which an arm serves the variant that takes its payload."""
        return variant_name(self.model, self.payload_of(arm))


class StageTotals(Record, frozen=True, kw_only=True):
    """A server's own account of a block: differences of its statistics, summed over the block's requests.

    The names are Triton's. What a server does not report is None; a negative number means that its counters ran
    backwards. `receive` and `encode` are the native server's HTTP stages; `decode` is part of compute_input on Triton.
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
    batches: dict[int, int] = msgspec.field(default_factory=dict)
    """Executed batch size → number of executions."""


class WorkerRecord(Record, frozen=True, kw_only=True):
    """What one process of a distributed generator did in a block. Its times are of its own machine's clock."""

    index: int
    host: str
    pid: int
    requests: int
    cpu_ns: int
    window_start_ns: int
    window_end_ns: int
    lost: str | None = None
    """How it was lost, where it was; `requests` are then those found in its file."""


class MachineLoad(Record, frozen=True, kw_only=True):
    """Who used the cores that the load generator may use, from just before a block's window to just after it, by the
    kernel's counters, whose step is 10 ms. None is not known."""

    total_ns: int
    """All time of these cores: idle, busy, stolen."""
    steal_ns: int | None
    """In which a core had work and the hypervisor gave it to another machine. A hypervisor may hide that: then 0."""
    busy_ns: int
    """In processes, without interrupts."""
    known_ns: int | None
    """CPU time of the servers, the load generator and the tool itself; None where a server on this machine cannot be
    told from other processes."""
    others: tuple[str, ...]
    """The busiest of the other processes: "ffmpeg 0.97 cores"."""
    runnable: int | None
    """Threads that ran or waited for a core just before the window, when nothing was sent."""
    waited_ns: int | None
    """Time in which at least one thread, whosever it was, waited for a core (pressure stall information)."""


class BlockRecord(Record, frozen=True, kw_only=True):
    """One stretch of load on one arm."""

    index: int
    cell: str
    round: int
    label: Label
    position: int
    """0 when this arm came first in its round."""
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
    server_cpu_ns: int | None
    stages: StageTotals | None
    complete: bool
    """False when the block was cut short: by a dead server, by Ctrl-C. Such a block takes part in no comparison."""
    note: str | None = None
    transport: Transport = "http"
    body_payload_bytes: tuple[int, ...] = ()
    """Bytes of tensors in each prepared body, by the number in the samples. They are part of the samples' request
    bytes, except with the transport shm, where they go through memory."""
    restart: int = 0
    """During which start of the servers, from 0."""
    offered: int | None = None
    """Requests that fell due in an open loop; those beyond `requests` could not be sent in time."""
    due_span_ns: int | None = None
    """From the first to the last moment at which one was due."""
    cool_down: int = 0
    """Good answers after the measured requests, while the last of those were under way; not among `requests`."""
    first_answer_ns: int | None = None
    """From the start of a connection to its first answer, before the window; the median over the users."""
    reconnects: int | None = None
    """Requests before which a connection that the server had closed was made again, inside their latency; None in
    records of before it was kept."""
    machine: MachineLoad | None = None
    """Who used the processors meanwhile; None where /proc cannot be read, and in records of before it was kept."""
    workers: tuple[WorkerRecord, ...] = ()
    """Processes of a distributed generator; empty where one process sent everything."""

    @property
    def executed_items(self) -> int:
        """Items in good answers, the cool-down's included: what the window's energy and CPU time were spent on."""
        good = self.requests - self.errors
        return self.items if good <= 0 else self.items * (good + self.cool_down) // good


class Environment(Record, frozen=True, kw_only=True):
    """The machine and the software that the generator saw."""

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
    """What was sent: kind (photographs, or synthetic for a model that we do not know), count, sha256."""


class ArmRecord(Record, frozen=True, kw_only=True):
    """One arm as in effect. None where the server does not tell."""

    FILE = "arms.json"
    label: Label
    title: str
    """For people: "native PyTorch 2.15.0 fp32 (cpu)"."""
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


class ParityCase(Record, frozen=True, kw_only=True):
    """Answers to the same images. `reference` compares an arm with the baseline; `alone` an arm's mixed batch with its
    own single answers."""

    name: str
    label: Label
    """Whose answers are compared."""
    kind: Literal["reference", "alone"]
    images: int
    cosine_min: float
    max_abs: float
    ok: bool
    relative_max: float | None = None
    """Largest relative error of an item: ‖answer − expected‖ over ‖expected‖; see `loadgen.statistics.agreement`."""
    element_max: float | None = None
    """Largest relative error of an element, of those that are not small beside the others."""
    output: str | None = None
    """The output with the largest relative error, where it failed."""


class ParityRecord(Record, frozen=True, kw_only=True):
    """Whether all arms compute the same function; speed is compared only then."""

    FILE = "parity.json"
    cases: tuple[ParityCase, ...]
    ok: bool
    error: str | None = None
    precision: str | None = None
    """The coarsest of all arms, which decides how much rounding may differ."""
    tolerance_relative: float | None = None
    """Largest relative error of an item that passes."""
    tolerance_element: float | None = None
    """The same of an element."""
    threshold_cosine: float | None = None
    """Of runs from before relative errors: the cosine decided."""

    @property
    def lowest_cosine(self) -> float | None:
        """Over all cases."""
        return min((case.cosine_min for case in self.cases), default=None)

    @property
    def largest_relative_error(self) -> float | None:
        """Over all cases."""
        return max((case.relative_max for case in self.cases if case.relative_max is not None), default=None)


class RunState(Record, frozen=True, kw_only=True):
    """How the run stands; "running" on disk with no process behind it means that it was killed."""

    FILE = "run.json"
    state: Literal["running", "finished", "interrupted", "failed"]
    phase: str
    error: str | None = None
    finished_at: str | None = None
