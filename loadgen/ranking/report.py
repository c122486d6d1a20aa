"""Finds and reads the results to rank, and makes the report of a ranking in all formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.documents import (
    MOST_RECORD_BYTES,
    DocumentError,
    decode_json,
    indented,
    kind_of,
    read_stored,
    results_in,
    stored_path,
)
from loadgen.base.quantities import counted, items, measured, measured_interval, number, per_second
from loadgen.engines.store import read_matrix, stored_matrix
from loadgen.ranking.analyse import RankInput, from_matrix, from_result
from loadgen.ranking.prices import ADD_A_PRICE
from loadgen.records.matrix import Matrix
from loadgen.records.ranks import TOKEN, Cost, LeftOut, Machine, Point, RankedGroup, RankedOption, RankResult, Work
from loadgen.records.store import StoredRunError
from loadgen.report.published import Published
from loadgen.report.renderers.tables import render_csv
from loadgen.stats.estimates import Estimate
from loadgen.verdict.result import FILE_NAME, read_result, readable, stored_result

MOST_NAMES = 6
"""Names that are listed of what one reason left out; rank.json has them all."""
CSV_OPTIONS, CSV_POINTS = "options", "points"
_ROWS_OF_WORK = ("source", "model", "precision", "weights", "payload", "transport", "length", "item")
_FRONT = "★"
NOTES = (
    "Ranks go by the measured values. Options whose 95 % intervals overlap may stand in either order.",
    f"{_FRONT} lists what is on the Pareto front: nothing else in the table is both cheaper and faster to answer.",
)
ALONE = (
    "Engine alone: on a GPU throughput, latency and cost leave out copies to and from the host unless the option says "
    "so, and are those of short runs, which a GPU at its power limit cannot keep up. On a CPU they are of whole calls."
)
_REMEDY = (
    "give a folder that `abserve engines` or `abserve compare` wrote to, a folder of such folders, a matrix.json or a "
    "result.json"
)


def read_all(paths: list[Path]) -> list[RankInput]:
    """Everything that can be ranked in these files and folders, each once. A result in a folder of results that cannot
    be read is left out. Raises `StoredRunError` for one that the user named."""
    results: dict[Path, Path] = {}
    named: set[Path] = set()
    for path in paths:
        found = list(_results_in(path))
        named.update(found if len(found) == 1 else ())
        for result in found:
            results.setdefault(result.resolve(), result)
    return [_read(path) if path in named else _read_if_possible(path) for path in results.values()]


def _results_in(path: Path) -> Iterator[Path]:
    """A file, the result of a folder, or those of the folders in it."""
    if not path.exists():
        raise StoredRunError(f"{path} does not exist; {_REMEDY}")
    if not path.is_dir():
        yield path.resolve() if path.is_symlink() else path  # a link that the user gives is followed
        return
    results = [_result_of(folder) for folder in results_in(path)]
    if not results:
        raise StoredRunError(f"{path} holds no result; {_REMEDY}")
    yield from results


def _result_of(folder: Path) -> Path:
    """The matrix or the result of a folder; the folder itself where the result was not made yet."""
    paths = (folder / name for name in (Matrix.FILE, FILE_NAME))
    return next((path for path in paths if stored_path(path).is_file()), folder)


def _read_if_possible(path: Path) -> RankInput:
    try:
        return _read(path)
    except StoredRunError as exc:
        name = str(path if path.is_dir() else path.parent)
        return RankInput(name, None, (), (LeftOut(result=name, what="everything in it", reason=str(exc)),))


def _read(path: Path) -> RankInput:
    name = str(path.parent if path.name in (Matrix.FILE, FILE_NAME) else path)
    with readable(path):
        if path.is_dir() and kind_of(path) == "engines":
            return from_matrix(name, stored_matrix(path))
        if path.is_dir():
            return from_result(name, stored_result(path))
        schema = _schema(path)
        if schema.startswith("abserve.engines/"):
            return from_matrix(name, read_matrix(path))
        if schema.startswith("abserve.result/"):
            return from_result(name, read_result(path))
    raise StoredRunError(f"{path} is neither an engine matrix nor a comparison; {_REMEDY}")


def _schema(path: Path) -> str:
    try:
        document: dict[str, Any] = decode_json(read_stored(path), dict[str, Any], most_bytes=MOST_RECORD_BYTES)
    except OSError as exc:
        raise StoredRunError(f"{path} cannot be read: {exc.strerror or exc}; {_REMEDY}") from exc
    except DocumentError as exc:
        raise StoredRunError(f"{path} cannot be read: {exc}; {_REMEDY}") from exc
    return str(document.get("schema"))


def published(ranking: RankResult) -> Published:
    """With rank.json, schema abserve.rank/1, options.csv and points.csv."""
    document = ranking_document(ranking)
    formats = {
        "csv": lambda: render_csv({"": document}, CSV_OPTIONS),
        "csv-points": lambda: render_csv({"": document}, CSV_POINTS),
        "json": lambda: indented(ranking).decode(),
    }
    files = {"rank.json": "json", "options.csv": "csv", "points.csv": "csv-points"}
    contents = {name: lambda _, form=form: formats[form]().encode() for name, form in files.items()}
    return Published(document, contents, formats)


def ranking_document(ranking: RankResult) -> doc.Document:
    """Tables of every kind of work, machines, prices, and what was left out."""
    sections = [
        _opening(ranking),
        *(section for group in ranking.groups for section in _group(group, ranking)),
        _machines(ranking),
        _prices(ranking),
        _left_out(ranking),
        _csv(ranking),
    ]
    chapters = {"": [section for section in sections if section is not None]}
    return doc.Document("Engines and machines, ranked", chapters, about="abserve rank")


def describe_work(work: Work) -> str:
    """torchvision:resnet50 in fp16, through an engine."""
    length = "" if work.length is None else f", length {work.length}"
    if work.item == TOKEN:
        if work.source == "engines":
            return f"{work.model} in {work.precision}, prompts of {work.length} tokens, engine alone"
        return f"{work.model} in {work.precision}, {work.length}, served over {work.transport}"
    if work.source == "engines":
        payload = "" if work.payload is None else f" from {work.payload}"
        return f"{work.model} in {work.precision}{payload}{length}, engine alone"
    return f"{work.model} in {work.precision}{length}, served over {work.transport} as {work.payload}"


def _opening(ranking: RankResult) -> doc.Section | None:
    options = sum(len(group.options) for group in ranking.groups)
    machines = counted(len(ranking.machines), "machine")
    if not options:
        return doc.section("Ranking", doc.Text("Nothing can be ranked; see what was left out and why.", "warning"))
    many = (
        ""
        if len(ranking.groups) == 1
        else (
            f" in {len(ranking.groups)} tables: results of different models, precisions, weights, payloads, "
            "transports or lengths are never compared"
        )
    )
    return doc.section(
        "Ranking",
        doc.Text(f"{counted(options, 'option')} on {machines}{many}."),
        doc.Text("The prices are dated examples, not offers; give your own with --prices FILE.", "warning")
        if ranking.example_prices and any(machine.prices for machine in ranking.machines)
        else None,
        *(doc.Text(note, "note") for note in NOTES),
        doc.Text(ALONE, "note")
        if any(group.work.source == "engines" and group.work.item != TOKEN for group in ranking.groups)
        else None,
    )


def _group(group: RankedGroup, ranking: RankResult) -> Iterator[doc.Section | None]:
    unit = per_second(group.work.item)
    latency = "batch latency" if group.work.source == "engines" else "p99 latency"
    if group.work.item == TOKEN:
        latency = "time of a step" if group.work.source == "engines" else "TPOT"
    several = len({option.result for option in group.options}) > 1
    names = [(option.name, option.machine) for option in group.options]
    loads = {frozenset(point.name for point in option.points) for option in group.options}
    columns = (
        *doc.numbers("#"), *doc.names("option", "machine"),
        doc.Column("result", "text", on=doc.PAGES),
        *doc.names("at"),
        *doc.numbers(unit, "95 % interval"),
        doc.Column(f"{latency}, ms", "number", short="ms"),
        doc.Column("95 % interval of the latency, ms", "number", on=doc.PAGES),
        doc.Column(f"J per {group.work.item}", "number", short="J"),
        doc.Column("95 % interval of the energy, J", "number", on=doc.PAGES),
    )  # fmt: skip
    rows: list[tuple[doc.Value, ...]] = [
        (
            option.throughput_rank, _titled(option, names), option.machine,
            option.result if several else "", option.point.name,
            *_with_interval(option.point.items_per_second), *_with_interval(option.point.latency_ms),
            *_with_interval(option.point.joules_per_item),
        )
        for option in group.options
    ]  # fmt: skip
    currencies = {cost.price.currency for option in group.options for cost in option.costs}
    alone = len(group.options) == 1
    tokens = doc.Table(
        (
            *doc.names("option", "machine", "at"),
            *doc.numbers(unit, "first token, ms", "TPOT, ms", "p99 TPOT, ms"),
        ),
        [
            (
                _titled(option, names), option.machine, point.name, number(point.items_per_second.value),
                measured(point.first_token_ms), _with_interval(point.latency_ms)[0],
                measured(point.tpot_p99_ms),
            )
            for option in group.options
            for point in option.points
        ],
        title="Every point",
        grouped=True,
        caption="TPOT: the time from one token to the next. Of a server the mean over its answers; of an engine alone "
        "the median step.",
    )  # fmt: skip
    yield doc.section(
        describe_work(group.work),
        doc.Text("There is nothing to rank this option against.", "note") if alone else None,
        doc.Table(columns, rows),
        tokens if group.work.item == TOKEN else None,
        doc.Text(
            "Not every option was measured at the same points, and each is ranked at its best one; compare the column "
            '"at" before you conclude.'
            if len(loads) > 1
            else "",
            "warning",
        ),
        *(block for currency in sorted(currencies) for block in _costs(group, currency, ranking)),
        _unpriced(group, ranking),
        on=doc.READ,
    )


def _titled(option: RankedOption, names: list[tuple[str, str]]) -> str:
    """The option's name, with its result's where another has the same name on the same machine."""
    twice = names.count((option.name, option.machine)) > 1
    return f"{option.name} [{Path(option.result).name}]" if twice else option.name


def _costs(group: RankedGroup, currency: str, ranking: RankResult) -> Iterator[doc.Block | None]:
    """The costs in one currency as a table and as a chart."""
    priced = [(option, cost) for option in group.options for cost in option.costs if cost.price.currency == currency]
    priced.sort(key=lambda pair: (pair[1].rank, pair[0].name, pair[0].machine))
    names = [(option.name, option.machine) for option, _ in priced]
    bound = "goodput" if group.work.item == TOKEN else "SLO"

    def per_thousand(cost: Estimate | None) -> str:
        return "" if cost is None else number(cost.value / 1000)

    thousands = (
        doc.Column("per 1,000 at 100 %", "number", short="per 1,000"),
        doc.Column(f"per 1,000 at the {bound} rate", "number", short=f"per 1,000 at {bound}"),
    )[: 2 if group.work.item == TOKEN else 0]
    columns = (
        *doc.numbers("#"), *doc.names("option", "machine"),
        doc.Column("price", "text", on=doc.PAGES),
        doc.Column(f"{currency}/h", "number"),
        doc.Column("at 100 %", "number"), *doc.numbers("95 % interval"),
        doc.Column(f"at the {bound} rate", "number", short=f"at {bound}"),
        doc.Column(f"95 % interval at the {bound} rate", "number", on=doc.PAGES),
        *thousands,
        doc.Column(f"{_FRONT} front", "text", short=_FRONT),
    )  # fmt: skip
    rows: list[tuple[doc.Value, ...]] = [
        (
            cost.rank, _titled(option, names), option.machine,
            f"{cost.price.provider}, {cost.price.machine}, {cost.price.date}", f"{cost.price.price_per_hour:g}",
            *_with_interval(cost.full), *_with_interval(cost.slo),
            *(per_thousand(of_cost) for of_cost, _ in zip((cost.full, cost.slo), thousands, strict=False)),
            doc.Cell(", ".join(option.points[place].name for place in cost.front), short=_FRONT if cost.front else " "),
        )
        for option, cost in priced
    ]  # fmt: skip
    title = f"Cost per million {items(group.work.item)} in {currency}, {ranking.kind}"
    yield doc.Table(columns, rows, title=title)
    yield _chart(priced, group, currency, ranking)


def _unpriced(group: RankedGroup, ranking: RankResult) -> doc.Text | None:
    """Which machines of a group have no price of this kind, and how to add one."""
    names = list(dict.fromkeys(option.machine for option in group.options if not option.costs))
    if not names:
        return None
    others = sorted({price.kind for machine in ranking.machines if machine.name in names for price in machine.prices})
    available = f" (there is {' and '.join(others)})" if others else ""
    return doc.Text(f"No {ranking.kind} price{available} for {'; '.join(names)}: {ADD_A_PRICE}.", "warning")


def _chart(
    priced: list[tuple[RankedOption, Cost]], group: RankedGroup, currency: str, ranking: RankResult
) -> doc.Chart | None:
    """Cost against latency: every way to run every option, with the front as a line."""
    data: list[doc.Figure] = []
    on_front: list[tuple[float, float]] = []
    everything: list[tuple[float, float]] = []
    for place, (option, cost) in enumerate(priced):
        marks = [
            (index, point, cost.points[index].value, point.latency_ms.value)
            for index, point in enumerate(option.points)
            if point.latency_ms is not None
        ]
        everything += [(x, y) for _, _, x, y in marks]
        on_front += [(x, y) for index, _, x, y in marks if index in cost.front]
        symbol = charts.MARKERS[place % len(charts.MARKERS)]
        marker: doc.Figure = {
            "size": [12 if index in cost.front else 7 for index, *_ in marks],
            "color": f"--{charts.style_at(place)}",
            "symbol": [symbol if index in cost.front else f"{symbol}-open" for index, *_ in marks],
        }
        name, texts = f"{option.name}, {option.machine}", [charts.label_text(point.name) for _, point, _, _ in marks]
        hover = f"%{{text}}<br>%{{x:.4g}} {currency} per million<br>%{{y:.4g}} ms"
        places = [(x, y) for _, _, x, y in marks]
        about: doc.Figure = {"name": charts.label_text(name), "text": texts, "marker": marker, "hovertemplate": hover}
        data.append(charts.scatter(places, "markers", **about))
    if len(everything) < 2:
        return None
    data.append(charts.front(sorted(on_front), "--muted", "Pareto front", shape="hv", dash=charts.DASHES[1], width=1))
    latency = "latency of a batch, ms" if group.work.source == "engines" else "p99 latency, ms"
    if group.work.item == TOKEN:
        latency = "time from one token to the next, ms"
    what = items(group.work.item)
    return doc.Chart(
        f"pareto-{currency.lower()}-{ranking.groups.index(group)}",
        f"Cost against latency: {describe_work(group.work)}",
        "Further down and to the left is better. Filled marks are on the front: no other mark is both cheaper and "
        "faster to answer.",
        data,
        {
            "height": 420 + 22 * len(priced),
            "xaxis": charts.axis(f"{currency} per million {what}", **charts.log_axis([x for x, _ in everything])),
            "yaxis": charts.axis(latency, **charts.log_axis([y for _, y in everything])),
            "legend": charts.LEGEND_ABOVE,
        },
    )


def _machines(ranking: RankResult) -> doc.Section | None:
    columns = (
        *doc.texts("machine"), doc.Column("CPU", "text"), *doc.numbers("cores"), *doc.texts("GPUs"),
        doc.Column("results", "number"), doc.Column("notes", "text", on=doc.PAGES),
    )  # fmt: skip
    rows: list[tuple[doc.Value, ...]] = [
        (
            machine.name, machine.cpu_model or "–", machine.cpu_count, "; ".join(_gpus(machine)) or "none",
            len(machine.results), "; ".join([*machine.notes, *_whole_price(machine)]),
        )
        for machine in ranking.machines
    ]  # fmt: skip
    notes = [
        f"{machine.name}: {note}." for machine in ranking.machines for note in (*machine.notes, *_whole_price(machine))
    ]
    return doc.section(
        "Machines",
        doc.Table(columns, rows),
        doc.Items([doc.Item(note) for note in notes], on=doc.TERMINAL),
        on=doc.READ,
    )


def _gpus(machine: Machine) -> list[str]:
    return [f"{machine.gpus.count(name)} × {name}" for name in dict.fromkeys(machine.gpus)]


def _whole_price(machine: Machine) -> list[str]:
    if len(machine.gpus) < 2:
        return []
    return [f"its price is that of all {len(machine.gpus)} GPUs, although an option may use one"]


def _prices(ranking: RankResult) -> doc.Section | None:
    columns = (
        *doc.texts("machine", "provider", "offer"), *doc.names("kind"), *doc.numbers("per hour"),
        doc.Column("currency", short=" "), doc.Column("term", on=doc.PAGES), *doc.names("date"),
        doc.Column("source", "text", on=doc.PAGES),
    )  # fmt: skip
    rows: list[tuple[doc.Value, ...]] = [
        (
            machine.name, price.provider, price.machine, price.kind, f"{price.price_per_hour:g}", price.currency,
            price.term or "", str(price.date), price.source + (f" ({price.note})" if price.note else ""),
        )
        for machine in ranking.machines
        for price in machine.prices
    ]  # fmt: skip
    return doc.section(
        "Prices that match",
        doc.Table(columns, rows, grouped=True),
        doc.Text(f"The costs above are at the lowest {ranking.kind} price of each machine and currency.", "note")
        if rows
        else None,
        on=doc.READ,
    )


def _left_out(ranking: RankResult) -> doc.Section | None:
    """What was left out, once per reason, each name once."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for omission in ranking.left_out:
        by_reason.setdefault((omission.result, omission.reason), []).append(omission.what)
    entries = []
    for (result, reason), what in by_reason.items():
        names = list(dict.fromkeys(what))
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        end = "" if reason.endswith((".", "?")) else "."
        entries.append(doc.Item(f"{'; '.join(names[:MOST_NAMES])}{more} ({result}): {reason}{end}"))
    return doc.section("Left out", doc.Items(entries), on=doc.READ)


def _csv(ranking: RankResult) -> doc.Section | None:
    """Every option with its ranks and costs, and every point, in full precision."""
    work = doc.names(*_ROWS_OF_WORK)
    identity = doc.names("option", "machine", "result")
    throughput, latency, energy, cost = (
        (name, f"{name}_low", f"{name}_high")
        for name in ("items_per_second", "latency_ms", "joules_per_item", "cost_per_million")
    )
    ranks = ("throughput_rank", "latency_rank", "energy_rank")
    at_slo = tuple(f"{name}_at_slo" for name in cost)
    price = ("currency", "price_per_hour", "price_kind", "provider", "price_date")
    options: list[tuple[doc.Value, ...]] = []
    points: list[tuple[doc.Value, ...]] = []
    tokens = ("first_token_ms", "tpot_p99_ms")
    for group in ranking.groups:
        work_values = tuple(getattr(group.work, name) for name in _ROWS_OF_WORK)
        for option in group.options:
            who = (option.name, option.machine, option.result)
            order = (option.throughput_rank, option.latency_rank, option.energy_rank)
            for cost_at in option.costs or (None,):
                paid = (None,) * len(price) if cost_at is None else (
                    cost_at.price.currency, cost_at.price.price_per_hour, cost_at.price.kind, cost_at.price.provider,
                    str(cost_at.price.date),
                )  # fmt: skip
                full, slo, rank = (None, None, None) if cost_at is None else (cost_at.full, cost_at.slo, cost_at.rank)
                options.append((
                    *work_values, *who, option.point.name, *_figures(option.point), *order, *paid, *_bounds(full),
                    *_bounds(slo), rank,
                ))  # fmt: skip
                for place, point in enumerate(option.points):
                    points.append((
                        *work_values, *who, point.name, point.kind, *_figures(point), paid[0],
                        *_bounds(None if cost_at is None else cost_at.points[place]),
                        None if cost_at is None else place in cost_at.front,
                        *(getattr(point, name) for name in tokens),
                    ))  # fmt: skip
    figures = (*throughput, *latency, *energy)
    return doc.section(
        "",
        doc.Table(
            (*work, *identity, *doc.names("point", *figures, *ranks, *price, *cost, *at_slo, "cost_rank")),
            options,
            name=CSV_OPTIONS,
        ),
        doc.Table(
            (*work, *identity, *doc.names("point", "kind", *figures, "currency", *cost, "on_front", *tokens)),
            points,
            name=CSV_POINTS,
        ),
        on=doc.CSV,
    )


def _figures(point: Point) -> tuple[float | None, ...]:
    return (*_bounds(point.items_per_second), *_bounds(point.latency_ms), *_bounds(point.joules_per_item))


def _bounds(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)


def _with_interval(estimate: Estimate | None) -> tuple[str, str]:
    """A value and its interval; empty where there is none."""
    if estimate is None:
        return "", ""
    interval = estimate.interval
    return measured(estimate.value), "" if interval is None else measured_interval(interval)
