"""Asks a server for health while a case runs: one client's nonsense must not keep the others waiting."""

from __future__ import annotations

import threading

from loadgen.conformance.records import Fact
from loadgen.conformance.subject import Subject

INTERVAL_SECONDS = 0.1
ANSWER_SECONDS = 10.0


class Heartbeat:
    """Asks while it is entered; `idle` asks nothing, for cases whose probe has servers of its own."""

    def __init__(self, subject: Subject, idle: bool) -> None:
        self._subject = subject
        self._idle = idle
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._worst_s = 0.0

    def __enter__(self) -> Heartbeat:
        if not self._idle:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def fact(self, limit_s: float) -> Fact:
        """Whether the slowest answer came within the limit."""
        return Fact(f"live within {limit_s:g} s during the case", self._worst_s <= limit_s, f"{self._worst_s:.1f} s")

    def _beat(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            answer = self._subject.http("GET", "/v2/health/live", deadline_s=ANSWER_SECONDS)
            self._worst_s = max(self._worst_s, answer.elapsed_s)
