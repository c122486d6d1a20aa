"""A server's own account of a stretch of load: the difference of two snapshots of its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.records.run import StageTotals

OWN_STAGES = "abserve_stages"
"""The native server's extra object in its statistics: receive, decode, queue, compute, encode."""

Statistics = Mapping[str, Any]


def requests_seen(statistics: Statistics) -> int:
    """Requests that a server has finished, good or bad."""
    return _value(statistics, "inference_stats", "success", "count") + _value(
        statistics, "inference_stats", "fail", "count"
    )


def stage_totals(before: Statistics, after: Statistics) -> StageTotals:
    """What happened between two snapshots (`model_stats[0]` each). Counters that a server lacks count as 0 in both,
    its own stages as None."""

    def grown(*path: str) -> int:
        return _value(after, *path) - _value(before, *path)

    def stage(name: str) -> int:
        return grown("inference_stats", name, "ns")

    def own(name: str) -> int | None:
        present = name in _object(after, OWN_STAGES)
        return grown(OWN_STAGES, name, "ns") if present else None

    executed_before, executed_after = _batches(before), _batches(after)
    batches = {size: count - executed_before.get(size, 0) for size, count in executed_after.items()}
    return StageTotals(
        requests=grown("inference_stats", "success", "count"),
        items=grown("inference_count"),
        executions=grown("execution_count"),
        queue_ns=stage("queue"),
        compute_input_ns=stage("compute_input"),
        compute_infer_ns=stage("compute_infer"),
        compute_output_ns=stage("compute_output"),
        receive_ns=own("receive"),
        decode_ns=own("decode"),
        encode_ns=own("encode"),
        batches={size: count for size, count in sorted(batches.items()) if count},
    )


def _batches(statistics: Statistics) -> dict[int, int]:
    entries = statistics.get("batch_stats")
    found: dict[int, int] = {}
    for entry in entries if isinstance(entries, list) else []:
        size = entry.get("batch_size") if isinstance(entry, Mapping) else None
        if isinstance(size, int):
            found[size] = _value(entry, "compute_infer", "count")
    return found


def _object(statistics: Statistics, key: str) -> Mapping[str, Any]:
    value = statistics.get(key)
    return value if isinstance(value, Mapping) else {}


def _value(statistics: Statistics, *path: str) -> int:
    value: Any = statistics
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else 0
