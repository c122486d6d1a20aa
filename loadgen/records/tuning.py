"""What a tuning stores: the space, the contenders, what each measured, and the winners.

    DIR/tuning.json            Tuning     rewritten after every measurement
    DIR/01-screening/ …        a run of `abserve compare` each, with the anchor and some contenders as its arms
    DIR/final/                 the comparison whose verdict is the answer

A *contender* is a target with values of its settings. Screenings find good ones cheaply, the finalists are measured
freshly, and the winners once more in the final comparison: no figure of the answer comes from a run that chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from loadgen.records.run import Label, Record

Stage = Literal["screening", "finalists", "final", "settings"]
"""settings: the winners beside themselves with one setting put back, to tell which settings matter."""
ANCHOR: Label = "anchor"
"""The arm of every screening that all scores refer to: the first server of the tuning at its defaults."""


class TunableSetting(Record, frozen=True, kw_only=True):
    """An option of `abserve serve TARGET` that may change how fast the server is."""

    name: str
    """Without the leading dashes, such as max-batch-size."""
    default: str
    """The value in effect on this machine where nothing is set; one of `values`."""
    values: tuple[str, ...]
    """What the search tries here; ascending if `ordered`."""
    ordered: bool = False
    when: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """It applies only where each of these settings has one of these values."""
    values_when: Mapping[str, Mapping[str, tuple[str, ...]]] = msgspec.field(default_factory=dict)
    """By value, the same for this value alone; a value that is not in it always applies. The default always does."""
    about: str = ""
    """The help of the option."""
    by_load: bool = False
    """Whether a comparison at every load's best tries it."""


class Space(Record, frozen=True, kw_only=True):
    """What can be tuned of one target, for one model on this machine."""

    target: str
    settings: tuple[TunableSetting, ...]
    """A setting comes after those of its `when`."""
    fixed: dict[str, str] = msgspec.field(default_factory=dict)
    """Options with which every contender of the target is started, unless its settings have other values."""
    on_request: tuple[TunableSetting, ...] = ()
    """What changes the answers too, such as the precision: searched only where `--tune` names it."""
    not_searched: tuple[str, ...] = ()
    """What could change the speed and is not tried, a clause each with its reason."""


class Contender(Record, frozen=True, kw_only=True):
    """A target with values of its settings."""

    name: Label
    """Unique in a tuning, such as native-3; native-0 is the target at its defaults."""
    target: str
    settings: dict[str, str]
    """The values that differ from the defaults, of settings that apply; empty: the defaults."""


OverLimit = tuple[float, float, float]
"""A limited metric over its limit, and the 95 % interval of that; above 1 misses the limit."""


class Score(Record, frozen=True, kw_only=True):
    """What one run measured of one contender."""

    contender: Label
    log_ratio: float
    """log of how many times better than the anchor it is by the goal; above 0 is better."""
    error: float
    """Standard error of that."""
    value: float
    """The goal's metric in its unit."""
    p99_ms: float | None = None
    """For the curve of latency and throughput."""
    limits: dict[str, OverLimit] = msgspec.field(default_factory=dict)
    """By the name of each limited metric."""


class TuningRun(Record, frozen=True, kw_only=True):
    """One run of the tuning with the scores of its contenders."""

    folder: str
    stage: Stage
    scores: tuple[Score, ...] = ()
    anchor: Score | None = None
    """The anchor, which is the first target at its defaults and never a contender of a run: its figures."""
    out: dict[Label, str] = msgspec.field(default_factory=dict)
    """Contenders that gave wrong answers, did not start or left the GPU unused: why, in one sentence. They never run
    again."""
    problem: str | None = None
    """Why the run as a whole counts for nothing, such as a busy machine."""
    seconds: float = 0.0
    load_seconds: float = 0.0
    """Of these, from the first block to the last."""


class Tuning(Record, frozen=True, kw_only=True):
    """The whole tuning, as far as it got."""

    FILE: ClassVar[str] = "tuning.json"

    schema: Literal["abserve.tuning/1"] = "abserve.tuning/1"
    settings: dict[str, object]
    """The content of the settings, without defaults left out."""
    spaces: tuple[Space, ...]
    contenders: tuple[Contender, ...] = ()
    runs: tuple[TuningRun, ...] = ()
    winners: tuple[Label, ...] = ()
    """One per target, in the order of `spaces`; empty until the finalists were measured."""
    finalists: tuple[Label, ...] = ()
    """Who goes into the finalists' runs; empty until the screenings are over, and where there is no time for these."""
    state: Literal["running", "finished", "interrupted", "failed"] = "running"
    error: str | None = None
