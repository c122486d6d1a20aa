"""Who waits for a queued request, and in which thread it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from servers.native.entries import Entry


class Waiter(Protocol):
    """The token of an `Entry`."""

    def answer_in_place(self, entry: Entry) -> bool:
        """In the engine thread, while nothing waits for the engine: answer if that needs no event loop.

        False leaves the entry to `wake`. Sparing the event loop a wake-up here halves the cost of the hand-off, and
        costs the engine nothing: it would sleep.
        """

    def wake(self, entry: Entry) -> None:
        """In the event loop: the entry is complete."""


class FutureWaiter:
    """A coroutine that awaits `future`."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer_in_place(self, entry: Entry) -> bool:  # noqa: ARG002  coroutines live in the event loop
        """See `Waiter`."""
        return False

    def wake(self, entry: Entry) -> None:  # noqa: ARG002  whoever awaits has it
        """See `Waiter`."""
        if not self.future.done():  # its task was cancelled while the engine worked
            self.future.set_result(None)  # not the entry: the two would hold each other


def answered_in_place(entry: Entry) -> bool:
    """In the engine thread: whether its waiter has answered, so that nobody need be woken."""
    return _waiter(entry).answer_in_place(entry)


def wake_all(entries: Sequence[Entry]) -> None:
    """In the event loop: tell the waiters of entries that are complete."""
    for entry in entries:
        _waiter(entry).wake(entry)


def _waiter(entry: Entry) -> Waiter:
    return entry.token  # type: ignore[return-value]  # the batcher does not know what it is
