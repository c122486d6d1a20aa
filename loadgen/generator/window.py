"""Decides when a block of load ends. Callers pass the time, so tests need no clock.

In a closed loop whose users stop one by one the last requests run at less than the intended load, and the users with
slow requests finish last. So when a block has enough requests, its users keep sending until every counted request is
answered: the cool-down, whose requests keep the load up and are not measured.

Several load processes share the counts of a block, so that one rule ends it for all of them: a process whose own
requests are answered goes on while another one's are not.
"""

from __future__ import annotations

import mmap
from enum import Enum

FAILURES_IN_A_ROW = 100
COOL_DOWN_SHARE = 1.0
"""The longest cool-down, as a share of the time before it. Requests that are still running then end at a falling
load."""


class Claim(Enum):
    """Whether a request of a closed loop is measured."""

    COUNTED = "counted"
    COOL_DOWN = "cool-down"


Counts = memoryview | list[int]
"""The counts of one block: first the moment since which it has enough, 0 until then; then a row per process, which only
that process writes. A row fills a cache line of its own, so that writing it does not slow the other processes down."""
_CLAIMED, _UNDER_WAY, _LATE, _ROW = 0, 1, 2, 8


def counts_bytes(processes: int) -> int:
    """Size of the memory for the counts of a block."""
    return 8 * _ROW * (1 + processes)


def shared_counts(descriptor: int) -> Counts:
    """The counts in memory that several processes map. Zero it before each block. Raises `OSError`."""
    return memoryview(mmap.mmap(descriptor, 0)).cast("q")


class LoadWindow:
    """Hands out requests until the block has enough: `requests` requests and `seconds`, at most `max_seconds`.

    It is cut short by `cut`, by FAILURES_IN_A_ROW failures without a good answer between them, and with a latency bound
    as soon as more requests than allowed were late or failed. Requests, late ones included, are those of all processes
    that share `counts`, of which this is number `part`; failures in a row are those of this process.
    """

    def __init__(
        self,
        requests: int,
        seconds: float,
        max_seconds: float,
        *,
        latency_bound_ns: int | None = None,
        late_allowed: int = 0,
        counts: Counts | None = None,
        part: int = 0,
    ) -> None:
        self.claimed = 0
        self.late = 0
        """Requests that failed or took longer than the bound; 0 without one."""
        self.cut_reason: str | None = None
        self._under_way = 0
        """Counted requests without an answer so far."""
        self._counts: Counts = [0] * (2 * _ROW) if counts is None else counts
        self._row = _ROW * (1 + part)
        self._requests = requests
        self._enough_ns = int(seconds * 1e9)
        self._most_ns = int(max_seconds * 1e9)
        self._start_ns = 0
        self._failures = 0
        self._bound_ns = latency_bound_ns
        self._late_allowed = late_allowed

    def start(self, now_ns: int) -> None:
        self._start_ns = now_ns

    def claim(self, now_ns: int) -> Claim | None:
        """The purpose of the caller's next request; None when it must send no more."""
        if self.cut_reason is not None:
            return None
        counts, row = self._counts, self._row
        enough_since_ns = counts[0]
        if not enough_since_ns:
            elapsed_ns = now_ns - self._start_ns
            enough = elapsed_ns >= self._enough_ns and self._total(_CLAIMED) >= self._requests
            if not enough and elapsed_ns < self._most_ns:
                self.claimed += 1
                self._under_way += 1
                counts[row + _CLAIMED] = self.claimed
                counts[row + _UNDER_WAY] = self._under_way
                return Claim.COUNTED
            counts[0] = enough_since_ns = now_ns
        until_ns = enough_since_ns + int(COOL_DOWN_SHARE * (enough_since_ns - self._start_ns))
        return Claim.COOL_DOWN if now_ns < until_ns and self._total(_UNDER_WAY) > 0 else None

    def _total(self, column: int) -> int:
        """The sum over all processes."""
        return sum(self._counts[_ROW + column :: _ROW])

    def answered(self, good: bool, latency_ns: int = 0, claim: Claim | None = None) -> None:
        """Report the end of a request: good or failed, its latency from the intended start, and its claim."""
        if claim is Claim.COUNTED:
            self._under_way -= 1
            self._counts[self._row + _UNDER_WAY] = self._under_way
        if self._bound_ns is not None and (not good or latency_ns > self._bound_ns):
            self.late += 1
            self._counts[self._row + _LATE] = self.late
            if self._total(_LATE) > self._late_allowed:
                self.cut(f"more than {self._late_allowed} requests were late")
        if good:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            self.cut(f"{FAILURES_IN_A_ROW} requests in a row failed")

    def cut(self, reason: str) -> None:
        """End the window early; the first reason stays."""
        self.cut_reason = self.cut_reason or reason
