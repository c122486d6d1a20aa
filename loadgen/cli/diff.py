"""`abserve diff OLD NEW`: have the ratios between the arms changed from one run to the other?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.output import announce, complain, fail, print_report

if TYPE_CHECKING:
    from loadgen.verdict.result import Result

HELP_GROUP = "Compare"

EXIT_UNCHANGED, EXIT_NOT_COMPARABLE, EXIT_CHANGED = 0, 1, 3
_RUN = "A folder that `abserve compare` wrote to, or a result.json."


def diff(
    old: Annotated[Path | None, typer.Argument(metavar="OLD", show_default=False, help=_RUN)] = None,
    new: Annotated[Path | None, typer.Argument(metavar="NEW", show_default=False, help="Another.")] = None,
    allow: Annotated[
        bool,
        typer.Option(
            "--allow-different-environments", help="Compare the runs although machine, software or load differ."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, schema abserve.diff/2.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Compare two finished runs: old ratio, new ratio, the change with its interval, and which verdicts changed.

    Without both, the last run in results meets the last before it of the same model, servers and loads; without NEW,
    OLD does.

    Exit status: 0 no change is shown, 1 the runs cannot be compared (each difference is named), 2 a run cannot be read,
    3 at least one comparison changed, for better or worse.
    """
    if as_json and as_markdown:
        fail("give --json or --markdown, not both")
    for path in (old, new):
        if path is not None and not path.exists():
            fail(f"{path} does not exist; give {_RUN[0].lower()}{_RUN[1:-1]}")
    announce("reading both runs", in_logs=False)
    from loadgen.base.documents import indented
    from loadgen.records.store import StoredRunError
    from loadgen.report.contents import difference_document
    from loadgen.report.renderers.markdown import render_markdown
    from loadgen.verdict.result import readable
    from loadgen.verdict.run_difference import compare_runs

    try:
        if old is None or new is None:
            from loadgen.report.history import last_of_its_question

            run = old and (old if old.is_dir() else old.parent).resolve()
            old, new = last_of_its_question(run.parent if run else Path("results"), run)
            complain(f"{old} and {new}: the same model, servers and loads", kind="note", style="dim")
        runs = [_read(path) for path in (old, new)]
        with readable(old if old == new else Path(f"{old} or {new}")):
            difference = compare_runs(runs[0], runs[1], names=(str(old), str(new)), allow_different=allow)
            if as_json:
                typer.echo(indented(difference), nl=False)
            elif as_markdown:
                typer.echo(render_markdown(difference_document(difference)), nl=False)
            else:
                print_report(difference_document(difference))
    except StoredRunError as exc:
        fail(str(exc))
    if not difference.comparable:
        raise typer.Exit(EXIT_NOT_COMPARABLE)
    changed = any(comparison.outcome == "changed" for comparison in difference.comparisons)
    raise typer.Exit(EXIT_CHANGED if changed else EXIT_UNCHANGED)


def _read(path: Path) -> Result:
    """The result of a run: a folder's records are analysed again, so that both runs get the same analysis."""
    from loadgen.verdict.result import read_result, readable, stored_result

    with readable(path):
        return stored_result(path) if path.is_dir() else read_result(path.resolve())
