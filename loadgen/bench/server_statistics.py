"""A server's own statistics of a block: the growth of its counters, for an ensemble that of the models it calls.

Triton's own entry of an ensemble has one execution per request and no time in a queue: queues, batches and decoding are
in the statistics of the models that it calls. Those also count the requests that others send to such a model, so the
number of its requests is kept beside its times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen.client.endpoint import Endpoint
from loadgen.records.model_config import listed, mapping, split_steps, whole
from loadgen.records.run import Access, StageTotals, StepRecord, StepTotals

OWN_STAGES = "abserve_stages"
"""The native server's own object in its statistics: receive, decode, queue, compute, encode."""
_MOST_NS = 2**53
"""104 days in nanoseconds."""
_COMPUTE = ("compute_input_ns", "compute_infer_ns", "compute_output_ns")

Statistics = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The statistics of a model and of the models that it calls; None: they cannot be read."""

    own: Statistics
    steps: tuple[Statistics | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Where the statistics of one model are; `steps` are the models that it calls, if it is an ensemble."""

    url: str
    access: Access
    model: str
    steps: tuple[StepRecord, ...] = ()

    def read(self) -> Snapshot | None:
        """One snapshot; None if the server has no such statistics."""
        own = Endpoint(self.url, access=self.access).statistics(self.model)
        return None if own is None else Snapshot(own, tuple(map(self._read_step, self.steps)))

    def _read_step(self, step: StepRecord) -> Statistics | None:
        """None also for a step whose configuration is unknown: it may be an ensemble itself."""
        if step.config is None:
            return None
        access = msgspec.structs.replace(self.access, version=step.version)
        return Endpoint(self.url, access=access).statistics(step.model)

    def settled(self, before: Snapshot, after: Snapshot, requests: int) -> bool:
        """Whether all requests between two snapshots are counted, those to the steps too."""
        grown = [(requests_seen(after.own) - requests_seen(before.own), 1)]
        grown += [
            (requests_seen(last) - requests_seen(first), step.calls)
            for step, first, last in self._pairs(before, after)
            if first is not None and last is not None
        ]
        return all(seen >= requests * calls for seen, calls in grown)

    def totals(self, before: Snapshot, after: Snapshot) -> StageTotals | None:
        """The growth between two snapshots; None when a number is impossible for a block of load."""
        own = stage_totals(before.own, after.own)
        if own is None or not self.steps:
            return own
        found = [
            (step, None if first is None or last is None else _whole_totals(first, last))
            for step, first, last in self._pairs(before, after)
        ]
        return ensemble_totals(own, found)

    def _pairs(
        self, before: Snapshot, after: Snapshot
    ) -> Iterator[tuple[StepRecord, Statistics | None, Statistics | None]]:
        return zip(self.steps, before.steps, after.steps, strict=True)


def ensemble_totals(own: StageTotals, steps: Sequence[tuple[StepRecord, StageTotals | None]]) -> StageTotals:
    """The totals of an ensemble by those of its steps: their times are summed; executions and batches are those of the
    step that computes longest, among the steps that do not only decode. If a step is unknown, only the numbers of
    requests and items are known."""
    decoding, _ = split_steps([step for step, _ in steps])
    found = [
        StepTotals(
            model=step.model, calls=step.calls, decodes=step in decoding, executes=False, totals=totals
        )
        for step, totals in steps
    ]  # fmt: skip
    known = [totals for _, totals in steps if totals is not None]
    if len(known) < len(found):
        unknown = dict.fromkeys(("executions", "queue_ns", *_COMPUTE, "decode_ns"))
        return msgspec.structs.replace(own, **unknown, batches={}, steps=tuple(found))
    computing = [one for one in found if not one.decodes]
    longest = max(computing, key=lambda one: (one.totals and one.totals.compute_infer_ns) or 0)
    place = found.index(longest)
    executed = known[place]
    found[place] = msgspec.structs.replace(longest, executes=True)
    decoders = [totals for one, totals in zip(found, known, strict=True) if one.decodes]
    executors = [totals for one, totals in zip(found, known, strict=True) if not one.decodes]
    return msgspec.structs.replace(
        own,
        executions=executed.executions,
        batches=executed.batches,
        queue_ns=_sum(known, "queue_ns"),
        decode_ns=_sum(decoders, *_COMPUTE) if decoders else None,
        **{name: _sum(executors, name) for name in _COMPUTE},
        steps=tuple(found),
    )


def _whole_totals(before: Statistics, after: Statistics) -> StageTotals | None:
    """The growth between two snapshots of a step; None if the server does not report its requests and all times."""
    totals = stage_totals(before, after)
    needed = ("requests", "queue_ns", *_COMPUTE)
    return None if totals is None or any(getattr(totals, name) is None for name in needed) else totals


def _sum(parts: Sequence[StageTotals], *names: str) -> int:
    """The sum of these times."""
    return sum(getattr(totals, name) for totals in parts for name in names)


def requests_seen(statistics: Statistics) -> int:
    """Requests that a server has finished, good or bad."""
    counts = (_value(statistics, "inference_stats", outcome, "count") for outcome in ("success", "fail"))
    return sum(count or 0 for count in counts)


def stage_totals(before: Statistics, after: Statistics) -> StageTotals | None:
    """The growth between two readings of one model. A counter that the server does not report is None; one that it
    reports since its first use was 0 before. None when a number is impossible for a block of load."""
    differences: list[int] = []

    def grown(*path: str) -> int | None:
        now = _value(after, *path)
        if now is None:
            return None
        differences.append(now - (_value(before, *path) or 0))
        return differences[-1]

    def stage(name: str) -> int | None:
        return grown("inference_stats", name, "ns")

    executed_before, executed_after = _batches(before), _batches(after)
    batches = {size: count - executed_before.get(size, 0) for size, count in executed_after.items()}
    differences += batches.values()
    totals = StageTotals(
        requests=grown("inference_stats", "success", "count"),
        items=grown("inference_count"),
        executions=grown("execution_count"),
        queue_ns=stage("queue"),
        compute_input_ns=stage("compute_input"),
        compute_infer_ns=stage("compute_infer"),
        compute_output_ns=stage("compute_output"),
        receive_ns=grown(OWN_STAGES, "receive", "ns"),
        decode_ns=grown(OWN_STAGES, "decode", "ns"),
        encode_ns=grown(OWN_STAGES, "encode", "ns"),
        batches={size: count for size, count in sorted(batches.items()) if count},
    )
    return totals if all(abs(difference) < _MOST_NS for difference in differences) else None


def _batches(statistics: Statistics) -> dict[int, int]:
    found: dict[int, int] = {}
    for entry in map(mapping, listed(statistics.get("batch_stats"))):
        size = whole(entry.get("batch_size"))
        if size is not None:
            found[size] = _value(entry, "compute_infer", "count") or 0
    return found


def _value(statistics: Statistics, *path: str) -> int | None:
    value: Any = statistics
    for key in path:
        value = mapping(value).get(key)
    return whole(value)
