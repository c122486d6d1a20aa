"""Checks on what the servers were asked before the load: does a repeated request cost as much as a new one?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from loadgen.analysis.checks.outcome import Check, CheckName, make_check
from loadgen.quantities import share
from loadgen.records.probes import CacheProbe

LEAST_SHARE = 0.6
"""Of a new request's time, in the median: a server that computes each answer takes about all of it."""
EXCEPTIONS = 1
"""Repetitions that may be slower although there is a cache."""


def check_probes(probes: Sequence[CacheProbe]) -> list[Check]:
    """One check over both arms; none where no server was asked."""
    if not probes:
        return []
    shares = {probe.label: found for probe in probes if (found := shortened_to(probe)) is not None}
    cached = [probe.label for probe in probes if answers_from_memory(probe)]
    errors = [f"{probe.label.upper()} did not answer it: {probe.error}" for probe in probes if probe.error]
    told = " and ".join(f"{share(found)} on {label.upper()}" for label, found in shares.items())
    detail = "; ".join([*([f"a repeated request takes the time of a new one to {told}"] if told else []), *errors])
    ok = False if cached else None if errors else True
    value = min(shares.values(), default=None)
    return [make_check(CheckName.REPEATED_REQUESTS, ok, value=value, threshold=LEAST_SHARE, detail=detail)]


def shortened_to(probe: CacheProbe) -> float | None:
    """Median share of a new request's time that its repetition takes; None without a whole probe."""
    if not probe.fresh_ns:
        return None
    return median(again / once for once, again in zip(probe.fresh_ns, probe.repeated_ns, strict=True))


def answers_from_memory(probe: CacheProbe) -> bool:
    """Whether repetitions are that much faster, and nearly every one of them."""
    found = shortened_to(probe)
    slower = sum(again >= once for once, again in zip(probe.fresh_ns, probe.repeated_ns, strict=True))
    return found is not None and found < LEAST_SHARE and slower <= EXCEPTIONS
