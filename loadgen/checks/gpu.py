"""Checks of where the arms ran. They are ranked as GPU servers only if each is verified on the same GPU. If every arm
reports that it runs on the CPU, nothing has to be verified: the verdict calls it a CPU comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from loadgen.base.quantities import join
from loadgen.checks.registry import Judgement, check
from loadgen.findings.gpu.records import EvidenceFile, EvidenceRecord, GpuFinding
from loadgen.metrics.facts import Facts, workload_scope
from loadgen.records.run import Label
from loadgen.records.store import StoredRun

Evidence = Mapping[Label, EvidenceRecord | None]
"""The finding about each arm, the baseline first."""


@check(
    "the model ran on a GPU",
    "The model did not run on a GPU",
    "informs",
    "Run on a machine with an NVIDIA GPU to compare GPU serving.",
    threshold="every arm on a GPU",
    caveat=("failed", "unknown"),
    not_known="It is not known whether the model ran on a GPU",
)
def gpu_present(facts: Facts) -> Iterator[Judgement]:
    run, sides = facts.run, _sides(facts.run)
    status = run.environment.gpu.get("status") if run.environment else None
    without_gpu = status not in (None, "ok") and all(arm.launched for arm in run.arms)
    if sides and all(side is False for side in sides):
        where = "this machine has no GPU" if without_gpu else f"{_all(sides)} arms ran on the CPU, as they report"
        yield Judgement(False, f"{where}: this is a CPU comparison", "cpu")
    elif True in sides and False in sides:
        yield Judgement(False, f"{_mixed(run, facts.names)}, so they are not ranked", "one arm")
    elif run.record_of(EvidenceFile) is not None:
        ok, reason = may_rank(_evidence(run, None), facts.names)
        detail = reason.rstrip(".") if ok else f"GPU use is not verified: {reason.rstrip('.')}"
        yield Judgement(ok, detail, "verified" if ok else "unproven")
    elif True in sides:
        detail = "the servers report that they use a GPU, but nothing was recorded to verify it"
        yield Judgement(None, detail, "reported")
    elif without_gpu and run.arms:
        yield Judgement(False, "this machine has no GPU: this is a CPU comparison", str(status))
    else:
        yield Judgement(None, "the servers do not report whether they use a GPU")


@check(
    "every arm is verified on the same GPU",
    "GPU use is not verified",
    "invalidates",
    "Find the code of the finding in docs/gpu-proof.md and follow its remedy.",
    unknown="invalidates",
    threshold="every arm GPU_VERIFIED on one GPU",
    not_known="GPU use is not verified",
    fault="GPU not verified",
)
def gpu_evidence(facts: Facts) -> Iterator[Judgement]:
    """Cold starts and searches have no blocks to watch, and the loads of a surface or a screening only short ones: they
    use the findings of the whole run."""
    run, sides = facts.run, _sides(facts.run)
    stored = run.record_of(EvidenceFile)
    if (sides and all(side is False for side in sides)) or (stored is None and True not in sides):
        return
    if True in sides and False in sides:
        on_cpu = tuple(arm.label for arm, side in zip(run.arms, sides, strict=True) if side is False)
        yield Judgement(False, f"{_mixed(run, facts.names)}, so they are not ranked", "one arm", arms=on_cpu)
    elif stored is None:
        yield Judgement(None, "nothing was recorded, and a server's own report does not verify anything")
    else:
        for workload in run.experiment.workloads:
            is_watched = workload.has_blocks and workload.scenario != "surface" and not run.experiment.screening
            evidence = _evidence(run, workload.name if is_watched else None)
            ok, sentence = may_rank(evidence, facts.names)
            value = join([record.finding.value if record is not None else "nothing" for record in evidence.values()])
            scope, blamed = workload_scope(workload.name), unverified(evidence)
            yield Judgement(ok, sentence.rstrip("."), value, scope=scope, arms=blamed)


@check(
    "GPU verification recognises a deliberate CPU run",
    "A deliberate CPU run was not recognised",
    "warns",
    "Let nothing else use the GPU: other work on it blurs every finding.",
    threshold=GpuFinding.CPU_FALLBACK.value,
)
def negative_control(facts: Facts) -> Iterator[Judgement]:
    names = facts.names
    stored = facts.run.record_of(EvidenceFile)
    if stored is None:
        return
    controls = [record for record in stored.records if record.control]
    if not controls:
        yield Judgement(None, "no arm was run on the CPU as a control")
    for record in controls:
        recognised = record.finding is GpuFinding.CPU_FALLBACK
        activity = f"the GPU was {record.activity}" if record.activity else "the GPU's activity is unknown"
        ok = recognised and record.activity == "idle" if record.activity is not None or not recognised else None
        if recognised and record.inputs.attribution.foreign:
            ok, activity = None, "another process used the GPU, so its work cannot be attributed"
        detail = f"{names[record.label]} ran on the CPU and was found to be {record.finding}; {activity}"
        yield Judgement(ok, detail, record.finding.value)


def unverified(evidence: Evidence) -> tuple[Label, ...]:
    """The arms that are not verified."""
    return tuple(
        label for label, record in evidence.items() if record is None or record.finding is not GpuFinding.GPU_VERIFIED
    )


def may_rank(evidence: Evidence, names: Mapping[Label, str]) -> tuple[bool, str]:
    """Whether the arms may be compared as GPU arms, and why (not), in one sentence."""
    uuids = {}
    for label, record in evidence.items():
        if record is None:
            return False, f"Nothing shows where {names[label]} ran."
        if record.finding is not GpuFinding.GPU_VERIFIED:
            code = f" ({record.code})" if record.code is not None else ""
            return False, f"{names[label]} is {record.finding}{code}: {record.sentence}"
        uuids[label] = record.uuid
    used = set(uuids.values())
    if len(used) > 1 or None in used:
        places = ", ".join(f"{names[label]} on {uuid}" for label, uuid in uuids.items())
        return False, f"The arms ran on different GPUs: {places}."
    return True, f"{_all(evidence).capitalize()} arms are GPU_VERIFIED on {used.pop()}."


def _evidence(run: StoredRun, workload: str | None) -> Evidence:
    """The findings for one workload, or for the whole run."""
    loads = (load for load in run.experiment.workloads if load.name == workload)
    labels = next((run.experiment.loaded(load) for load in loads), run.experiment.labels)
    stored = run.record_of(EvidenceFile)
    records = () if stored is None else stored.records
    by_label = {record.label: record for record in records if (record.workload, record.control) == (workload, False)}
    return {label: by_label.get(label) for label in labels}


def _all(arms: Sized) -> str:
    return "both" if len(arms) == 2 else "all"


def _sides(run: StoredRun) -> list[bool | None]:
    """Where each arm runs, as its server reports: on a GPU (True), on the CPU (False), or unknown."""
    devices = [arm.in_effect.get("device") for arm in run.arms]
    return [None if device is None else not str(device).startswith("cpu") for device in devices]


def _mixed(run: StoredRun, names: Mapping[Label, str]) -> str:
    return join(
        [
            f"{names[arm.label]} ran on {'a GPU' if side else 'the CPU'}"
            for arm, side in zip(run.arms, _sides(run), strict=True)
            if side is not None
        ]
    )
