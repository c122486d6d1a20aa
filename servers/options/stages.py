"""Where the seconds of a start go: each stage's own, without those of a stage inside it.

describe: what the model is; import: libraries; build: the module with its weights; load: the rest until it executes;
choose: measuring forms of the model; verify: comparing answers; warm_up: batches of each size; capture: CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

_seconds: dict[str, float] = {}
_inside = [0.0]
"""Seconds of the stages inside each stage that has not ended, the outermost first."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the time of this block to a stage of this process's start. Models load one after another, so that no two
    threads are in stages at once; what other threads do meanwhile belongs to the stage of the one that waits."""
    started = perf_counter()
    _inside.append(0.0)
    try:
        yield
    finally:
        took = perf_counter() - started
        _seconds[name] = _seconds.get(name, 0.0) + took - _inside.pop()
        _inside[-1] += took


def stages() -> Mapping[str, float]:
    """The seconds of each stage so far; those of the next model begin without them."""
    taken = {name: round(seconds, 2) for name, seconds in _seconds.items()}
    _seconds.clear()
    return taken


def start_line() -> str:
    """The line of a log that says where the seconds of the start went."""
    return f"start {' '.join(f'{name}_s={seconds}' for name, seconds in stages().items())}"
