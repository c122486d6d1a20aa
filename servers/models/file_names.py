"""Paths with letters beyond ASCII in a process whose Python takes ASCII for the encoding of file names.

Triton's python backend starts Python without a locale, whatever the environment says. There Python's own functions take
a path whose other bytes are surrogate escapes, and libraries in C++ take the text itself.
"""

from __future__ import annotations

import os
from pathlib import Path


def for_python(path: str) -> str:
    """A path from a text, such as a JSON file, as this process's Python opens it."""
    return os.fsdecode(path.encode("utf-8", "surrogateescape"))


def for_library(path: Path) -> str:
    """A path as a library in C++ takes it: as text in UTF-8."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")
