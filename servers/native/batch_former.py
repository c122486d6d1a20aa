"""Decides when the next batch starts and with how many rows: no thread, no clock, no request.

A request that finds the engine idle starts at once, unless waiting pays: when so many others will come so soon that
executing all together ends earlier than executing these now and the others after them. Others means as many as the
clients have had outstanding at once lately: a closed loop whose requests all wait brings no more. Soon means as fast
as requests came at their fastest lately, and only where that was much faster than on average: then they come in bursts,
as after the answers to a batch. A batch waits for them no longer than what that saves, and never longer than the
maximum delay. While a batch executes, the next one starts just before the predicted end of it, or when it is full,
unless waiting beyond that end pays.

A batch takes all rows that wait, or only as many as fill a bucket, if that executes more rows per second.

All times are ns of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

ARRIVALS = 16
"""The rate is that of so many of the latest requests."""
BATCHES_PER_PEAK = 16
"""The peaks of outstanding rows and of the rate are those of one to two times so many of the latest batches."""
MIN_BURST = 4
"""Requests come in bursts if their fastest rate is so many times the average; of random arrivals it is two to three."""
MIN_MISSING_ROWS = 2
"""Nothing waits for fewer rows than this: one may be a client that is slower than the others."""
NEWEST_SHARE = 0.25
"""How much the newest execution changes the expected time of its bucket."""
LEAD_NS = 150_000
"""A batch starts so long, and the time to copy it, before the predicted end of the one before."""
COPIED_BYTES_PER_NS = 25
"""About the speed of PCI Express 4 and 5 with sixteen lanes; a wrong value only starts a batch earlier or later."""


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
        self._arrivals: deque[tuple[int, int]] = deque(maxlen=ARRIVALS)
        self._arrived_rows = 0  # the sum of those
        self._execution_ns: dict[int, float] = {}
        self._flights: deque[tuple[int, int]] = deque()  # start and bucket of each batch that is not finished
        self._flying_rows: deque[int] = deque()
        self._free_from_ns = 0  # when the engine finished its last batch
        self._peaks = [0, 0]  # of outstanding rows: before the last turn, and since
        self._peak_rates = [0.0, 0.0]  # of rows per ns
        self._turn_ns, self._turn_rows = 0, 0  # when the present turn began, and its rows
        self._mean_rate = 0.0  # of the last turn
        self._met_rows = 0  # of the last finished batch, and those that were queued during it
        self._batches = 0

    def arrived(self, now_ns: int, rows: int) -> None:
        """A request has been queued at `now_ns`."""
        arrivals = self._arrivals
        if len(arrivals) == ARRIVALS:
            self._arrived_rows -= arrivals[0][1]
        arrivals.append((now_ns, rows))
        self._arrived_rows += rows
        if len(arrivals) == ARRIVALS:
            rate = self._arrived_rows / max(1, now_ns - arrivals[0][0])
            if rate > self._peak_rates[1]:
                self._peak_rates[1] = rate
        if now_ns < self._free_from_ns:  # queued during the last execution, when nobody could say so
            self._met_rows += rows
            self._peaks[1] = max(self._peaks[1], self._met_rows)

    def started(self, now_ns: int, rows: int) -> None:
        """The next batch is on its way to the device."""
        self._flights.append((now_ns, self._bucket[rows]))
        self._flying_rows.append(rows)
        self._batches += 1
        self._turn_rows += rows
        if self._batches % BATCHES_PER_PEAK == 0:
            self._peaks = [self._peaks[1], 0]
            self._peak_rates = [self._peak_rates[1], 0.0]
            self._mean_rate = self._turn_rows / max(1, now_ns - self._turn_ns)
            self._turn_ns, self._turn_rows = now_ns, 0

    def finished(self, now_ns: int) -> None:
        """The oldest batch on its way has been executed."""
        start_ns, bucket = self._flights.popleft()
        self._met_rows = self._flying_rows.popleft()
        took_ns = now_ns - max(start_ns, self._free_from_ns)
        self._free_from_ns = now_ns
        before = self._execution_ns.get(bucket, took_ns)
        self._execution_ns[bucket] = before + NEWEST_SHARE * (took_ns - before)

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
        return max(0, free_ns - LEAD_NS - round(rows * self._copy_ns_per_row) - now_ns)

    def rows_to_take(self, rows: int) -> int:
        """How many of the waiting rows the next batch takes at most."""
        most = min(rows, self._max_rows)
        if most in self._buckets or not self._execution_ns:
            return most
        candidates = [bucket for bucket in self._buckets if most // 2 < bucket < most]
        return max([most, *candidates], key=lambda taken: taken / self._expected_ns(taken))

    def _saved_ns(self, rows: int) -> int:
        """What executing `rows` with those that are missing saves; 0 if they come too slowly for that, or are few."""
        missing, rate = min(self._max_rows, max(self._peaks)) - rows, max(self._peak_rates)
        if missing < MIN_MISSING_ROWS or rate < MIN_BURST * self._mean_rate:
            return 0
        apart_ns = self._expected_ns(rows) + self._expected_ns(missing)
        saved_ns = apart_ns - self._expected_ns(rows + missing)
        return round(saved_ns) if missing < saved_ns * rate else 0

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
