"""What `abserve rank` reads of a price file, and what it finds: `rank.json`, schema abserve.rank/1.

A *machine* is a kind of machine, by its recorded environment. An *option* is an engine configuration or an arm on a
machine. A *point* is one way to run an option, such as a batch size or a workload, with what was measured there. A
*group* holds the options that did the same work, so that they may be compared. Prices are never fetched, and no
currency is converted.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

import msgspec

from loadgen.records.run import Record
from loadgen.stats.estimates import Estimate

PriceKind = Literal["on-demand", "spot", "reserved"]
Source = Literal["engines", "comparison"]
PointKind = Literal["batch", "closed", "open", "slo"]
TOKEN = "token"
"""The item of language models: of a server every token that it sends, of an engine those that it decodes."""
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class PriceMatch(Record, frozen=True, kw_only=True):
    """The machines that a price is for; every condition that is given must hold. Without `gpu` it is for
    machines that have none."""

    gpu: str | None = None
    """Part of the name of every GPU, in any case."""
    gpu_count: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    cpu: str | None = None
    """Part of the CPU's model name, in any case."""
    cpu_count_min: Annotated[int, msgspec.Meta(ge=1)] | None = None
    cpu_count_max: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Price(Record, frozen=True, kw_only=True):
    """One entry of a price file."""

    machine: _Name
    """What the provider calls it."""
    match: PriceMatch
    price_per_hour: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    """Of the whole machine."""
    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]
    """ISO 4217: USD, EUR."""
    kind: PriceKind
    term: _Name | None = None
    """Of a reserved price: 1 year."""
    provider: _Name
    source: _Name
    """Where the price was read, a URL."""
    date: datetime.date
    """When the source stated it."""
    note: str = ""


class PriceFile(Record, frozen=True, kw_only=True):
    """The whole price file."""

    prices: tuple[Price, ...] = ()


class Machine(Record, frozen=True, kw_only=True):
    """A kind of machine: results of equal processors, cores and GPUs belong to one."""

    id: str
    """12 hexadecimal digits over the fields below."""
    name: str
    """Short and unique within a ranking."""
    architecture: str | None
    cpu_model: str | None
    cpu_count: int | None
    gpus: tuple[str, ...]
    """Names of the GPUs that the results list, whether or not they were used."""
    results: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What differs between the results that were joined, such as the driver."""
    prices: tuple[Price, ...] = ()
    """All entries of the price file that match, of every kind, the cheapest first."""


class Point(Record, frozen=True, kw_only=True):
    """One way to run an option."""

    name: str
    """batch 8, concurrent(16), slo(p99≤10ms)."""
    kind: PointKind
    items_per_second: Estimate
    latency_ms: Estimate | None
    """Of a matrix: one batch. Of a comparison: p99 of a request, from its intended start; of a rate search the highest
    p99 among the trials at the rates found. Of tokens: the time from one to the next (TPOT), of an engine the median
    step, of a server the mean over its answers."""
    joules_per_item: Estimate | None = None
    first_token_ms: float | None = None
    """Of tokens: the time to the first one; of an engine the median to that of the last request of a batch, of a server
    the mean over its answers."""
    tpot_p99_ms: float | None = None
    """Of tokens: the p99 of `latency_ms`; of an engine over steps, of a server over answers."""


class Work(Record, frozen=True, kw_only=True):
    """The work that options must share to be ranked against each other."""

    source: Source
    """Items through an engine and items through a server are not the same work."""
    model: str
    precision: str
    weights: str
    payload: str | None = None
    transport: str | None = None
    length: str | None = None
    """Of sequences: 128, or 8–64 where they differ; of a language model's prompts 128, and of a server's prompts and
    answers "32 → 64 tokens"; None for other inputs."""
    item: str = "item"


class Candidate(Record, frozen=True, kw_only=True):
    """An option as a result describes it, before it is ranked."""

    work: Work
    name: str
    """native torch fp16; onnxruntime/graph."""
    machine: str
    """`Machine.id`"""
    result: str
    points: tuple[Point, ...]


class Cost(Record, frozen=True, kw_only=True):
    """Cost per million items at one price. The interval is that of the throughput; the price has none."""

    price: Price
    full: Estimate
    """At the highest measured throughput (a utilisation of 100 %)."""
    slo: Estimate | None = None
    """At the highest rate that held its latency bound."""
    points: tuple[Estimate, ...]
    """In the order of `RankedOption.points`."""
    rank: int
    """By `full`, among the options of the group with a price in this currency."""
    front: tuple[int, ...] = ()
    """Places in `RankedOption.points` that are on the Pareto front of cost against latency."""


class RankedOption(Record, frozen=True, kw_only=True):
    """A ranked option; ranks count from 1, equal values share one."""

    name: str
    machine: str
    """`Machine.name`"""
    result: str
    points: tuple[Point, ...]
    best: int
    """The place of the point with the highest throughput, which is ranked."""
    slo: int | None
    """The place of the point of a rate search; None without one."""
    throughput_rank: int
    latency_rank: int | None
    """By the latency of the best point."""
    energy_rank: int | None
    costs: tuple[Cost, ...] = ()
    """The cheapest matching price of each currency."""

    @property
    def point(self) -> Point:
        return self.points[self.best]


class RankedGroup(Record, frozen=True, kw_only=True):
    """Options that did the same work, the highest throughput first."""

    work: Work
    options: tuple[RankedOption, ...]


class LeftOut(Record, frozen=True, kw_only=True):
    """Something that is not ranked, and why."""

    result: str
    what: str
    reason: str


class RankResult(Record, frozen=True, kw_only=True):
    """The whole ranking. Fields are only added, with a default."""

    schema: Literal["abserve.rank/1"] = "abserve.rank/1"
    kind: PriceKind
    """The kind of price that costs are at."""
    price_file: str
    example_prices: bool
    """Whether they are the examples that abserve ships, and not the user's."""
    machines: tuple[Machine, ...]
    groups: tuple[RankedGroup, ...]
    left_out: tuple[LeftOut, ...]
