"""One row of the corpus: a probe and what it must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadgen.conformance.records import Door, Expectation, MemoryBound, Observation
from loadgen.conformance.settings import AS_STARTED, Setting
from loadgen.conformance.subject import Subject

Probe = Callable[[Subject], Observation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the corpus. `number` is the reference's number and, for one of several, a letter: "6b"."""

    number: str
    title: str
    probe: Probe
    expected: Expectation
    door: Door = Door.HTTP
    setting: Setting = AS_STARTED
    memory: MemoryBound | None = None
    warm_up: Callable[[Subject], None] | None = None
    """Sent before memory is read, for what a server allocates once and keeps."""
    destructive: bool = False
    """Loads, blocks or may end the server: never sent to a machine that is not known to be ours."""

    @property
    def order(self) -> tuple[int, str]:
        """The reference's number, then the letter."""
        digits = self.number.rstrip("abcdefghijklmnopqrstuvwxyz")
        return int(digits), self.number[len(digits) :]

    def describe(self) -> str:
        """What is expected, in one line."""
        parts = (self.expected.describe(), self.memory.describe() if self.memory else "")
        return "; ".join(part for part in parts if part)
