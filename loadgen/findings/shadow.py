"""What a shadow found: which requests of the traffic it compared."""

from __future__ import annotations

from loadgen.metrics.facts import Facts
from loadgen.records.probes import ShadowRecord
from loadgen.records.run import Found


class ShadowFound(Found, frozen=True, kw_only=True):
    """The record of the shadow."""

    STUDY = "shadow"
    record: ShadowRecord | None = None
    """None for other runs."""


def analyse(facts: Facts) -> ShadowFound:
    """The stored record."""
    return ShadowFound(record=facts.run.record_of(ShadowRecord))
