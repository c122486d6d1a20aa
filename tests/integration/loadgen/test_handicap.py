"""Runs that compare each arm with the same server at its own defaults: planted handicaps are found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.findings.handicap import HandicapRecord, HandicapsFound
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRequest, Workload
from loadgen.verdict.result import Result, analyse
from tests.again import again
from tests.integration.loadgen.conftest import FAKE_ABSERVE, make_experiment, stored

pytestmark = pytest.mark.usefixtures("no_process_left")
SLOW = "10"
"""Milliseconds that a planted handicap adds to an answer of about one."""


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.measure.probes.handicap.SECONDS", 0.1)
    monkeypatch.setattr("loadgen.measure.probes.handicap.ROUNDS", 6)


SINGLE = (Workload(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.1, max_seconds=5.0, rounds=2),)


def run(out: Path, *, b: dict[str, str], **more: object) -> Result:
    arm = ArmRequest(label="b", target="triton", settings=b)
    state = run_experiment(make_experiment(b=arm, **more), out, RunProgress(), abserve=FAKE_ABSERVE)  # type: ignore[arg-type]
    assert (state.state, state.error) == ("finished", None)
    return analyse(out)


@again
def test_a_planted_handicap_is_found_and_its_setting_named_in_the_headline(tmp_path: Path) -> None:
    result = run(tmp_path / "run", b={"handicap-ms": SLOW, "harmless": "yes"})
    assert not result.valid
    slow = result.of(HandicapsFound).loads
    assert [(one.label, one.users, one.slower) for one in slow] == [("b", 1, True), ("b", 4, True)]
    assert {name for one in slow for name, _ in one.explained_by} == {"handicap-ms"}
    failed = [check for check in result.checks if check.name == "handicap" and check.ok is False]
    assert {check.scope for check in failed} == {"workload single", "workload concurrent(4)"}
    assert f"{result.names['b']} is slowed by its own settings (handicap-ms)" in result.verdict.sentence
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}
    logs = [path.read_text() for path in (tmp_path / "run").glob("logs/b-*.log")]
    assert len(logs) == 1
    assert (tmp_path / "run/handicap/plain/logs" / next((tmp_path / "run").glob("logs/b-*.log")).name).exists()


@again
def test_a_single_setting_that_fails_is_stored_with_its_reason(tmp_path: Path) -> None:
    """Its arm was compared with its plain server all the same."""
    result = run(tmp_path / "run", b={"handicap-ms": SLOW, "harmless": "die-alone"}, workloads=SINGLE)
    record = stored(tmp_path / "run" / "handicap.json", HandicapRecord)
    failed = {pair.setting: pair.reason is not None for pair in record.probes}
    assert failed == {None: False, "handicap-ms": False, "harmless": True}
    assert record.arms[1].reason is None
    assert {name for one in result.of(HandicapsFound).loads for name, _ in one.explained_by} == {"handicap-ms"}


@again
def test_settings_that_cost_nothing_leave_the_verdict(tmp_path: Path) -> None:
    result = run(tmp_path / "run", b={"harmless": "yes"}, workloads=SINGLE, equivalence_margin=1.0)
    (harmless,) = (probe for probe in stored(tmp_path / "run" / "handicap.json", HandicapRecord).probes)
    assert (harmless.label, harmless.setting) == ("b", None)
    assert all(not one.slower for one in result.of(HandicapsFound).loads)
    assert not [check for check in result.checks if check.name == "handicap" and check.ok is False]


def test_an_arm_with_its_servers_defaults_needs_no_probe_and_a_url_is_configured_by_the_user(
    tmp_path: Path, fake_url: object
) -> None:
    a = ArmRequest(label="a", target=fake_url("--handicap-ms", "1"))  # type: ignore[operator]
    result = run(tmp_path / "run", a=a, b={}, workloads=SINGLE)
    assert not (tmp_path / "run" / "handicap").exists()
    said = {check.detail: check.ok for check in result.checks if check.name == "handicap"}
    assert said == {
        f"{result.names['a']} is configured by you": None,
        f"{result.names['b']} has its server's own defaults": True,
    }


def test_without_the_check_the_arms_are_compared_as_configured(tmp_path: Path) -> None:
    result = run(tmp_path / "run", b={"handicap-ms": SLOW}, workloads=SINGLE, handicap_check=False)
    assert not (tmp_path / "run" / "handicap.json").exists()
    assert not [check for check in result.checks if check.name == "handicap"]


def test_a_plain_server_that_does_not_start_leaves_the_arm_unprobed_with_the_reason(tmp_path: Path) -> None:
    """The fake dies while it starts without its tuning; the run goes on."""
    result = run(tmp_path / "run", b={"harmless": "die-without"}, workloads=SINGLE)
    _, b = stored(tmp_path / "run" / "handicap.json", HandicapRecord).arms
    assert "could not be compared with its plain server" in str(b.reason)
    (check,) = (one for one in result.checks if one.name == "handicap" and one.detail.startswith(result.names["b"]))
    assert check.ok is None
