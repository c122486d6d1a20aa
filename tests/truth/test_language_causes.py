"""Servers of streamed tokens whose parts have a known cost per token, through real sockets: the ablations find it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.findings.causes import CauseName, CausesFound
from loadgen.measure import load_runner
from loadgen.records.run import ArmRequest
from loadgen.verdict.result import Result, analyse
from tests.truth.planted_reference import FRONTS_MS, TRITON_MS
from tests.truth.streams import run_arms, users

TOKENS = 12
LATE_MS = 0.2
"""Per token, by which an event loop on a busy machine may be late."""


def explained(tmp_path: Path) -> Result:
    """A native server with a front end, beside Triton with the same engine."""
    arms = (ArmRequest(label="a", target="native"), ArmRequest(label="b", target="triton"))
    run_arms(tmp_path / "run", arms, users(1, 4, 5, tokens=TOKENS), transport="generate_stream", explain=True)
    return analyse(tmp_path / "run")


@pytest.mark.slow  # by default test_causes_keep_their_promises.py, and tests/unit/loadgen/measure/probes
def test_what_a_part_of_a_server_costs_per_token_is_found_on_its_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_runner, "WARM_UP_SECONDS", 0.0)
    result = explained(tmp_path)
    (causes,) = result.of(CausesFound).workloads
    found = {cause.name: cause for cause in causes.causes}
    planted: dict[CauseName, tuple[str, float, str]] = {
        "server": ("b", TRITON_MS - FRONTS_MS, "triton → native"),
        "front_ends": ("a", FRONTS_MS, "fronts 1 → 0"),
    }
    assert found.keys() == planted.keys()
    for name, (label, cost_ms, changed) in planted.items():
        (effect,) = found[name].effects
        assert found[name].found
        assert effect.label == label
        assert effect.changed.startswith(changed)
        assert effect.ci95_ms is not None
        low_ms, high_ms = (bound / (TOKENS - 1) for bound in effect.ci95_ms)  # the first token costs as much everywhere
        assert low_ms - LATE_MS <= cost_ms <= high_ms + LATE_MS
        assert high_ms - low_ms < 1.5
    assert "serving layer of" in causes.sentence
