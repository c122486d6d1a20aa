"""Renders a result as JSON, HTML and Markdown, and on the terminal. It computes nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from loadgen.verdict.result_file import Result

EXPERIMENT_FILE = "experiment.yaml"


def write_reports(out_dir: Path, result: Result) -> list[Path]:
    """Write report.html, summary.md, result.json and the effective experiment.yaml into `out_dir`, each whole or not at
    all; returns their paths, report.html first. An equal result.json of an older version is kept. Raises `OSError`."""
    from loadgen.documents import stored_path
    from loadgen.experiment.options import write_content
    from loadgen.report.contents import result_document
    from loadgen.report.renderers.html import render_html
    from loadgen.report.renderers.markdown import render_markdown
    from loadgen.verdict.result_file import FILE_NAME, ResultError, encode_result, read_result, write_atomically

    settings, sha256 = result.experiment.settings, result.experiment.settings_sha256
    document = result_document(result)
    contents = {
        "report.html": render_html(document).encode(),
        "summary.md": render_markdown(document).encode(),
        FILE_NAME: encode_result(result),
    }
    if settings is not None and sha256 is not None:
        contents[EXPERIMENT_FILE] = write_content(settings, sha256).encode()
    stored = None
    with suppress(ResultError):
        stored = read_result(out_dir / FILE_NAME)
    for name, content in contents.items():
        if name != FILE_NAME or stored != result:
            write_atomically(out_dir / name, content)
    return [stored_path(out_dir / name) for name in contents]
