"""Sections of every server at its best: the tables of a comparison whose settings were chosen for each load."""

from __future__ import annotations

import math
from collections.abc import Sequence

import loadgen.report.document as doc
from loadgen.base.quantities import measured, measured_with_interval, ratio_with_interval, share
from loadgen.findings.best import BestFound, ServerFigure
from loadgen.metrics.claims import place
from loadgen.metrics.comparisons import leading_comparisons, log_lead
from loadgen.metrics.registry import METRICS
from loadgen.records.run import Label, shown
from loadgen.report.charts import style_at
from loadgen.stats.estimates import Estimate
from loadgen.stats.ratios import geometric_mean
from loadgen.verdict.result import Result


def _name(result: Result, server: Label) -> doc.Cell:
    words = next((title.split() for label, title in result.titles.items() if _server(result, label) == server), [])
    return doc.Cell(f"{shown(server)} ({words[0]})" if words else shown(server), _style(result, server))


def _server(result: Result, label: Label) -> Label:
    return result.experiment.servers.get(label, label)


def _style(result: Result, server: Label) -> doc.Style:
    return style_at([*dict.fromkeys(result.experiment.servers.values())].index(server))


def at_best(result: Result) -> doc.Section | None:
    """Table 1: every server at its best for each load."""
    found = result.of(BestFound)
    rows: list[tuple[doc.Value, ...]] = []
    for load in result.experiment.workloads:
        figures = [figure for figure in found.at_best if figure.workload == load.name]
        first = _leader(figures)
        for figure in figures:
            settings = found.settings_of(figure.arm)
            behind = _behind(result, load.name, first, figure.arm)
            value = measured_with_interval(figure.value, figure.ci95)
            rows.append((load.name, _name(result, figure.server), value, figure.unit, settings, behind))
    columns = (
        *doc.names("load", "server"),
        *doc.numbers("measured"),
        *doc.names("unit", "settings", "first better by"),
    )
    return doc.section(
        "Each server at its best for each load",
        doc.Table(columns, rows, grouped=True),
        doc.Text(
            "The settings of each load were chosen in short runs before the comparison, whose figures are not in this "
            "table." if rows else "", "note",
        ),
        doc.Items([doc.Item(problem, "warning") for problem in found.problems]),
        on=doc.READ,
    )  # fmt: skip


def _leader(figures: Sequence[ServerFigure]) -> Label | None:
    known = [(figure.value, figure.arm) for figure in figures if figure.value is not None]
    if not known:
        return None
    return (max if METRICS[figures[0].metric].higher_is_better else min)(known)[1]


def _behind(result: Result, workload: str, first: Label | None, arm: Label) -> doc.Cell:
    """How many times better the first server of a load is than this one, dimmed where it is not shown to be better."""
    if arm == first:
        return doc.Cell("first", "ok")
    leading = leading_comparisons(result.comparisons)
    pair = next((c for c in leading if c.workload == workload and {*c.pairing} == {first, arm}), None)
    logs = None if pair is None or pair.verdict == "invalid" or first is None else log_lead(pair, first)
    if pair is None or logs is None:
        return doc.Cell("–", "unknown")
    gain = logs.exp()
    return doc.Cell(ratio_with_interval(gain.value, gain.interval), None if pair.winner == first else "note")


def one_configuration(result: Result) -> doc.Section | None:
    """Table 2: every server with one configuration for all loads."""
    found = result.of(BestFound)
    rows: list[tuple[doc.Value, ...]] = []
    for server in dict.fromkeys(figure.server for figure in found.compromises):
        figures = [figure for figure in found.compromises if figure.server == server]
        settings = found.settings_of(figures[0].arm)
        for figure in figures:
            loss = "–" if figure.loss is None else _loss(figure.loss)
            value = measured_with_interval(figure.value, figure.ci95)
            rows.append((_name(result, server), settings, figure.workload, value, figure.unit, loss))
        mean = found.mean_loss.get(server)
        rows.append((_name(result, server), settings, "all loads", "", "", "–" if mean is None else _share(mean - 1.0)))
    places = {load.name: place(load) for load in result.experiment.workloads}
    orders = [doc.Item(f"{places.get(r.workload, r.workload)}: {r.words()}") for r in found.rankings]
    columns = (
        *doc.names("server", "settings", "load"), *doc.numbers("measured"), *doc.names("unit"),
        *doc.numbers("own best better by"),
    )  # fmt: skip
    return doc.section(
        "Each server with one configuration for all loads",
        doc.Table(columns, rows, grouped=True),
        doc.Text("All loads: the geometric mean." if rows else "", "note"),
        doc.Items(orders if any(server.configurations[1:] for server in found.servers) else []),
        on=doc.READ,
    )


def _loss(loss: Estimate) -> str:
    if loss.value == 1.0:
        return "its best"
    words = _share(loss.value - 1.0)
    if loss.interval is None or not math.isfinite(loss.interval[1]):
        return words
    low, high = (_share(bound - 1.0) for bound in loss.interval)
    return f"{words} ({low} to {high})"


def _share(value: float) -> str:
    return share(value).replace("-", "−")


def tried(result: Result) -> doc.Section | None:
    """Everything that was tried, with what each configuration loses against the best one of its server."""
    found = result.of(BestFound)
    rows: list[tuple[doc.Value, ...]] = []
    brief: list[tuple[doc.Value, ...]] = []
    for server in found.servers:
        best = {t.workload: t for t in server.tried if t.configuration == server.best.get(t.workload)}
        for configuration in server.configurations:
            name, settings = _name(result, server.server), server.settings_in_words(configuration)
            own = [t for t in server.tried if t.configuration == configuration.name and t.workload in best]
            losses = [best[t.workload].gain.value / t.gain.value for t in own]
            for entry, loss in zip(own, losses, strict=True):
                times = ratio_with_interval(entry.gain.value, entry.gain.interval)
                rows.append((name, settings, entry.workload, measured(entry.value), times, _share(loss - 1.0)))
            whole = bool(own) and len(own) == len(best)
            mean = _share(geometric_mean(losses) - 1.0) if whole else "–"
            rows.append((name, settings, "all loads", "", "", mean))
            chosen = [load for load, label in server.best.items() if label == configuration.name]
            for_all = ["all loads"] if server.compromise == configuration.name else []
            brief.append((name, settings, mean, ", ".join([*for_all, *chosen]), configuration.out or ""))
    if not any(server.tried for server in found.servers):
        return None
    first = doc.names("server", "settings")
    return doc.section(
        "What was tried",
        doc.Table((*first, *doc.numbers("loses on average"), *doc.names("chosen for"), *doc.texts("left out")), brief,
                  grouped=True, on=doc.READ),
        doc.Table((*first, *doc.names("load"), *doc.numbers("measured", "times as asked for", "loses")), rows,
                  grouped=True, on=doc.PAGES),
        doc.Text(
            "In the short runs that chose. Loses: against the configuration chosen for the load; on average: the "
            "geometric mean over the loads. A load gets other settings than were asked for if they are better there by "
            "more than one standard error, and all loads if that is shown at 99 %. Intervals include what another "
            "start of a server changes. These runs are part of no verdict.", "note",
        ),
        on=doc.READ,
    )  # fmt: skip


SECTIONS = {"": (at_best, one_configuration), "Detail": (tried,)}
