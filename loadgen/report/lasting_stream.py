"""A text stream that outlasts its reader: a terminal that has gone, or a closed pipe, does not end a measurement."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO, Any


class LastingStream:
    """Passes everything on until that fails; then it drops it. What it wraps may be closed by nobody meanwhile."""

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
