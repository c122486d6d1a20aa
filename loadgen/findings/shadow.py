"""What a shadow found: which requests of the traffic it compared."""

from __future__ import annotations

from loadgen.metrics.facts import Facts
from loadgen.records.probes import ShadowRecord
from loadgen.records.run import Found

FOR_CLIENTS = (
    "both servers take turns: in half of the blocks of time clients get the candidate's answers, errors and latency, "
    "and what one server keeps, such as a session, the other one does not have"
)
"""What `--swap` means for clients."""


class ShadowFound(Found, frozen=True, kw_only=True):
    """The record of the shadow."""

    STUDY = "shadow"
    record: ShadowRecord | None = None
    """None for other runs."""


def analyse(facts: Facts) -> ShadowFound:
    """The stored record."""
    return ShadowFound(record=facts.run.record_of(ShadowRecord))
