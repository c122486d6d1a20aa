"""The documents of the commands: of a result, of two results beside each other, of several runs, of a calibration.

A new table of a result is one function that returns a section, listed in `CONTENTS` or in the `SECTIONS` of its probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module

import loadgen.report.document as doc
from loadgen.base.quantities import join, number, share
from loadgen.checks.registry import validity
from loadgen.experiment.plan import Combination
from loadgen.findings.registry import probes
from loadgen.metrics.claims import verdict_words
from loadgen.metrics.comparisons import Comparison, leading_comparisons
from loadgen.metrics.registry import METRICS
from loadgen.records.machine import CEILING_SHARE_LIMIT, Calibration, CalibrationWorkload, TimingError
from loadgen.records.run import Label, Pairing, shown
from loadgen.report.charts import several, style_at
from loadgen.report.sections import checks, comparisons, conditions, surface, tokens, verdict
from loadgen.report.sections.comparisons import against_baseline, better_of, comparison_table
from loadgen.verdict.result import Result
from loadgen.verdict.run_difference import ComparisonChange, PropertyDifference, RunDifference

MakeSection = Callable[[Result], doc.Section | None]
PROBES = None
"""The place of the probes' sections in a chapter."""
CONTENTS: Sequence[tuple[str, Sequence[MakeSection | None]]] = (
    ("", (verdict.verdict, PROBES, surface.decision_surface, verdict.overview, verdict.brief_why, verdict.brief_proof)),
    ("Comparisons", (comparisons.comparisons, comparisons.ranking, comparisons.thresholds)),
    ("Why", (PROBES,)),
    ("Detail", (tokens.token_table, tokens.first_token_and_pace, tokens.gaps, tokens.costs, PROBES)),
    ("Proof", (PROBES, checks.same_answers, checks.checks)),
    ("Conditions", (conditions.arms, conditions.experiment, conditions.environment, conditions.reproduce)),
)


def result_document(result: Result) -> doc.Document:
    """The chapters and sections of a result in their order, for all formats."""
    base, *others = result.names.values()
    of_the_probes = [import_module(probe.sections).SECTIONS for probe in probes() if probe.sections is not None]

    def sections(title: str, makers: Sequence[MakeSection | None]) -> Iterator[doc.Section]:
        for make in makers:
            of_probes = (maker for shown in of_the_probes for maker in shown.get(title, ()))
            chosen = of_probes if make is PROBES else [make]
            yield from (section for maker in chosen if (section := doc.attempted(maker, result)) is not None)

    what = f"{len(others) + 1} arms serving" if several(result) else "A/B of"
    return doc.Document(
        f"{validity(result.checks)} · {base} against {join(others)}",
        {title: list(sections(title, makers)) for title, makers in CONTENTS},
        about=f"{what} {result.experiment.model}",
        started_at=result.environment.started_at if result.environment is not None else None,
    )


INDEX_NOTE = (
    "Each table compares the arms over one transport with one payload. Do not compare figures of different tables: the "
    "tables were measured one after the other."
)


def index_document(results: Mapping[Combination, Result | None]) -> doc.Document:
    """A section per transport and payload with links to its reports; None stands for a run that stored nothing."""
    sections = (_run_section(combination, result) for combination, result in results.items())
    return doc.Document("Transports and payloads", {"": [doc.Section("", (doc.Text(INDEX_NOTE),)), *sections]})


def _run_section(combination: Combination, result: Result | None) -> doc.Section:
    """The leading metric of every scenario of one run."""
    return doc.Section(
        f"{combination.title}: {'INVALID' if result is None else validity(result.checks)}",
        (
            doc.Text("This run stored nothing." if result is None else result.headline),
            doc.Link("summary", f"{combination.folder}/summary.md", on=doc.MARKDOWN),
            doc.Link("report", f"{combination.folder}/report.html"),
            *([] if result is None else [_leading_table(result)]),
        ),
    )


def _leading_table(result: Result) -> doc.Table:
    def bytes_sent(comparison: Comparison) -> str:
        sizes = {
            summary.payload_bytes
            for summary in result.summaries
            if summary.workload == comparison.workload and summary.payload_bytes is not None
        }
        return " / ".join(f"{size:,.0f}" for size in sorted(sizes)) or "–"

    leading = leading_comparisons(against_baseline(result))
    return comparison_table(result, leading, {"tensor bytes per request": bytes_sent})


def difference_document(difference: RunDifference) -> doc.Document:
    """Two runs: the outcome, every comparison that both have, the missing ones, and what else differs between them."""
    shared = [
        change for change in difference.comparisons if change.old_ratio is not None and change.new_ratio is not None
    ]
    several_arms = len({(change.baseline, change.arm) for change in difference.comparisons}) > 1
    missing: dict[str, list[str]] = {}
    for change in difference.comparisons:
        if change.reason is not None:
            missing.setdefault(change.reason, []).append(_name(change, several_arms))
    columns = (
        *doc.names("scenario", "metric", *(["arms"] if several_arms else [])),
        *doc.numbers("old", "new", "change", "95 % interval"),
        *doc.names("outcome"),
        doc.Column("verdict", on=doc.PAGES),
    )
    sections = (
        doc.section(
            "",
            doc.Text(difference_headline(difference)),
            doc.Items([doc.Item(difference.old, lead="old"), doc.Item(difference.new, lead="new")], on=doc.PAGES),
            *(doc.Text(caveat, "warning") for caveat in difference.caveats),
            doc.Table(columns, [_change_row(change, difference, several_arms) for change in shared], grouped=True),
            doc.Text(
                "Old and new: the better arm in each run. Change: by how much one arm has gained on the other."
                if shared
                else "",
                "note",
            ),
        ),
        _list(
            "Other verdicts",
            [f"{_name(change, several_arms)}: {_verdicts(change)}" for change in shared if change.verdict_changed],
            doc.TERMINAL,
        ),
        _list("Not compared", [f"{', '.join(names)}: {reason}" for reason, names in missing.items()]),
        _list("Differences between the runs", [f"{fact.name}: {_sides(fact)}" for fact in difference.differences]),
    )
    return doc.Document("Old run against new", {"": [section for section in sections if section is not None]})


def difference_headline(difference: RunDifference) -> str:
    """The outcome of `abserve diff` in a sentence."""
    if difference.refused:
        return (
            f"Not compared: the runs differ in {', '.join(difference.refused)}. Measure both in one environment, or "
            "add --allow-different-environments."
        )
    if not difference.comparable:
        return "Nothing can be compared: no comparison has an interval in both runs."
    usable = [change for change in difference.comparisons if change.outcome != "not comparable"]
    changed = [change for change in usable if change.outcome == "changed"]
    if not changed:
        return f"No change shown in any of {len(usable)} comparisons."
    counts = {arm: sum(change.better_for == arm for change in changed) for arm in _labels(difference)}
    better = [f"{count} for {shown(arm)}" for arm, count in counts.items() if count]
    return f"{len(changed)} of {len(usable)} comparisons changed: {', '.join(better)}."


def _labels(difference: RunDifference) -> list[Label]:
    """The arms of both runs, the baseline first."""
    return list(dict.fromkeys(label for change in difference.comparisons for label in (change.baseline, change.arm)))


def _change_row(change: ComparisonChange, difference: RunDifference, several_arms: bool) -> tuple[str | doc.Cell, ...]:
    arm, metric, pairing = change.better_for, METRICS[change.metric], Pairing(change.baseline, change.arm)
    short = f"{shown(arm)} gained" if arm else "?" if change.change_ci95 is None else " "
    style = style_at(_labels(difference).index(arm)) if arm else None
    old, new, factor = (
        better_of(pairing, value, ci95, metric.higher_is_better)
        for value, ci95 in (
            (change.old_ratio, change.old_ci95),
            (change.new_ratio, change.new_ci95),
            (change.change, change.change_ci95),
        )
    )
    return (
        change.workload,
        doc.Cell(metric.title, short=metric.title.removesuffix(" latency")),
        *([_arms(change)] if several_arms else []),
        old[0],
        new[0],
        *factor,
        doc.Cell(change.outcome + (f", better for {shown(arm)}" if arm else ""), style, short),
        _verdicts(change),
    )


def _arms(change: ComparisonChange) -> str:
    return f"{shown(change.arm)}/{shown(change.baseline)}"


def _name(change: ComparisonChange, several_arms: bool) -> str:
    return f"{METRICS[change.metric].title} in {change.workload}" + (f" ({_arms(change)})" if several_arms else "")


def _verdicts(change: ComparisonChange) -> str:
    pairing = Pairing(change.baseline, change.arm)
    old, new = (
        "–" if name is None else verdict_words(name, pairing) for name in (change.old_verdict, change.new_verdict)
    )
    return f"{old} → {new}" if change.verdict_changed else new


def _list(title: str, lines: list[str], on: doc.Format = doc.READ) -> doc.Section | None:
    return doc.section(title, doc.Items([doc.Item(line) for line in lines], on=on))


def _sides(fact: PropertyDifference) -> str:
    """What differs, or which run alone has it."""
    if fact.old is None or fact.new is None:
        side, value = ("new", fact.new) if fact.old is None else ("old", fact.old)
        return f"{value}, in the {side} run only"
    return f"{fact.old} → {fact.new}"


CALIBRATION_HEADINGS = (
    "images\n/s", "users", "CPU\nµs", "core", "idle\np50", "\np99", "load\np50", "\np99", "\nat",
)  # fmt: skip
"""Headings in two lines, so that a row fits in 80 columns."""


def calibration_document(calibration: Calibration) -> doc.Document:
    """A row per transport, payload and batch size, then the meaning of the columns."""
    host = calibration.host
    section = doc.Section(
        f"The load generator on {host.get('cpu_model')}, {host.get('cpu_count')} cores, kernel {host.get('kernel')}, "
        f"Python {host.get('python')}; {calibration.made_at}",
        (
            doc.Table(
                (*doc.names("workload"), *doc.numbers(*CALIBRATION_HEADINGS)),
                [_calibration_row(workload) for workload in calibration.workloads],
            ),
            *([_token_ceilings(calibration)] if calibration.tokens else []),
            *map(doc.Text, _calibration_notes(calibration)),
        ),
    )
    return doc.Document("Calibration", {"": [section]})


def _calibration_row(workload: CalibrationWorkload) -> tuple[str, ...]:
    idle, loaded = (*workload.timing, None, None)[:2]
    return (
        f"{workload.transport} {workload.payload} ×{workload.batch_size}",
        number(workload.images_per_s) + ("" if workload.limited_by == "generator" else "*"),
        str(workload.concurrency),
        number(workload.cpu_us_per_request),
        share(workload.generator_cpu_share),
        *_timing_errors(idle),
        *_timing_errors(loaded),
        "–" if loaded is None else share(loaded.ceiling_share),
    )


def _token_ceilings(calibration: Calibration) -> doc.Table:
    """The most streamed tokens that one process receives one by one."""
    return doc.Table(
        (*doc.names("streamed tokens"), *doc.numbers("tokens\n/s", "users", "CPU\nµs")),
        [
            (
                ceiling.transport,
                number(ceiling.tokens_per_s),
                str(ceiling.concurrency),
                number(ceiling.cpu_us_per_token),
            )
            for ceiling in calibration.tokens
        ],
    )


def _timing_errors(timing: TimingError | None) -> tuple[str, ...]:
    return tuple(
        "–" if value is None else ("+" if value >= 0.0 else "−") + number(abs(value) / 1000.0, 2)
        for value in ((None, None) if timing is None else (timing.p50_us, timing.p99_us))
    )


def _calibration_notes(calibration: Calibration) -> list[str]:
    """How to read the figures."""
    lines = [
        "Images/s: the most that one generator process sends with this many users; abserve compare warns above "
        f"{share(CEILING_SHARE_LIMIT)} of it. CPU: the generator's CPU time per request. Core: its share of one core "
        "at that ceiling.",
        "Idle, load: the timing error in ms, which is the reported latency minus the time that the server held the "
        "request, so it includes the way there and back. Idle is with one user, load at that share of the ceiling.",
    ]
    if calibration.tokens:
        lines.append(
            "Tokens/s: the most streamed tokens that one process can receive, each in a read of its own, by its CPU "
            "time per token."
        )
    if any(workload.limited_by != "generator" for workload in calibration.workloads):
        lines.append(
            "* The generator used less than 90 % of a core, so the sink or other programs set the limit and the true "
            "ceiling is higher. Close other programs and calibrate again."
        )
    return lines + [f"Not measured: {problem}" for problem in calibration.problems]
