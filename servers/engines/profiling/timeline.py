"""Intervals on a device's clock: which execution a launch belongs to, and who has the time in which several run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from servers.engines.profiling.records import Total


class Launch(NamedTuple):
    """One kernel, copy or fill, or one operator on a CPU; ns on any clock."""

    name: str
    start_ns: int
    end_ns: int


def between_marks(launches: Iterable[Launch], is_mark: Callable[[str], bool]) -> list[list[Launch]]:
    """What started between each mark and the next; what comes before the first and after the last is left out."""
    groups: list[list[Launch]] = []
    current: list[Launch] | None = None
    for launch in sorted(launches, key=lambda launch: launch.start_ns):
        if is_mark(launch.name):
            if current is not None:
                groups.append(current)
            current = []
        elif current is not None:
            current.append(launch)
    return groups


def span_ns(launches: Sequence[Launch]) -> int:
    """From the first start to the last end."""
    return max(launch.end_ns for launch in launches) - min(launch.start_ns for launch in launches)


def add_busy_time(launches: Sequence[Launch], totals: dict[str, Total]) -> None:
    """Add one execution to `totals`: the times added are the length of the union of all intervals.

    An instant in which n launches run counts 1/n for each.
    """
    edges = []
    for index, launch in enumerate(launches):
        totals.setdefault(launch.name, Total()).count += 1
        edges += [(launch.start_ns, 0, index), (launch.end_ns, 1, index)]
    running: set[int] = set()
    before_ns = 0
    for at_ns, is_end, index in sorted(edges):
        if running and at_ns > before_ns:
            part_ns = (at_ns - before_ns) / len(running)
            for other in running:
                totals[launches[other].name].ns += part_ns
        before_ns = at_ns
        if is_end:
            running.discard(index)
        else:
            running.add(index)
