"""Case 35: rounds of steady load, and how much resident memory has grown since the middle of them.

The first half fills caches and arenas, so only growth after it counts as a leak.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from time import perf_counter, sleep

from loadgen.conformance.case import Case
from loadgen.conformance.records import Door, Fact, NotApplicableError, Observation, expect
from loadgen.conformance.subject import Subject
from loadgen.conformance.watching import resident_bytes

BOUND_BYTES = 100_000_000
SETTLE_SECONDS = 0.5
ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """How long and how hard."""

    seconds: float = 20.0
    rounds: int = 10
    concurrency: int = 20
    batch: int = 8
    bound_bytes: int = BOUND_BYTES


@dataclass(frozen=True, slots=True)
class GrowthReading:
    """Resident bytes before and after each round, and what was answered."""

    resident: tuple[int, ...]
    answered: int
    failed: int

    @property
    def growth_bytes(self) -> int:
        """From the midpoint to the end."""
        return self.resident[-1] - self.resident[len(self.resident) // 2]


def measure_growth(subject: Subject, plan: GrowthPlan) -> GrowthReading:
    """Load it in rounds. Raises `NotApplicableError` when its memory cannot be read."""
    request = subject.infer_bytes(subject.model.binary(subject.model.rows(plan.batch)))
    counts: Counter[bool] = Counter()
    readings = [_resident(subject)]
    for _ in range(plan.rounds):
        counts += _round(subject, request, plan)
        sleep(SETTLE_SECONDS)
        readings.append(_resident(subject))
    return GrowthReading(tuple(readings), counts[True], counts[False])


def growth_case(plan: GrowthPlan) -> Case:
    """The corpus row."""

    def probe(subject: Subject, _: Door) -> Observation:
        reading = measure_growth(subject, plan)
        grown, bound = reading.growth_bytes, plan.bound_bytes
        answered = f"{reading.answered} answered, {reading.failed} failed"
        return Observation(
            facts=(
                Fact("requests answered", reading.failed == 0 and reading.answered > 0, answered),
                Fact(f"growth from the midpoint < {bound / 1e6:g} MB", grown < bound, f"{grown / 1e6:+.1f} MB"),
            )
        )

    title = f"{plan.seconds:g} s × {plan.rounds} rounds at concurrency {plan.concurrency}, batch {plan.batch}"
    expected = expect(note=f"growth < {plan.bound_bytes / 1e6:g} MB from the midpoint")
    return Case("35", title, probe, expected, destructive=True)


def _round(subject: Subject, request: bytes, plan: GrowthPlan) -> Counter[bool]:
    """How many requests were answered with 200, and how many were not."""
    counts: Counter[bool] = Counter()
    end = perf_counter() + plan.seconds

    def user() -> None:
        try:
            with subject.connect() as connection:
                came = True
                while came and perf_counter() < end:
                    answer = connection.exchange(request, ANSWER_SECONDS)
                    came = answer.came
                    with lock:
                        counts[answer.good] += 1
        except OSError:
            with lock:
                counts[False] += 1

    lock = threading.Lock()
    users = [threading.Thread(target=user, daemon=True) for _ in range(plan.concurrency)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    return counts


def _resident(subject: Subject) -> int:
    now = resident_bytes(subject.pids())
    if now is None:
        raise NotApplicableError("the server's memory cannot be read; use --launch or --pid")
    return now
