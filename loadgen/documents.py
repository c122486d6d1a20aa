"""What others wrote, a server's documents or stored records: decoded within bounds, every text in it made printable.

This is the only place where JSON that somebody else chose is decoded. Whatever the bytes are, the outcome is a value or
a `DocumentError`.
"""

from __future__ import annotations

from typing import Any

import msgspec

MOST_BYTES = 2**20
"""Of a server's document; Triton's configuration of an ensemble of 100 models stays below a tenth of that."""
MOST_RECORD_BYTES = 2**26
"""Of a stored record."""
MOST_DEPTH = 32
MOST_CHARACTERS = 1000
_MOST_WORDS = 300


class DocumentError(ValueError):
    """A document cannot be used; the message says why, without naming the document."""


def one_line(words: str, most: int = _MOST_WORDS) -> str:
    """Somebody else's words as they go into records and onto terminals: one line, at most `most` characters, each of
    them printable. Control characters, escape codes and marks that change the direction of text are replaced."""
    line = " ".join(words[: 4 * most].split()) if most else " ".join(words.split())
    if most and len(line) > most:
        line = line[: most - 1] + "…"
    return printable(line)


def printable(text: str) -> str:
    """Every character that is not printable replaced; line breaks too."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def read_json(content: bytes | memoryview, *, most_bytes: int = MOST_BYTES) -> Any:
    """Plain values. Texts are one line each and at most MOST_CHARACTERS long. Raises `DocumentError`."""
    return _clean(decode_json(content, Any, most_bytes=most_bytes), MOST_DEPTH)


def decode_json(content: bytes | memoryview, kind: Any, *, most_bytes: int) -> Any:
    """A value of this type, its texts as they came. Raises `DocumentError`."""
    if len(content) > most_bytes:
        raise DocumentError(f"it has {len(content):,} bytes, and at most {most_bytes:,} are read")
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise DocumentError("it is nested too deeply") from None
    except ValueError as exc:  # msgspec's, and what is no UTF-8
        raise DocumentError(one_line(str(exc))) from exc


def read_record(content: bytes, kind: Any) -> Any:
    """A stored record of this type, its texts made printable. Raises `DocumentError`."""
    document = _clean(decode_json(content, Any, most_bytes=MOST_RECORD_BYTES), MOST_DEPTH, most=0)
    try:
        return msgspec.convert(document, kind, str_keys=True)
    except (ValueError, RecursionError) as exc:
        raise DocumentError(one_line(str(exc))) from exc


def _clean(value: Any, depth: int, most: int = MOST_CHARACTERS) -> Any:
    """`most` characters of a text are kept, all of them with 0."""
    if isinstance(value, str):
        return value if value.isprintable() and (not most or len(value) <= most) else one_line(value, most)
    if isinstance(value, dict | list):
        if depth == 0:
            raise DocumentError(f"it is nested more than {MOST_DEPTH} deep")
        if isinstance(value, list):
            return [_clean(element, depth - 1, most) for element in value]
        return {_clean(key, 0, most): _clean(element, depth - 1, most) for key, element in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise DocumentError("it holds a number of more than 64 bits")
    return value
