"""What a run is asked to do, as it is stored: the arms, the cells and everything that both have in common."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.records.payloads import variant_name

Label = Literal["a", "b"]
Scenario = Literal["cold-start", "single", "batched", "concurrent", "open", "slo", "ramp"]
Arrivals = Literal["closed", "constant", "poisson"]
Transport = Literal["http", "grpc", "shm"]
DeploymentKind = Literal["embedded", "compose"]
Caches = Literal["cached", "uncached"]


EMBEDDED = ("native", "triton")
"""Targets whose servers are ours."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything stored: immutable, named fields, unknown fields refused."""


def setting_key(option: str) -> str:
    """A setting whatever its spelling: --max-batch-size, max-batch-size and max_batch_size are one."""
    return option.lstrip("-").replace("-", "_")


class ArmRequest(Record, frozen=True, kw_only=True):
    """One side as asked for. `target` is native, triton or a URL (a server that somebody else started)."""

    label: Label
    target: str
    settings: dict[str, str] = {}
    """Options for `abserve serve …` beyond those that both arms share, without the leading dashes."""
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
    pairs: int
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

    schema: Literal["abserve.experiment/1"] = "abserve.experiment/1"
    a: ArmRequest
    b: ArmRequest
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
    """How often both servers are started afresh; each restart gets its share of the pairs."""
    until_decided: bool = False
    """Whether pairs are added until the leading comparison of every cell is decided: `Cell.pairs` are the least."""
    time_limit_minutes: float | None = None
    """Of load, with `until_decided`: no round begins that would end later."""
    explain: bool = False
    """Whether the causes of the differences are tested by counterfactual cells after the load."""
    explain_seconds: float = 600.0
    """The longest time for that."""
    ceiling: bool = False
    """Whether the engines of our own servers are measured alone when the servers are stopped."""

    @property
    def payloads(self) -> tuple[str, ...]:
        """What is sent, A's first."""
        return tuple(dict.fromkeys(self.payload_of(arm) for arm in (self.a, self.b)))

    def payload_of(self, arm: ArmRequest) -> str:
        """What an arm is sent."""
        return arm.payload or self.payload

    def model_of(self, arm: ArmRequest) -> str:
        """The name under which an arm serves the variant that takes its payload."""
        return variant_name(self.model, self.payload_of(arm))
