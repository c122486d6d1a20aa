"""Whole comparisons with --best of real servers over sockets, whose best setting depends on the load in a known way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadgen.experiment.settings import ExperimentSettings
from loadgen.findings.best import BestFound, BestRecord
from loadgen.findings.handicap import HandicapRecord
from loadgen.measure.machine_watch import read_processors
from loadgen.measure.planning import plan_experiment
from loadgen.measure.preparation import Prepared
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import Experiment, RunState
from loadgen.records.store import read_one
from loadgen.tune.best import choose, final_experiment, read_servers
from loadgen.verdict.result import Result, analyse
from tests.again import again
from tests.integration.loadgen.conftest import NO_MACHINE, descendants
from tests.truth import tuned_server
from tests.truth.tuned_server import LANES_MS, LITSERVE_MS

ABSERVE = (sys.executable, str(Path(tuned_server.__file__)))


@pytest.fixture(autouse=True)
def machine_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that others disturb shows no difference as small as those between settings."""
    monkeypatch.setattr(read_processors, "__defaults__", NO_MACHINE)


def at_best(out: Path, arms: dict[str, str], **more: object) -> tuple[BestRecord, Result]:
    """A comparison as the command runs it, but without its reports. No process is left."""
    before = descendants()
    settings = ExperimentSettings.model_validate(
        {"arms": arms, "model": "planted", "best": True, "scenarios": "single,concurrent", "concurrency": "8",
         "rounds": 8, **more}
    )  # fmt: skip
    planned = plan_experiment(settings).runs[0][1]

    def run_stage(experiment: Experiment, folder: Path, prepared: Prepared) -> RunState:
        return run_experiment(experiment, folder, RunProgress(), abserve=ABSERVE, prepared=prepared)

    record = BestRecord(servers=read_servers(planned, ABSERVE))
    record = choose(settings, planned, record, out, run_stage, gpu=False)
    state = run_experiment(final_experiment(planned, record), out, RunProgress(), abserve=ABSERVE)
    assert state.state == "finished", state.error
    assert descendants() <= before
    return record, analyse(out)


@pytest.mark.timeout(600)
@again
def test_the_best_setting_of_each_load_and_the_compromise_are_found(tmp_path: Path) -> None:
    """As it was asked for, a loses both loads to b; at its best it wins both."""
    record, result = at_best(tmp_path / "run", {"a": "fastapi", "b": "litserve"})
    found = result.of(BestFound)
    lanes = found.servers[0]
    chosen = {load: lanes.named(name).settings for load, name in lanes.best.items()}
    assert chosen == {"single": {"lanes": "1"}, "concurrent(8)": {"lanes": "4"}}
    assert lanes.named(lanes.compromise).settings == {"lanes": "1"}
    alike = {"b2": "b"}  # a setting that changes nothing may look best by chance
    arms = [tuple(alike.get(label, label) for label in load.arms) for load in result.experiment.workloads]
    assert arms == [("a", "b"), ("a2", "b")]
    ratios = {
        (c.workload, *(alike.get(label, label) for label in c.pairing)): c.ratio
        for c in result.comparisons
        if c.leading
    }
    assert ratios == {
        ("single", "a", "b"): pytest.approx(LANES_MS["1"] / LITSERVE_MS, rel=0.25),
        ("concurrent(8)", "a2", "b"): pytest.approx(2 * LANES_MS["4"] / (4 * LITSERVE_MS), rel=0.25),
    }
    loss = {f.workload: f.loss and f.loss.value for f in found.compromises if f.server == "a"}
    worst = 4 * LANES_MS["1"] / LANES_MS["4"]
    assert loss == {"single": 1.0, "concurrent(8)": pytest.approx(worst, rel=0.25)}
    assert found.mean_loss == {"a": pytest.approx(worst**0.5, rel=0.1), "b": pytest.approx(1.0, rel=0.1)}
    assert not record.problems
    handicap = read_one(tmp_path / "run", HandicapRecord)
    assert handicap is not None
    assert all(arm.reason and not arm.settings for arm in handicap.arms), (
        "the runs that chose have measured the defaults"
    )


@pytest.mark.timeout(600)
def test_equal_servers_whose_settings_change_nothing_have_no_winner_and_advise_no_change(tmp_path: Path) -> None:
    """One run in twenty may name a winner, by the promise; of two runs at most one in 400 does for the same load."""
    named: set[str] | None = None
    for attempt in ("first", "second"):
        _, result = at_best(tmp_path / attempt, {"a": "litserve", "b": "litserve"})
        for server in result.of(BestFound).servers:
            assert server.named(server.compromise).settings == {}
        found = {c.workload for c in result.comparisons if c.leading and c.winner is not None}
        named = found if named is None else named & found
        if not named:
            break
    assert not named
