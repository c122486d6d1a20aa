"""Failures that may repeat with every request, in the log: each kind with its traceback, but at most every ten seconds.

A client that sends the same bad request again and again must not fill a disk, nor take the time of others.
"""

from __future__ import annotations

import sys
import threading
import time

import structlog

LOGGED_EVERY_S = 10.0
MAX_KINDS = 256


class FailureLog:
    """A logger's `exception` with a limit; any thread.

    Failures are of one kind if the event, the exception's class and the line that raised it are the same.
    """

    def __init__(self, name: str) -> None:
        self._log = structlog.get_logger(name)
        self._lock = threading.Lock()
        self._kinds: dict[object, tuple[float, int]] = {}  # when it was logged last, and how many were not since

    def exception(self, event: str, **fields: object) -> None:
        """Log the exception that is handled now, unless one of its kind was logged just before."""
        now = time.monotonic()
        kind = event, *_origin()
        with self._lock:
            logged, unlogged = self._kinds.get(kind, (-LOGGED_EVERY_S, 0))
            if now < logged + LOGGED_EVERY_S:
                self._kinds[kind] = logged, unlogged + 1
                return
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            self._kinds[kind] = now, 0
        self._log.exception(event, **fields, **({"repeated": unlogged} if unlogged else {}))


def _origin() -> tuple[object, ...]:
    error_class, _, trace = sys.exc_info()
    if trace is None:
        return (error_class,)
    while trace.tb_next is not None:
        trace = trace.tb_next
    return error_class, trace.tb_frame.f_code, trace.tb_lineno
