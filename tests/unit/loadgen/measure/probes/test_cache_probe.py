"""What looks like a cache is probed once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.checks.run import answers_from_memory
from loadgen.client.inputs import InputError
from loadgen.measure.probes.fairness import probe_cache


class Server:
    """Answers new requests in 2 ms, and known ones in 1 ms in those of its sessions that have a cache."""

    def __init__(self, *cached: bool | InputError) -> None:
        self.cached, self.sessions = list(cached), 0

    @contextmanager
    def timed(self, _: object, count: int) -> Iterator[Callable[[int], int]]:
        cached, known = self.cached[self.sessions], set[int]()
        self.sessions += 1

        def ask(number: int) -> int:
            assert number < count
            if isinstance(cached, InputError):
                raise cached
            faster = cached and number in known
            known.add(number)
            return 1_000_000 if faster else 2_000_000

        yield ask


@pytest.mark.parametrize(
    ("server", "sessions", "found"),
    [
        (Server(False), 1, False),
        (Server(True, False), 2, False),
        (Server(True, True), 2, True),
    ],
)
def test_a_cache_is_found_twice_or_not_at_all(server: Server, sessions: int, found: bool) -> None:
    context: Any = SimpleNamespace(sent=server)
    assert answers_from_memory(probe_cache(context, "a", SimpleNamespace(), 30.0)) is found  # type: ignore[arg-type]
    assert server.sessions == sessions


def test_an_arm_that_fails_in_the_second_probe_was_not_probed() -> None:
    context: Any = SimpleNamespace(sent=Server(True, InputError("HTTP 500")))
    probe = probe_cache(context, "a", SimpleNamespace(), 30.0)  # type: ignore[arg-type]
    assert (probe.error, probe.fresh_ns, probe.repeated_ns) == ("HTTP 500", (), ())
