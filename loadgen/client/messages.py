"""Commands to the load generator and its replies: one line of JSON each, the type in the field `type`.

    Prepare → CommandReply    make the bodies of these batch sizes
    Open    → CommandReply    users spawned and connected, each with one settling request answered
    Go      → BlockOutcome    run the block: all users start together; a `CommandReply` if it cannot
    Abort                     end the running block early; has no reply, its outcome comes as usual

While a block opens and while it runs the generator sends null every second, to say that it is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from loadgen.client.endpoint import Signature
from loadgen.client.event_stream import answer_limit_s
from loadgen.experiment.prompts import SETTLING, PromptPlan, PromptShape
from loadgen.experiment.replay import Replay
from loadgen.experiment.schedule import Offsets, arrival_count, due_offsets_ns
from loadgen.records.run import DEFAULT_ACCESS, Access, Arrivals, WorkerRecord
from loadgen.records.targets import Transport

CONNECT_SECONDS = 30.0
"""How long the users of a block may take to connect."""
SETTLING_FACTOR = 4.0
"""How many times longer a request may take while many users settle than alone on a server that answers one request
after another."""


class GeneratorError(Exception):
    """The load generator refuses a command, gave an unexpected answer or has ended."""


class GeneratorMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Prepare(GeneratorMessage, frozen=True, kw_only=True):
    """Read the samples in a directory and make bodies for a model; replaces those made before under the same key.

    A language model has no samples but `prompts`; its signature has a name and no tensors."""

    samples_directory: str
    payload: str
    signature: Signature
    batch_sizes: tuple[int, ...]
    seed: int
    lengths: tuple[int, ...] = ()
    """Also make bodies whose items are all of one of these lengths."""
    transport: Transport = "http"
    key: str = ""
    """Two arms that are sent different bodies have two keys."""
    prompts: PromptPlan | None = None
    """The prompts of a language model."""
    body: dict[str, Any] = {}
    """What differs from the usual fields of a request to a language model."""
    replays: tuple[Replay, ...] = ()
    """Also make the bodies of these replays."""

    @property
    def sources(self) -> dict[tuple[str, str], Replay]:
        """The replays by what decides their requests; of those with one source the one that has the most of them."""
        longest_last = sorted(self.replays, key=lambda replay: replay.seconds * replay.speed)
        return {replay.source: replay for replay in longest_last}


class Open(GeneratorMessage, frozen=True, kw_only=True):
    """Get ready for one block. Without `samples_path` nothing is stored: a warm-up."""

    url: str
    batch_size: int
    concurrency: int
    requests: int
    seconds: float
    max_seconds: float
    timeout_s: float
    """Most seconds of a request, or of a streamed answer most seconds in which the server sends nothing."""
    samples_path: str | None = None
    grpc_address: str | None = None
    """Address of the server's gRPC, needed for that transport."""
    access: Access = DEFAULT_ACCESS
    """How a server given by URL is reached, with the values of its headers: this message is never stored."""
    key: str = ""
    """Key of the bodies to send, which also determine the transport and the model."""
    length: int | None = None
    """The length of all items; None: of any."""
    shape: PromptShape | None = None
    """Lengths of the prompts and answers of a language model, one of the shapes that were prepared."""
    replay: Replay | None = None
    """A replay that was prepared, without a shape; `arrivals_seed` chooses its window."""
    replay_number: int = 0
    """In the first ids of all prompts of a trace, and in the salt of recorded ones, so that no server finds them in its
    cache from another replay."""
    first_body: int = 0
    """The body to begin with: where inputs differ in length, no body should be the first of every block."""
    arrivals: Arrivals = "closed"
    rate_per_s: float | None = None
    """Rate of an open loop, where `concurrency` is the largest number of connections."""
    arrivals_seed: int = 0
    part: int = 0
    parts: int = 1
    """With several workers: each takes every `parts`-th request of the same schedule, from number `part`. Numbers of
    requests are those of the whole block."""
    counts: int | None = None
    """Descriptor of the memory in which the workers share their counts; see `loadgen.client.traffic`."""
    first_user: int = 0
    """Number of its first user, so that no two workers' users have the same."""
    latency_bound_ns: int | None = None
    """A request that takes longer, from its intended start, is late; with more than `late_allowed` the block ends."""
    late_allowed: int = 0
    keep_answers: int = 0
    """How many of the answers are kept for a comparison with the reference."""
    keep_seed: int = 0
    """Decides which answers are kept."""

    @property
    def shapes(self) -> Sequence[PromptShape]:
        """The lengths of its prompts and of their streamed answers; none of tensors. Raises `TrafficError` for a replay
        that cannot be read."""
        if self.replay is not None:
            return self.replay.shapes()
        return () if self.shape is None else (self.shape,)

    @property
    def answer_limit_s(self) -> float:
        """Most seconds of any request of the block, also of the small one before it. Raises `TrafficError` for a
        replay that cannot be read."""
        if not (shapes := self.shapes):
            return self.timeout_s
        return answer_limit_s(self.timeout_s, max(shape.output_tokens for shape in (SETTLING, *shapes)))

    def settling_users(self, alone_s: float) -> int:
        """How many users may have their settling requests under way at the same time, so that each answer comes within
        the time limit of a request. `alone_s` is the time that one request takes alone."""
        return min(self.concurrency, max(1, int(self.timeout_s / (SETTLING_FACTOR * max(alone_s, 1e-9)))))

    def settling_s(self, alone_s: float) -> float:
        """How long all users together may take for their settling requests."""
        return CONNECT_SECONDS + SETTLING_FACTOR * self.concurrency * alone_s

    def due_offsets_ns(self) -> Offsets | None:
        """The whole schedule of an open loop, of all workers; None for a closed one. Raises `TrafficError` for a
        replay that cannot be read."""
        if self.replay is not None:
            return self.replay.window(self.arrivals_seed)[1]
        if self.arrivals == "closed" or self.rate_per_s is None:
            return None
        count = arrival_count(self.rate_per_s, self.requests, self.seconds, self.max_seconds)
        return due_offsets_ns(self.arrivals, self.rate_per_s, count, self.arrivals_seed)


class Go(GeneratorMessage, frozen=True, kw_only=True):
    """Start the block that was opened: now, or at this moment of the machine's monotonic clock."""

    start_ns: int | None = None


class Abort(GeneratorMessage, frozen=True, kw_only=True):
    """End the running block: no new requests, those in flight finish."""

    reason: str


class CommandReply(GeneratorMessage, frozen=True, kw_only=True):
    """The command is done, or a sentence says why it failed; the generator stays usable."""

    refusal: str | None = None


class KeptTensor(GeneratorMessage, frozen=True, kw_only=True):
    """Some rows of an output: binary data of a NumPy datatype, or for `O` a MessagePack list of byte strings."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class KeptAnswer(GeneratorMessage, frozen=True, kw_only=True):
    """An answer under load. Which items the body holds follows from its number and the seed of the bodies; item `i` of
    the body was sent under the number `first` + i."""

    request: int
    """Number of requests that the block, or its worker, sent before."""
    user: int
    body: int
    first: int
    rows: tuple[int, ...]
    """Items of the body whose outputs are here."""
    outputs: tuple[KeptTensor, ...]
    error: str | None = None
    """Why the answer is wrong before any comparison."""


class BlockOutcome(GeneratorMessage, frozen=True, kw_only=True):
    """The outcome of a block. `cut_reason`: why it ended early. `storage_error`: why its samples are not on disk.
    `cpu_ns`: CPU time of the generator. `spin_ns`: the part of it in which users only waited for the moment to send."""

    window_start_ns: int
    window_end_ns: int
    requests: int
    errors: int
    error_messages: tuple[str, ...]
    cpu_ns: int
    spin_ns: int = 0
    reconnects: int
    cut_reason: str | None
    storage_error: str | None
    transport: Transport = "http"
    body_payload_bytes: tuple[int, ...] = ()
    """Bytes of tensors in each body, by its number."""
    offered: int | None = None
    """Requests that were due in an open loop; those beyond `requests` could not be sent in time."""
    due_span_ns: int | None = None
    """Time from the first due request to the last."""
    workers: tuple[WorkerRecord, ...] = ()
    """With several processes, the outcome of each."""
    late: int = 0
    """Requests that failed or took longer than the block's latency bound."""
    cool_down: int = 0
    """Good answers to requests that kept the load up after the measured part of a closed loop; not in `requests`."""
    cool_down_ns: int = 0
    """Sum of their latencies."""
    cool_down_tokens: int = 0
    """Tokens of their answers, of a language model."""
    first_answer_ns: int | None = None
    """Time of connecting and of the first answer, before the window: the median over the users of a process, and of
    several processes the largest. The wait for other users' first answers is not a part of it."""
    answers: tuple[KeptAnswer, ...] = ()
    generator_waited_ns: int | None = None
    """Time in which the generator could have run and had no core; of several processes the longest. None: unknown."""

    @property
    def requests_per_s(self) -> float | None:
        """Requests per second of the window, in which the users also send the cool-down's; None without a request."""
        seconds, requests = (self.window_end_ns - self.window_start_ns) / 1e9, self.requests + self.cool_down
        return requests / seconds if seconds > 0.0 and requests else None


Command = Prepare | Open | Go | Abort
Reply = CommandReply | BlockOutcome
