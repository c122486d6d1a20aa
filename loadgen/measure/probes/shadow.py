"""Shadow: which requests of production traffic were compared. `abserve shadow` measures it, and no comparison."""

from __future__ import annotations

from loadgen.findings.registry import Probe
from loadgen.findings.shadow import ShadowFound, analyse

PROBE = Probe(
    wanted=lambda _: False,
    measure=lambda _: None,
    finding=ShadowFound,
    analyse=analyse,
    sections="loadgen.report.sections.shadow",
)
