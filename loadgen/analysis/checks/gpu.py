"""Checks on where the arms ran: two arms are ranked as GPU servers only when both are proven to be, on the same GPU.

Arms that both say they execute on the CPU need no proof: that is a CPU comparison, which the first line says.
"""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.analysis.checks.registry import Facts, Outcome, cell_scope, check
from loadgen.records.run import Label
from loadgen.storage.stored_run import StoredRun
from loadgen.studies.gpu_proof.decision import may_rank
from loadgen.studies.gpu_proof.records import EvidenceFile, EvidenceRecord, Finding

EVERY_ARM = "every arm on a GPU"
VERIFIED = "both arms GPU_VERIFIED on one GPU"


@check(
    title="a GPU did the work",
    severity="informs",
    caveat=True,
    remedy="Run on a machine with an NVIDIA GPU to compare GPU serving.",
)
def gpu_present(facts: Facts) -> Iterator[Outcome]:
    run, sides = facts.run, _sides(facts.run)
    status = run.environment.gpu.get("status") if run.environment else None
    launched = all(arm.launched for arm in run.arms)
    ok: bool | None = False
    value: str | None
    if sides and all(side is False for side in sides):
        here = status not in (None, "ok") and launched
        where = "This machine has no GPU" if here else "Both arms ran on the CPU, as their servers report"
        value, detail = "cpu", f"{where}: this is a CPU comparison."
    elif True in sides and False in sides:
        value, detail = "one arm", f"{_mixed(run)}: they are not ranked."
    elif run.evidence is not None:
        ok, sentence = may_rank(_evidence_of(run.evidence, "a", None), _evidence_of(run.evidence, "b", None))
        value, detail = ("verified", sentence) if ok else ("unproven", f"Not proven: {sentence}")
    elif True in sides:
        ok, value = None, "reported"
        detail = "The servers say that they run on a GPU; no evidence was recorded."
    elif status is not None and status != "ok" and run.arms and launched:
        value, detail = str(status), "This machine has no GPU: this is a CPU comparison."
    else:
        ok, value, detail = None, None, "It is not known what the servers run on: they do not report it."
    yield Outcome(ok, detail, value, EVERY_ARM)


@check(
    title="both arms are proven to run on the same GPU",
    severity="invalidates",
    unknown="invalidates",
    remedy="Read the findings below and docs/gpu-proof.md: each code has its remedy there.",
)
def gpu_evidence(facts: Facts) -> Iterator[Outcome]:
    """Cold starts, searches and ramps have no block to watch: they stand on the findings over the whole run."""
    run, sides = facts.run, _sides(facts.run)
    if (sides and all(side is False for side in sides)) or (run.evidence is None and True not in sides):
        return
    if True in sides and False in sides:
        yield Outcome(False, f"{_mixed(run)}: they are not ranked", "one arm", VERIFIED)
    elif run.evidence is None:
        detail = "no evidence was recorded, and what a server says about itself proves nothing"
        yield Outcome(None, detail, threshold=VERIFIED)
    else:
        for cell in run.experiment.cells:
            judged = cell.name if cell.has_blocks else None
            a, b = _evidence_of(run.evidence, "a", judged), _evidence_of(run.evidence, "b", judged)
            ok, sentence = may_rank(a, b)
            value = " and ".join(record.finding.value if record is not None else "nothing" for record in (a, b))
            yield Outcome(ok, sentence.rstrip("."), value, VERIFIED, cell_scope(cell.name))


@check(
    title="a deliberate CPU run is recognised as one",
    severity="warns",
    remedy="Let nothing else use the GPU: what keeps it busy while a server computes on the CPU blurs every finding.",
)
def negative_control(facts: Facts) -> Iterator[Outcome]:
    if facts.run.evidence is None:
        return
    controls = [record for record in facts.run.evidence.records if record.control]
    if not controls:
        yield Outcome(None, "no arm was run on the CPU deliberately", threshold=Finding.CPU_FALLBACK.value)
    for record in controls:
        recognised = record.finding is Finding.CPU_FALLBACK
        yield Outcome(
            recognised and record.activity == "idle" if record.activity is not None or not recognised else None,
            f"arm {record.label.upper()} on the CPU came out {record.finding}; "
            f"the GPU was {record.activity or 'not to be judged'} meanwhile",
            record.finding.value,
            Finding.CPU_FALLBACK.value,
        )


def _evidence_of(evidence: EvidenceFile, label: Label, cell: str | None) -> EvidenceRecord | None:
    """The finding for one arm in a cell, or over all of them."""
    return next((r for r in evidence.records if (r.label, r.cell, r.control) == (label, cell, False)), None)


def _sides(run: StoredRun) -> list[bool | None]:
    """For each arm: on a GPU, on the CPU (False), or not known, by the servers' own word."""
    devices = [arm.in_effect.get("device") for arm in run.arms]
    return [None if device is None else not str(device).startswith("cpu") for device in devices]


def _mixed(run: StoredRun) -> str:
    places = [
        f"arm {arm.label.upper()} ran on {'a GPU' if side else 'the CPU'}"
        for arm, side in zip(run.arms, _sides(run), strict=True)
    ]
    text = " and ".join(places)
    return text[0].upper() + text[1:]
