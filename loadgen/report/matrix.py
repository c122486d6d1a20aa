"""`summary.md` and `index.html` of a matrix: one small table a transport and payload, and links to the whole reports.

Every row compares A with B over the same transport with the same payload. Rows of different tables were measured one
after the other, not interleaved, and are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from loadgen.analysis.checks.run import leading_comparisons
from loadgen.analysis.result import Result, write_atomically
from loadgen.experiment.combinations import Combination
from loadgen.report import tables
from loadgen.report.markdown import escape, make_table

HERE = Path(__file__).parent / "templates"
HEADINGS = ("scenario", "metric", "unit", "A", "B", "B/A", "95 % interval", "verdict", "bytes of tensors a request")
NOTE = (
    "Each table compares A with B over one transport with one payload. The tables were measured one after the other, "
    "so their figures are not compared with each other."
)


@dataclass(frozen=True, slots=True)
class MatrixEntry:
    """One run of the matrix; no result where it could not store anything."""

    combination: Combination
    result: Result | None

    @property
    def headline(self) -> str:
        """The run's verdict."""
        return "This run stored nothing." if self.result is None else self.result.verdict.headline

    @property
    def word(self) -> str:
        """VALID or INVALID."""
        return "VALID" if self.result is not None and self.result.valid else "INVALID"

    def rows(self) -> list[tuple[str, ...]]:
        """The leading metric of every scenario, as in `HEADINGS`."""
        if self.result is None:
            return []
        leading = leading_comparisons(self.result.comparisons)
        return [
            (row.scenario, row.metric, row.unit, row.a, row.b, row.ratio, row.interval, row.verdict,
             _payload(self.result, row.scenario))
            for row in tables.comparison_rows(self.result, measured_only=True)
            if row.comparison in leading
        ]  # fmt: skip


def _payload(result: Result, cell: str) -> str:
    sizes = {s.payload_bytes for s in result.summaries if s.cell == cell and s.payload_bytes is not None}
    return " / ".join(f"{size:,.0f}" for size in sorted(sizes)) or "–"


def write_index(out_dir: Path, entries: Sequence[MatrixEntry]) -> list[Path]:
    """Write both files, each whole or not at all; return their paths. Raises `OSError`."""
    contents = {"index.html": _html(entries), "summary.md": render_index(entries)}
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomically(out_dir / name, content.encode())
    return [out_dir / name for name in contents]


def render_index(entries: Sequence[MatrixEntry]) -> str:
    """The Markdown."""
    parts = ["# Transports and payloads", NOTE]
    for entry in entries:
        folder = entry.combination.folder
        parts.append(f"## {entry.combination.title}: {entry.word}")
        parts.append(f"{escape(entry.headline)} [summary]({folder}/summary.md), [report]({folder}/report.html)")
        rows = entry.rows()
        parts += [make_table(HEADINGS, rows, right=(3, 4, 5, 6, 8))] if rows else []
    return "\n\n".join(parts) + "\n"


def _html(entries: Sequence[MatrixEntry]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("matrix.html.j2").render(
        entries=entries, headings=HEADINGS, note=NOTE, style=(HERE / "report.css").read_text()
    )
