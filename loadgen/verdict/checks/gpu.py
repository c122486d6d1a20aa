"""Checks of the GPU verification: arms are ranked as GPU servers only if each is verified on the same GPU.

If every arm reports that it runs on the CPU, nothing has to be verified: the verdict calls it a CPU comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from loadgen.comparison.claims import join
from loadgen.comparison.facts import Facts, workload_scope
from loadgen.probes.gpu.records import EvidenceFile, EvidenceRecord, GpuFinding
from loadgen.records.run import Label, shown
from loadgen.run.storage import StoredRun
from loadgen.verdict.checks.registry import Outcome, check

Evidence = Mapping[Label, EvidenceRecord | None]
"""The finding about each arm, the baseline first."""


@check(
    "the model ran on a GPU",
    "informs",
    "Run on a machine with an NVIDIA GPU to compare GPU serving.",
    threshold="every arm on a GPU",
    caveat=("failed", "unknown"),
)
def gpu_present(facts: Facts) -> Iterator[Outcome]:
    run, sides = facts.run, _sides(facts.run)
    status = run.environment.gpu.get("status") if run.environment else None
    without_gpu = status not in (None, "ok") and all(arm.launched for arm in run.arms)
    if sides and all(side is False for side in sides):
        where = "this machine has no GPU" if without_gpu else f"{_all(sides)} arms ran on the CPU, as they report"
        yield Outcome(False, f"{where}: this is a CPU comparison", "cpu")
    elif True in sides and False in sides:
        yield Outcome(False, f"{_mixed(run)}, so they are not ranked", "one arm")
    elif run.record_of(EvidenceFile) is not None:
        ok, reason = may_rank(_evidence(run, None))
        detail = reason.rstrip(".") if ok else f"GPU use is not verified: {reason.rstrip('.')}"
        yield Outcome(ok, detail, "verified" if ok else "unproven")
    elif True in sides:
        detail = "the servers report that they use a GPU, but nothing was recorded to verify it"
        yield Outcome(None, detail, "reported")
    elif without_gpu and run.arms:
        yield Outcome(False, "this machine has no GPU: this is a CPU comparison", str(status))
    else:
        yield Outcome(None, "the servers do not report whether they use a GPU")


@check(
    "every arm is verified on the same GPU",
    "invalidates",
    "Find the code of the finding in docs/gpu-proof.md and follow its remedy.",
    unknown="invalidates",
    threshold="every arm GPU_VERIFIED on one GPU",
)
def gpu_evidence(facts: Facts) -> Iterator[Outcome]:
    """Cold starts, searches and ramps have no blocks to watch: they use the findings of the whole run."""
    run, sides = facts.run, _sides(facts.run)
    evidence = run.record_of(EvidenceFile)
    if (sides and all(side is False for side in sides)) or (evidence is None and True not in sides):
        return
    if True in sides and False in sides:
        yield Outcome(False, f"{_mixed(run)}, so they are not ranked", "one arm")
    elif evidence is None:
        yield Outcome(None, "nothing was recorded, and a server's own report does not verify anything")
    else:
        for workload in run.experiment.workloads:
            found = _evidence(run, workload.name if workload.has_blocks else None)
            ok, sentence = may_rank(found)
            value = join([record.finding.value if record is not None else "nothing" for record in found.values()])
            yield Outcome(ok, sentence.rstrip("."), value, scope=workload_scope(workload.name))


@check(
    "GPU verification recognises a deliberate CPU run",
    "warns",
    "Let nothing else use the GPU: other work on it blurs every finding.",
    threshold=GpuFinding.CPU_FALLBACK.value,
)
def negative_control(facts: Facts) -> Iterator[Outcome]:
    evidence = facts.run.record_of(EvidenceFile)
    if evidence is None:
        return
    controls = [record for record in evidence.records if record.control]
    if not controls:
        yield Outcome(None, "no arm was run on the CPU as a control")
    for record in controls:
        recognised = record.finding is GpuFinding.CPU_FALLBACK
        activity = f"the GPU was {record.activity}" if record.activity else "the GPU's activity is unknown"
        ok = recognised and record.activity == "idle" if record.activity is not None or not recognised else None
        if recognised and record.inputs.attribution.foreign:
            ok, activity = None, "another process used the GPU, so its work cannot be attributed"
        detail = f"arm {shown(record.label)} ran on the CPU and was found to be {record.finding}; {activity}"
        yield Outcome(ok, detail, record.finding.value)


def may_rank(found: Evidence) -> tuple[bool, str]:
    """Whether the arms may be compared as GPU arms, and why (not), in one sentence."""
    uuids = {}
    for label, record in found.items():
        if record is None:
            return False, f"Nothing shows where arm {shown(label)} ran."
        if record.finding is not GpuFinding.GPU_VERIFIED:
            code = f" ({record.code})" if record.code is not None else ""
            return False, f"Arm {shown(label)} is {record.finding}{code}: {record.sentence}"
        uuids[label] = record.uuid
    used = set(uuids.values())
    if len(used) > 1 or None in used:
        places = ", ".join(f"{shown(label)} on {uuid}" for label, uuid in uuids.items())
        return False, f"The arms ran on different GPUs: {places}."
    return True, f"{_all(found).capitalize()} arms are GPU_VERIFIED on {used.pop()}."


def _evidence(run: StoredRun, workload: str | None) -> Evidence:
    """The findings for one workload, or for the whole run."""
    evidence = run.record_of(EvidenceFile)
    records = () if evidence is None else evidence.records
    found = {record.label: record for record in records if (record.workload, record.control) == (workload, False)}
    return {label: found.get(label) for label in run.experiment.labels}


def _all(arms: Sized) -> str:
    return "both" if len(arms) == 2 else "all"


def _sides(run: StoredRun) -> list[bool | None]:
    """Where each arm runs, as its server reports: on a GPU (True), on the CPU (False), or unknown."""
    devices = [arm.in_effect.get("device") for arm in run.arms]
    return [None if device is None else not str(device).startswith("cpu") for device in devices]


def _mixed(run: StoredRun) -> str:
    return join(
        [
            f"arm {shown(arm.label)} ran on {'a GPU' if side else 'the CPU'}"
            for arm, side in zip(run.arms, _sides(run), strict=True)
            if side is not None
        ]
    )
