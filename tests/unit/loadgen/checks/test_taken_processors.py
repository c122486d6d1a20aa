"""What the hypervisor or another process took of the processors counts by its effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run
from tests.unit.loadgen.checks.test_checks import SMALL, check, edit_json


def take(directory: Path, field: str, blocks: int | None = None, **shares: float) -> None:
    """Take the stated shares of ten seconds of two cores from the arms' blocks of `single`, or from the first `blocks`
    of each."""
    left: dict[str, int | None] = dict.fromkeys(shares, blocks)
    for path in sorted((directory / "blocks").glob("*.json")):
        block = json.loads(path.read_text())
        if block["workload"] != "single":
            continue
        n = left[block["label"]]
        taken = shares[block["label"]] if n is None or n > 0 else 0.0
        left[block["label"]] = None if n is None else n - 1
        total_ns = 20_000_000_000
        machine: dict[str, Any] = {
            "total_ns": total_ns, "steal_ns": 0, "busy_ns": 40_000_000, "known_ns": 40_000_000,
            "others": ["PID 812 ffmpeg, 0.97 cores"], "runnable": 1, "waited_ns": None,
        }  # fmt: skip
        machine[field] += round(taken * total_ns)
        edit_json(path, machine=machine)


@pytest.mark.parametrize(
    ("taken", "ok", "severity", "words"),
    [
        ({"a": 0.0, "b": 0.02}, True, "warns", "0 % of the CPU's time in A's blocks and 2.0 % in B's went to "),
        (
            {"a": 0.06, "b": 0.05},
            False,
            "warns",
            "6.0 % of the CPU's time in A's blocks and 5.0 % in B's went to ",
        ),
        ({"a": 0.3, "b": 0.3}, False, "invalidates", "over 20 % in the median block"),
        ({"a": 0.0, "b": 0.1}, False, "invalidates", "so the arms did not have the same machine"),
        ({"a": 0.0, "b": 0.4, "blocks": 1}, False, "warns", "(1 of"),
    ],
)
@pytest.mark.parametrize("field", ["steal_ns", "busy_ns"])
def test_processors_that_were_taken_away_count_by_their_effect(
    tmp_path: Path, field: str, taken: dict[str, Any], ok: bool, severity: str, words: str
) -> None:
    """The attacker's cases: 30 % of steal and a machine that was 100 % busy were VALID."""
    write_run(tmp_path, Plan(**SMALL))
    take(tmp_path, field=field, **taken)
    result = analyse(tmp_path)
    names = {"steal_ns": "cpu_steal", "busy_ns": "other_processes"}
    seen = check(result, names[field], "single")
    assert (seen.ok, seen.severity) == (ok, severity)
    assert words in seen.detail
    assert result.valid == (severity != "invalidates")
    assert ("PID 812 ffmpeg, 0.97 cores" in seen.detail) == (field == "busy_ns" and not ok)
    single = {c.verdict for c in result.comparisons if c.workload == "single" and c.ratios}
    assert (single == {"invalid"}) == (severity == "invalidates")
