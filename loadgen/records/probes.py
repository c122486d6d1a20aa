"""What was asked of the servers before the load, in order to trust what they say under it."""

from __future__ import annotations

from loadgen.records.run import Label, Record


class CacheProbe(Record, frozen=True, kw_only=True):
    """Requests that the arm had never seen, each sent twice; empty with an `error`."""

    label: Label
    fresh_ns: tuple[int, ...]
    repeated_ns: tuple[int, ...]
    """The same requests once more, in the same order."""
    error: str | None = None
