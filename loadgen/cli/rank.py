"""`abserve rank RESULT…`: which engine on which machine is the fastest, the cheapest, the most economical?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli.output import announce, console_for, fail, printed, show

HELP_GROUP = "Compare"


def rank(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT",
            show_default=False,
            help="Folders of `abserve engines`, `compare` and `tune` (of which only the final counts), folders of such "
            "folders, or their matrix.json and result.json.",
        ),
    ],
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Price file; it replaces the dated examples that abserve ships.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Use spot prices instead of on-demand prices.")] = False,
    reserved: Annotated[
        bool, typer.Option("--reserved", help="Use reserved prices instead of on-demand prices.")
    ] = False,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Rank only this model.")] = None,
    precision: Annotated[str | None, typer.Option(metavar="PRECISION", help="Rank only this precision.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write report.html, summary.md, rank.json and CSV here.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="Print csv, csv-points, json or markdown instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, schema abserve.rank/1.")] = False,
) -> None:
    """Rank engines and servers over several machines by throughput, latency, cost per million items and energy.

    Results of different models, precisions, weights or payloads are never compared with each other.

    Exit status: 0 something is ranked, 1 nothing can be ranked (each reason is named) or DIR cannot be written, 2 a
    result, the price file or an option is wrong.
    """
    announce("reading the results", in_logs=False)
    from loadgen.base.documents import DocumentError
    from loadgen.ranking import analyse
    from loadgen.ranking.prices import EXAMPLES, read_prices
    from loadgen.ranking.report import published, read_all
    from loadgen.records.store import StoredRunError
    from loadgen.verdict.result import readable

    if spot and reserved:
        fail("give --spot or --reserved, not both")
    if as_json and output not in (None, "json"):
        fail("give --json or --format, not both")
    if out is not None and out.exists() and not out.is_dir():
        fail(f"--out {out}: this is a file; give a folder")
    try:
        read_results, price_list = read_all(results), read_prices(prices or EXAMPLES)
        with readable(Path(", ".join(map(str, results)))):
            ranking = analyse.rank(
                read_results,
                price_list,
                "spot" if spot else "reserved" if reserved else "on-demand",
                model=model,
                precision=precision,
                price_file=EXAMPLES.name if prices is None else str(prices),
                example_prices=prices is None,
            )
            report = published(ranking)
    except (DocumentError, StoredRunError) as exc:
        fail(str(exc))
    output = "json" if as_json else output
    console = console_for()
    if output is not None:
        printed(report, output)
    show(report, None if output is not None else console)
    if out is not None:
        try:
            page, *_ = report.write(out)
        except OSError as exc:
            fail(f"cannot write to {out}: {exc.strerror or exc}; make it writable, or leave --out away", 1)
        if output is None:
            console.print(f"report: {page}", soft_wrap=True)
    if not ranking.groups:
        raise typer.Exit(1)
