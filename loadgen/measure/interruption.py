"""Signals during a run: SIGTERM and SIGHUP end it like Ctrl-C, and nothing interrupts its clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ECHO_SECONDS = 1.0
"""A second signal this soon is a repeated key press, or the one that the terminal sends to the process group."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Each of `ENDING` raises `KeyboardInterrupt`, once for signals that come together, so that the second does not
    interrupt the start of the clean-up. An ignored signal, such as SIGHUP under nohup, stays ignored."""
    last = -_ECHO_SECONDS

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = monotonic()
        echo, last = now - last < _ECHO_SECONDS, now
        if not echo:
            raise KeyboardInterrupt

    heeded = tuple(number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None))
    with _handled(heeded, interrupt):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore `ENDING`: a second Ctrl-C must not leave servers behind, and stopping them is bounded."""
    with _handled(ENDING, signal.SIG_IGN):
        yield


@contextmanager
def _handled(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Set the handler of these signals; does nothing outside the main thread, where Python sets none."""
    main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers} if main else {}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            if earlier is not None:  # one that was not set from Python cannot be set from Python again
                signal.signal(number, earlier)
