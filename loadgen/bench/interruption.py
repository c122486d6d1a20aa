"""How a run meets signals: SIGTERM and SIGHUP end it as Ctrl-C does, and while it cleans up none interrupts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ECHO_SECONDS = 1.0
"""A signal so soon after another one is an impatient finger, or the terminal's to its group beside our own."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Each of `ENDING` raises `KeyboardInterrupt`, once for signals that come together, so that the second cannot
    break into the clean-up before it has begun. One that is ignored, as SIGHUP is under nohup, stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -_ECHO_SECONDS

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = monotonic()
        echo, last = now - last < _ECHO_SECONDS, now
        if not echo:
            raise KeyboardInterrupt

    heeded = [number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        _restore(previous)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave servers behind; stopping is bounded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        _restore(previous)


def _restore(previous: dict[signal.Signals, signal._HANDLER]) -> None:
    for number, handler in previous.items():
        if handler is not None:  # one that was not set from Python cannot be set again from here
            signal.signal(number, handler)
