"""Every server at its best: the settings chosen for each load, one configuration for all loads, and what was tried.

    DIR/best.json     BestRecord   what was tried and chosen, written before the comparison
    DIR/choices/…     the short runs that chose, see `loadgen.tune.best`

The comparison measures the chosen configurations freshly: no figure of the two tables comes from a run that chose,
since the best of many looks better than it is. What one configuration for all loads loses is its ratio to the
configuration that was chosen for the load; the geometric mean counts every load once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.base.quantities import Interval
from loadgen.metrics.claims import WorkloadRanking, rank
from loadgen.metrics.comparisons import Comparison, PooledRequests, compare_all, leading_comparisons, log_lead
from loadgen.metrics.facts import Facts
from loadgen.metrics.registry import leading_metric
from loadgen.metrics.summaries import figure_of, interval_of
from loadgen.records.run import Found, Label, Record, Workload
from loadgen.stats.estimates import Estimate
from loadgen.stats.ratios import geometric_mean


class TriedConfiguration(Record, frozen=True, kw_only=True):
    """One server with some of its settings."""

    name: Label
    """Its arm in the runs that chose, such as c-0 for the arm c as it was asked for."""
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    """What differs from the arm as it was asked for; empty for that one."""
    arm: Label | None = None
    """Its arm in the comparison; None if it was chosen for no load."""
    out: str | None = None
    """Why it could not be measured, in one sentence."""


class Tried(Record, frozen=True, kw_only=True):
    """What the runs that chose measured of one configuration in one workload."""

    configuration: Label
    workload: str
    value: float
    """By the leading metric of the workload."""
    gain: Estimate
    """How many times better it is than the arm as it was asked for."""


class TriedServer(Record, frozen=True, kw_only=True):
    """One server: what was tried and chosen."""

    server: Label
    """The arm that the user named."""
    target: str
    configurations: tuple[TriedConfiguration, ...]
    """The first is the arm as it was asked for."""
    defaults: dict[str, str] = msgspec.field(default_factory=dict)
    """The values there of the settings that are tried."""
    tried: tuple[Tried, ...] = ()
    best: dict[str, Label] = msgspec.field(default_factory=dict)
    """By workload the configuration that is compared."""
    compromise: Label
    """The configuration that loses least over all workloads together."""

    def named(self, configuration: Label) -> TriedConfiguration:
        return next(entry for entry in self.configurations if entry.name == configuration)

    def settings_in_words(self, configuration: TriedConfiguration) -> str:
        """ "instances=4, threads=1" """
        if not configuration.settings and not self.defaults:
            return "as asked for"
        values = {**self.defaults, **configuration.settings}
        words = ", ".join(f"{name}={value}" for name, value in values.items())
        return words if configuration.settings else f"{words} (as asked for)"


class BestRecord(Record, frozen=True, kw_only=True):
    """DIR/best.json."""

    FILE = "best.json"
    servers: tuple[TriedServer, ...]
    problems: tuple[str, ...] = ()
    """Why a run that should have chosen counts for nothing, a sentence each."""
    settings: dict[str, object] = msgspec.field(default_factory=dict)
    """Those of the whole as asked for, so that it can go on after an interruption."""
    done: bool = False
    """Whether everything is chosen."""
    seconds: float = 0.0
    """That choosing took."""
    processes: int = 0
    """Of the load generator, which the runs that chose needed."""


class ServerFigure(Record, frozen=True, kw_only=True):
    """What the comparison measured of one server in one workload."""

    workload: str
    server: Label
    arm: Label
    metric: str
    unit: str
    value: float | None
    ci95: Interval | None
    loss: Estimate | None = None
    """How many times better the configuration chosen for this load is; 1 for that one, None if it was not measured."""


class BestFound(Found, frozen=True, kw_only=True):
    """Each server at its best for each load, and with one configuration for all loads."""

    STUDY = "best"
    servers: tuple[TriedServer, ...] = ()
    problems: tuple[str, ...] = ()
    at_best: tuple[ServerFigure, ...] = ()
    compromises: tuple[ServerFigure, ...] = ()
    mean_loss: dict[Label, float] = msgspec.field(default_factory=dict)
    """By server the geometric mean, over the workloads, of what its one configuration loses; 1 loses nothing."""
    rankings: tuple[WorkloadRanking, ...] = ()
    """The servers with one configuration each, in every workload with a valid comparison."""

    def settings_of(self, arm: Label) -> str:
        """The settings of an arm of the comparison that were tried, in words."""
        every = ((server, entry) for server in self.servers for entry in server.configurations)
        return next((server.settings_in_words(entry) for server, entry in every if entry.arm == arm), "")


def analyse(facts: Facts) -> BestFound:
    """The figures of both tables, from the comparison alone."""
    stored, experiment = facts.run.record_of(BestRecord), facts.run.experiment
    if stored is None:
        return BestFound()
    loads = [workload for workload in experiment.workloads if workload.has_blocks]
    one_each = {server.server: server.named(server.compromise).arm or server.server for server in stored.servers}
    at_best, compromises = [], []
    for server in stored.servers:
        apart = [
            msgspec.structs.replace(load, arms=(one_each[server.server], best), beside=())
            for load in loads
            if (best := experiment.arm_of(server.server, load.name)) != one_each[server.server]
        ]
        losses = {
            c.workload: None if (logs := log_lead(c, c.arm)) is None else logs.exp()
            for c in leading_comparisons(_compared(facts, apart))
        }
        for load in loads:
            best = experiment.arm_of(server.server, load.name)
            at_best.append(_figure(facts, load, server.server, best))
            loss = losses.get(load.name) if best != one_each[server.server] else Estimate(1.0, 1.0, 1.0)
            compromises.append(_figure(facts, load, server.server, one_each[server.server], loss))
    mean_loss = {
        server: geometric_mean([loss.value for loss in known])
        for server in one_each
        if len(known := [f.loss for f in compromises if f.server == server and f.loss is not None]) == len(loads)
        and loads
    }
    return BestFound(
        servers=stored.servers, problems=stored.problems, at_best=tuple(at_best), compromises=tuple(compromises),
        mean_loss=mean_loss,
    )  # fmt: skip


def conclude(finding: BestFound, facts: Facts) -> BestFound:
    """With the order of the servers with one configuration each, where the checks leave a verdict."""
    usable = {c.workload for c in leading_comparisons(facts.comparisons) if c.verdict != "invalid"}
    arms = tuple(dict.fromkeys(figure.arm for figure in finding.compromises))
    loads = [
        msgspec.structs.replace(load, arms=arms, beside=())
        for load in facts.run.experiment.workloads
        if load.name in usable and len(arms) > 1
    ]
    return msgspec.structs.replace(finding, rankings=rank(_compared(facts, loads), lambda _: arms[0]))


def _compared(facts: Facts, loads: Sequence[Workload]) -> tuple[Comparison, ...]:
    """The comparisons of the arms that these workloads name, as if there were no others."""
    if not loads:
        return ()
    view = msgspec.structs.replace(facts.run.experiment, workloads=tuple(loads))
    pooled = PooledRequests(facts.run.blocks).by_block if any(load.is_open for load in loads) else None
    return compare_all(view, facts.blocks, requests=pooled, item=facts.item, names=facts.names)


def _figure(facts: Facts, load: Workload, server: Label, arm: Label, loss: Estimate | None = None) -> ServerFigure:
    metric = leading_metric(load)
    summary = next((s for s in facts.summaries if (s.workload, s.label) == (load.name, arm)), None)
    return ServerFigure(
        workload=load.name, server=server, arm=arm, metric=metric.name, unit=metric.unit_for(facts.item),
        value=None if summary is None else figure_of(summary, metric),
        ci95=None if summary is None else interval_of(summary, metric), loss=loss,
    )  # fmt: skip
