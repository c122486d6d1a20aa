"""The base of all stored records."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything stored: immutable; unknown fields are refused."""

    FILE: ClassVar[str]
    """Path relative to DIR: of the record, of the list of all records of this kind, or of a folder with a numbered file
    for each."""
