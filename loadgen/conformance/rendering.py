"""A report as a table on the terminal and as a section of a Markdown document."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.conformance.records import CaseResult, ConformanceReport, Verdict

_STYLES = {
    Verdict.CONFORMS: "green",
    Verdict.DEVIATES: "red",
    Verdict.CRASHED: "bold red",
    Verdict.NOT_APPLICABLE: "dim",
    Verdict.SKIPPED: "yellow",
}


NARROWEST = 140


class DocumentError(Exception):
    """A document has no place for a generated table; the message says what it must hold."""


def print_report(report: ConformanceReport, console: Console) -> None:
    """The table, then the summary."""
    table = Table(title=f"Conformance of {report.server_title}", title_justify="left", expand=True)
    for name, ratio in (("Case", 18), ("Door", 0), ("Expected", 20), ("Got", 26), ("Verdict", 26)):
        table.add_column(name, ratio=ratio or None, overflow="fold", no_wrap=name == "Door")
    for result in report.results:
        table.add_row(
            escape(f"{result.number} {result.title}"),
            result.door,
            escape(result.expected),
            escape(result.got),
            f"[{_STYLES[result.verdict]}]{result.verdict.value}[/]{escape(_because(result))}",
        )
    # Below this width the cells would be columns of syllables; a terminal wraps or scrolls instead.
    console.print(table, width=max(console.width, NARROWEST))
    console.print(summary(report), style="bold", markup=False)
    if report.stopped is not None:
        console.print(f"The run ended early: {report.stopped}", style="bold red", markup=False)


def summary(report: ConformanceReport) -> str:
    """How many of each verdict."""
    return ", ".join(f"{report.count(verdict)} {verdict.value}" for verdict in Verdict)


def write_section(report: ConformanceReport, path: Path, name: str) -> None:
    """Replace what stands between `<!-- conformance NAME -->` and `<!-- end NAME -->`. Raises `DocumentError`."""
    begin, end = f"<!-- conformance {name} -->", f"<!-- end {name} -->"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise DocumentError(f"{path} has no lines {begin} and {end}; add them where the table belongs")
    path.write_text(f"{before}{begin}\n{markdown(report)}\n{end}{after}", encoding="utf-8")


def markdown(report: ConformanceReport) -> str:
    """Deviations and crashes as a table; the rest as lists of numbers, since what conforms is the corpus itself."""
    failed = [result for result in report.results if result.verdict in (Verdict.DEVIATES, Verdict.CRASHED)]
    lines = [
        f"{report.server_title}, model `{report.model}`, {report.created_at[:10]}, abserve {report.abserve_version}.",
        f"{summary(report)}.",
        "",
    ]
    if failed:
        lines += ["| Case | Door | Expected | Got | Verdict |", "|---|---|---|---|---|"]
        lines += [
            f"| {result.number} {_cell(result.title)} | {result.door} | {_cell(result.expected)} | {_cell(result.got)} "
            f"| {result.verdict.value}{_cell(_because(result))} |"
            for result in failed
        ]
        lines.append("")
    for verdict in (Verdict.CONFORMS, Verdict.NOT_APPLICABLE, Verdict.SKIPPED):
        chosen = [result for result in report.results if result.verdict is verdict]
        if not chosen:
            continue
        if verdict is Verdict.CONFORMS:
            lines += [f"Conforms: {', '.join(result.number for result in chosen)}.", ""]
        else:
            lines.append(f"{verdict.value.capitalize()}:")
            lines.append("")
            reasons = dict.fromkeys(result.reason for result in chosen)
            lines += [
                f"- {', '.join(r.number for r in chosen if r.reason == reason)}: {_cell(reason)}" for reason in reasons
            ]
            lines.append("")
    unobserved = [result for result in report.results if result.not_observed]
    if unobserved:
        lines += ["Not observed:", ""]
        lines += [f"- {result.number}: {_cell('; '.join(result.not_observed))}" for result in unobserved]
        lines.append("")
    return "\n".join(lines)


def _because(result: CaseResult) -> str:
    parts = [result.reason] if result.reason else []
    parts += [f"not observed: {name}" for name in result.not_observed]
    return f": {'; '.join(parts)}" if parts else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
