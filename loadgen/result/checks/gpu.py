"""Checks on where the arms ran: arms are ranked as GPU servers only when each is proven to be one, on the same GPU.

Arms that all say they execute on the CPU need no proof: that is a CPU comparison, which the first line says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from loadgen.comparison.claims import join
from loadgen.comparison.facts import Facts, cell_scope
from loadgen.records.run import Label, shown
from loadgen.result.checks.registry import Outcome, check
from loadgen.storage.stored_run import StoredRun
from loadgen.studies.gpu_proof.records import EvidenceRecord, Finding

Evidence = Mapping[Label, EvidenceRecord | None]
"""What was found of each arm, the baseline first."""
EVERY_ARM = "every arm on a GPU"
VERIFIED = "every arm GPU_VERIFIED on one GPU"


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
        where = "This machine has no GPU" if here else f"{_all(sides)} arms ran on the CPU, as their servers report"
        value, detail = "cpu", f"{where}: this is a CPU comparison."
    elif True in sides and False in sides:
        value, detail = "one arm", f"{_mixed(run)}: they are not ranked."
    elif run.evidence is not None:
        ok, sentence = may_rank(_evidence(run, None))
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
    title="the arms are proven to run on the same GPU",
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
            found = _evidence(run, cell.name if cell.has_blocks else None)
            ok, sentence = may_rank(found)
            value = join([record.finding.value if record is not None else "nothing" for record in found.values()])
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
            f"arm {shown(record.label)} on the CPU came out {record.finding}; "
            f"the GPU was {record.activity or 'not to be judged'} meanwhile",
            record.finding.value,
            Finding.CPU_FALLBACK.value,
        )


def may_rank(found: Evidence) -> tuple[bool, str]:
    """Whether the arms may be compared as GPU arms, and why (not), in one sentence."""
    uuids = {}
    for label, record in found.items():
        if record is None:
            return False, f"Nothing shows where arm {shown(label)} ran."
        if record.finding is not Finding.GPU_VERIFIED:
            code = f" ({record.code})" if record.code is not None else ""
            return False, f"Arm {shown(label)} is {record.finding}{code}: {record.sentence}"
        uuids[label] = record.uuid
    used = set(uuids.values())
    if len(used) > 1 or None in used:
        places = ", ".join(f"{shown(label)} on {uuid}" for label, uuid in uuids.items())
        return False, f"The arms ran on different GPUs: {places}."
    return True, f"{_all(found)} arms are GPU_VERIFIED on {used.pop()}."


def _evidence(run: StoredRun, cell: str | None) -> Evidence:
    """The findings for the arms in a cell, or over all of them."""
    records = () if run.evidence is None else run.evidence.records
    found = {record.label: record for record in records if (record.cell, record.control) == (cell, False)}
    return {label: found.get(label) for label in run.experiment.labels}


def _all(arms: Sized) -> str:
    return "Both" if len(arms) == 2 else "All"


def _sides(run: StoredRun) -> list[bool | None]:
    """For each arm: on a GPU, on the CPU (False), or not known, by the servers' own word."""
    devices = [arm.in_effect.get("device") for arm in run.arms]
    return [None if device is None else not str(device).startswith("cpu") for device in devices]


def _mixed(run: StoredRun) -> str:
    places = [
        f"arm {shown(arm.label)} ran on {'a GPU' if side else 'the CPU'}"
        for arm, side in zip(run.arms, _sides(run), strict=True)
        if side is not None
    ]
    text = join(places)
    return text[0].upper() + text[1:]
