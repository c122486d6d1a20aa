"""The account of time adds up for both arms, whatever each of them reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.analysis.analysis import analyse
from loadgen.analysis.reasons import explain_stages
from loadgen.analysis.stages import STAGES, folded
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run


def test_every_account_adds_up(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=2)))
    assert len(result.stages) == 7
    for account in result.stages:
        assert account.a is not None
        assert account.b is not None
        for arm, other in ((account.a, account.b), (account.b, account.a)):
            assert set(arm.stages_ms) == set(STAGES)
            assert sum(v for v in arm.stages_ms.values() if v is not None) == pytest.approx(arm.client_total_ms)
            assert sum(folded(arm, other).values()) == pytest.approx(arm.client_total_ms)
        assert sum(d.b_minus_a_ms for d in account.differences) == pytest.approx(account.total_b_minus_a_ms)
        assert sum(d.share or 0.0 for d in account.differences) == pytest.approx(1.0)


def test_a_stage_that_one_arm_lacks_is_folded_into_where_the_other_keeps_it(tmp_path: Path) -> None:
    account = analyse(write_run(tmp_path, Plan(pairs=2))).stages[0]
    assert account.a is not None
    assert account.b is not None
    assert account.b.stages_ms["decode"] is None
    shared = folded(account.a, account.b)
    assert set(shared) == {"send_delay", "queue", "compute_input", "compute_infer", "compute_output", "unattributed"}
    assert shared["compute_input"] == pytest.approx(
        (account.a.stages_ms["compute_input"] or 0) + (account.a.stages_ms["decode"] or 0)
    )


@pytest.mark.parametrize(
    ("b", "stage"),
    [
        (SimulatedArm(item_ms=14.0, reports_http=False), "executing the model +"),
        (SimulatedArm(transport_ms=9.0, reports_http=False), "outside the server's account +"),
    ],
)
def test_the_planted_cause_leads_the_reasons(tmp_path: Path, b: SimulatedArm, stage: str) -> None:
    account = analyse(write_run(tmp_path, Plan(b=b, pairs=3))).stages[0]
    text = explain_stages(account)[0]
    assert f"are: {stage}" in text


def test_an_arm_without_stages_gets_no_explanation(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2))
    for path in (tmp_path / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["label"] == "b":
            path.write_text(json.dumps(block | {"stages": None}))
    result = analyse(tmp_path)
    assert all(account.b is None and account.a is not None for account in result.stages)
    assert all(explain_stages(account) == [] for account in result.stages)
