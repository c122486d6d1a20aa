"""A report as a table on the terminal and as Markdown."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.conformance.records import CaseResult, ConformanceReport, Verdict
from loadgen.documents import printable

_STYLES = {
    Verdict.CONFORMS: "green",
    Verdict.DEVIATES: "red",
    Verdict.CRASHED: "bold red",
    Verdict.NOT_APPLICABLE: "dim",
    Verdict.SKIPPED: "yellow",
}
NARROWEST = 140


def print_report(report: ConformanceReport, console: Console) -> None:
    """The table, then the summary."""
    table = Table(title=f"Conformance of {report.server_title}", title_justify="left", expand=True)
    for name, ratio in (("Case", 18), ("Protocol", 0), ("Expected", 20), ("Received", 26), ("Verdict", 26)):
        table.add_column(name, ratio=ratio or None, overflow="fold", no_wrap=name == "Protocol")
    for result in report.results:
        table.add_row(
            f"{result.number} {result.title}",
            result.protocol,
            result.expected,
            result.got,
            Text.assemble((result.verdict.value, _STYLES[result.verdict]), _because(result)),
        )
    # In a narrower table every word would be broken; the terminal wraps or scrolls instead.
    console.print(table, width=max(console.width, NARROWEST))
    console.print(summary(report), style="bold", markup=False)
    if report.stopped is not None:
        console.print(f"The run ended early: {report.stopped}", style="bold red", markup=False)


def summary(report: ConformanceReport) -> str:
    """How many cases have each verdict."""
    return ", ".join(f"{verdict.value}: {report.count(verdict)}" for verdict in Verdict)


def markdown(report: ConformanceReport) -> str:
    """Deviations and crashes as a table, the other cases as lists of numbers."""
    by_verdict = {verdict: [one for one in report.results if one.verdict is verdict] for verdict in Verdict}
    title = f"{escaped(report.server_title)}, model `{report.model}`, {report.created_at[:10]}"
    lines = [f"{title}, abserve {report.abserve_version}.", f"{summary(report)}.", ""]
    if failed := [one for one in report.results if one.failed]:
        lines += ["| Case | Protocol | Expected | Received | Verdict |", "|---|---|---|---|---|"]
        lines += [
            f"| {one.number} {escaped(one.title)} | {one.protocol} | {escaped(one.expected)} | {escaped(one.got)} "
            f"| {one.verdict.value}{escaped(_because(one))} |"
            for one in failed
        ]
        lines.append("")
    if conforming := by_verdict[Verdict.CONFORMS]:
        lines += [f"Conforms: {', '.join(one.number for one in conforming)}.", ""]
    for verdict in (Verdict.NOT_APPLICABLE, Verdict.SKIPPED):
        numbers: dict[str, list[str]] = {}
        for one in by_verdict[verdict]:
            numbers.setdefault(one.reason, []).append(one.number)
        rows = [f"- {', '.join(found)}: {escaped(reason)}" for reason, found in numbers.items()]
        lines += [f"{verdict.value.capitalize()}:", "", *rows, ""] if rows else []
    rows = [f"- {one.number}: {escaped('; '.join(one.not_observed))}" for one in report.results if one.not_observed]
    lines += ["Not observed:", "", *rows, ""] if rows else []
    return "\n".join(lines)


def _because(result: CaseResult) -> str:
    parts = [result.reason] if result.reason else []
    parts += [f"not observed: {name}" for name in result.not_observed]
    return f": {'; '.join(parts)}" if parts else ""


def escaped(text: str) -> str:
    """Text escaped for a Markdown table."""
    clean = printable(" ".join(text.split()))
    return clean.replace("|", "\\|").replace("<", "&lt;").replace("](", "\\](")
