"""What a search for a rate and a ramp store, and what is concluded from one search or one ramp on one arm.

    DIR/trials/NNNN.json   Trial   written when the trial is over, after its samples
    DIR/trials/NNNN.npy    its raw samples; see `loadgen.records.samples`

A trial is a stretch of load at a rate, or with a number of users, that an earlier one decided. It is no block: no two
of different arms belong together, what is compared is what the searches came to.
"""

from __future__ import annotations

from typing import Literal

from loadgen.records.run import Found, Label, Record

Ended = Literal["found", "highest", "none"]


class Trial(Record, frozen=True, kw_only=True):
    """One step of a search (`rate_per_s` is set) or one rung of a ramp (it is None)."""

    index: int
    cell: str
    round: int
    restart: int
    label: Label
    position: int
    """0 when this arm came first in its pair, else 1."""
    step: int
    """From 0, within the search or the ramp."""
    concurrency: int
    """Users of a rung; the most requests under way at a rate."""
    rate_per_s: float | None = None
    started_at: str
    window_start_ns: int
    window_end_ns: int
    samples: str
    """Path of the sample file, relative to DIR."""
    requests: int
    errors: int
    error_messages: tuple[str, ...] = ()
    generator_cpu_ns: int
    """Of all its processes."""
    generator_processes: int = 1
    throughput_per_s: float | None
    """Images a second: of the loop in its stride in a rung; good answers over the time that they took at a rate."""
    p50_ms: float | None
    p99_ms: float | None
    """None where the trial has too few samples for them. From the intended start, of good answers."""
    send_lag_p99_ms: float | None = None
    planned: int | None = None
    """Requests that fall due in the trial, by its rate and the early-stopping bound."""
    late: int | None = None
    """Answers later than the bound, failed requests, and requests that could not be sent in time."""
    late_allowed: int | None = None
    """With more of them p99 is not within the bound at 99 % confidence; the trial ends at once."""
    held: bool | None = None
    note: str | None = None
    """What cut it short other than that."""

    @property
    def generator_cpu_share(self) -> float | None:
        """Of one core, the mean of its processes."""
        window_ns = self.window_end_ns - self.window_start_ns
        return self.generator_cpu_ns / window_ns / self.generator_processes if window_ns > 0 else None


class RateFound(Record, frozen=True, kw_only=True):
    """What one search on one arm came to."""

    cell: str
    round: int
    restart: int
    label: Label
    bound_ms: float
    rate_per_s: float | None
    """The highest rate whose p99 held the bound; None where none did, or the search did not end."""
    failed_rate_per_s: float | None
    """The lowest that did not: the truth lies between."""
    ended: Ended | None
    """None: cut short."""
    client_limited: bool
    """The generator was busy when the rate failed, so the server may hold more."""
    trials: int
    seconds: float
    """Under load."""


class RampRung(Record, frozen=True, kw_only=True):
    """One step of the curve."""

    concurrency: int
    throughput_per_s: float
    p50_ms: float | None
    p99_ms: float | None


class RampFound(Record, frozen=True, kw_only=True):
    """What one ramp on one arm came to."""

    cell: str
    round: int
    restart: int
    label: Label
    rungs: tuple[RampRung, ...]
    saturation_per_s: float | None
    """Images a second, the best of all rungs."""
    knee_concurrency: int | None
    """Users of the first rung from which no later one is 5 % better."""
    saturated: bool
    """Two rungs in a row brought nothing but latency; else the ladder was too short."""
    client_limited: bool
    """The generator was busy on the best rung, so the server may do more."""


class RatesFound(Found, frozen=True, kw_only=True):
    """Everything that searches and ramps came to."""

    STUDY = "rate_search"
    trials: tuple[Trial, ...] = ()
    """In the order in which they ran."""
    rates: tuple[RateFound, ...] = ()
    """One a search for the highest rate within a latency bound."""
    ramps: tuple[RampFound, ...] = ()
    """One a climb to saturation."""
