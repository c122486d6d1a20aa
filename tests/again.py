"""For claims that another program on the same cores, or chance, upsets once in a while, but not time after time.

A fault that such a test guards against is there each time; so it is found whatever the machine does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

TIMES = 4


class Repeatable:
    """What one measurement found, and what it finds when it is made again: `make` gets 0, 1, …"""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._found: list[Any] = []

    def found(self, time: int) -> Any:
        """What the `time`-th measurement found, which all tests share."""
        while len(self._found) <= time:
            self._found.append(self._make(len(self._found)))
        return self._found[time]


def again(test: Callable[..., None]) -> Callable[..., None]:
    """Make a test pass that passes at one of `TIMES` times. Each time a `Repeatable` among its fixtures stands for what
    another measurement found, and `tmp_path` is empty."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        for time in range(TIMES):
            given = {
                name: value.found(time) if isinstance(value, Repeatable) else value for name, value in fixtures.items()
            }
            if "tmp_path" in given:
                given["tmp_path"] /= f"time{time}"
                given["tmp_path"].mkdir()
            try:
                test(**given)
            except AssertionError:
                if time == TIMES - 1:
                    raise
            else:
                return

    return run
