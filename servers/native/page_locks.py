"""Page-locks the warm slots that requests lie in, so that a GPU copies from them while Python goes on.

A class of slots is locked when the first request of that size comes, in a thread: until that is done, and for slots
that are not warm, copies only take longer. Models share the slots: what one engine has locked is locked for all engines
of the process (see `servers.engines.torch.copies.LockedPages`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import structlog

from servers.engines.interface import Engine
from servers.native.arena import Arena

MAX_SEEN = 4096
"""So many addresses are remembered, since requests lie in the same slots again and again."""

log = structlog.get_logger("abserve.engine")


class PageLocks:
    """Belongs to the thread that starts batches, and to one engine."""

    def __init__(self, engine: Engine, arena: Arena) -> None:
        self._engine = engine
        self._arena = arena
        self._noticed: list[tuple[int, int]] = []
        self._seen: set[int] = set()

    def notice(self, addresses: Sequence[int]) -> None:
        """Requests lie there."""
        if self._seen.issuperset(addresses):
            return
        for address in addresses:
            self._notice(address)
        if len(self._seen) > MAX_SEEN:
            self._seen.clear()
        self._seen.update(addresses)

    def _notice(self, address: int) -> None:
        if any(start <= address < end for start, end in self._noticed):
            return
        arena = self._arena
        found = arena.warm_range(address - arena.address) if arena.address <= address < arena.end else None
        if found is None:
            return
        start, size = arena.address + found[0], found[1]
        self._noticed.append((start, start + size))
        threading.Thread(target=self._lock, args=(start, size), name="page-locking", daemon=True).start()

    def _lock(self, start: int, size: int) -> None:
        if not self._engine.pin(start, size):
            log.warning("memory for requests cannot be page-locked, so copies to the GPU are slower", bytes=size)
