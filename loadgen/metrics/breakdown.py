"""Where the time of requests went: the latency breakdown by stages, and requests that stalled for 0.5 s.

**Stages.** They are the same for every server:

    client total = send_delay + receive + decode + queue + compute_input + compute_infer + compute_output + encode
                 + read_answer + unattributed

All are means per request, because means add up and medians do not. The names are Triton's; the client measures
`send_delay` and `read_answer`. Requests are encoded before the load, so that is not a stage; sending one overlaps its
`receive`. On Triton `decode` is part of compute_input, and `receive` and `encode` are not reported, so they are part of
`unattributed`, with the network and the protocol. To compare two arms, a stage that only one of them reports is folded
into the stage that contains it on the other. In a dynamic batch every request is charged the whole execution that it
waited for: the breakdown is of waiting time, not of work.

**Stalls.** In a closed loop they show requests that met a timer, apart from a latency that is simply broad. A request
stalled if it took 0.45 to 0.6 s more than a prompt one: the fastest tenth of the requests, or
the fastest request of its size if that took longer, so that a long text is not a stall. The tail of a broad latency
falls, so at most a third of the requests that took 0.15 to 0.6 s more are stalls; an arm has stalls if it has more of
them than chance explains (one-sided binomial test, p ≤ 5 %), which takes three at least.

The test needs independent cases, and one sleep of a server delays all of its users at once. So of the slow requests
that overlap only the first to begin is a case: its length does not depend on which request was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.base.quantities import number
from loadgen.records.run import Label, Pairing, Record, StageTotals
from loadgen.records.samples import NS_PER_MS, Samples, good, latencies_ms
from loadgen.records.store import StoredBlock
from loadgen.stats.distributions import binomial_cdf
from loadgen.stats.estimates import SIGNIFICANCE
from loadgen.stats.percentiles import Pool, Values

STAGE_TITLES = {
    "send_delay": "waiting to be sent",
    "receive": "receiving the request",
    "decode": "decoding the input",
    "queue": "waiting in the queue",
    "compute_input": "preparing the batch",
    "compute_infer": "executing the model",
    "compute_output": "splitting the outputs",
    "encode": "encoding the response",
    "read_answer": "reading the response",
    "unattributed": "network and client",
}
STAGES = tuple(STAGE_TITLES)
CLIENT_STAGES = ("send_delay", "read_answer")
OVERLAP_LIMIT = 0.02
"""Share of a request by which the stages may exceed the client's time, since both clocks are read in software."""
COUNT_LIMIT = 0.01
"""Share of a block's requests by which counts may differ (or by one request) without moving a mean by more."""
FOLDED_INTO = {
    "decode": "compute_input",
    "receive": "unattributed",
    "encode": "unattributed",
    "read_answer": "unattributed",
}


class ArmStages(Record, frozen=True, kw_only=True):
    """Means per request of one arm in one workload, in ms; None if the server does not report a stage."""

    label: Label
    requests: int
    """Requests that the server counted."""
    client_requests: int
    client_total_ms: float
    stages_ms: dict[str, float | None]
    """Time per stage, by the names in STAGES. A negative `unattributed` means that the server's stages overlap."""
    contradictions: tuple[str, ...] = ()
    """Why the stages cannot be right, in words: stages longer than the requests, counters that ran backwards, other
    request counts. With any of them no latency breakdown is shown."""


class StageDifference(Record, frozen=True, kw_only=True):
    """Arm minus baseline in one stage, and its share of the difference of the client totals; None if those are
    equal."""

    stage: str
    difference_ms: float
    share: float | None


class LatencyBreakdown(Record, frozen=True, kw_only=True):
    """Two arms in one workload. `differences` is empty unless both breakdowns add up; the largest comes first."""

    workload: str
    baseline: Label
    arm: Label
    baseline_stages: ArmStages | None
    arm_stages: ArmStages | None
    difference_ms: float | None
    """Difference of the client totals, arm minus baseline."""
    differences: tuple[StageDifference, ...]

    @property
    def sides(self) -> tuple[ArmStages | None, ArmStages | None]:
        return self.baseline_stages, self.arm_stages


def stages_of(label: Label, blocks: Sequence[StoredBlock]) -> ArmStages | None:
    """The breakdown over blocks of one arm and workload; None if no block has both good responses and request
    counts."""
    totals, records, client_times = [], [], []
    for block in blocks:
        stages = block.record.stages
        if stages is not None and stages.requests is not None and (times := _client_times(block)) is not None:
            totals.append(stages)
            records.append(block.record)
            client_times.append(times)
    if not client_times:
        return None
    answers, client_ms, delay_ms, reading_ms = map(sum, zip(*client_times, strict=True))
    # The server's statistics include the cool-down, whose requests may have waited less.
    cooled = [record for record in records if record.cool_down_ns is not None]
    cooled_ms = sum(record.cool_down_ns or 0 for record in cooled) / NS_PER_MS
    total_ms = (client_ms + cooled_ms) / (answers + sum(record.cool_down for record in cooled))
    means: dict[str, float | None] = {
        "send_delay": delay_ms / answers,
        "read_answer": reading_ms / answers if reading_ms else None,
    }
    served = (stage for stage in STAGES if stage != "unattributed" and stage not in CLIENT_STAGES)
    means |= {stage: _mean_ms(totals, stage) for stage in served}
    rest_ms = total_ms - sum(value for value in means.values() if value is not None)
    contradictions = contradictions_of(blocks)
    if rest_ms < -OVERLAP_LIMIT * total_ms:
        contradictions.insert(0, f"its stages add up to {number(total_ms - rest_ms)} ms")
    return ArmStages(
        label=label,
        requests=sum(stages.requests or 0 for stages in totals),
        client_requests=answers + sum(record.cool_down for record in records),
        client_total_ms=total_ms,
        stages_ms=means | {"unattributed": rest_ms},
        contradictions=tuple(contradictions),
    )


def contradictions_of(blocks: Sequence[StoredBlock]) -> list[str]:
    """The contradictions of all blocks: each kind once, with its first block and the number of the others."""
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for block in blocks:
        for kind, text in contradictions_in(block).items():
            by_kind.setdefault(kind, []).append((block.record.index, text))
    return [
        f"{seen[0][1]} in block {seen[0][0]}" + (f" and {len(seen) - 1} more" if len(seen) > 1 else "")
        for seen in by_kind.values()
    ]


def contradictions_in(block: StoredBlock) -> dict[str, str]:
    """How a server's statistics contradict a block, as text by the kind of count; empty without statistics."""
    stages = block.record.stages
    if stages is None or (samples := block.samples) is None:
        return {}
    reported = (stages, *(step.totals for step in stages.steps if step.totals is not None))
    if any(value < 0 for totals in reported for value in _numbers(totals)):
        return {"counters": "its counters ran backwards"}
    if unread := next((step for step in stages.steps if step.totals is None), None):
        return {"steps": f"the configuration or the statistics of its step {unread.model} cannot be read"}
    answers = good(samples)
    sent_items, good_items, size = int(samples["batch"].sum()), int(answers["batch"].sum()), block.workload.batch_size
    texts, cooled = {}, block.record.cool_down
    for name, counted, seen, sent, single in (
        ("requests", stages.requests, len(answers), len(samples), 1),
        ("items", stages.items, good_items, sent_items, size),
    ):
        if not _plausible(counted, seen + cooled * single, sent + cooled * single, single):
            texts[name] = f"it counted {counted:,} {name} where {seen + cooled * single:,} were answered"
    for step in stages.steps:
        calls, counted = step.calls, None if step.totals is None else step.totals.requests
        seen, sent = calls * (len(answers) + cooled), calls * (len(samples) + cooled)
        if not _plausible(counted, seen, sent, calls):
            more = ", so others send it requests" if (counted or 0) > sent else ""
            name = f"step {step.model}"
            texts[name] = f"its {name} counted {counted:,} requests where {seen:,} were expected{more}"
    return texts


def _plausible(counted: int | None, answered: int, sent: int, single: int) -> bool:
    """Whether a count fits; the server may also have counted a request that failed on its way back."""
    tolerance = max(COUNT_LIMIT * answered, single)
    return counted is None or answered - tolerance <= counted <= sent + tolerance


def _numbers(totals: StageTotals) -> list[int]:
    """All counters that the server reports."""
    values = msgspec.structs.asdict(totals).values()
    return [value for value in (*values, *totals.batches.values()) if isinstance(value, int)]


def _client_times(block: StoredBlock) -> tuple[int, float, float, float] | None:
    """The number of good responses of a block, and the sums over them in ms of the latency, of the time from the
    intended start to the first byte sent, and from the first byte received to the last; None without any."""
    samples = block.samples
    if samples is None or len(answered := good(samples)) == 0:
        return None
    latency_ms = float(np.sum(latencies_ms(answered)))
    delay_ms = float(np.sum(answered["send_ns"] - answered["intended_ns"])) / NS_PER_MS
    reading_ms = float(np.sum(answered["end_ns"] - answered["first_byte_ns"])) / NS_PER_MS
    return len(answered), latency_ms, delay_ms, reading_ms


def _mean_ms(totals: Sequence[StageTotals], stage: str) -> float | None:
    values = [getattr(stages, f"{stage}_ns") for stages in totals]
    if any(value is None for value in values):
        return None
    requests = sum(stages.requests or 0 for stages in totals)
    return float(sum(values)) / requests / NS_PER_MS if requests > 0 else None


def break_down(workload: str, blocks: Sequence[StoredBlock], pairings: Sequence[Pairing]) -> list[LatencyBreakdown]:
    """The breakdown of each arm over the given blocks of one workload, and the differences of each pairing."""
    labels = dict.fromkeys(label for pairing in pairings for label in pairing)
    arms = {label: stages_of(label, [block for block in blocks if block.record.label == label]) for label in labels}
    return [_breakdown(workload, pairing, arms[pairing.baseline], arms[pairing.arm]) for pairing in pairings]


def _breakdown(workload: str, pairing: Pairing, baseline: ArmStages | None, arm: ArmStages | None) -> LatencyBreakdown:
    total, apart = None, {}
    if baseline is not None and arm is not None:
        total = arm.client_total_ms - baseline.client_total_ms
        if not (baseline.contradictions or arm.contradictions):
            before, after = folded(baseline, arm), folded(arm, baseline)
            apart = {stage: after[stage] - before[stage] for stage in before}
    return LatencyBreakdown(
        workload=workload,
        baseline=pairing.baseline,
        arm=pairing.arm,
        baseline_stages=baseline,
        arm_stages=arm,
        difference_ms=total,
        differences=tuple(
            StageDifference(stage=stage, difference_ms=ms, share=ms / total if total else None)
            for stage, ms in sorted(apart.items(), key=lambda item: -abs(item[1]))
        ),
    )


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


PROMPT_MS = 200.0
"""Latency of the fastest tenth below which a wait of 0.5 s stands apart."""
SLOW_MS, STALL_MS = 150.0, (450.0, 600.0)
"""What a slow request takes beyond a prompt one, and what a stalled one does: the last third of SLOW_MS to its end."""
UNAVAILABLE = (503, 1014)
"""The status of a request whose time in the queue was over, in HTTP and gRPC."""

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Stalls:
    """The stalls of one arm in one closed loop."""

    requests: int
    stalled: int
    """Requests that took about 0.5 s more than a prompt one, or were refused as unavailable after so long; 0 unless
    there are more than a broad latency has."""
    refused: int
    """Those of them that were refused."""
    median_ms: float
    """Median latency of the good responses that did not stall."""
    factor: float
    """The mean latency of the good responses over that of those that did not stall: what the stalls cost in
    throughput."""


def find_stalls(blocks: Sequence[StoredBlock]) -> Stalls | None:
    """The stalls in blocks of one arm and closed loop; None without good responses, and if prompt ones take too long to
    tell a stall from them."""
    stored = [block for block in blocks if block.has_samples]
    every, fastest = Pool(), dict[float, float]()
    for block in stored:
        samples, sizes = _read(block)
        answered = samples["error"] < 0
        latency = latencies_ms(samples[answered])
        every.add(block.record.index, latency)
        order = np.argsort(latency, kind="stable")
        each, first = np.unique(sizes[answered][order], return_index=True)
        for size, least in zip(each.tolist(), latency[order[first]].tolist(), strict=True):
            fastest[size] = min(least, fastest.get(size, math.inf))
    prompt_ms = float(np.quantile(every.values, 0.1)) if every.count else PROMPT_MS
    if prompt_ms >= PROMPT_MS:
        return None
    count = stalled = refused = cases = stalled_cases = 0
    others = Pool()
    for block in stored:
        samples, sizes = _read(block)
        slow, stalls = _slow(samples, sizes, prompt_ms, fastest)
        rows = _cases(samples, slow)
        count, cases = count + len(samples), cases + len(rows)
        stalled, stalled_cases = stalled + int(stalls.sum()), stalled_cases + int(stalls[rows].sum())
        refused += int((stalls & _refused(samples)).sum())
        others.add(block.record.index, latencies_ms(samples[(samples["error"] < 0) & ~stalls]))
    chance = 1.0 - binomial_cdf(stalled_cases - 1, cases, 1.0 / 3.0)
    if chance > SIGNIFICANCE:
        stalled, refused, others = 0, 0, every
    return Stalls(
        requests=count,
        stalled=stalled,
        refused=refused,
        median_ms=float(np.median(others.values)),
        factor=(every.mean or 0.0) / (others.mean or math.nan),
    )


def _read(block: StoredBlock) -> tuple[Samples, Values]:
    """The samples, and the bytes of each request's tensors; 0 where they are not recorded."""
    samples = block.samples
    assert samples is not None
    sizes = np.array(block.record.body_payload_bytes or (0,), dtype=np.float64)
    bodies = samples["body"]
    recorded = (bodies >= 0) & (bodies < len(sizes))
    return samples, np.where(recorded, sizes[np.where(recorded, bodies, 0)], 0.0)


def _refused(samples: Samples) -> _Mask:
    return np.asarray((samples["error"] >= 0) & np.isin(samples["status"], UNAVAILABLE))


def _slow(samples: Samples, sizes: Values, prompt_ms: float, fastest: Mapping[float, float]) -> tuple[_Mask, _Mask]:
    """The slow requests of a block, and those of them that stalled. `fastest` is the least latency of each size."""
    each, places = np.unique(sizes, return_inverse=True)
    prompt = np.array([max(prompt_ms, fastest.get(size, 0.0)) for size in each.tolist()])[places]
    refused, latency = _refused(samples), latencies_ms(samples)
    beyond = np.where(refused, latency, latency - prompt)
    slow = ((samples["error"] < 0) | refused) & (beyond >= SLOW_MS) & (beyond <= STALL_MS[1])
    return slow, slow & (beyond >= STALL_MS[0])


def _cases(samples: Samples, slow: _Mask) -> list[int]:
    """The rows of one block's slow requests, without those that overlap the one before by another user."""
    rows = np.flatnonzero(slow)
    cases: list[int] = []
    begun_ns, ended_ns, user = samples["intended_ns"], samples["end_ns"], samples["user"]
    for row in rows[np.argsort(begun_ns[rows], kind="stable")]:
        last = cases[-1] if cases else None
        ended = last is None or begun_ns[row] >= ended_ns[last] - SLOW_MS * NS_PER_MS
        if last is None or ended or user[row] == user[last]:
            cases.append(int(row))
    return cases
