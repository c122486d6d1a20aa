"""The outcome of a check, as stored and shown."""

from __future__ import annotations

from typing import Literal

from loadgen.records.run import Label, Record

Severity = Literal["invalidates", "roughens", "warns", "informs"]
"""roughens: others used the machine or the servers, so intervals include what they may have taken, and the figures are
not to be cited."""
State = Literal["passed", "failed", "unknown"]
Value = float | int | str | None


class Check(Record, frozen=True, kw_only=True):
    """The outcome of one check, as stored and shown."""

    name: str
    title: str
    """The condition that holds; of a check that has not passed, what is wrong or not known."""
    state: State
    """unknown: its data is missing."""
    severity: Severity
    """The effect when it has not passed."""
    scope: str
    """run, plan, or "workload NAME"."""
    value: Value
    threshold: Value
    detail: str
    """What happened, with its value, and why it matters; in lower case, without a full stop."""
    remedy: str
    """What to do, in one sentence."""
    arms: tuple[Label, ...] = ()
    """The arms to blame where it has not passed; empty if they are not known, or if it is about the whole run."""

    @property
    def ok(self) -> bool | None:
        return {"passed": True, "failed": False, "unknown": None}[self.state]
