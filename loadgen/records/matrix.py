"""What `abserve engines` stores, and what it finds.

    DIR/plan.json           MatrixPlan  what was asked for and which combinations were refused; written first
    DIR/environment.json    Environment host, versions, GPU; see `loadgen.records.run`
    DIR/visits/NNNN.json    Visit       one engine process of one round; written when its last cell is measured
    DIR/judged.json         JudgedMatrix  of language models: the answers beside the reference
    DIR/matrix.json         Matrix      made from the files above by `analyse`, at any time

A *configuration* is what one engine process holds. A *cell* is a configuration at one batch size and one length. A
*round* is every configuration once, in random order; a *visit* is one configuration in one round, its cells in random
order. The round is the unit of replication. With processes "fresh" every visit is a new process, so that the intervals
include what a restart changes, such as memory layout and chosen kernels. With processes "kept", which is for GPUs where
starting takes most of the time, one process per configuration of a model lives through all rounds.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from loadgen.base.quantities import counted
from loadgen.records.checks import Check
from loadgen.records.payloads import kind_of_model
from loadgen.records.probes import JudgedAnswers
from loadgen.records.run import Environment, MachineLoad, Record, RunState
from loadgen.records.targets import Kind
from loadgen.stats.estimates import Estimate

Shape = tuple[int, int | None]
"""A batch size and a length; the length is None for a model without an axis of variable size."""
NO_MODEL = "null"
"""The engine that computes no model, so that `all` leaves it out and its answers are not compared."""


def shape_text(shape: Shape) -> str:
    """batch 8, length 128"""
    batch, length = shape
    return f"batch {batch}" if length is None else f"batch {batch}, length {length}"


class Scope(NamedTuple):
    """A model on a device with a number of threads; only configurations of one scope are compared."""

    model: str
    device: str
    threads: int | None


class Configuration(Record, frozen=True, kw_only=True):
    """The settings of one engine process; `auto` is already resolved."""

    model: str
    """As `--model` takes it: torchvision:resnet50."""
    engine: str
    precision: str
    mode: str
    device: str
    """cpu or cuda:N."""
    threads: int | None = None
    """Intra-op threads; None on a GPU."""

    @property
    def scope(self) -> Scope:
        """The scope within which it is compared."""
        return Scope(self.model, self.device, self.threads)

    @property
    def engine_mode(self) -> str:
        """torch/eager"""
        return f"{self.engine}/{self.mode}"

    @property
    def title(self) -> str:
        """torch/eager fp32"""
        return f"{self.engine_mode} {self.precision}"

    @property
    def name(self) -> str:
        """torch/graph; onnxruntime/extended CPU, 2 threads"""
        threads = "" if self.threads is None else f", {counted(self.threads, 'thread')}"
        return f"{self.engine_mode}{' CPU' if self.device == 'cpu' else ''}{threads}"


def described(configuration: Configuration) -> str:
    """For a reader: "torchvision:resnet50 torch/eager fp32, 2 threads"."""
    threads = "" if configuration.threads is None else f", {counted(configuration.threads, 'thread')}"
    return f"{configuration.model} {configuration.title}{threads}"


class RefusedCombination(Record, frozen=True, kw_only=True):
    """A combination that was asked for and is not run; the reason ends with the remedy where there is one."""

    configuration: Configuration
    reason: str


class MatrixPlan(Record, frozen=True, kw_only=True):
    """The settings of a matrix and what follows from them. `settings` is the content of the matrix file in effect and
    `sha256` its hash; a run is only resumed with equal settings."""

    FILE: ClassVar[str] = "plan.json"

    schema: Literal["abserve.engines-plan/1"] = "abserve.engines-plan/1"
    settings: dict[str, Any]
    sha256: str
    seed: int
    rounds: int
    processes: Literal["fresh", "kept"] = "fresh"
    configurations: tuple[Configuration, ...]
    refused: tuple[RefusedCombination, ...]
    batches: tuple[int, ...]
    lengths: dict[str, tuple[int | None, ...]]
    """By model; (None,) for a model without an axis of variable size."""
    baseline: str
    """The engine/mode that speed-ups divide by, as in torch/eager, in FP32; of the same model, device, threads, batch
    and length."""
    min_cosine: float
    min_top1: float
    """Cells below either limit are shown and not ranked."""

    def baseline_precision(self, place: int) -> str:
        """That of the baseline of a configuration: a large language model may not fit into memory in FP32."""
        return {Kind.TENSORS: "fp32", Kind.TOKENS: self.configurations[place].precision}[self.kind]

    @property
    def kind(self) -> Kind:
        """What all models give. The lengths of language models are those of prompts, and their items are tokens."""
        return next((kind_of_model(configuration.model) for configuration in self.configurations), Kind.TENSORS)


class Conversion(Record, frozen=True, kw_only=True):
    """One step from the model to what the engine executes, with its own cost. `made_now` is False for an artefact that
    already existed; its seconds are then those of its manifest."""

    step: str
    """export, quantise or build."""
    seconds: float
    made_now: bool = True
    file: str | None = None
    file_bytes: int | None = None
    sha256: str | None = None


class GeneratedAnswer(Record, frozen=True, kw_only=True):
    """The ids of a prompt and of its answer."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class GeneratedTokens(Record, frozen=True, kw_only=True):
    """What is measured of an engine that generates tokens besides the time of its steps."""

    prompts_ns: tuple[int, ...]
    """From adding all requests of a batch to the first token of the last one; of each repetition."""
    context: float
    """Tokens that a request had in its cache, on average, while decoding was measured."""
    step_bytes: float
    """What a step must read: the weights, and the keys and values of every request."""
    copy_bytes_per_s: float
    """Of a copy on the same device, in the same process."""
    answers: tuple[GeneratedAnswer, ...] = ()


class Measured(Record, frozen=True, kw_only=True):
    """One cell of one visit. Latencies are of one whole batch."""

    batch: int
    length: int | None
    first_call_ns: int
    """The first call in this shape: compilation, allocation, autotuning."""
    calls_ns: tuple[int, ...]
    """`Engine.infer` by the host's clock, with every copy, in order."""
    executions_ns: tuple[int, ...] | None = None
    """On inputs that lie on the device, without copies: between device events, or by the host's clock until the device
    is done, as the engine offers it; None where it offers neither."""
    cosine_min: float | None = None
    top1: float | None = None
    relative_error: float | None = None
    fault: str | None = None
    """Why the answers are not the model's; None if they are, within the precision's tolerance."""
    flops_per_item: int | None = None
    allocated_bytes: int | None = None
    """Peak of the framework's allocator on the device during this cell."""
    reserved_bytes: int | None = None
    process_device_bytes: int | None = None
    """The process's device memory by NVML, after this cell."""
    rss_bytes: int | None = None
    """Peak resident host memory of the process so far."""
    energy_joules: float | None = None
    """Of the device (GPU: NVML's counter; CPU: RAPL, if this user may read it) during `energy_items`."""
    energy_items: int = 0
    sustained_ns: int | None = None
    """Time per batch while the energy was measured, one batch after the other."""
    kernels: tuple[dict[str, Any], ...] = ()
    """With --profile: name, count, seconds, share; the longest first."""
    generated: GeneratedTokens | None = None
    """Of a language model, whose calls are decoding steps: in each every request of the batch gets one token."""

    @property
    def shape(self) -> Shape:
        return self.batch, self.length


class Visit(Record, frozen=True, kw_only=True):
    """One configuration in one round. With `error` the process, or one of its cells, failed: the cells are those that
    were measured all the same, often none. With processes "kept" only the first visit has the seconds and the
    conversions."""

    FILE = "visits"
    round: int
    configuration: int
    """Its place in `MatrixPlan.configurations`."""
    started_at: str
    error: str | None = None
    import_seconds: float | None = None
    load_seconds: float | None = None
    """From the model's weights to an engine that is ready, without conversions that made an artefact and without the
    comparison of the answers."""
    conversions: tuple[Conversion, ...] = ()
    description: dict[str, Any] = msgspec.field(default_factory=dict)
    """The engine's description: version, precision, mode, device and threads in effect, details."""
    item: str = "item"
    cells: tuple[Measured, ...] = ()
    machine: MachineLoad | None = None
    """Use of the cores while the cells were measured; None in results of earlier versions."""


class JudgedCell(JudgedAnswers, frozen=True, kw_only=True):
    """The answers of one configuration at one batch size and length of prompts, of all rounds."""

    configuration: int
    batch: int
    length: int | None

    @property
    def shape(self) -> Shape:
        return self.batch, self.length


class JudgedMatrix(Record, frozen=True, kw_only=True):
    """The answers of a language model's engines beside the reference, which reads them when all engines are closed."""

    FILE: ClassVar[str] = "judged.json"

    cells: tuple[JudgedCell, ...]


class GenerationResult(Record, frozen=True, kw_only=True):
    """Of a cell whose items are tokens; see `GeneratedTokens`."""

    prompt_tokens_per_second: Estimate
    first_token_ns: Estimate
    """Of the last request of a batch."""
    context: float
    bandwidth_share: Estimate
    """What the steps must read per second, as a share of a copy's bandwidth on the same device."""
    answers: int = 0
    """Answers that the reference judged."""
    mean_deficit: float | None = None
    largest_deficit: float | None = None
    best_share: float | None = None
    """Tokens that are the reference's own choice."""


class CellResult(Record, frozen=True, kw_only=True):
    """One cell over all rounds. Times are in ns of one batch; rates, ratios and TFLOP/s come from `latency_ns`."""

    configuration: int
    batch: int
    length: int | None
    rounds: int
    latency_ns: Estimate
    """Geometric mean over rounds of each round's median: on a GPU between device events, without copies to and from the
    host; on a CPU, and for an engine without device events, of the whole call."""
    call_ns: Estimate
    """Like `latency_ns`, but of the whole call by the host's clock, with every copy."""
    p99_ns: int | None
    """Of all the times behind `latency_ns` together; None with too few for a 99th percentile."""
    items_per_second: Estimate
    speedup: Estimate | None
    """Throughput over the baseline's, paired by round; None for the baseline and where it was not measured."""
    tflops: float | None = None
    first_call_seconds: float
    cosine_min: float | None = None
    top1: float | None = None
    relative_error: float | None = None
    fault: str | None = None
    excluded: str | None = None
    """Why it is not ranked: wrong answers, or a loss of accuracy beyond the limits."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_device_bytes: int | None = None
    rss_bytes: int | None = None
    joules_per_item: Estimate | None = None
    """None too where a batch took twice its latency while the energy was measured: then it is the energy of waiting."""
    sustained_ns: Estimate | None = None
    """Time per batch while the energy was measured, longer than the timed bursts; None where it was not measured."""
    kernels: tuple[dict[str, Any], ...] = ()
    generation: GenerationResult | None = None
    """Of a language model: then latencies are those of a decoding step, and items are tokens."""

    @property
    def shape(self) -> Shape:
        return self.batch, self.length


class ConfigurationResult(Record, frozen=True, kw_only=True):
    """The start-up cost of one configuration, over all rounds."""

    configuration: Configuration
    item: str
    description: dict[str, Any]
    load_seconds: Estimate | None
    conversions: tuple[Conversion, ...]
    """The first of each step; a later round finds the artefact."""
    errors: tuple[str, ...] = ()
    """One per failed visit."""


class Winner(Record, frozen=True, kw_only=True):
    """The fastest ranked configuration at one batch and length of a model on a device and number of threads."""

    model: str
    device: str
    threads: int | None
    batch: int
    length: int | None
    configuration: int
    runner_up: int | None
    ratio: Estimate | None
    """Throughput over the runner-up's, paired by round."""
    certain: bool
    """Whether it is faster than every other ranked configuration there, with a chance of at most 5 % of one false
    certain winner in the whole matrix (Holm)."""
    unbeaten: int | None = None
    """Of a winner that is not certain: the configuration that it beats least certainly. It can be a much slower one
    whose time varies from round to round."""

    @property
    def scope(self) -> Scope:
        """The model, device and threads of its competitors."""
        return Scope(self.model, self.device, self.threads)

    @property
    def shape(self) -> Shape:
        return self.batch, self.length


class BreakEven(Record, frozen=True, kw_only=True):
    """How many items a conversion has to serve before it pays, at one batch and length; see docs/engine-matrix.md."""

    configuration: int
    baseline: int
    path: str
    """PyTorch → ONNX → ONNX Runtime."""
    batch: int
    length: int | None
    one_time_seconds: float
    """Of a process that serves all shapes of the matrix."""
    gain_seconds_per_item: Estimate
    items: Estimate | None
    """None where it never pays. Only `high` None: it may never pay. Both bounds None: no interval, see `Estimate`."""
    parity: str
    """The proof that both compute the same."""

    @property
    def shape(self) -> Shape:
        return self.batch, self.length


class Matrix(Record, frozen=True, kw_only=True):
    """All results of a matrix. Fields are only added, with a default."""

    FILE: ClassVar[str] = "matrix.json"

    schema: Literal["abserve.engines/1"] = "abserve.engines/1"
    state: RunState | None
    environment: Environment
    plan: MatrixPlan
    configurations: tuple[ConfigurationResult, ...]
    """In the order of `MatrixPlan.configurations`; those that never loaded have no description."""
    cells: tuple[CellResult, ...]
    winners: tuple[Winner, ...] = ()
    break_even: tuple[BreakEven, ...] = ()
    checks: tuple[Check, ...] = ()
    """Whether other programs or the hypervisor took CPU time."""
