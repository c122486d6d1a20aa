"""`summary.md` and `index.html` of a matrix: a section for each transport and payload, with links to its reports.

Every row compares arms over the same transport with the same payload. Rows of different tables were measured one
after the other, not interleaved, and are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import loadgen.report.document as doc
from loadgen.comparison.comparisons import leading_comparisons
from loadgen.experiment.plan import Combination
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.sections.comparisons import against_baseline, comparison_cells, comparison_columns
from loadgen.result.result_file import Result, write_atomically

NOTE = (
    "Each table compares the arms over one transport with one payload. The tables were measured one after the other, "
    "so their figures are not compared with each other."
)


@dataclass(frozen=True, slots=True)
class MatrixEntry:
    """One run of the matrix; no result where it could not store anything."""

    combination: Combination
    result: Result | None


def write_index(out_dir: Path, entries: Sequence[MatrixEntry]) -> list[Path]:
    """Write both files, each whole or not at all; return their paths. Raises `OSError`."""
    document = index(entries)
    contents = {"index.html": render_html(document), "summary.md": render_markdown(document)}
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomically(out_dir / name, content.encode())
    return [out_dir / name for name in contents]


def index(entries: Sequence[MatrixEntry]) -> doc.Document:
    """The leading metric of every scenario, run by run."""
    sections = (doc.Section("", (doc.Text(NOTE),)), *map(_section, entries))
    return doc.Document("Transports and payloads", (doc.Chapter("", sections),))


def _section(entry: MatrixEntry) -> doc.Section:
    combination, result = entry.combination, entry.result
    tables = [] if result is None else [_table(result)]
    return doc.Section(
        f"{combination.title}: {'VALID' if result is not None and result.valid else 'INVALID'}",
        (
            doc.Text("This run stored nothing." if result is None else result.verdict.sentence),
            doc.Link("summary", f"{combination.folder}/summary.md", on=doc.MARKDOWN),
            doc.Link("report", f"{combination.folder}/report.html"),
            *tables,
        ),
    )


def _table(result: Result) -> doc.Table:
    return doc.Table(
        (*comparison_columns(result), *doc.numbers("bytes of tensors a request")),
        [
            (*comparison_cells(result, one), _payload(result, one.scenario))
            for one in leading_comparisons(against_baseline(result))
            if one.ratio is not None
        ],
        grouped=True,
    )


def _payload(result: Result, cell: str) -> str:
    sizes = {s.payload_bytes for s in result.summaries if s.cell == cell and s.payload_bytes is not None}
    return " / ".join(f"{size:,.0f}" for size in sorted(sizes)) or "–"
