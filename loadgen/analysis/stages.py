"""One account of time for both arms: where a request's time went, in the same stages, with what is left over.

    client total = send_delay + receive + decode + queue + compute_input + compute_infer + compute_output + encode
                 + read_answer + unattributed

All are means a request, because means add up and medians do not. The names are Triton's; the first and the one before
the last are the client's own. Requests are encoded before the load, so that is no stage; sending one overlaps its
`receive`. A server reports what it has: on Triton `decode` is part of compute_input, and `receive` and `encode` are
not reported, so they stay inside `unattributed`, with the network, the protocol and whatever no one times. To compare
two arms, a stage that only one of them reports is folded into where the other one keeps it. In a dynamic batch every
request is charged the whole execution that it waited for: this is an account of waiting time, not of work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.records.run import Label, Record, StageTotals
from loadgen.records.samples import NS_PER_MS, Samples, good, latencies_ms
from loadgen.storage.stored_run import StoredBlock

STAGES = (
    "send_delay",
    "receive",
    "decode",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "encode",
    "read_answer",
    "unattributed",
)
CLIENT_STAGES = ("send_delay", "read_answer")
TITLES = {
    "send_delay": "waiting to be sent",
    "receive": "receiving the request",
    "decode": "decoding the input",
    "queue": "waiting in the queue",
    "compute_input": "preparing the batch",
    "compute_infer": "executing the model",
    "compute_output": "splitting the outputs",
    "encode": "encoding the answer",
    "read_answer": "reading the answer",
    "unattributed": "outside the server's account",
}
FOLDED_INTO = {
    "decode": "compute_input",
    "receive": "unattributed",
    "encode": "unattributed",
    "read_answer": "unattributed",
}


class ArmStages(Record, frozen=True, kw_only=True):
    """Means a request of one arm in one cell, in ms; None where the server does not report a stage."""

    label: Label
    requests: int
    """As the server counted them."""
    client_requests: int
    client_total_ms: float
    stages_ms: dict[str, float | None]
    """By the names of STAGES. A negative `unattributed` means that the server's stages overlap."""


class StageDifference(Record, frozen=True, kw_only=True):
    """B minus A in one stage, and its share of the difference of the client totals; None where those are equal."""

    stage: str
    b_minus_a_ms: float
    share: float | None


class StageAccount(Record, frozen=True, kw_only=True):
    """Both arms of one cell. `differences` is empty unless both report; the largest comes first."""

    cell: str
    a: ArmStages | None
    b: ArmStages | None
    total_b_minus_a_ms: float | None
    differences: tuple[StageDifference, ...]


def account_arm(label: Label, blocks: Sequence[StoredBlock]) -> ArmStages | None:
    """Account of the given blocks, all of one arm and cell; None where none has both samples and stages."""
    used = [(good(block.samples), block.record.stages) for block in blocks if block.samples is not None]
    reported = [
        (samples, stages) for samples, stages in used if stages is not None and stages.requests and len(samples)
    ]
    if not reported:
        return None
    total_ms = float(np.mean(np.concatenate([latencies_ms(samples) for samples, _ in reported])))
    totals = [stages for _, stages in reported]
    served = (stage for stage in STAGES if stage != "unattributed" and stage not in CLIENT_STAGES)
    means = _client_means_ms(np.concatenate([samples for samples, _ in reported]))
    means |= {stage: _mean_ms(totals, stage) for stage in served}
    means["unattributed"] = total_ms - sum(value for value in means.values() if value is not None)
    return ArmStages(
        label=label,
        requests=sum(stages.requests for stages in totals),
        client_requests=sum(len(samples) for samples, _ in reported),
        client_total_ms=total_ms,
        stages_ms=means,
    )


def _client_means_ms(samples: Samples) -> dict[str, float | None]:
    """Of good answers: from the intended start to the first byte out, and from the answer's first byte to its last."""
    reading_ns = samples["end_ns"] - samples["first_byte_ns"]
    return {
        "send_delay": float(np.mean(samples["send_ns"] - samples["intended_ns"])) / NS_PER_MS,
        "read_answer": float(np.mean(reading_ns)) / NS_PER_MS if reading_ns.any() else None,
    }


def _mean_ms(totals: Sequence[StageTotals], stage: str) -> float | None:
    values = [getattr(stages, f"{stage}_ns") for stages in totals]
    if any(value is None for value in values):
        return None
    return float(sum(values)) / sum(stages.requests for stages in totals) / NS_PER_MS


def account_cell(cell: str, blocks: Sequence[StoredBlock]) -> StageAccount:
    """Account of both arms over the given blocks of one cell, and what explains their difference."""
    a = account_arm("a", [block for block in blocks if block.record.label == "a"])
    b = account_arm("b", [block for block in blocks if block.record.label == "b"])
    if a is None or b is None:
        return StageAccount(cell=cell, a=a, b=b, total_b_minus_a_ms=None, differences=())
    total = b.client_total_ms - a.client_total_ms
    folded_a, folded_b = folded(a, b), folded(b, a)
    differences = [
        StageDifference(
            stage=stage,
            b_minus_a_ms=folded_b[stage] - folded_a[stage],
            share=(folded_b[stage] - folded_a[stage]) / total if abs(total) > 0.0 else None,
        )
        for stage in folded_a
    ]
    differences.sort(key=lambda difference: -abs(difference.b_minus_a_ms))
    return StageAccount(cell=cell, a=a, b=b, total_b_minus_a_ms=total, differences=tuple(differences))


def folded(arm: ArmStages, other: ArmStages) -> dict[str, float]:
    """The stages of `arm` at the granularity that both arms share; they still add up to the client total."""
    result = {stage: value for stage, value in arm.stages_ms.items() if value is not None}
    for stage, target in FOLDED_INTO.items():
        if stage in result and other.stages_ms.get(stage) is None:
            result[target] = result.get(target, 0.0) + result.pop(stage)
    for stage in STAGES:
        if stage not in result and other.stages_ms.get(stage) is not None and stage not in FOLDED_INTO:
            result[stage] = 0.0
    return {stage: result[stage] for stage in STAGES if stage in result}
