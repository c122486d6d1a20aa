"""A small corpus of real photographs as JPEGs of several sizes and qualities; CREDITS.md names source and licence."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def jpeg_paths() -> tuple[Path, ...]:
    """The corpus in its fixed order."""
    return tuple(sorted(FOLDER.glob("*.jpg")))


def credits_text() -> str:
    """Source, author and licence of every picture, as Markdown."""
    return (FOLDER / "CREDITS.md").read_text(encoding="utf-8")
