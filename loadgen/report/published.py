"""A result as people and programs get it: the files of its folder, the formats that a command prints, its export.

Each kind of result makes one with its own `stored(folder)`: a comparison in `loadgen.report.files`, a matrix of engines
and a tuning in the `files` of their packages, a ranking and a conformance report in their `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import loadgen.report.document as doc
from loadgen.base.documents import stored_path, write_atomically
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown

Content = Callable[[Path], bytes | None]
"""The bytes of a file for this folder; None leaves the file there as it is."""


class Published(NamedTuple):
    """The report of a result, and functions that make it in other forms."""

    document: doc.Document
    contents: Mapping[str, Content]
    """The files beside report.html and summary.md, by name."""
    formats: Mapping[str, Callable[[], str]]
    """What a command can print for other programs, by name; `printable` has Markdown too."""
    export: Callable[[str, Path], str] | None = None
    """To an MLflow store, of the folder that was written. Raises `MlflowExportError`."""
    notes: tuple[str, ...] = ()
    page: str = "report.html"
    summary: str = "summary.md"

    def write(self, folder: Path) -> list[Path]:
        """Write the page, the summary and the other files, each whole or not at all; returns their paths in this
        order. Raises `OSError`, and the error of a file that failed, after the others are written."""
        folder.mkdir(parents=True, exist_ok=True)
        pages: dict[str, Content] = {
            self.page: lambda _: render_html(self.document).encode(),
            self.summary: lambda _: render_markdown(self.document).encode(),
        }
        contents, faults = {**pages, **self.contents}, []
        for name, make in contents.items():
            try:
                if (content := make(folder)) is not None:
                    write_atomically(folder / name, content)
            except OSError:
                raise
            except Exception as exc:  # noqa: BLE001 (a file that fails costs itself: the others are written first)
                faults.append(exc)
        if faults:
            raise faults[0]
        return [stored_path(folder / name) for name in contents]

    @property
    def printable(self) -> dict[str, Callable[[], str]]:
        """Every format by its name."""
        return {**self.formats, "markdown": lambda: render_markdown(self.document)}
