"""Hands the requests of an open loop to its users when they are due.

gevent's timers have a resolution of a millisecond, which is most of a fast server's latency; a kernel timer (timerfd)
wakes the loop within some ten microseconds. So the timer is set a little early, and the user waits for the rest without
giving the processor away. How early follows from how long it takes from the timer to the user on this machine: the
other users' answers are not read while one waits, so a wait that is too long costs more accuracy than it gains.

A request waits while no user is idle, first come first served, and its lag records for how long. Importing this module
imports gevent.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from time import perf_counter_ns

import gevent
from gevent.queue import SimpleQueue

from loadgen.client.traffic import LoadWindow
from loadgen.experiment.schedule import drain_ns

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 0o4000, 0o2000000, 1
_NS = 1_000_000_000
OPEN_LEAD_NS = 20_000_000
"""Time from the start of an open loop to its first request, which would otherwise always be late."""
_FIRST_LEAD_NS, _MOST_LEAD_NS = 100_000, 300_000
SPIN_SHARE = 0.125
"""Above this share of the time in such waits the lead grows no further."""
_LATE_STEP_NS, _EARLY_STEP_NS = 1_600, 400
"""Steps of the lead after a user that came late or early: it settles where four of five come early (stochastic
approximation of a quantile; Robbins and Monro, Ann. Math. Statist. 22, 1951)."""
_LONGEST_WAIT_NS = 100_000_000
_libc = ctypes.CDLL(None, use_errno=True)
_Itimerspec = ctypes.c_long * 4
"""The seconds and nanoseconds of the interval, which is 0, then those of the moment."""


class MonotonicTimer:
    """Waits for moments of `perf_counter_ns`, which on Linux is CLOCK_MONOTONIC. Linux only."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._descriptor = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._descriptor < 0:
            raise _timer_error("there is no descriptor for its timer")
        self._ready = gevent.get_hub().loop.io(self._descriptor, 1)

    def wait_until(self, moment_ns: int) -> None:
        """Let other greenlets run until then; returns at once for a moment in the past."""
        if moment_ns <= perf_counter_ns():
            return
        setting = _Itimerspec(0, 0, moment_ns // _NS, moment_ns % _NS)
        if _libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(setting), None) < 0:
            raise _timer_error("its timer cannot be set")
        gevent.get_hub().wait(self._ready)
        os.read(self._descriptor, 8)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            self._ready.stop()
            self._ready.close()
            os.close(self._descriptor)
            self._descriptor = -1


def _timer_error(what: str) -> OSError:
    code = ctypes.get_errno()
    remedy = "; raise the limit of open files (ulimit -n)" if code in (errno.EMFILE, errno.ENFILE) else ""
    return OSError(f"the load generator cannot keep time: {what} ({os.strerror(code)}){remedy}")


class Pacer:
    """A queue of requests that are due, from which waiting users take them. Close it, or `run` it, which does."""

    def __init__(self, window: LoadWindow) -> None:
        """Raises `OSError` when the process may open no further descriptor for the timer."""
        self.spun_ns = 0
        """For how long users have waited without giving the processor away."""
        self.timer = MonotonicTimer()
        self._window = window
        self._due: SimpleQueue[int | None] = SimpleQueue()
        self._lead_ns = _FIRST_LEAD_NS
        self._start_ns = 0
        self._timed_ns = 0
        """The request that was handed out last, by its due moment, if the timer was set for it."""

    def take(self) -> int | None:
        """Wait for the next request that is due and return its due moment; None when there are no more."""
        intended_ns: int | None = self._due.get()
        if intended_ns is None:
            return None
        now_ns = perf_counter_ns()
        early_ns = intended_ns - now_ns
        if intended_ns == self._timed_ns:  # else it was already due within the lead
            self._adapt(early_ns, now_ns)
        if early_ns > 0:
            while perf_counter_ns() < intended_ns:
                pass
            self.spun_ns += early_ns
        return intended_ns

    def _adapt(self, early_ns: int, now_ns: int) -> None:
        """Adapt the lead to a user that came `early_ns` early, or late if it is negative. A user so late that no
        allowed lead would have helped changes nothing."""
        if early_ns >= 0:
            self._lead_ns = max(self._lead_ns - _EARLY_STEP_NS, 0)
        elif self._lead_ns - early_ns <= _MOST_LEAD_NS and self.spun_ns < SPIN_SHARE * (now_ns - self._start_ns):
            self._lead_ns += _LATE_STEP_NS

    def run(self, offsets_ns: Iterable[int], start_ns: int, users: int) -> None:
        """Hand out a request at each offset, ascending and perhaps endless, until the window is cut. Then wait until
        the last is taken, at most `drain_ns`, and end the users; requests not taken by then are never sent."""
        self._start_ns = start_ns
        try:
            span_ns = self._hand_out(offsets_ns, start_ns)
            deadline_ns = start_ns + span_ns + drain_ns(span_ns)
            while self._due.qsize() and self._window.cut_reason is None and perf_counter_ns() < deadline_ns:
                self.timer.wait_until(min(deadline_ns, perf_counter_ns() + _NS // 1000))
        finally:
            self.close()
            while self._due.qsize():
                self._due.get()
            for _ in range(users):
                self._due.put(None)

    def close(self) -> None:
        """Idempotent."""
        self.timer.close()

    def _hand_out(self, offsets_ns: Iterable[int], start_ns: int) -> int:
        last_ns = 0
        for offset_ns in offsets_ns:
            due_ns, timed_ns = start_ns + offset_ns, 0
            while (now_ns := perf_counter_ns()) < due_ns - self._lead_ns:
                if self._window.cut_reason is not None:
                    return last_ns
                timed_ns = due_ns
                self.timer.wait_until(min(due_ns - self._lead_ns, now_ns + _LONGEST_WAIT_NS))
            if self._window.cut_reason is not None:
                return last_ns
            last_ns, self._timed_ns = offset_ns, timed_ns
            self._due.put(due_ns)
        return last_ns
