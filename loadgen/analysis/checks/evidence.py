"""Checks on where the arms ran: two arms are ranked as GPU servers only when both are proven to be, on the same GPU.

Arms that both say they execute on the CPU need no proof: that is a CPU comparison, which the first line says.
"""

from __future__ import annotations

from loadgen.analysis.checks.outcome import RUN, Check, CheckName, cell_scope, make_check
from loadgen.evidence.decision import may_rank
from loadgen.evidence.records import EvidenceFile, EvidenceRecord, Finding
from loadgen.records.run import ArmRecord, Label
from loadgen.storage.stored_run import StoredRun

EVERY_ARM = "every arm on a GPU"
VERIFIED = "both arms GPU_VERIFIED on one GPU"


def check_evidence(run: StoredRun) -> list[Check]:
    """Whether there is a GPU comparison, whether it is proven in each scenario, and whether the proof can fail."""
    return [_present(run), *_proven(run), *_control(run)]


def arm_device(arm: ArmRecord) -> str | None:
    """cpu or cuda:N in effect, as the server says; None where it does not tell."""
    device = arm.in_effect.get("device")
    return str(device) if device is not None else None


def arm_evidence(evidence: EvidenceFile | None, label: Label, cell: str | None) -> EvidenceRecord | None:
    """The finding for one arm in a cell, or over all of them."""
    records = evidence.records if evidence is not None else ()
    return next((r for r in records if (r.label, r.cell, r.control) == (label, cell, False)), None)


def _sides(run: StoredRun) -> list[bool | None]:
    """For each arm: on a GPU, on the CPU (False), or not known, by the servers' own word."""
    devices = [arm_device(arm) for arm in run.arms]
    return [None if device is None else not device.startswith("cpu") for device in devices]


def _present(run: StoredRun) -> Check:
    sides = _sides(run)
    status = run.environment.gpu.get("status") if run.environment else None

    def answer(ok: bool | None, value: str | None, detail: str) -> Check:
        return make_check(CheckName.GPU_PRESENT, ok, value=value, threshold=EVERY_ARM, detail=detail)

    if sides and all(side is False for side in sides):
        where = "This machine has no GPU" if status != "ok" else "Both arms ran on the CPU"
        return answer(False, "cpu", f"{where}: this is a CPU comparison.")
    if True in sides and False in sides:
        return answer(False, "one arm", f"{_mixed(run)}: they are not ranked.")
    if run.evidence is not None:
        proven, sentence = may_rank(arm_evidence(run.evidence, "a", None), arm_evidence(run.evidence, "b", None))
        return answer(proven, "verified" if proven else "unproven", sentence if proven else f"Not proven: {sentence}")
    if True in sides:
        return answer(None, "reported", "The servers say that they run on a GPU; no evidence was recorded.")
    if status is not None and status != "ok" and run.arms and all(arm.launched for arm in run.arms):
        return answer(False, str(status), "This machine has no GPU: this is a CPU comparison.")
    return answer(None, None, "the servers do not tell what they run on")


def _proven(run: StoredRun) -> list[Check]:
    sides = _sides(run)
    if (sides and all(side is False for side in sides)) or (run.evidence is None and True not in sides):
        return []
    if True in sides and False in sides:
        return [
            make_check(
                CheckName.GPU_EVIDENCE,
                False,
                scope=RUN,
                value="one arm",
                threshold=VERIFIED,
                detail=f"{_mixed(run)}: they are not ranked",
            )
        ]
    if run.evidence is None:
        detail = "no evidence was recorded, and what a server says about itself proves nothing"
        return [make_check(CheckName.GPU_EVIDENCE, None, threshold=VERIFIED, detail=detail)]
    return [_cell_proven(run.evidence, cell.name, not cell.has_blocks) for cell in run.experiment.cells]


def _cell_proven(evidence: EvidenceFile, cell: str, without_blocks: bool) -> Check:
    """Cold starts, searches and ramps have no block to watch: they stand on the findings over the whole run."""
    judged = None if without_blocks else cell
    a, b = arm_evidence(evidence, "a", judged), arm_evidence(evidence, "b", judged)
    ok, sentence = may_rank(a, b)
    value = " and ".join(record.finding.value if record is not None else "nothing" for record in (a, b))
    return make_check(
        CheckName.GPU_EVIDENCE, ok, scope=cell_scope(cell), value=value, threshold=VERIFIED, detail=sentence.rstrip(".")
    )


def _mixed(run: StoredRun) -> str:
    places = [
        f"arm {arm.label.upper()} ran on {'a GPU' if side else 'the CPU'}"
        for arm, side in zip(run.arms, _sides(run), strict=True)
    ]
    text = " and ".join(places)
    return text[0].upper() + text[1:]


def _control(run: StoredRun) -> list[Check]:
    if run.evidence is None:
        return []
    controls = [record for record in run.evidence.records if record.control]
    if not controls:
        detail = "no arm was run on the CPU deliberately"
        return [make_check(CheckName.NEGATIVE_CONTROL, None, threshold=Finding.CPU_FALLBACK.value, detail=detail)]
    checks = []
    for record in controls:
        seen = f"the GPU was {record.activity or 'not to be judged'} meanwhile"
        recognised = record.finding is Finding.CPU_FALLBACK
        checks.append(
            make_check(
                CheckName.NEGATIVE_CONTROL,
                recognised and record.activity == "idle" if record.activity is not None or not recognised else None,
                value=record.finding.value,
                threshold=Finding.CPU_FALLBACK.value,
                detail=f"arm {record.label.upper()} on the CPU came out {record.finding}; {seen}",
            )
        )
    return checks
