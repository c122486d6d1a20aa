"""Two runs beside each other, on a terminal and as Markdown; renders only."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.analysis.comparisons import METRICS
from loadgen.analysis.run_difference import ComparisonChange, RunDifference
from loadgen.quantities import ratio, ratio_interval
from loadgen.report.markdown import escape, make_table
from loadgen.report.tables import VERDICT_WORDS
from loadgen.report.terminal import SHORT

HEADINGS = ("scenario", "metric", "old B/A", "new B/A", "change", "95 % interval", "outcome", "verdict")
RIGHT = (2, 3, 4, 5)


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
    parts = [f"{len(names)} for {arm.upper()}" for arm in ("a", "b") if (names := _better(changed, arm))]
    return f"{len(changed)} of {len(usable)} comparisons changed: {', '.join(parts)}."


def _better(changed: list[ComparisonChange], arm: str) -> list[ComparisonChange]:
    return [one for one in changed if one.better_for == arm]


def difference_rows(found: RunDifference) -> list[tuple[str, ...]]:
    """Every comparison that both runs have."""
    return [
        (
            one.scenario,
            METRICS[one.metric].title,
            ratio(one.old_ratio, one.old_ci95),
            ratio(one.new_ratio, one.new_ci95),
            ratio(one.change, one.change_ci95),
            ratio_interval(one.change_ci95),
            one.outcome + (f", better for {one.better_for.upper()}" if one.better_for else ""),
            _verdict(one),
        )
        for one in found.comparisons
        if one.old_ratio is not None and one.new_ratio is not None
    ]


def _verdict(one: ComparisonChange) -> str:
    words = [VERDICT_WORDS[verdict] if verdict is not None else "–" for verdict in (one.old_verdict, one.new_verdict)]
    return f"{words[0]} → {words[1]}" if one.verdict_changed else words[1]


def missing_lines(found: RunDifference) -> list[str]:
    """What has no change with an interval, and why: those with the same reason together."""
    groups: dict[str, list[str]] = {}
    for one in found.comparisons:
        if one.reason is not None:
            groups.setdefault(one.reason, []).append(f"{METRICS[one.metric].title} in {one.scenario}")
    return [f"{', '.join(names)}: {reason}" for reason, names in groups.items()]


def environment_lines(found: RunDifference) -> list[str]:
    """What differs, by name."""
    return [f"{one.name}: {_short(one.old)} → {_short(one.new)}" for one in found.differences]


def _short(value: str | None) -> str:
    """A digest is known by its beginning."""
    if value is None:
        return "unknown"
    return f"{value[:12]}…" if len(value) >= 40 and " " not in value else value


def print_difference(found: RunDifference, console: Console) -> None:
    """For people, in 80 columns."""
    console.print(Text(headline(found), style="bold"))
    rows = [one for one in found.comparisons if one.old_ratio is not None and one.new_ratio is not None]
    if rows:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
        for heading in ("scenario", "metric", "old B/A", "new B/A", "change", "95 % interval", ""):
            table.add_column(
                heading, justify="left" if heading in ("scenario", "metric", "") else "right", no_wrap=True
            )
        previous = ""
        for one in rows:
            table.add_row(
                "" if one.scenario == previous else one.scenario,
                SHORT.get(one.metric, one.metric),
                ratio(one.old_ratio, one.old_ci95),
                ratio(one.new_ratio, one.new_ci95),
                ratio(one.change, one.change_ci95),
                ratio_interval(one.change_ci95),
                f"{one.better_for.upper()} gained" if one.better_for else "?" if one.change_ci95 is None else "",
                style="bold" if one.outcome == "changed" else "",
            )
            previous = one.scenario
        console.print(table)
    _print_list(console, "Other verdicts", [_verdict_line(one) for one in rows if one.verdict_changed])
    _print_list(console, "Not compared", missing_lines(found))
    _print_list(console, "What differs", environment_lines(found))
    for caveat in found.caveats:
        console.print(Text(caveat, style="yellow"))


def _verdict_line(one: ComparisonChange) -> str:
    return f"{METRICS[one.metric].title} in {one.scenario}: {_verdict(one)}"


def _print_list(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(Text(f"  {line}"))
        console.print()


def render_difference(found: RunDifference) -> str:
    """Markdown, ending in a newline."""
    parts = [
        "# Old run against new",
        escape(headline(found)),
        f"- old: {escape(found.old)}\n- new: {escape(found.new)}",
    ]
    if found.caveats:
        parts.append("\n".join(f"> {escape(caveat)}" for caveat in found.caveats))
    if rows := difference_rows(found):
        parts.append(make_table(HEADINGS, rows, right=RIGHT))
    if missing := missing_lines(found):
        parts.append("## Not compared")
        parts.append("\n".join(f"- {escape(line)}" for line in missing))
    if lines := environment_lines(found):
        parts.append("## What differs")
        parts.append("\n".join(f"- {escape(line)}" for line in lines))
    return "\n\n".join(parts) + "\n"
