"""Decides when the next batch starts and with how many rows: no thread, no clock, no request.

A request that finds the engine idle starts at once, unless waiting pays: when so many others will come so soon that
executing all together ends earlier than executing these now and the others after them. Others means as many as the
clients have had outstanding at once lately: a closed loop whose requests all wait brings no more. Soon means as fast
as they came back lately: the time from the end of a batch until as many rows were queued as it had. A batch waits for
them no longer than what that saves, and never longer than the maximum delay. While a batch executes, the next one
starts just before the predicted end of it, or when it is full, unless waiting beyond that end pays.

A batch takes all rows that wait, or only as many as fill a bucket, if that executes more rows per second.

All times are ns of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

BATCHES_PER_PEAK = 16
"""The peak of outstanding rows is that of one to two times so many of the latest batches."""
MIN_MISSING_ROWS = 2
"""Nothing waits for fewer rows than this: one may be a client that is slower than the others."""
MIN_GAIN = 1.5
"""Waiting pays if it saves so many times the time that it takes: those who are expected may not come."""
NEWEST_SHARE = 0.25
"""How much the newest execution changes the expected time of its bucket."""
LEAD_NS = 100_000
"""A batch starts so long, and the times to start and to copy it, before the predicted end of the one before."""
COPIED_BYTES_PER_NS = 25
"""About the speed of PCI Express 4 and 5 with sixteen lanes; a wrong value only starts a batch earlier or later."""


@dataclass(slots=True)
class _End:
    """Of a batch of so many rows, of which `missing` have not been queued again."""

    ns: int
    rows: int
    missing: int


class BatchFormer:
    """Belongs to one thread, and to one engine."""

    def __init__(
        self, max_rows: int, max_delay_ns: int, executed_rows: Callable[[int], int], row_bytes: int = 0
    ) -> None:
        """`executed_rows` gives the bucket in which a batch is executed; `row_bytes` is the size of a row's inputs."""
        self._max_rows = max_rows
        self._max_delay_ns = max_delay_ns
        self._bucket = {rows: executed_rows(rows) for rows in range(1, max_rows + 1)}
        self._buckets = sorted(set(self._bucket.values()) & set(self._bucket))
        self._copy_ns_per_row = row_bytes / COPIED_BYTES_PER_NS
        self._execution_ns: dict[int, float] = {}
        self._flights: deque[tuple[int, int]] = deque()  # start and bucket of each batch that is not finished
        self._flying_rows: deque[int] = deque()
        self._start_ns = 0.0
        self._peaks = [0, 0]  # of outstanding rows: before the last turn, and since
        self._return_ns = math.inf  # from the end of a batch until as many rows were queued
        self._return_rows = 1.0  # of such a batch
        self._ends: deque[_End] = deque([_End(0, 0, 0)] * 2)  # of the last two batches
        self._met_rows = 0  # of the last finished batch, and those that were queued during it
        self._batches = 0

    def arrived(self, now_ns: int, rows: int) -> None:
        """A request has been queued at `now_ns`."""
        before_last, last = self._ends
        end = last if now_ns >= last.ns else before_last
        if end.missing > 0 and now_ns >= end.ns:
            end.missing -= rows
            if end.missing <= 0:
                self._returned(end, now_ns)
        if now_ns < last.ns:  # queued during the last execution, when nobody could say so
            self._met_rows += rows
            self._peaks[1] = max(self._peaks[1], self._met_rows)

    def started(self, now_ns: int, rows: int, took_ns: int = 0) -> None:
        """The next batch is on its way to the device; its start at `now_ns` kept the thread for `took_ns`."""
        self._start_ns += NEWEST_SHARE * (took_ns - self._start_ns)
        self._flights.append((now_ns, self._bucket[rows]))
        self._flying_rows.append(rows)
        self._batches += 1
        if self._batches % BATCHES_PER_PEAK == 0:
            self._peaks = [self._peaks[1], 0]

    def finished(self, now_ns: int) -> None:
        """The oldest batch on its way has been executed."""
        start_ns, bucket = self._flights.popleft()
        took_ns = now_ns - max(start_ns, self._free_from_ns)
        self._met_rows = self._flying_rows.popleft()
        before_last = self._ends.popleft()
        if before_last.missing > 0:  # they took longer than a batch, perhaps much longer
            self._returned(before_last, self._ends[0].ns)
        self._ends.append(_End(now_ns, self._met_rows, self._met_rows))
        before = self._execution_ns.get(bucket, took_ns)
        self._execution_ns[bucket] = before + NEWEST_SHARE * (took_ns - before)

    @property
    def _free_from_ns(self) -> int:
        """When the engine finished its last batch."""
        return self._ends[-1].ns

    @property
    def in_flight(self) -> int:
        """Batches that have started and not finished."""
        return len(self._flights)

    def wait_ns(self, now_ns: int, rows: int, oldest_ns: int) -> int:
        """How long `rows` waiting rows, the oldest queued at `oldest_ns`, should wait for others; 0: start now."""
        self._peaks[1] = max(self._peaks[1], rows + sum(self._flying_rows))
        if rows >= self._max_rows:
            return 0
        free_ns = self._predicted_end_ns() if self._flights else self._free_from_ns
        patience_ns = min(self._max_delay_ns, self._saved_ns(rows))
        if patience_ns > 0:
            return max(0, max(free_ns, oldest_ns) + patience_ns - now_ns)
        if not self._flights:
            return 0
        return max(0, free_ns - LEAD_NS - round(self._start_ns + rows * self._copy_ns_per_row) - now_ns)

    def rows_to_take(self, rows: int) -> int:
        """How many of the waiting rows the next batch takes at most."""
        most = min(rows, self._max_rows)
        if most in self._buckets or not self._execution_ns:
            return most
        candidates = [bucket for bucket in self._buckets if most // 2 < bucket < most]
        return max([most, *candidates], key=lambda taken: taken / self._expected_ns(taken))

    def _returned(self, end: _End, now_ns: int) -> None:
        """The clients of a batch have asked again, or have at least taken so long."""
        took_ns = now_ns - end.ns
        before = self._return_ns if self._return_ns < math.inf else took_ns
        self._return_ns = before + NEWEST_SHARE * (took_ns - before)
        self._return_rows += NEWEST_SHARE * (end.rows - self._return_rows)

    def _saved_ns(self, rows: int) -> int:
        """What executing `rows` with those that are missing saves; 0 if they come too late for that, or are few."""
        missing = min(self._max_rows, max(self._peaks)) - rows
        if missing < MIN_MISSING_ROWS:
            return 0
        apart_ns = self._expected_ns(rows) + self._expected_ns(missing)
        saved_ns = apart_ns - self._expected_ns(rows + missing)
        wait_ns = self._return_ns * max(1, missing / self._return_rows)
        return round(saved_ns) if MIN_GAIN * wait_ns < saved_ns else 0

    def _expected_ns(self, rows: int) -> float:
        bucket = self._bucket[min(rows, self._max_rows)]
        known = self._execution_ns.get(bucket)
        if known is not None or not self._execution_ns:
            return known or 0.0
        measured: Sequence[int] = sorted(self._execution_ns)
        return float(np.interp(bucket, measured, [self._execution_ns[one] for one in measured]))

    def _predicted_end_ns(self) -> int:
        end_ns = self._free_from_ns
        for start_ns, bucket in self._flights:
            end_ns = max(start_ns, end_ns) + round(self._execution_ns.get(bucket, 0))
        return end_ns
