"""The result on a terminal: valid or not and the headline first, then the figures, why, and what to mend."""

from __future__ import annotations

from collections.abc import Container, Sequence

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from loadgen.analysis.result import Result
from loadgen.quantities import share
from loadgen.report import cause_tables, ceiling_tables, container_starts, threshold_rows
from loadgen.report.check_tables import CheckState, check_rows, counts
from loadgen.report.evidence import summary_lines
from loadgen.report.fairness import fairness_summary
from loadgen.report.searches import print_searches
from loadgen.report.tables import ComparisonRow, comparison_rows, footing, titles

STYLES = {
    "a_faster": "bold blue",
    "b_faster": "bold dark_orange",
    "equivalent": "green",
    "undecided": "dim",
    "invalid": "bold red",
}
SHORT = {
    "throughput": "images/s",
    "achieved_rate": "images/s",
    "latency_p50": "p50, ms",
    "latency_p90": "p90, ms",
    "latency_p99": "p99, ms",
    "time_to_ready": "ready, s",
    "time_to_first_answer": "first answer, s",
    "slo_rate": "requests/s",
    "saturation": "images/s",
}
MARKS: dict[CheckState, tuple[str, str]] = {
    "failed": ("✗", "bold red"),
    "warning": ("!", "bold yellow"),
    "unknown": ("?", "yellow"),
    "note": ("·", "dim"),
    "ok": ("✓", "green"),
}


def print_result(result: Result, console: Console) -> None:
    """Print everything that a person needs to decide; the reports hold the rest."""
    console.print()
    for caveat in result.verdict.caveats:
        console.print(Text(caveat, style="yellow"))
    console.print(_headline(result))
    if rows := comparison_rows(result, measured_only=True):
        console.print(_comparisons(rows))
        margin = share(result.experiment.equivalence_margin)
        console.print(
            Text(f"Above 1 B is better in images/s, worse in times. Equivalent: within ±{margin}.", style="dim")
        )
        console.print(Text(footing(result), style="dim"))
        console.print()
    _print_thresholds(result, console)
    _print_reasons(result, console)
    _print_ceilings(result, console)
    if lines := summary_lines(result):
        console.print(Text("Where the arms ran", style="bold"))
        for line in lines:
            console.print(_indented(line))
        console.print()
    print_searches(result, console)
    _print_container_starts(result, console)
    _print_checks(result, console)


def _headline(result: Result) -> Panel:
    valid = result.verdict.valid
    names = titles(result)
    lines = [
        Text(result.verdict.headline, style="bold"),
        Text.assemble(
            ("A ", STYLES["a_faster"]), names["a"], "   ", ("B ", STYLES["b_faster"]), names["b"], style="dim"
        ),
    ]
    lines += [Text(f"✗ {text}", style="red") for text in result.verdict.failed[:4]]
    if len(result.verdict.failed) > 4:
        lines.append(Text(f"✗ and {len(result.verdict.failed) - 4} more failed checks, below", style="red"))
    return Panel(
        Group(*lines),
        title=Text(" VALID " if valid else " INVALID ", style="bold white on green" if valid else "bold white on red"),
        title_align="left",
        border_style="green" if valid else "red",
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _comparisons(rows: list[ComparisonRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("scenario", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    table.add_column("A", justify="right", no_wrap=True)
    table.add_column("B", justify="right", no_wrap=True)
    table.add_column("B/A", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    previous = ""
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].scenario != row.scenario
        table.add_row(
            "" if row.scenario == previous else row.scenario,
            SHORT.get(row.comparison.metric, row.metric),
            row.a,
            row.b,
            row.ratio,
            row.interval,
            Text(row.verdict, style=STYLES[row.comparison.verdict]),
            end_section=last and row.scenario != rows[-1].scenario,
        )
        previous = row.scenario
    return table


def _print_thresholds(result: Result, console: Console) -> None:
    if not result.thresholds:
        return
    console.print(Text("Thresholds", style="bold"))
    for condition, scenario, outcome, found in threshold_rows.threshold_rows(result):
        mark, style = MARKS["ok" if outcome == "kept" else "failed"]
        console.print(Text.assemble((f"{mark} ", style), f"fail if {condition}"))
        console.print(_indented(f"{scenario}: {found}", style="dim"))
    console.print()


def _print_reasons(result: Result, console: Console) -> None:
    for scenario in result.verdict.scenarios:
        if scenario.scenario == result.verdict.main_scenario and scenario.reasons:
            console.print(Text(f"Why, in {scenario.scenario}", style="bold"))
            for reason in scenario.reasons:
                console.print(_indented(reason))
            console.print()
    for causes in result.causes:
        if causes.cell != result.verdict.main_scenario:
            console.print(Text.assemble((f"{causes.cell}: ", "bold"), causes.sentence))
    if note := cause_tables.causes_note(result):
        console.print(Text(note, style="dim"))
        console.print()


def _print_ceilings(result: Result, console: Console) -> None:
    said = ceiling_tables.ceiling_sentences(result)
    if not said:
        return
    console.print(Text(ceiling_tables.TITLE, style="bold"))
    if rows := ceiling_tables.ceiling_rows(result):
        console.print(_table(ceiling_tables.CEILING_HEADINGS, rows, right=ceiling_tables.NUMBERS))
        console.print(Text(ceiling_tables.ceiling_caption(result), style="dim"))
    for text in said:
        console.print(Text(text))
    console.print()


def _print_container_starts(result: Result, console: Console) -> None:
    for label in container_starts.LABELS:
        if not (rows := container_starts.rows(result, label)):
            continue
        console.print(
            Text.assemble(
                (f"Cold starts of {label.upper()}'s container", "bold"),
                (f"  {container_starts.service(result, label)}", "dim"),
            )
        )
        headings = container_starts.headings(result, label)
        console.print(_table(headings, rows, right=range(1, len(headings))))
        for text in container_starts.failures(result, label):
            console.print(_indented(text, style="red"))
    if result.container_cold_starts:
        console.print(Text(container_starts.CAPTION, style="dim"))
        console.print()


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Container[int]) -> Table:
    """`right`: the columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _print_checks(result: Result, console: Console) -> None:
    rows = check_rows(result)
    console.print(Text.assemble(("Checks", "bold"), f"  {counts(rows)}"))
    if fairness := fairness_summary(result.checks):
        console.print(Text(f"Before the load: {fairness}.", style="dim"))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    table.add_column(width=2)
    table.add_column(ratio=1)
    table.add_column(ratio=2)
    for row in rows:
        if row.state in ("ok", "note") or (row.state == "unknown" and row.severity == "informs"):
            continue
        mark, style = MARKS[row.state]
        what = Text.assemble(row.title, (f"\n{row.scope}", "dim"))
        table.add_row(Text(mark, style=style), what, Text.assemble(row.detail, (f"\n→ {row.remedy}", "italic")))
    if table.row_count:
        console.print(table)
    console.print()


def _indented(text: str, style: str = "") -> Padding:
    """Also where it is wrapped."""
    return Padding(Text(text, style=style), (0, 0, 0, 2), expand=False)
