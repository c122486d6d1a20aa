"""Copies for a `GraphRunner` on the CPU: every call is done when it returns, in any stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from servers.engines import settings
from servers.engines.torch.copies import Copy, CudaCopies, LockedPages
from servers.engines.torch.engine import TorchEngine

if TYPE_CHECKING:  # a server of a test imports this module, too
    import pytest


class HostCopies(CudaCopies):
    """Stands in for the driver's calls; there are neither streams nor events."""

    _locked_pages = LockedPages()

    def __init__(self) -> None:
        self.incoming = self.compute = self.outgoing = 0
        self.pinned = ()
        self._lock = threading.Lock()
        self._events, self._remembered = [], set()

    def enter(self) -> None:
        return

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def to_device(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int, *, locked: bool = False
    ) -> None:
        self.copy_many(targets, sources, sizes, stream)

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.copy(target, source, size, stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        ctypes.memmove(target, source, size)

    def within_device(self, target: int, copy: Copy, stream: int) -> None:
        for row in range(copy.rows):
            self.copy(target + row * copy.width, copy.source + row * copy.pitch, copy.width, stream)

    def event(self) -> int:
        return 0

    def record(self, event: int, stream: int) -> None:
        return

    def order(self, event: int, before: int, after: int) -> None:
        return

    def happened(self, event: int) -> bool:
        return True

    def wait(self, event: int) -> None:
        return

    def synchronise(self) -> None:
        return

    def captured(self, run: Callable[[], object], pool: Any) -> Callable[[], object]:
        return run

    def _register(self, address: int, byte_size: int) -> bool:
        return True

    def _unregister(self, address: int) -> None:
        return


def graph_mode_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch engines have mode graph on the CPU, where a bucket's function takes the place of its graph."""
    monkeypatch.setitem(settings.KINDS, "torch", replace(settings.KINDS["torch"], modes={"cpu": ("graph", "eager")}))
    start = TorchEngine._start
    monkeypatch.setattr(
        TorchEngine,
        "_start",
        lambda engine, *arguments, **options: start(engine, *arguments, copies=HostCopies(), **options),
    )
