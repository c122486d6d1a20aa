"""The stored comparison of the arms' answers to the same inputs, before the load."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.records.run import Label, Record


class ParityCase(Record, frozen=True, kw_only=True):
    """Outputs for the same items. `reference` compares an arm with the baseline; `alone` an arm's mixed batch with its
    own single responses."""

    name: str
    label: Label
    """The arm whose outputs are compared."""
    kind: Literal["reference", "alone"]
    images: int
    """Items, also of other kinds than images."""
    cosine_min: float
    max_abs: float
    ok: bool
    relative_max: float | None = None
    """Largest relative error of an item: ‖answer − expected‖ over ‖expected‖; see `loadgen.stats.agreement`."""
    element_max: float | None = None
    """Largest relative error of an element, except elements that are small relative to the others."""
    output: str | None = None
    """The first output that differs by more than rounding, if it failed."""
    fault: str | None = None
    """How that output differs, in words that follow its name."""
    top1: float | None = None
    """Share of items with the same highest logit; None without logits."""
    top5: float | None = None
    """Share of items with the same five highest logits; None without logits, or with five classes or fewer."""


class ParityRecord(Record, frozen=True, kw_only=True):
    """Whether all arms compute the same function; if not, speed is not compared."""

    FILE = "parity.json"
    cases: tuple[ParityCase, ...]
    ok: bool
    error: str | None = None
    precision: str | None = None
    """The coarsest precision of all arms, which decides the tolerance."""
    tolerance_relative: float | None = None
    """Largest relative error of an item that passes."""
    tolerance_element: float | None = None
    """Largest relative error of an element that passes."""
    threshold_cosine: float | None = None
    """Threshold in older runs, in which the cosine decided."""
    kinds: dict[str, str] = msgspec.field(default_factory=dict)
    """How each output was compared: embedding, logits, labels (equal), tensor; empty in older runs."""
    alike: dict[Label, tuple[str, ...]] | None = None
    """The outputs of each arm with the same values for every input; None with one input, and in older runs."""

    @property
    def lowest_cosine(self) -> float | None:
        return min((case.cosine_min for case in self.cases), default=None)

    @property
    def largest_relative_error(self) -> float | None:
        return max((case.relative_max for case in self.cases if case.relative_max is not None), default=None)

    def lowest_share(self, name: Literal["top1", "top5"]) -> float | None:
        """The lowest share of items with the same highest logits."""
        return min((share for case in self.cases if (share := getattr(case, name)) is not None), default=None)
