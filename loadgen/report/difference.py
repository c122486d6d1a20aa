"""Two runs beside each other, on a terminal and as Markdown."""

from __future__ import annotations

import loadgen.report.document as doc
from loadgen.metrics.claims import verdict_words
from loadgen.metrics.registry import METRICS
from loadgen.records.run import Label, Pairing, shown
from loadgen.report.sections.comparisons import better_of
from loadgen.verdict.run_difference import ComparisonChange, RunDifference


def difference(found: RunDifference) -> doc.Document:
    """The outcome, every comparison that both runs have, the missing ones, and the differences between the runs."""
    both = [one for one in found.comparisons if one.old_ratio is not None and one.new_ratio is not None]
    several = len({(one.baseline, one.arm) for one in found.comparisons}) > 1
    missing: dict[str, list[str]] = {}
    for one in found.comparisons:
        if one.reason is not None:
            missing.setdefault(one.reason, []).append(_name(one, several))
    columns = (
        *doc.names("scenario", "metric", *(["arms"] if several else [])),
        *doc.numbers("old", "new", "change", "95 % interval"),
        *doc.names("outcome"),
        doc.Column("verdict", on=doc.PAGES),
    )
    sections = (
        doc.section(
            "",
            doc.Text(headline(found)),
            doc.Items([doc.Item(found.old, lead="old"), doc.Item(found.new, lead="new")], on=doc.PAGES),
            *(doc.Text(caveat, "warning") for caveat in found.caveats),
            doc.Table(columns, [_row(one, found, several) for one in both], grouped=True),
            doc.Text(
                "Old and new: the better arm in each run. Change: by how much one arm has gained on the other."
                if both
                else "",
                "note",
            ),
        ),
        _list(
            "Other verdicts",
            [f"{_name(one, several)}: {_verdict(one)}" for one in both if one.verdict_changed],
            doc.TERMINAL,
        ),
        _list("Not compared", [f"{', '.join(parts)}: {reason}" for reason, parts in missing.items()]),
        _list(
            "Differences between the runs",
            [f"{one.name}: {_short(one.old)} → {_short(one.new)}" for one in found.differences],
        ),
    )
    return doc.Document("Old run against new", (doc.Chapter("", tuple(one for one in sections if one is not None)),))


def headline(found: RunDifference) -> str:
    """The outcome in a sentence."""
    if found.refused:
        return (
            f"Not compared: the runs differ in {', '.join(found.refused)}. Measure both in one environment, or add "
            "--allow-different-environments."
        )
    if not found.comparable:
        return "Nothing can be compared: no comparison has an interval in both runs."
    usable = [one for one in found.comparisons if one.outcome != "not comparable"]
    changed = [one for one in usable if one.outcome == "changed"]
    if not changed:
        return f"No change shown in any of {len(usable)} comparisons."
    better = {arm: sum(1 for one in changed if one.better_for == arm) for arm in _labels(found)}
    parts = [f"{number} for {shown(arm)}" for arm, number in better.items() if number]
    return f"{len(changed)} of {len(usable)} comparisons changed: {', '.join(parts)}."


def _labels(found: RunDifference) -> list[Label]:
    """The arms of both runs, the baseline first."""
    return list(dict.fromkeys(label for one in found.comparisons for label in (one.baseline, one.arm)))


def _row(one: ComparisonChange, found: RunDifference, several: bool) -> tuple[str | doc.Cell, ...]:
    arm, metric, pairing = one.better_for, METRICS[one.metric], Pairing(one.baseline, one.arm)
    short = f"{shown(arm)} gained" if arm else "?" if one.change_ci95 is None else " "
    style = doc.ARM_STYLES[_labels(found).index(arm) % len(doc.ARM_STYLES)] if arm else None
    old, new, change = (
        better_of(pairing, value, ci95, metric.higher_is_better)
        for value, ci95 in ((one.old_ratio, one.old_ci95), (one.new_ratio, one.new_ci95), (one.change, one.change_ci95))
    )
    return (
        one.scenario,
        doc.Cell(metric.title, short=metric.title.removesuffix(" latency")),
        *([_arms(one)] if several else []),
        old[0],
        new[0],
        *change,
        doc.Cell(one.outcome + (f", better for {shown(arm)}" if arm else ""), style, short),
        _verdict(one),
    )


def _arms(one: ComparisonChange) -> str:
    return f"{shown(one.arm)}/{shown(one.baseline)}"


def _name(one: ComparisonChange, several: bool) -> str:
    return f"{METRICS[one.metric].title} in {one.scenario}" + (f" ({_arms(one)})" if several else "")


def _verdict(one: ComparisonChange) -> str:
    pairing = Pairing(one.baseline, one.arm)
    old, new = ("–" if name is None else verdict_words(name, pairing) for name in (one.old_verdict, one.new_verdict))
    return f"{old} → {new}" if one.verdict_changed else new


def _list(title: str, lines: list[str], on: doc.Format = doc.READ) -> doc.Section | None:
    return doc.section(title, doc.Items([doc.Item(line) for line in lines], on=on))


def _short(value: str | None) -> str:
    """Shorten a digest to its beginning."""
    if value is None:
        return "unknown"
    return f"{value[:12]}…" if len(value) >= 40 and " " not in value else value
