"""The order of blocks, and when the requests of an open loop are due: pure functions of settings and a seed.

Blocks come in rounds, one block per arm, so that slow drift (temperature, clocks, neighbours) affects all arms alike.
The order inside a round is random but balanced: in n successive rounds of a workload with n arms, each arm comes once
in each place (a Latin square; with two arms ABBA or BAAB), so an advantage of coming first or last cancels.

The workloads are interleaved: each pass holds one round of every workload that has any left, in random order. So the
rounds of a workload spread over the whole run, their scatter includes the machine's drift, and an interrupted run has
some rounds of every workload. Several restarts of the servers share the rounds of each workload evenly.

The arrivals of an open loop are computed before the load. All arms of a round get the same ones, and each of n workers
takes every n-th. Poisson arrivals have independent exponential gaps; constant ones are 1/rate apart. The first request
is due at 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.records.run import Arrivals, Experiment, Label, Workload
from loadgen.records.targets import Kind

RATE_LIMIT_PER_S = 100_000.0
"""Above this rate the generator cannot send the requests one by one."""
OPEN_WARM_UP_USERS = 8
_DRAIN_SHARE = 0.25
_LEAST_DRAIN_SECONDS = 1.0
_CHUNK = 4096
_BETWEEN_BLOCKS_SECONDS = 0.3
_WHOLE_BLOCK = 1.25
"""Length of a block with its cool-down, divided by the time in which its requests begin."""
_COOL_DOWN = 0.75
"""The cool-down in requests, where one takes long: it begins somewhere within a request and ends with one."""

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScheduledBlock:
    """One planned block; `position` counts the arms of its round from 0."""

    index: int
    workload: Workload
    round: int
    label: Label
    position: int
    restart: int = 0


def closed_loop(
    concurrency: int,
    requests: int,
    *,
    batch_size: int = 1,
    seconds: float = 0.0,
    max_seconds: float,
    length: int | None = None,
    rate_per_s: float | None = None,
    of: Workload | None = None,
) -> Workload:
    """A load that is not one of the experiment's workloads, of the same requests as the workload `of`. `rate_per_s` is
    the rate of the open loop that it stands for; its users do not wait for it."""
    load = Workload(
        scenario="concurrent", batch_size=batch_size, concurrency=concurrency, requests=requests, seconds=seconds,
        max_seconds=max_seconds, rounds=1, sequence_length=length, rate_per_s=rate_per_s,
    )  # fmt: skip
    return load if of is None else msgspec.structs.replace(load, **request_shape(of)._asdict())


class RequestShape(NamedTuple):
    """What all requests of a workload have in common."""

    batch_size: int
    sequence_length: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    shared_prefix: int

    @property
    def words(self) -> str:
        """The shape for a message: "batch 8, length 32", "32 → 64 tokens"."""
        if self.output_tokens is not None:
            shared = f", {self.shared_prefix} of them shared" if self.shared_prefix else ""
            return f"{self.prompt_tokens} → {self.output_tokens} tokens{shared}"
        return f"batch {self.batch_size}" + ("" if self.sequence_length is None else f", length {self.sequence_length}")


def request_shape(workload: Workload) -> RequestShape:
    return RequestShape(*(getattr(workload, name) for name in RequestShape._fields))


def warm_up_users(workload: Workload) -> int:
    """Users of the warm-up: few for an open loop, whose connections are only a limit."""
    return min(workload.concurrency, OPEN_WARM_UP_USERS) if workload.is_open else workload.concurrency


def block_seconds(workload: Workload, request_s: float | None = None) -> float:
    """About how long a block takes, with its cool-down and the moment before it, on an arm that needs `request_s` for
    a request at that load; without it as long as planned."""
    if workload.is_open or request_s is None or workload.kind is Kind.TENSORS:
        return _WHOLE_BLOCK * workload.seconds + _BETWEEN_BLOCKS_SECONDS
    sent = max(workload.seconds, math.ceil(workload.requests / workload.concurrency) * request_s)
    return min(sent, workload.max_seconds) + _COOL_DOWN * request_s + _BETWEEN_BLOCKS_SECONDS


def load_workloads(workloads: Sequence[Workload]) -> list[Workload]:
    """The workloads with blocks; cold starts and searches have their own order."""
    return [workload for workload in workloads if workload.has_blocks]


def has_load(experiment: Experiment) -> bool:
    """Whether any workload has blocks."""
    return bool(load_workloads(experiment.workloads))


def sends_load(experiment: Experiment) -> bool:
    """Whether any workload has blocks, or trials of a search."""
    return has_load(experiment) or bool(search_schedule(experiment))


def arm_orders(labels: Sequence[Label], rounds: int, random: Random) -> list[tuple[Label, ...]]:
    """The order of the arms in each of `rounds` successive rounds, balanced over every `len(labels)` of them."""
    orders: list[tuple[Label, ...]] = []
    while len(orders) < rounds:
        first = list(labels)
        random.shuffle(first)
        square = [(*first[shift:], *first[:shift]) for shift in range(len(first))]
        random.shuffle(square)
        orders.extend(square)
    return orders[:rounds]


def schedule(experiment: Experiment) -> tuple[ScheduledBlock, ...]:
    """All load blocks, in order."""
    load = load_workloads(experiment.workloads)
    return interleave(load, experiment.labels, experiment.seed, experiment.restarts)


def search_schedule(experiment: Experiment) -> tuple[ScheduledBlock, ...]:
    """All searches, in order: each entry is one of them on one arm, with as many trials as it takes."""
    searches = [workload for workload in experiment.workloads if workload.is_search]
    return interleave(searches, experiment.labels, experiment.seed, experiment.restarts)


def interleave(
    workloads: Sequence[Workload], labels: Sequence[Label], seed: int, restarts: int = 1
) -> tuple[ScheduledBlock, ...]:
    """Every round of the workloads, in the order that the module describes."""
    random = Random(seed)
    orders = {workload.name: arm_orders(workload.loaded(labels), workload.rounds, random) for workload in workloads}
    blocks: list[ScheduledBlock] = []
    for restart in range(restarts):
        shares = {workload.name: range(*_share(workload.rounds, restart, restarts)) for workload in workloads}
        for place in range(max((len(share) for share in shares.values()), default=0)):
            in_pass = [workload for workload in workloads if place < len(shares[workload.name])]
            random.shuffle(in_pass)
            for workload in in_pass:
                number = shares[workload.name][place]
                blocks += round_of(workload, number, orders[workload.name][number], len(blocks), restart)
    return tuple(blocks)


def round_of(workload: Workload, number: int, order: Sequence[Label], index: int, restart: int) -> list[ScheduledBlock]:
    """The blocks of one round, numbered from `index`."""
    return [
        ScheduledBlock(index + position, workload, number, label, position, restart)
        for position, label in enumerate(order)
    ]


def endless_passes(
    workloads: Sequence[Workload], labels: Sequence[Label], seed: int, first: int = 0, restart: int = 0
) -> Iterator[list[list[ScheduledBlock]]]:
    """Endless passes with one round of every workload with blocks, numbered from `first` and balanced as in `schedule`.
    The caller decides which rounds of a pass run, and numbers their blocks, which here begin with 0 in each round;
    leaving out a workload from some pass on keeps it balanced."""
    random = Random(seed)
    load = load_workloads(workloads)
    number, passes = first, passes_in_balance(workloads, labels)
    while True:
        orders = {workload.name: arm_orders(workload.loaded(labels), passes, random) for workload in load}
        for place in range(passes):
            in_pass = [round_of(each, number + place, orders[each.name][place], 0, restart) for each in load]
            random.shuffle(in_pass)
            yield in_pass
        number += passes


def passes_in_balance(workloads: Sequence[Workload], labels: Sequence[Label]) -> int:
    """After so many passes each arm of every workload has come equally often in each place."""
    return math.lcm(*(len(workload.loaded(labels)) for workload in load_workloads(workloads)))


def _share(rounds: int, restart: int, restarts: int) -> tuple[int, int]:
    """The first round of one restart, and the first of the next."""
    return rounds * restart // restarts, rounds * (restart + 1) // restarts


def arrival_count(rate_per_s: float, requests: int, seconds: float, max_seconds: float) -> int:
    """Requests due in a block: at least `requests` and `seconds` of this rate, at most `max_seconds` of it,
    and never fewer than 2, so that there is a span."""
    least = max(requests, math.ceil(rate_per_s * seconds))
    return max(2, min(least, math.ceil(rate_per_s * max_seconds)))


def due_offsets_ns(arrivals: Arrivals, rate_per_s: float, count: int, seed: int) -> Offsets:
    """When each of `count` requests is due, in ns from the start of the block, ascending. The same arguments give the
    same schedule. Raises `ValueError` for a closed loop."""
    if arrivals == "closed" or rate_per_s <= 0.0 or count < 1:
        raise ValueError(f"no schedule for {count} {arrivals} arrivals at {rate_per_s:g}/s")
    gap_ns = 1e9 / rate_per_s
    if arrivals == "constant":
        return np.asarray(np.round(np.arange(count) * gap_ns), dtype=np.int64)
    gaps = np.random.default_rng(seed).exponential(gap_ns, count)
    gaps[0] = 0.0
    return np.asarray(np.round(np.cumsum(gaps)), dtype=np.int64)


def endless_offsets_ns(arrivals: Arrivals, rate_per_s: float, seed: int) -> Iterator[int]:
    """An endless schedule, for a test that a person stops; it draws other numbers than `due_offsets_ns`."""
    random = np.random.default_rng(seed)
    gap_ns, last = 1e9 / rate_per_s, 0.0
    for first in count(0, _CHUNK):
        if arrivals == "constant":
            yield from np.round(np.arange(first, first + _CHUNK) * gap_ns).astype(np.int64).tolist()
            continue
        moments = last + np.cumsum(random.exponential(gap_ns, _CHUNK))
        last = float(moments[-1])
        yield from np.round(moments).astype(np.int64).tolist()


def drain_ns(span_ns: int) -> int:
    """How long overdue requests are still sent after the last one was due: a quarter of the schedule's span, at least a
    second. Requests unsent by then stay unsent: the rate was not sustained."""
    return max(int(_LEAST_DRAIN_SECONDS * 1e9), int(_DRAIN_SHARE * span_ns))


def schedule_seed(seed: int, workload: str, pair: int) -> int:
    """The seed of one round's schedule: the same for all arms, different for every round and workload."""
    return int(np.random.SeedSequence([seed & (2**64 - 1), zlib.crc32(workload.encode()), pair]).generate_state(1)[0])
