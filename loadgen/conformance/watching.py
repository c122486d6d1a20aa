"""Watches a server while a case runs: its resident memory, and whether it still answers other clients."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic, sleep

import psutil

from loadgen.conformance.records import MIB, Fact, MemoryBound
from loadgen.conformance.subject import Subject

SAMPLE_SECONDS = 0.02
SETTLE_SECONDS = 3.0
HEARTBEAT_SECONDS = 0.1
ANSWER_SECONDS = 10.0


def resident_bytes(pids: Iterable[int]) -> int | None:
    """Sum of the resident sets; None when none of the processes can be read."""
    total = None
    for pid in pids:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total = (total or 0) + psutil.Process(pid).memory_info().rss
    return total


class Watch:
    """Samples while it is entered. With `memory_only` it asks nothing, for cases that start servers themselves."""

    def __init__(self, subject: Subject, memory_only: bool) -> None:
        self._subject = subject
        self._before_bytes = self._peak_bytes = resident_bytes(subject.pids())
        self._worst_s = 0.0
        self._stop = threading.Event()
        self._threads = []
        if self._before_bytes is not None:
            self._threads.append(threading.Thread(target=self._sample, daemon=True))
        if not memory_only:
            self._threads.append(threading.Thread(target=self._beat, daemon=True))

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def live_fact(self, limit_s: float) -> Fact:
        """Whether the slowest answer of health/live came within the limit."""
        return Fact(f"live within {limit_s:g} s during the case", self._worst_s <= limit_s, f"{self._worst_s:.1f} s")

    def memory_facts(self, bound: MemoryBound) -> list[Fact]:
        """Whether memory stayed within the bounds; waits up to 3 s for growth to be given back."""
        facts = []
        if bound.retained_bytes is not None:
            deadline = monotonic() + SETTLE_SECONDS
            while (growth := self._growth(resident_bytes(self._subject.pids()))) is not None:
                if growth < bound.retained_bytes or monotonic() > deadline:
                    break
                sleep(SAMPLE_SECONDS)
            facts.append(_bounded("growth", growth, bound.retained_bytes))
        if bound.peak_bytes is not None:
            facts.append(_bounded("peak growth", self._growth(self._peak_bytes), bound.peak_bytes))
        return facts

    def _growth(self, now_bytes: int | None) -> int | None:
        return None if now_bytes is None or self._before_bytes is None else now_bytes - self._before_bytes

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak_bytes = max(self._peak_bytes or 0, resident_bytes(self._subject.pids()) or 0)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            answer = self._subject.http("GET", "/v2/health/live", deadline_s=ANSWER_SECONDS)
            self._worst_s = max(self._worst_s, answer.elapsed_s)


def _bounded(name: str, growth: int | None, bound: int) -> Fact:
    if growth is None:
        return Fact(f"memory {name}", None, "the server's memory cannot be read; use --launch or --pid")
    return Fact(f"memory {name} < {bound / MIB:g} MiB", growth < bound, f"{growth / MIB:+.1f} MiB")
