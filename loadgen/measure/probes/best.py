"""Every server at its best: `loadgen.tune.best` chooses before the run begins, so nothing is measured here."""

from __future__ import annotations

from loadgen.findings.best import BestFound, analyse, conclude
from loadgen.findings.registry import Probe

PROBE = Probe(
    wanted=lambda _: False,  # its record is written before the run begins
    measure=lambda _: None,
    finding=BestFound,
    analyse=analyse,
    conclude=conclude,
    sections="loadgen.report.sections.best",
)
