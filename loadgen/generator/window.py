"""When a block of load ends: requests are shared among its users, and the clock is given, not read."""

from __future__ import annotations

FAILURES_IN_A_ROW = 100


class LoadWindow:
    """Hands out requests until the block has had enough.

    It has had enough after `requests` requests or `seconds`, whichever is later, and in any case after `max_seconds`.
    It is cut short by `cut` or by FAILURES_IN_A_ROW failures with no good answer between them; with a latency bound
    also as soon as more requests than allowed were late or failed, since nothing to come can change that.
    """

    def __init__(
        self,
        requests: int,
        seconds: float,
        max_seconds: float,
        *,
        latency_bound_ns: int | None = None,
        late_allowed: int = 0,
    ) -> None:
        self.claimed = 0
        self.late = 0
        """Requests that failed or took longer than the bound; 0 without one."""
        self.cut_reason: str | None = None
        self._requests = requests
        self._enough_ns = int(seconds * 1e9)
        self._most_ns = int(max_seconds * 1e9)
        self._start_ns = 0
        self._failures = 0
        self._bound_ns = latency_bound_ns
        self._late_allowed = late_allowed

    def start(self, now_ns: int) -> None:
        """The window opens."""
        self._start_ns = now_ns

    def claim(self, now_ns: int) -> bool:
        """Whether the caller is to send one more request."""
        elapsed_ns = now_ns - self._start_ns
        enough = self.claimed >= self._requests and elapsed_ns >= self._enough_ns
        if self.cut_reason is not None or enough or elapsed_ns >= self._most_ns:
            return False
        self.claimed += 1
        return True

    def answered(self, good: bool, latency_ns: int = 0) -> None:
        """Tell what became of a request, and how long after its intended start."""
        if self._bound_ns is not None and (not good or latency_ns > self._bound_ns):
            self.late += 1
            if self.late > self._late_allowed:
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
