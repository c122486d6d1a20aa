"""Decodes JSON from other programs within limits on size and depth, and makes every text in it printable.

The result is a value or a `DocumentError`, whatever the bytes are. Servers' documents and stored records are decoded
only here.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import msgspec

MOST_BYTES = 2**20
"""Limit of a server's document; Triton's configuration of an ensemble of 100 models is a tenth of it."""
MOST_RECORD_BYTES = 2**26
"""Limit of a stored record."""
MOST_DEPTH = 32
MOST_CHARACTERS = 1000
_MOST_WORDS = 300


class DocumentError(ValueError):
    """A document cannot be used; the message says why, but not which document."""


def one_line(words: str, most: int = _MOST_WORDS) -> str:
    """A text from another program for records and terminals: one line of at most `most` characters (0: any number).
    Control characters, escape codes and marks that change the direction of text are replaced."""
    line = " ".join(words[: 4 * most].split()) if most else " ".join(words.split())
    if most and len(line) > most:
        line = line[: most - 1] + "…"
    return printable(line)


def printable(text: str) -> str:
    """Replace every character that is not printable, also line breaks."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def stored_path(path: Path) -> Path:
    """The file itself, or its compressed copy NAME.gz where only that exists, as in published runs."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def read_stored(path: Path) -> bytes:
    """Read a stored file, unpacked if it is compressed. Raises `OSError` and `DocumentError`."""
    path = stored_path(path)
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read(MOST_RECORD_BYTES + 1)  # one byte over the limit, which the decoder refuses
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise DocumentError(f"it is not a whole gzip file ({exc})") from exc


def read_json(content: bytes | memoryview) -> Any:
    """Plain values, each text one line of at most MOST_CHARACTERS. Raises `DocumentError`."""
    return _clean(decode_json(content, Any, most_bytes=MOST_BYTES), MOST_DEPTH)


def decode_json(content: bytes | memoryview, kind: Any, *, most_bytes: int) -> Any:
    """A value of this type, with unchanged texts. Raises `DocumentError`."""
    if len(content) > most_bytes:
        raise DocumentError(f"it has {len(content):,} bytes, more than the limit of {most_bytes:,}")
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise DocumentError("it is nested too deeply") from None
    except ValueError as exc:  # msgspec's errors, and text that is not UTF-8
        raise DocumentError(one_line(str(exc))) from exc


def read_record(content: bytes, kind: Any) -> Any:
    """A stored record of this type, with printable texts. Raises `DocumentError`."""
    document = _clean(decode_json(content, Any, most_bytes=MOST_RECORD_BYTES), MOST_DEPTH, most=0)
    try:
        return msgspec.convert(document, kind, str_keys=True)
    except (ValueError, RecursionError) as exc:
        raise DocumentError(one_line(str(exc))) from exc


def _clean(value: Any, depth: int, most: int = MOST_CHARACTERS) -> Any:
    """`most` characters of each text are kept; 0 keeps all."""
    if isinstance(value, str):
        return value if value.isprintable() and (not most or len(value) <= most) else one_line(value, most)
    if isinstance(value, dict | list):
        if depth == 0:
            raise DocumentError(f"it is nested more than {MOST_DEPTH} levels deep")
        if isinstance(value, list):
            return [_clean(element, depth - 1, most) for element in value]
        return {_clean(key, 0, most): _clean(element, depth - 1, most) for key, element in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise DocumentError("it holds a number of more than 64 bits")
    return value
