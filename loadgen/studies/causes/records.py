"""What is stored of counterfactual cells: DIR/causes.json, and the blocks of each below DIR/causes.

A counterfactual is one arm twice: as it is (or as a cause before it has left it) against the same arm without one
cause. In the folder of a counterfactual the blocks are labelled `as-is` and `without`; they are interleaved like those
of the arms.
"""

from __future__ import annotations

from typing import Literal

from loadgen.records.run import Cell, Label, Pairing, Record, Transport

CauseName = Literal["payload", "transfer", "queue_delay", "compute"]
"""Another payload than the other arm's; tensors sent over a socket; waiting for a batch; executing the model."""
AS_IS: Label = "as-is"
WITHOUT: Label = "without"
BESIDE = Pairing(WITHOUT, AS_IS)


class Variant(Record, frozen=True, kw_only=True):
    """How an arm is started and asked. An empty value in `settings` takes that option away."""

    payload: str
    transport: Transport
    settings: dict[str, str]
    """Options that differ from the arm's own."""


class Counterfactual(Record, frozen=True, kw_only=True):
    """One cause taken away from one arm, in all cells that are explained."""

    number: int
    cause: CauseName
    label: Label
    """Whose arm it is."""
    changed: str
    """What was done, in words: "max-queue-delay-us 10000 → 0"."""
    as_is: Variant
    without: Variant
    cells: tuple[Cell, ...]

    @property
    def folder(self) -> str:
        """Of its blocks, relative to DIR."""
        return f"causes/{self.number:02d}-{self.cause}-{self.label}"


class Untested(Record, frozen=True, kw_only=True):
    """A cause that was not taken away from an arm, and why."""

    cause: CauseName
    label: Label
    reason: str
    moot: bool = False
    """There was nothing to take away: it can explain nothing, and needs no cell to show that."""


class Explanation(Record, frozen=True, kw_only=True):
    """DIR/causes.json, rewritten after each counterfactual that is done."""

    FILE = "causes.json"
    schema: Literal["abserve.causes/2"] = "abserve.causes/2"
    cells: tuple[str, ...]
    """Whose difference is explained."""
    left_out: tuple[str, ...]
    """Cells with a difference for which there was no time."""
    done: tuple[Counterfactual, ...]
    untested: tuple[Untested, ...]
