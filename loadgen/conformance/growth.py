"""Case 35: rounds of steady load, and how much resident memory has grown since the middle of them.

The first half fills caches and arenas, so only growth after it counts as a leak.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep

from loadgen.conformance.case import Case
from loadgen.conformance.memory import resident_bytes
from loadgen.conformance.records import Expectation, Fact, NotApplicableError, Observation
from loadgen.conformance.subject import Subject

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


def measure_growth(
    subject: Subject, plan: GrowthPlan, progress: Callable[[int], None] = lambda _: None
) -> GrowthReading:
    """Load it in rounds. Raises `NotApplicableError` when its memory cannot be read."""
    request = subject.infer_bytes(subject.model.binary(subject.model.rows(plan.batch)))
    answered, failed = 0, 0
    readings = [_resident(subject)]
    for number in range(plan.rounds):
        done = _round(subject, request, plan)
        answered, failed = answered + done[0], failed + done[1]
        sleep(SETTLE_SECONDS)
        readings.append(_resident(subject))
        progress(number + 1)
    return GrowthReading(tuple(readings), answered, failed)


def growth_case(plan: GrowthPlan) -> Case:
    """The corpus row."""

    def probe(subject: Subject) -> Observation:
        reading = measure_growth(subject, plan)
        grown = reading.growth_bytes
        return Observation(
            facts=(
                Fact("requests answered", reading.failed == 0 and reading.answered > 0, _answered(reading)),
                Fact(
                    f"growth from the midpoint < {plan.bound_bytes / 1e6:g} MB",
                    grown < plan.bound_bytes,
                    f"{grown / 1e6:+.1f} MB",
                ),
            )
        )

    title = f"{plan.seconds:g} s × {plan.rounds} rounds at concurrency {plan.concurrency}, batch {plan.batch}"
    expected = Expectation(note=f"growth < {plan.bound_bytes / 1e6:g} MB from the midpoint")
    return Case(number="35", title=title, probe=probe, expected=expected, destructive=True)


def _answered(reading: GrowthReading) -> str:
    return f"{reading.answered} answered, {reading.failed} failed"


def _round(subject: Subject, request: bytes, plan: GrowthPlan) -> tuple[int, int]:
    counts = [[0, 0] for _ in range(plan.concurrency)]
    end = perf_counter() + plan.seconds

    def user(mine: list[int]) -> None:
        try:
            with subject.connect() as connection:
                while perf_counter() < end:
                    answer = connection.exchange(request, ANSWER_SECONDS)
                    mine[answer.status != "200"] += 1
                    if not answer.came:
                        return
        except OSError:
            mine[1] += 1

    users = [threading.Thread(target=user, args=(mine,), daemon=True) for mine in counts]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    return sum(mine[0] for mine in counts), sum(mine[1] for mine in counts)


def _resident(subject: Subject) -> int:
    now = resident_bytes(subject.pids())
    if now is None:
        raise NotApplicableError("the server's memory cannot be read; use --launch or --pid")
    return now
