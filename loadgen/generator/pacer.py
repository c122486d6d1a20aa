"""Hands the requests of an open loop to its users when they are due.

gevent's timers have a resolution of a millisecond, which is most of a fast server's latency; a kernel timer (timerfd)
wakes the loop within some ten microseconds. A request waits while no user is idle, first come first served, and its
lag records for how long. Importing this module imports gevent.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from time import perf_counter_ns

import gevent
from gevent.queue import SimpleQueue

from loadgen.experiment.arrivals import drain_ns
from loadgen.generator.window import LoadWindow

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 0o4000, 0o2000000, 1
_NS = 1_000_000_000
OPEN_LEAD_NS = 20_000_000
"""Time from the start of an open loop to its first request, which would otherwise always be late."""
_LEAD_NS = 100_000
"""The loop is woken this much early, about the time from the timer to the user. The user waits for the rest, so that
nothing is sent early."""
_LONGEST_WAIT_NS = 100_000_000
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class MonotonicTimer:
    """Waits for moments of `perf_counter_ns`, which on Linux is CLOCK_MONOTONIC. Linux only."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._descriptor = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no timer descriptor")
        self._ready = gevent.get_hub().loop.io(self._descriptor, 1)

    def wait_until(self, moment_ns: int) -> None:
        """Let other greenlets run until then; returns at once for a moment in the past."""
        if moment_ns <= perf_counter_ns():
            return
        setting = _Itimerspec(_Timespec(0, 0), _Timespec(moment_ns // _NS, moment_ns % _NS))
        if _libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(setting), None) < 0:
            raise OSError(ctypes.get_errno(), "the timer cannot be set")
        gevent.get_hub().wait(self._ready)
        os.read(self._descriptor, 8)

    def close(self) -> None:
        self._ready.stop()
        self._ready.close()
        os.close(self._descriptor)


class Pacer:
    """A queue of requests that are due, from which waiting users take them."""

    def __init__(self, window: LoadWindow) -> None:
        self._window = window
        self._due: SimpleQueue[int | None] = SimpleQueue()

    def take(self) -> int | None:
        """Wait for the next request that is due and return its due moment; None when there are no more."""
        intended_ns: int | None = self._due.get()
        if intended_ns is not None:
            while perf_counter_ns() < intended_ns:
                pass
        return intended_ns

    def run(self, offsets_ns: Iterable[int], start_ns: int, users: int) -> None:
        """Hand out a request at each offset, ascending and perhaps endless, until the window is cut. Then wait until
        the last is taken, at most `drain_ns`, and end the users; requests not taken by then are never sent."""
        timer = MonotonicTimer()
        try:
            span_ns = self._hand_out(timer, offsets_ns, start_ns)
            deadline_ns = start_ns + span_ns + drain_ns(span_ns)
            while self._due.qsize() and self._window.cut_reason is None and perf_counter_ns() < deadline_ns:
                timer.wait_until(min(deadline_ns, perf_counter_ns() + _NS // 1000))
        finally:
            timer.close()
        while self._due.qsize():
            self._due.get()
        for _ in range(users):
            self._due.put(None)

    def _hand_out(self, timer: MonotonicTimer, offsets_ns: Iterable[int], start_ns: int) -> int:
        last_ns = 0
        for offset_ns in offsets_ns:
            due_ns = start_ns + offset_ns
            while (now_ns := perf_counter_ns()) < due_ns - _LEAD_NS:
                if self._window.cut_reason is not None:
                    return last_ns
                timer.wait_until(min(due_ns - _LEAD_NS, now_ns + _LONGEST_WAIT_NS))
            if self._window.cut_reason is not None:
                return last_ns
            last_ns = offset_ns
            self._due.put(due_ns)
        return last_ns
