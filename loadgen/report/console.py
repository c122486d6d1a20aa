"""The terminal that every command writes to: text stays text, whatever a server, a file or a log has put into it, and a
terminal or pipe that has gone does not end a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from loadgen.documents import printable


class LastingStream:
    """Passes everything on until the reader has gone, then drops it. The stream it wraps must stay open."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Never raises `OSError`."""
        try:
            return self._stream.write(text)
        except OSError:
            self._lose()
        return len(text)

    def flush(self) -> None:
        """Never raises `OSError`."""
        try:
            self._stream.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """Send everything to /dev/null, including the rest in the stream's buffer, on which the interpreter would fail
        at its end."""
        with suppress(OSError, ValueError):
            number = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        """The stream's encoding, file number and so on."""
        return getattr(self._stream, name)


class PlainConsole(Console):
    """Passes no control character on: only rich's own styles and cursor movements reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render everything printed, tables and panels included."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment("\n".join(printable(line) for line in text.split("\n")), segment.style)


def make_console(stream: IO[str]) -> Console:
    """A console whose loss does not end a run, without markup and emoji names."""
    return PlainConsole(file=cast("IO[str]", LastingStream(stream)), markup=False, emoji=False, highlight=False)
