"""Ranks the options of stored results: throughput, latency, energy, cost, and the Pareto front of cost and latency.

    cost per million items = price per hour ÷ (items per second × 3600) × 1,000,000

The intervals are those of the results. Ranks and the front go by the values alone, so options with overlapping
intervals may stand in either order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from loadgen.engine_matrix.records import Estimate
from loadgen.ranking.candidates import Read, join_machines
from loadgen.ranking.prices import prices_of
from loadgen.ranking.records import Candidate, Cost, Group, Kind, LeftOut, Machine, Option, Price, Ranking, Work

MILLION = 1e6
_SECONDS_PER_HOUR = 3600.0


def cost_per_million(price_per_hour: float, items_per_second: Estimate) -> Estimate:
    """The interval is that of the throughput, turned round; a bound at or below 0 gives no bound."""

    def cost(rate: float | None) -> float | None:
        return None if rate is None or rate <= 0.0 else price_per_hour / (rate * _SECONDS_PER_HOUR) * MILLION

    value = cost(items_per_second.value)
    if value is None:
        raise ValueError("a cost needs a throughput above 0")
    return Estimate(value=value, low=cost(items_per_second.high), high=cost(items_per_second.low))


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """The places of the points that no other point beats: none is as low in both values and lower in one."""
    front: set[int] = set()
    best = float("inf")
    at_best: tuple[float, float] | None = None
    for place in sorted(range(len(points)), key=points.__getitem__):
        _, second = point = points[place]
        if second < best or point == at_best:
            front.add(place)
            best, at_best = second, point
    return front


def rank(
    reads: Sequence[Read],
    prices: Sequence[Price],
    kind: Kind = "on-demand",
    *,
    model: str | None = None,
    precision: str | None = None,
    price_file: str = "",
    example_prices: bool = False,
) -> Ranking:
    """Rank what results hold, only this model and precision if given."""
    machines = tuple(replace(one, prices=prices_of(one, prices)) for one in join_machines(list(reads)))
    by_id = {machine.id: machine for machine in machines}
    groups: dict[Work, list[Candidate]] = {}
    left_out = [one for read in reads for one in read.left_out]
    for candidate in (one for read in reads for one in read.candidates):
        reason = _not_asked_for(candidate.work, model, precision)
        if reason is None:
            groups.setdefault(candidate.work, []).append(candidate)
        else:
            left_out.append(LeftOut(result=candidate.result, what=candidate.name, reason=reason))
    ordered = sorted(groups, key=lambda work: (work.source, work.model, work.precision, work.weights, str(work)))
    return Ranking(
        kind=kind,
        price_file=price_file,
        example_prices=example_prices,
        machines=machines,
        groups=tuple(_group(work, groups[work], by_id, kind) for work in ordered),
        left_out=tuple(left_out),
    )


def _not_asked_for(work: Work, model: str | None, precision: str | None) -> str | None:
    for option, wanted, own in (("--model", model, work.model), ("--precision", precision, work.precision)):
        if wanted is not None and wanted != own:
            return f"{option} asks for {wanted}, and this is {own}"
    return None


def _group(work: Work, candidates: Sequence[Candidate], machines: dict[str, Machine], kind: Kind) -> Group:
    best = [_best(candidate) for candidate in candidates]
    points = [candidate.points[place] for candidate, place in zip(candidates, best, strict=True)]
    speeds = _ranks([-point.items_per_second.value for point in points])
    latencies = _ranks([None if one.latency_ms is None else one.latency_ms.value for one in points])
    energies = _ranks([None if one.joules_per_item is None else one.joules_per_item.value for one in points])
    options = [
        Option(
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
    return Group(
        work=work, options=tuple(sorted(options, key=lambda one: (one.throughput_rank, one.name, one.machine)))
    )


def _best(candidate: Candidate) -> int:
    """The point with the highest throughput; a rate that a server sustained is a throughput as well."""
    return max(range(len(candidate.points)), key=lambda place: candidate.points[place].items_per_second.value)


def _slo(candidate: Candidate) -> int | None:
    """The point of the rate search with the highest rate."""
    found = [place for place, one in enumerate(candidate.points) if one.kind == "slo"]
    return max(found, key=lambda place: candidate.points[place].items_per_second.value, default=None)


def _ranks(values: Sequence[float | None]) -> list[int | None]:
    """Ranks from 1, the lowest value first; equal values share one."""
    known = [value for value in values if value is not None]
    return [None if value is None else 1 + sum(other < value for other in known) for value in values]


def _cheapest(prices: Iterable[Price], kind: Kind) -> dict[str, Price]:
    """The lowest price of this kind, by currency."""
    found: dict[str, Price] = {}
    for price in prices:
        if price.kind == kind:
            found[price.currency] = min(found.get(price.currency, price), price, key=lambda one: one.price_per_hour)
    return found


def _with_costs(options: Sequence[Option], prices: Sequence[Price | None]) -> list[Option]:
    """The options with their costs at these prices of one currency."""
    costs: list[list[Estimate]] = [
        [] if price is None else [cost_per_million(price.price_per_hour, one.items_per_second) for one in option.points]
        for option, price in zip(options, prices, strict=True)
    ]
    places = [
        (number, place)
        for number, option in enumerate(options)
        for place in range(len(costs[number]))
        if option.points[place].latency_ms is not None
    ]
    coordinates = [
        (costs[number][place].value, latency.value)
        for number, place in places
        if (latency := options[number].points[place].latency_ms) is not None
    ]
    front = {places[index] for index in pareto_front(coordinates)}
    full = _ranks([own[option.best].value if own else None for option, own in zip(options, costs, strict=True)])
    found = []
    for number, (option, price) in enumerate(zip(options, prices, strict=True)):
        position = full[number]
        if price is None or position is None:
            found.append(option)
            continue
        cost = Cost(
            price=price,
            full=costs[number][option.best],
            slo=None if option.slo is None else costs[number][option.slo],
            points=tuple(costs[number]),
            rank=position,
            front=tuple(place for place in range(len(option.points)) if (number, place) in front),
        )
        found.append(replace(option, costs=(*option.costs, cost)))
    return found
