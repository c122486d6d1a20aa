"""Ranks the options of stored results: throughput, latency, energy, cost, and the Pareto front of cost and latency.

    cost per million items = price per hour ÷ (items per second × 3600) × 1,000,000

The intervals are those of the results. Ranks and the front go by the values alone, so options with overlapping
intervals may stand in either order. What of a result cannot be ranked is left out with the reason.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from loadgen.checks.registry import complaints, gravest, validity
from loadgen.engines.analyse import has_copies
from loadgen.experiment.schedule import request_shape
from loadgen.findings.gpu.analysis import GpuFound
from loadgen.findings.rate_search import RatesFound
from loadgen.metrics.registry import METRICS, RATES, TPOT, TTFT, Metric
from loadgen.metrics.summaries import figure_of, interval_of, items_per_request
from loadgen.metrics.tokens import per_million
from loadgen.ranking.prices import prices_of
from loadgen.records.checks import Check
from loadgen.records.machine import own_devices
from loadgen.records.matrix import ConfigurationResult, Matrix, shape_text
from loadgen.records.ranks import (
    TOKEN,
    Candidate,
    Cost,
    LeftOut,
    Machine,
    Point,
    Price,
    PriceKind,
    RankedGroup,
    RankedOption,
    RankResult,
    Work,
)
from loadgen.records.run import ArmRecord, Environment, Label, Workload, item_of, shown
from loadgen.records.targets import Kind
from loadgen.stats.estimates import Estimate, pareto_front
from loadgen.stats.ratios import interval_of_mean, mean_over_starts
from loadgen.verdict.result import Result

NOT_REPORTED = "not reported"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_JOINED = {"kernel": "kernels", "python": "Python versions", "virtualisation": "virtualisations"}
"""Fields of `Environment.host` that do not tell kinds of machines apart, but are named where they differ."""


LATENCY: Mapping[Kind, Metric] = {Kind.TENSORS: METRICS["latency_p99"], Kind.TOKENS: TPOT}
"""What `Point.latency_ms` is of a server."""


@dataclass(frozen=True, slots=True)
class RankInput:
    """The options of one result. `environment` is None if the run failed before it recorded its machine."""

    name: str
    environment: Environment | None
    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]


def machine_of(environment: Environment) -> Machine:
    """The kind of machine, without results; `name` is not unique yet."""
    host = environment.host
    gpus = tuple(sorted(str(device.get("name") or "GPU") for device in own_devices(environment.gpu)))
    cores = host.get("cpu_count")
    identity = {
        "architecture": _text(host.get("architecture")),
        "cpu_model": _text(host.get("cpu_model")),
        "cpu_count": cores if isinstance(cores, int) else None,
        "gpus": gpus,
    }
    digest = hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:12]
    kinds = [f"{count} × {name}" if (count := gpus.count(name)) > 1 else name for name in dict.fromkeys(gpus)]
    counted = f"{cores} cores" if isinstance(cores, int) else "unknown CPU"
    name = ", ".join([*(kind.replace("NVIDIA ", "") for kind in kinds), counted])
    return msgspec.convert({"id": digest, "name": name, **identity}, Machine)


def join_machines(reads: list[RankInput]) -> tuple[Machine, ...]:
    """One machine per kind with its results, and what differs between those; the names are unique."""
    machines: dict[str, Machine] = {}
    environments: dict[str, list[Environment]] = {}
    for read in reads:
        if read.environment is not None:
            machine = machine_of(read.environment)
            before = machines.get(machine.id, machine)
            machines[machine.id] = replace(before, results=(*before.results, read.name))
            environments.setdefault(machine.id, []).append(read.environment)
    names = [machine.name for machine in machines.values()]
    unique = []
    for key, machine in machines.items():
        name = machine.name
        if names.count(name) > 1:
            name = f"{name} ({names[: list(machines).index(key)].count(name) + 1})"
        unique.append(replace(machine, name=name, notes=tuple(_notes(environments[key]))))
    return tuple(unique)


def _notes(environments: list[Environment]) -> Iterator[str]:
    """What differs between results of one kind of machine."""
    for field, words in _JOINED.items():
        values = {str(environment.host.get(field)) for environment in environments}
        if len(values) > 1:
            yield f"the results have different {words}: {', '.join(sorted(values))}"
    drivers = {
        str(nvml.get("driver_version"))
        for environment in environments
        if isinstance(nvml := environment.gpu.get("nvml"), dict)
    }
    if len(drivers) > 1:
        yield f"the results have different GPU drivers: {', '.join(sorted(drivers))}"
    uuids = {tuple(sorted(str(d.get("uuid")) for d in own_devices(environment.gpu))) for environment in environments}
    if len(uuids) > 1:
        yield f"the results come from {len(uuids)} machines of this kind, told apart by their GPUs"


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _why_not(checks: Sequence[Check]) -> str:
    """ "it is INVALID: …", "it is ROUGH: …" """
    reasons = complaints(checks) or complaints(checks, "roughens")
    return f"it is {validity(checks).partition(':')[0]}: {'; '.join(reasons) or 'see its report'}"


def from_matrix(name: str, matrix: Matrix) -> RankInput:
    """One option per configuration and sequence length, with a point per batch size."""
    if gravest(matrix.checks):
        left = LeftOut(result=name, what="its engines", reason=_why_not(matrix.checks))
        return RankInput(name, matrix.environment, (), (left,))
    machine = machine_of(matrix.environment).id
    candidates, left_out = [], []
    for place, measured in enumerate(matrix.configurations):
        configuration = measured.configuration
        cells = [cell for cell in matrix.cells if cell.configuration == place]
        copied = any(has_copies(cell, configuration.device) for cell in cells)
        option = configuration.name + (" (with copies)" if copied else "")
        payload = matrix.plan.settings.get("payload")
        if not cells:
            error = measured.errors[0] if measured.errors else "no cell was measured"
            left_out.append(LeftOut(result=name, what=f"{option}, {configuration.model}", reason=error))
        for length in dict.fromkeys(cell.length for cell in cells):
            points = []
            for cell in (cell for cell in cells if cell.length == length):
                reason = cell.excluded or cell.fault
                if reason is None and not cell.items_per_second.value > 0.0:
                    reason = "no throughput was measured"
                if reason is not None:
                    what = f"{option}, {configuration.model}, {shape_text(cell.shape)}"
                    left_out.append(LeftOut(result=name, what=what, reason=reason))
                    continue
                generated, p99_ns = cell.generation, cell.p99_ns
                points.append(
                    Point(
                        name=f"batch {cell.batch}",
                        kind="batch",
                        items_per_second=cell.items_per_second,
                        latency_ms=cell.latency_ns.scaled(1e-6),
                        joules_per_item=cell.joules_per_item,
                        first_token_ms=None if generated is None else generated.first_token_ns.value / 1e6,
                        tpot_p99_ms=None if generated is None or p99_ns is None else p99_ns / 1e6,
                    )
                )
            if points:
                work = Work(
                    source="engines",
                    model=configuration.model,
                    precision=configuration.precision,
                    weights=_weights_of(measured, matrix),
                    length=None if length is None else str(length),
                    payload=None if payload is None else str(payload),
                    item=measured.item,
                )
                candidates.append(Candidate(work=work, name=option, machine=machine, result=name, points=tuple(points)))
    if matrix.state is None or matrix.state.state != "finished":
        reason = "the run did not finish; continue it with abserve engines --resume DIR"
        left_out.append(LeftOut(result=name, what="the rounds that are missing", reason=reason))
    for refusal in matrix.plan.refused:
        asked = refusal.configuration
        what = f"{asked.engine_mode}, {asked.model}, {asked.precision}, {asked.device}"
        left_out.append(LeftOut(result=name, what=what, reason=refusal.reason))
    return RankInput(name, matrix.environment, tuple(candidates), tuple(left_out))


def _weights_of(configured: ConfigurationResult, matrix: Matrix) -> str:
    return str(configured.description.get("weights") or matrix.plan.settings.get("weights") or NOT_REPORTED)


def from_result(name: str, result: Result) -> RankInput:
    """One option per arm and sequence length, with a point per workload."""

    def nothing(reason: str) -> RankInput:
        left = LeftOut(result=name, what=f"the comparison of {result.experiment.model}", reason=reason)
        return RankInput(name, result.environment, (), (left,))

    if result.experiment.screening:
        return nothing("it is a screening of `abserve tune`, which chose; rank the final of its tuning")
    if not result.valid:
        return nothing(_why_not(result.checks))
    if result.environment is None:
        return nothing("it does not describe its machine")
    machine = machine_of(result.environment).id
    weights = next((str(arm.in_effect["weights"]) for arm in result.arms if arm.in_effect.get("weights")), None)
    options = Counter(map(_arm_name, result.arms))
    candidates: list[Candidate] = []
    left_out: list[LeftOut] = []
    for arm in result.arms:
        what = f"{shown(arm.label)} {arm.title}"
        if not arm.launched and (urlsplit(arm.url).hostname or "") not in _LOOPBACK:
            reason = "the result describes the load generator's machine, and this server ran on another one"
            left_out.append(LeftOut(result=name, what=what, reason=reason))
            continue
        request = result.experiment.arm(arm.label)
        by_length: dict[str | None, list[Point]] = {}
        planned = [load for load in result.experiment.workloads if arm.label in result.experiment.loaded(load)]
        for workload in planned:
            point, reason = _point(result, arm.label, workload)
            if point is not None:
                by_length.setdefault(_length(result.environment, workload), []).append(point)
            elif reason:
                left_out.append(LeftOut(result=name, what=f"{what} in {workload.name}", reason=reason))
        for length, points in by_length.items():
            work = Work(
                source="comparison",
                model=result.experiment.reference_of(request),
                precision=str(arm.in_effect.get("precision") or NOT_REPORTED),
                weights=str(arm.in_effect.get("weights") or weights or result.experiment.weights),
                payload=result.experiment.payload_of(request),
                transport=result.experiment.transport_of(request),
                length=length,
                item={Kind.TENSORS: item_of(result.environment), Kind.TOKENS: TOKEN}[result.experiment.kind],
            )
            option = _arm_name(arm)
            if options[option] > 1:
                option = f"{option}: {result.names[arm.label]}"
            candidates.append(Candidate(work=work, name=option, machine=machine, result=name, points=tuple(points)))
    return RankInput(name, result.environment, tuple(candidates), tuple(left_out))


def _arm_name(arm: ArmRecord) -> str:
    """The arm's title; the device is named where the title does not."""
    mode = str(arm.in_effect.get("mode") or "")
    return arm.title if not mode or mode in arm.title else f"{arm.title} ({mode})"


def _length(environment: Environment, workload: Workload) -> str | None:
    if workload.kind is Kind.TOKENS:
        if workload.traffic is not None:
            return f"traffic {workload.traffic} at speed {workload.speed:g}"
        return f"trace {workload.trace}" if workload.trace is not None else request_shape(workload).words
    fixed = environment.length_of(workload)
    if fixed is not None:
        return str(fixed)
    least, most = environment.inputs.get("length_min"), environment.inputs.get("length_max")
    return None if most is None else f"{least}–{most}"


def _point(result: Result, label: Label, workload: Workload) -> tuple[Point | None, str]:
    """An arm's point in a workload, or why it is not ranked; the reason is empty for a workload of another kind."""
    if any(
        comparison.workload == workload.name
        and label in (comparison.baseline, comparison.arm)
        and comparison.verdict == "invalid"
        for comparison in result.comparisons
    ):
        return None, "a check that covers it failed"
    if workload.scenario in ("slo", "goodput"):
        return _slo_point(result, label, workload)
    if not workload.has_blocks:
        return None, ""
    summary = next((s for s in result.summaries if (s.workload, s.label) == (workload.name, label)), None)
    if summary is None or not summary.throughput_per_s:
        return None, "no throughput was measured"
    if summary.open_loop is not None and summary.open_loop.saturation is not None:
        return None, f"{summary.open_loop.saturation}, so that its latency depends on the length of the run"
    rate, latency = RATES[workload.kind], LATENCY[workload.kind]
    speed, latency_ms = figure_of(summary, rate), figure_of(summary, latency)
    if not speed:
        return None, "no tokens were counted"
    joules = result.of(GpuFound).joules_per_item(label, workload.name)
    return Point(
        name=workload.name,
        kind="open" if workload.is_open else "closed",
        items_per_second=Estimate.of(speed, interval_of(summary, rate)),
        latency_ms=None if latency_ms is None else Estimate.of(latency_ms, interval_of(summary, latency)),
        joules_per_item=None if joules is None else Estimate(joules / (speed / summary.throughput_per_s)),
        first_token_ms=figure_of(summary, TTFT),
        tpot_p99_ms=figure_of(summary, METRICS["tpot_p99"]),
    ), ""


def _slo_point(result: Result, label: Label, workload: Workload) -> tuple[Point | None, str]:
    """The rate that held the bound: the geometric mean of the searches, in items."""
    rate_search = result.of(RatesFound)
    searches = [rate for rate in rate_search.rates if (rate.workload, rate.label) == (workload.name, label)]
    items = items_per_request(workload, label, result.experiment.workloads, result.summaries, result.blocks)
    if items is None:
        return None, "no recorded request was answered in a replay, so the items of a request are not known"
    rates: dict[int, list[float]] = {}
    for search in searches:
        if search.rate_per_s:
            rates.setdefault(search.restart, []).append(search.rate_per_s * items)
    starts = list(rates.values())
    if not starts:
        return None, "no rate held the latency bound"
    if (held := sum(map(len, starts))) < len(searches):
        return None, f"only {held} of {len(searches)} searches found a rate that held the latency bound"
    at_rates = {(search.round, search.rate_per_s) for search in searches}
    tails = [
        trial.p99_ms
        for trial in rate_search.trials
        if (trial.workload, trial.label) == (workload.name, label)
        and trial.held
        and trial.p99_ms is not None
        and (trial.round, trial.rate_per_s) in at_rates
    ]
    return Point(
        name=workload.name,
        kind="slo",
        items_per_second=Estimate.of(mean_over_starts(starts), interval_of_mean(starts)),
        latency_ms=Estimate(value=max(tails)) if tails and workload.kind is Kind.TENSORS else None,
    ), ""


def cost_per_million(price_per_hour: float, items_per_second: Estimate) -> Estimate:
    """Cost per million items with the inverted interval of the throughput; a bound at or below 0 gives no bound."""
    if items_per_second.value <= 0.0:
        raise ValueError("a cost needs a throughput above 0")
    return items_per_second.inverted(per_million(price_per_hour, 1.0))


def rank(
    reads: Sequence[RankInput],
    prices: Sequence[Price],
    kind: PriceKind = "on-demand",
    *,
    model: str | None = None,
    precision: str | None = None,
    price_file: str = "",
    example_prices: bool = False,
) -> RankResult:
    """Rank the options of results, only those of this model and precision if given."""
    machines = tuple(replace(machine, prices=prices_of(machine, prices)) for machine in join_machines(list(reads)))
    by_id = {machine.id: machine for machine in machines}
    groups: dict[Work, list[Candidate]] = {}
    left_out = [omission for read in reads for omission in read.left_out]
    for candidate in (candidate for read in reads for candidate in read.candidates):
        reason = _not_asked_for(candidate.work, model, precision)
        if reason is None:
            groups.setdefault(candidate.work, []).append(candidate)
        else:
            left_out.append(LeftOut(result=candidate.result, what=candidate.name, reason=reason))
    ordered = sorted(groups, key=lambda work: (work.source, work.model, work.precision, work.weights, str(work)))
    return RankResult(
        kind=kind,
        price_file=price_file,
        example_prices=example_prices,
        machines=machines,
        groups=tuple(_group(work, groups[work], by_id, kind) for work in ordered),
        left_out=tuple(left_out),
    )


def _not_asked_for(work: Work, model: str | None, precision: str | None) -> str | None:
    for option, asked, actual in (("--model", model, work.model), ("--precision", precision, work.precision)):
        if asked is not None and asked != actual:
            return f"{option} asks for {asked}, and this is {actual}"
    return None


def _group(work: Work, candidates: Sequence[Candidate], machines: dict[str, Machine], kind: PriceKind) -> RankedGroup:
    best = [_best(candidate) for candidate in candidates]
    points = [candidate.points[place] for candidate, place in zip(candidates, best, strict=True)]
    speeds = _ranks([-point.items_per_second.value for point in points])
    latencies = _ranks([None if point.latency_ms is None else point.latency_ms.value for point in points])
    energies = _ranks([None if point.joules_per_item is None else point.joules_per_item.value for point in points])
    options = [
        RankedOption(
            name=candidate.name,
            machine=machines[candidate.machine].name,
            result=candidate.result,
            points=candidate.points,
            best=place,
            slo=_slo(candidate),
            throughput_rank=speed or 0,
            latency_rank=latency,
            energy_rank=energy,
        )
        for candidate, place, speed, latency, energy in zip(candidates, best, speeds, latencies, energies, strict=True)
    ]
    used = [_cheapest(machines[candidate.machine].prices, kind) for candidate in candidates]
    for currency in sorted({currency for prices in used for currency in prices}):
        options = _with_costs(options, [prices.get(currency) for prices in used])
    return RankedGroup(
        work=work,
        options=tuple(sorted(options, key=lambda option: (option.throughput_rank, option.name, option.machine))),
    )


def _best(candidate: Candidate) -> int:
    """The point with the highest throughput; a rate that a server sustained is a throughput as well."""
    return max(range(len(candidate.points)), key=lambda place: candidate.points[place].items_per_second.value)


def _slo(candidate: Candidate) -> int | None:
    """The point of the rate search with the highest rate."""
    places = [place for place, point in enumerate(candidate.points) if point.kind == "slo"]
    return max(places, key=lambda place: candidate.points[place].items_per_second.value, default=None)


def _ranks(values: Sequence[float | None]) -> list[int | None]:
    """Ranks from 1, the lowest value first; equal values share one."""
    measured = [value for value in values if value is not None]
    return [None if value is None else 1 + sum(other < value for other in measured) for value in values]


def _cheapest(prices: Iterable[Price], kind: PriceKind) -> dict[str, Price]:
    """The lowest price of this kind, by currency."""
    cheapest: dict[str, Price] = {}
    for price in prices:
        if price.kind == kind:
            other = cheapest.get(price.currency, price)
            cheapest[price.currency] = min(other, price, key=lambda price: price.price_per_hour)
    return cheapest


def _with_costs(options: Sequence[RankedOption], prices: Sequence[Price | None]) -> list[RankedOption]:
    """The options with their costs at these prices of one currency."""
    costs: list[list[Estimate]] = [
        []
        if price is None
        else [cost_per_million(price.price_per_hour, point.items_per_second) for point in option.points]
        for option, price in zip(options, prices, strict=True)
    ]
    coordinates = {
        (number, place): (cost.value, latency.value)
        for number, option in enumerate(options)
        for place, cost in enumerate(costs[number])
        if (latency := option.points[place].latency_ms) is not None
    }
    places = list(coordinates)
    front = {places[index] for index in pareto_front(list(coordinates.values()))}
    full = _ranks([cost[option.best].value if cost else None for option, cost in zip(options, costs, strict=True)])
    priced = []
    for number, (option, price) in enumerate(zip(options, prices, strict=True)):
        position = full[number]
        if price is None or position is None:
            priced.append(option)
            continue
        cost = Cost(
            price=price,
            full=costs[number][option.best],
            slo=None if option.slo is None else costs[number][option.slo],
            points=tuple(costs[number]),
            rank=position,
            front=tuple(place for place in range(len(option.points)) if (number, place) in front),
        )
        priced.append(replace(option, costs=(*option.costs, cost)))
    return priced
