"""Shadow: which requests of production traffic were compared. `abserve shadow` measures it, and no comparison."""

from __future__ import annotations

from loadgen.findings.registry import Probe
from loadgen.findings.shadow import ShadowFound, analyse
from loadgen.records.probes import ShadowRecord

PROBE = Probe(
    wanted=lambda _: False,
    measure=lambda _: None,
    records=(ShadowRecord,),
    finding=ShadowFound,
    analyse=analyse,
    sections="loadgen.report.sections.shadow",
)
