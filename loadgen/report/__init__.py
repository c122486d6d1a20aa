"""Renders a result as JSON, HTML and Markdown, and on the terminal. Not in scope: computing anything of it."""

from __future__ import annotations

from pathlib import Path

from loadgen.result import Result


def write_reports(out_dir: Path, result: Result) -> list[Path]:
    """Write report.html, summary.md and result.json into `out_dir`, each whole or not at all; return their paths, the
    one to look at first. Raises `OSError`."""
    from loadgen.report import html, markdown
    from loadgen.result import FILE_NAME, encode_result, write_atomically

    contents = {
        html.FILE_NAME: html.render_html(result),
        markdown.FILE_NAME: markdown.render_markdown(result),
    }
    write_atomically(out_dir / FILE_NAME, encode_result(result))
    for name, text in contents.items():
        write_atomically(out_dir / name, text.encode())
    return [out_dir / name for name in (*contents, FILE_NAME)]
