"""The stored records of ablations: DIR/causes.json, and the blocks of each below DIR/causes.

An ablation runs one arm twice: with one cause and without it. In its folder the blocks are labelled `as-is` and
`without`; they are interleaved like those of the arms.
"""

from __future__ import annotations

from typing import Literal

from loadgen.records.run import Label, Pairing, Record, Transport, Workload

CauseName = Literal["payload", "transfer", "queue_delay", "compute"]
"""Causes: a payload unlike the other arm's; tensors sent over a socket; waiting for a batch; executing the model."""
AS_IS: Label = "as-is"
WITHOUT: Label = "without"
BESIDE = Pairing(WITHOUT, AS_IS)


class Variant(Record, frozen=True, kw_only=True):
    """How an arm is started and loaded."""

    payload: str
    transport: Transport
    settings: dict[str, str]
    """Options that differ from the arm's own; an empty value removes the option."""


class Ablation(Record, frozen=True, kw_only=True):
    """One cause removed from one arm, in all workloads that are explained."""

    number: int
    cause: CauseName
    label: Label
    changed: str
    """The change as text: "max-queue-delay-us 10000 → 0"."""
    as_is: Variant
    """With the cause. If two causes depend on each other, the second starts from the arm without the first."""
    without: Variant
    workloads: tuple[Workload, ...]

    @property
    def folder(self) -> str:
        """Where its blocks are, relative to DIR."""
        return f"causes/{self.number:02d}-{self.cause}-{self.label}"


class Untested(Record, frozen=True, kw_only=True):
    """A cause that was not removed from an arm, and why."""

    cause: CauseName
    label: Label
    reason: str
    moot: bool = False
    """The arm does not have the cause, so it explains nothing and needs no ablation."""


class Explanation(Record, frozen=True, kw_only=True):
    """DIR/causes.json, rewritten after each ablation."""

    FILE = "causes.json"
    schema: Literal["abserve.causes/2"] = "abserve.causes/2"
    workloads: tuple[str, ...]
    """Workloads whose difference is explained."""
    left_out: tuple[str, ...]
    """Workloads with a difference, for which the time was too short."""
    done: tuple[Ablation, ...]
    untested: tuple[Untested, ...]
