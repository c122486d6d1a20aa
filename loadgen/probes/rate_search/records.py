"""The stored records of rate searches and ramps, and the result of each search or ramp on one arm.

    DIR/trials/NNNN.json   Trial   written when the trial is over, after its samples
    DIR/trials/NNNN.npy    its raw samples; see `loadgen.records.samples`

A trial is a stretch of load at a rate, or with a number of users, that earlier trials decided. Trials of different arms
are not paired; the results of the searches are compared.
"""

from __future__ import annotations

from typing import Literal

from loadgen.records.run import Figure, Found, Label, Record

Ended = Literal["found", "highest", "none"]


class Trial(Record, frozen=True, kw_only=True):
    """One trial of a search (`rate_per_s` is set) or one step of a ramp (it is None)."""

    index: int
    workload: str
    round: int
    restart: int
    label: Label
    position: int
    """0 when this arm came first in its pair, else 1."""
    step: int
    """Index within the search or the ramp, from 0."""
    concurrency: int
    """Users of a ramp's step; the most requests in flight at a rate."""
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
    """CPU time of all its processes."""
    generator_spin_ns: int = 0
    """The part of it in which users only waited for the moment to send."""
    generator_processes: int = 1
    throughput_per_s: float | None
    """Items per second: in a ramp while all users were busy; at a rate good answers over the trial's time."""
    p50_ms: float | None
    p99_ms: float | None
    """p99 from the intended start, of good answers; None with too few samples."""
    send_lag_p99_ms: float | None = None
    planned: int | None = None
    """Requests that fall due in the trial, by its rate and the early-stopping bound."""
    late: int | None = None
    """Answers later than the bound, failed requests, and requests that could not be sent in time."""
    late_allowed: int | None = None
    """With more late requests the trial ends at once; see `loadgen.stats.percentiles`."""
    held: bool | None = None
    note: str | None = None
    """Any other reason why it was cut short."""

    @property
    def generator_cpu_share(self) -> float | None:
        """Share of one core that sending and receiving took, the mean of its processes."""
        window_ns, work_ns = self.window_end_ns - self.window_start_ns, self.generator_cpu_ns - self.generator_spin_ns
        return max(work_ns, 0) / window_ns / self.generator_processes if window_ns > 0 else None


class RateFound(Record, frozen=True, kw_only=True):
    """Result of one search on one arm."""

    workload: str
    round: int
    restart: int
    label: Label
    bound_ms: float
    rate_per_s: float | None
    """The highest rate that held: an estimate of the rate at which p99 reaches the bound, and no lower bound of it.
    None if no rate held, or the search did not end."""
    failed_rate_per_s: float | None
    """The lowest rate that failed: the true limit lies between the two."""
    ended: Ended | None
    """How the search ended; None if it was cut short."""
    client_limited: bool
    """The generator was busy when the rate failed, so the server may hold more."""
    trials: int
    seconds: float
    """Time under load."""


class RampRung(Record, frozen=True, kw_only=True):
    """One step of a ramp."""

    concurrency: int
    throughput_per_s: float
    p50_ms: float | None
    p99_ms: float | None


class RampFound(Record, frozen=True, kw_only=True):
    """Result of one ramp on one arm."""

    workload: str
    round: int
    restart: int
    label: Label
    rungs: tuple[RampRung, ...]
    saturation_per_s: float | None
    """Items per second, the best of all steps."""
    knee_concurrency: int | None
    """Users of the first step that no later one exceeds by 5 %."""
    saturated: bool
    """Whether two steps in a row raised only the latency; else the ramp was too short."""
    client_limited: bool
    """The generator was busy on the best step, so the server may do more."""


class RatesFound(Found, frozen=True, kw_only=True):
    """Results of all searches and ramps."""

    STUDY = "rate_search"
    trials: tuple[Trial, ...] = ()
    """All trials, in the order in which they ran."""
    rates: tuple[RateFound, ...] = ()
    """A result per search for the highest rate within a latency bound."""
    ramps: tuple[RampFound, ...] = ()
    """A result per ramp to saturation."""

    def figures(self) -> list[Figure]:
        """The rates and the saturations that were found."""
        return [
            *(Figure("slo_rate", r.workload, r.label, r.round, r.restart, r.rate_per_s) for r in self.rates),
            *(Figure("saturation", r.workload, r.label, r.round, r.restart, r.saturation_per_s) for r in self.ramps),
        ]
