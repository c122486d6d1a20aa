"""The latency breakdown of a stretch of load: the difference of two snapshots of a server's own statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.records.model_config import whole
from loadgen.records.run import StageTotals

OWN_STAGES = "abserve_stages"
"""The native server's own object in its statistics: receive, decode, queue, compute, encode."""

_MOST = 2**53
"""104 days in nanoseconds."""

Statistics = Mapping[str, Any]


def requests_seen(statistics: Statistics) -> int:
    """Requests that a server has finished, good or bad."""
    counts = (_value(statistics, "inference_stats", outcome, "count") for outcome in ("success", "fail"))
    return sum(count or 0 for count in counts)


def stage_totals(before: Statistics, after: Statistics) -> StageTotals | None:
    """The growth between two snapshots (`model_stats[0]` each). A counter that the server does not report is None; one
    that it reports since its first use was 0 before. None when a number is impossible for a block of load."""
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
    return totals if all(abs(difference) < _MOST for difference in differences) else None


def _batches(statistics: Statistics) -> dict[int, int]:
    entries = statistics.get("batch_stats")
    found: dict[int, int] = {}
    for entry in entries if isinstance(entries, list) else []:
        size = whole(entry.get("batch_size")) if isinstance(entry, Mapping) else None
        if size is not None:
            found[size] = _value(entry, "compute_infer", "count") or 0
    return found


def _value(statistics: Statistics, *path: str) -> int | None:
    value: Any = statistics
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return whole(value)
