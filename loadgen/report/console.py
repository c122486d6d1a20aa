"""The terminal as every command writes to it: text is text, whatever a server, a file or a log has put into it, and a
terminal that has gone, or a closed pipe, does not end a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from loadgen.documents import printable


class LastingStream:
    """Passes everything on until that fails; then it drops it. The stream it wraps must stay open."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.lost = False
        """Whether nobody reads any more."""

    def write(self, text: str) -> int:
        """Never raises for a reader that is gone."""
        if not self.lost:
            try:
                return self._stream.write(text)
            except OSError:
                self._lose()
        return len(text)

    def flush(self) -> None:
        """As `write`."""
        if not self.lost:
            try:
                self._stream.flush()
            except OSError:
                self._lose()

    def _lose(self) -> None:
        """What is still in the stream's own buffer goes nowhere, or the interpreter would fail on it in the end."""
        self.lost = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        """Its encoding, whether it is a terminal, its number."""
        return getattr(self._stream, name)


class PlainConsole(Console):
    """Takes no markup and no names of emoji in text, and passes no control character on: only rich's own styles and
    cursor movements reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed comes through here, also what stands in tables and panels."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment("\n".join(printable(line) for line in text.split("\n")), segment.style)


def make_console(stream: IO[str]) -> Console:
    """On which a run of minutes does not depend."""
    lasting = cast("IO[str]", LastingStream(stream))
    return PlainConsole(file=lasting, markup=False, emoji=False, highlight=False)
