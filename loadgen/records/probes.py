"""The stored records of the probes that checks read: conditions before the load, compared answers, starts.

DIR/conditions.json             Conditions         readings of the arms and the machine right before the load
DIR/cache_probes.json           list[CacheProbe]   times of new and of repeated requests, one per arm
DIR/answers.json                list[AnswersCompared]
DIR/token_answers.json          list[TokensCompared]  of a language model, instead of answers.json
DIR/cold_starts.json            list[ServerStart]
DIR/container_cold_starts.json  list[ContainerStart]
DIR/shadow.json                 ShadowRecord       which requests of production traffic a shadow has compared
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.records.run import ArmRequest, Experiment, Label, Record, setting_key
from loadgen.records.targets import Transport

Caches = Literal["cached", "uncached"]


class Variant(Record, frozen=True, kw_only=True):
    """How an arm is started and loaded."""

    payload: str
    transport: Transport
    settings: dict[str, str]
    """Options that differ from the arm's own; an empty value removes the option."""
    target: str | None = None
    """The server that takes the place of the arm's own."""

    def request(self, request: ArmRequest) -> ArmRequest:
        """The arm's request, changed as the variant says, however its options are spelt."""
        changed = {setting_key(name) for name in self.settings}
        unchanged = {name: value for name, value in request.settings.items() if setting_key(name) not in changed}
        return msgspec.structs.replace(
            request,
            target=self.target or request.target,
            payload=self.payload,
            settings=unchanged | {name: value for name, value in self.settings.items() if value},
            transport=None,  # the experiment's is the variant's
        )

    def experiment(self, experiment: Experiment, request: ArmRequest) -> Experiment:
        """The experiment with the changed request in place of the original."""
        arms = tuple(request if arm.label == request.label else arm for arm in experiment.arms)
        return msgspec.structs.replace(experiment, arms=arms, transport=self.transport)


class CacheProbe(Record, frozen=True, kw_only=True):
    """Times of new requests and of repeated ones sent among them, group by group; empty with an `error`. The time of a
    streamed answer is the time to its first token, since the tokens after it take as long with a cached prompt."""

    FILE = "cache_probes.json"
    label: Label
    fresh_ns: tuple[int, ...]
    """Time of the new request of each group."""
    repeated_ns: tuple[int, ...]
    """Times of the repeated requests, as many for each new one, in the order of the groups."""
    error: str | None = None


class ArmConditions(Record, frozen=True, kw_only=True):
    """Readings of one arm."""

    label: Label
    loopback: bool
    """Whether its address is this machine's loopback."""
    connect_ms: float | None
    """Median time of a TCP connection to its HTTP port: one round trip; null if one failed."""
    pids: tuple[int, ...]
    """Processes of its server, where it runs on this machine and they can be seen."""


class GpuCondition(Record, frozen=True, kw_only=True):
    """One GPU, as its driver reports it. Null is unknown."""

    uuid: str | None
    name: str | None
    utilisation: float | None
    """Share of the driver's last interval with a kernel running."""
    sm_clock_hertz: float | None
    temperature_celsius: float | None
    clock_event_reasons: tuple[str, ...] | None
    """NVML's reasons why the clocks are not at their highest."""
    pids: tuple[int, ...] | None
    """Processes with a compute context; in a container these may be the host's PIDs."""


class Conditions(Record, frozen=True, kw_only=True):
    """The arms, the processors and the GPUs right before the load, with all servers up and nothing sent."""

    FILE = "conditions.json"
    schema: Literal["abserve.conditions/1"] = "abserve.conditions/1"
    taken_at: str
    arms: tuple[ArmConditions, ...]
    cpu_busy_share: float | None
    """Busy share of all cores that the load generator may use, over 0.3 s in which nothing was sent."""
    cpu_governors: tuple[str, ...] | None
    """The different governors of all cores; null where the kernel does not report them (virtual machines)."""
    gpus: tuple[GpuCondition, ...]
    """The GPUs; empty without a GPU, or if no server reports one."""


class ServerStart(Record, frozen=True, kw_only=True):
    """One start of one server; times count from just before its process was created."""

    FILE = "cold_starts.json"
    label: Label
    repetition: int
    live_ns: int | None
    ready_ns: int | None
    first_answer_ns: int | None
    error: str | None = None
    conditions: str | None = None
    """State of the machine: "page cache warm, fresh ports, the other servers stopped"."""
    caches: Caches = "cached"
    """Uncached: a first start, which found the folders empty in which servers keep choices and compiled code. It is not
    compared."""
    filled: tuple[str, ...] = ()
    """The caches that a first start has filled, which the server's other starts found warm."""
    plain: bool = False
    """Without the settings that only affect the server's speed, for the handicap check. It is not compared."""
    command_ns: int | None = None
    """The time of the command that plans the start, before the process is created; a first start may choose in it."""
    stages_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds of each stage of the start, by the server's log; empty if it does not say."""

    @property
    def compared(self) -> bool:
        """Whether it is one of the starts whose seconds are compared."""
        return self.caches == "cached" and not self.plain


class ContainerStart(Record, frozen=True, kw_only=True):
    """One start of one container; times count from the request to the engine to start it, except batch latencies."""

    FILE = "container_cold_starts.json"
    label: Label
    repetition: int
    service: str
    image: str
    conditions: str
    caches: Caches = "cached"
    """Whether the compile caches of torch and Triton were kept."""
    started_ns: int | None = None
    """Time at which the engine had created the process."""
    milestones_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """Time of each milestone that the log shows, by the names of `MILESTONES` in
    `loadgen.measure.probes.cold_start_measurement`."""
    live_ns: int | None = None
    ready_ns: int | None = None
    first_answer_ns: int | None = None
    batch_answers_ns: dict[int, int] = msgspec.field(default_factory=dict)
    """Latency of the first request of each batch size, in ascending order, one after the other."""
    error: str | None = None


class AnswersCompared(Record, frozen=True, kw_only=True):
    """Answers of an arm under load in one workload and one start of the servers, compared with the answers to the same
    inputs sent alone, or with recorded ones."""

    FILE = "answers.json"
    workload: str
    label: Label
    restart: int
    answers: int
    """Answers that were compared, chosen by the seed before each block."""
    recorded: int = 0
    """Of these, the ones that were compared with recorded answers."""
    items: int
    """Items in these answers."""
    wrong: int
    """Answers with an item that differs by more than the tolerance."""
    relative_max: float | None
    """Largest relative error of an item; None without any, or if one is infinite."""
    tolerance_relative: float
    top1: float | None = None
    """Share of items with the same highest logit; None without logits."""
    top5: float | None = None
    """Share of items with the same five highest logits; None without logits, or with five classes or fewer."""
    fault: str | None = None
    """The first wrong answer: which request, and how it is wrong."""
    error: str | None = None
    """Why the answers could not be compared."""


class ShadowRecord(Record, frozen=True, kw_only=True):
    """What became of the requests that a shadow chose among those to the primary, and how it compared them."""

    FILE = "shadow.json"
    share: float
    """The share that was asked for."""
    block_seconds: float
    swap: bool = False
    """Whether both servers took turns in answering clients."""
    requests: int = 0
    """To models, chosen or not."""
    copied: int = 0
    dropped: int = 0
    """Chosen and not compared: the candidate or the recorder was too slow."""
    failed: int = 0
    """Copies without a whole answer."""
    unpaired: int = 0
    """Without a whole answer of the primary."""
    refused: int = 0
    """Pairs that both arms refused with a status of 4xx, which are not timed."""
    pairs: int = 0
    compared: int = 0
    """Pairs whose answers were compared."""
    wrong: int = 0
    """Of these, pairs with different answers."""
    drawn: int = 0
    """Pairs of texts that may differ, because their tokens were drawn."""
    lag_p50_ms: float | None = None
    """How much later the copy was sent than the request itself."""
    lag_p99_ms: float | None = None

    @property
    def dropped_share(self) -> float:
        """The part of the chosen requests that was dropped."""
        return self.dropped / max(self.copied + self.dropped, 1)


class ReferenceAnswer(Record, frozen=True, kw_only=True):
    """One answer under load, token by token beside the reference: transformers' own module, given the prompt and the
    answer's own tokens (teacher forcing). The deficit of a token is its logit below the reference's best logit there:
    0 where the reference would have chosen it too."""

    block: str
    """The block or trial it comes from, for messages: "block 12"."""
    request: int
    """Number of the request of its user in that block, from 0."""
    user: int
    tokens: int
    digest: str = ""
    """Of the answer's ids: equal for equal answers."""
    deficit: float | None = None
    """The largest deficit of its tokens, 1e9 for an id that the model does not have; None without a reference."""
    place: int = 0
    """The place of that token, from 0."""
    chosen: int = 0
    """That token."""
    best: int = 0
    """The reference's best token there."""
    largest: float = 0.0
    """The largest magnitude of a logit of the reference."""
    mean: float | None = None
    """The mean deficit of its tokens."""
    noise: float | None = None
    """The mean deficit, at the same places, of the tokens that the reference chooses in the precision that is served;
    only of mixtures of experts."""
    random: float = 0.0
    """The mean deficit of tokens chosen at random."""
    other: int = 0
    """Tokens that are not the reference's best."""
    masked_ends: int = 0
    """Of these, tokens where the reference's best is the end of the text."""


class JudgedAnswers(Record, frozen=True, kw_only=True):
    """Answers of one server or engine beside the reference."""

    answers: tuple[ReferenceAnswer, ...]
    """Chosen by the seed before each block."""
    precision: str | None = None
    """The coarsest precision of all arms, which decides the tolerance."""
    noise: float | None = None
    """The largest deficit between the reference's own batch sizes, which routing of experts may make large."""
    mean_noise: float | None = None
    """Of a mixture of experts: the mean of `ReferenceAnswer.noise` over all answers that the reference judged, ..."""
    most_noise: float | None = None
    """... and the largest."""
    weights_sha256: str = ""
    """Of the weights that the reference used."""
    error: str | None = None
    """Why there is no reference, though the model is known."""


class TokensCompared(JudgedAnswers, frozen=True, kw_only=True):
    """The answers kept of one arm in one workload and one start of the servers, beside the reference."""

    FILE = "token_answers.json"
    workload: str
    label: Label
    restart: int
    firsts: int | None = None
    """Of the probe: prompts to which both the baseline and this arm gave a first token that can be compared. None for
    the baseline, for other workloads and in older runs."""
    equal_firsts: int = 0
    """Of these, prompts to which both gave the same."""
