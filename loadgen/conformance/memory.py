"""Resident memory of a server's process tree, watched while a case runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic, sleep

import psutil

SAMPLE_SECONDS = 0.02
SETTLE_SECONDS = 3.0


def resident_bytes(pids: Iterable[int]) -> int | None:
    """Sum of the resident sets; None when none of the processes can be read."""
    total = None
    for pid in pids:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total = (total or 0) + psutil.Process(pid).memory_info().rss
    return total


class MemoryWatch:
    """Samples while it is entered. Without readable processes its readings are None."""

    def __init__(self, pids: Callable[[], tuple[int, ...]]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before_bytes: int | None = None
        self._peak_bytes: int | None = None

    def __enter__(self) -> MemoryWatch:
        self.before_bytes = self._peak_bytes = resident_bytes(self._pids())
        if self.before_bytes is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def peak_growth_bytes(self) -> int | None:
        """The largest reading less the first."""
        if self.before_bytes is None or self._peak_bytes is None:
            return None
        return self._peak_bytes - self.before_bytes

    def retained_growth_bytes(self, bound: int) -> int | None:
        """What is left of the growth: waits up to 3 s for it to fall below `bound`."""
        deadline = monotonic() + SETTLE_SECONDS
        while True:
            now = resident_bytes(self._pids())
            if now is None or self.before_bytes is None:
                return None
            growth = now - self.before_bytes
            if growth < bound or monotonic() > deadline:
                return growth
            sleep(SAMPLE_SECONDS)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            now = resident_bytes(self._pids())
            if now is not None:
                self._peak_bytes = max(self._peak_bytes or 0, now)
