"""The stored records of the handicap check: DIR/handicap.json, and the blocks of each probe below DIR/handicap.

A probe loads two servers of one arm in interleaved rounds: `tuned` with the settings that only affect its speed, or
with one of them, and `plain` without any.
"""

from __future__ import annotations

from loadgen.records.run import Label, Pairing, Record, Workload

TUNED: Label = "tuned"
PLAIN: Label = "plain"
BESIDE = Pairing(TUNED, PLAIN)
"""Ratios are those of the plain server over the tuned one."""


class Probe(Record, frozen=True, kw_only=True):
    """One pair of servers of an arm, and the loads under which they ran."""

    number: int
    label: Label
    setting: str | None
    """The only setting that the tuned server has; None: the arm itself with all of its settings."""
    loads: tuple[Workload, ...]

    @property
    def folder(self) -> str:
        """Where its blocks are, relative to DIR."""
        return f"handicap/{self.number:02d}-{self.label}"


class ArmTuning(Record, frozen=True, kw_only=True):
    """What tunes one arm."""

    label: Label
    settings: dict[str, str]
    """Settings that only affect its speed and differ from the server's defaults, with their values."""
    reason: str | None = None
    """Why it was not compared with its plain server, as the end of a sentence about the arm; None where it was, or
    where it has no such setting."""


class HandicapProbes(Record, frozen=True, kw_only=True):
    """DIR/handicap.json, rewritten after each probe."""

    FILE = "handicap.json"
    arms: tuple[ArmTuning, ...] = ()
    probes: tuple[Probe, ...] = ()
    """Those that have run, the arm's own before those of single settings."""
