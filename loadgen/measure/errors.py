"""What ends a run, besides the errors of what it uses."""

from __future__ import annotations

from loadgen.records.run import Label


class RunError(Exception):
    """A step of a run failed, or its load was cut short; everything before it is stored."""

    def __init__(self, message: str, arm: Label | None = None) -> None:
        """`arm` is the one that failed, if it is known."""
        super().__init__(message)
        self.arm = arm
