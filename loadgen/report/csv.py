"""CSV for spreadsheets and scripts: one row a comparison, or one row a block; full precision, nothing rounded.

What was not measured is an empty field. `run` names the combination of a matrix and is empty elsewhere.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from loadgen.analysis.result import Result

COMPARISONS = (
    "run", "scenario", "metric", "unit", "higher_is_better", "a", "b", "ratio_b_over_a", "ci95_low", "ci95_high",
    "verdict", "pairs", "restarts", "method", "p_value", "p_adjusted", "p_equivalence", "minimal_detectable_effect",
    "reason",
)  # fmt: skip
BLOCKS = (
    "run", "index", "cell", "pair", "restart", "label", "position", "start_s", "duration_s", "complete", "requests",
    "errors", "items", "throughput_per_s", "mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "p99_9_ms",
    "send_lag_p99_ms", "full_load_share", "generator_cpu_share", "server_cpu_cores", "request_bytes", "response_bytes",
    "note",
)  # fmt: skip


def comparisons_csv(results: Mapping[str, Result]) -> str:
    """By the name of the run; the name is empty where there is one."""
    rows = (
        {
            **_fields(one, COMPARISONS),
            "run": name,
            "ci95_low": None if one.ci95 is None else one.ci95[0],
            "ci95_high": None if one.ci95 is None else one.ci95[1],
        }
        for name, result in results.items()
        for one in result.comparisons
    )
    return _table(COMPARISONS, rows)


def blocks_csv(results: Mapping[str, Result]) -> str:
    """Every block of load, in the order in which they ran."""
    rows = (
        {**_fields(block, BLOCKS), **_fields(block.latency, BLOCKS), "run": name}
        for name, result in results.items()
        for block in result.blocks
    )
    return _table(BLOCKS, rows)


def _fields(record: object, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _table(names: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(row[name]) for name in names})
    return out.getvalue()


def _cell(value: object) -> object:
    """A text that a spreadsheet would take for a formula is one no more."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
