"""`summary.md` and `index.html` of a matrix: a section per transport and payload, with links to its reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import loadgen.report.document as doc
from loadgen.documents import write_atomically
from loadgen.experiment.plan import Combination
from loadgen.metrics.comparisons import Comparison, leading_comparisons
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.sections.comparisons import against_baseline, comparison_table
from loadgen.verdict.result import Result

NOTE = (
    "Each table compares the arms over one transport with one payload. Do not compare figures of different tables: the "
    "tables were measured one after the other."
)


@dataclass(frozen=True, slots=True)
class MatrixEntry:
    """One run of the matrix; no result if it could not store anything."""

    combination: Combination
    result: Result | None


def write_index(out_dir: Path, entries: Sequence[MatrixEntry]) -> None:
    """Write both files, each whole or not at all. Raises `OSError`."""
    sections = (doc.Section("", (doc.Text(NOTE),)), *map(_section, entries))
    document = doc.Document("Transports and payloads", (doc.Chapter("", sections),))
    out_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(out_dir / "index.html", render_html(document).encode())
    write_atomically(out_dir / "summary.md", render_markdown(document).encode())


def _section(entry: MatrixEntry) -> doc.Section:
    """The leading metric of every scenario of one run."""
    combination, result = entry.combination, entry.result
    return doc.Section(
        f"{combination.title}: {'VALID' if result is not None and result.valid else 'INVALID'}",
        (
            doc.Text("This run stored nothing." if result is None else result.verdict.sentence),
            doc.Link("summary", f"{combination.folder}/summary.md", on=doc.MARKDOWN),
            doc.Link("report", f"{combination.folder}/report.html"),
            *([] if result is None else [_table(result)]),
        ),
    )


def _table(result: Result) -> doc.Table:
    def bytes_sent(one: Comparison) -> str:
        sizes = {
            s.payload_bytes for s in result.summaries if s.workload == one.scenario and s.payload_bytes is not None
        }
        return " / ".join(f"{size:,.0f}" for size in sorted(sizes)) or "–"

    leading = leading_comparisons(against_baseline(result))
    return comparison_table(result, leading, {"tensor bytes per request": bytes_sent})
