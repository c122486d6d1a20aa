"""Whole tunings of real servers over sockets, whose speed is a known function of their settings."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loadgen.experiment.tuning import TuneSettings
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import Experiment, RunState
from loadgen.records.tuning import Tuning, TuningRun
from loadgen.tune.declared import read_spaces
from loadgen.tune.files import read_tuning
from loadgen.tune.race import RaceProgress, TuningRace
from loadgen.tune.search import RaceLead
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import descendants
from tests.truth import tuned_server
from tests.truth.tuned_server import best_ms, right, time_ms

ABSERVE = (sys.executable, str(Path(tuned_server.__file__)))


@dataclass
class Watched(RaceProgress):
    """Interrupts the process as the stage after so many runs begins."""

    interrupt_after: int = 0
    runs: list[TuningRun] = field(default_factory=list)
    leads: Sequence[RaceLead] = ()

    def run_done(self, run: TuningRun, leads: Sequence[RaceLead]) -> None:
        self.runs.append(run)
        self.leads = leads

    def stage_begins(self, title: str) -> None:
        if self.interrupt_after and len(self.runs) == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)


def settings(minutes: float, **changes: object) -> TuneSettings:
    return TuneSettings.model_validate({"model": "planted", "concurrency": 2, "minutes": minutes, **changes})


def run(asked: TuneSettings, out: Path, progress: RaceProgress | None = None, resume: Tuning | None = None) -> Tuning:
    """A tuning as the command runs it, but without its reports. No process is left."""
    before = descendants()

    def compare(experiment: Experiment, folder: Path) -> RunState | None:
        return run_experiment(experiment, folder, RunProgress(), abserve=ABSERVE)

    tuned = {name: values.split(",") for name, values in asked.tune.items()}
    spaces = read_spaces(asked.arms, {}, tune=tuned, fix=asked.fix, abserve=ABSERVE)
    race = TuningRace(asked, spaces, out, progress or RaceProgress(), compare, abserve=ABSERVE, resume=resume)
    tuning = race.run()
    assert descendants() <= before
    assert read_tuning(out) == tuning
    return tuning


def winner(tuning: Tuning, target: str) -> dict[str, str]:
    """The settings of the target's winner."""
    return next(c.settings for c in tuning.contenders if c.name in tuning.winners and c.target == target)


FEW = {"tune": {"arithmetic": "fast"}, "fix": {"engine": "torch", "workers": "1", "batch": "4", "allocator": "libc"}}
"""Four contenders: the default, graphs (0.93 of its time), and both with arithmetic that is fast and wrong."""


def test_a_wrong_contender_is_out_and_an_interruption_keeps_the_rest(tmp_path: Path) -> None:
    watched = Watched(interrupt_after=1)
    tuning = run(settings(4.0, arms="native", **FEW), tmp_path / "tuning", watched)
    assert tuning.state == "interrupted"
    first = tuning.runs[0]
    wrong = {c.name for c in tuning.contenders if not right(c.settings)}
    assert len(wrong) == 2
    assert wrong == first.out.keys()
    assert {score.contender for score in first.scores} == {c.name for c in tuning.contenders} - wrong - {"native-0"}
    assert first.anchor is not None
    assert first.anchor.contender == "native-0"
    best = watched.leads[0].best
    assert best is not None
    assert right(best.contender.settings)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_tuning_goes_through_all_stages(tmp_path: Path) -> None:
    """The only setting of the winner put back is the default, which the final measures: that needs no run before."""
    tuning = run(settings(6.0, arms="native", **FEW), tmp_path / "tuning")
    assert tuning.state == "finished", tuning.error
    assert [run.stage for run in tuning.runs if run.stage != "finalists"] == ["screening", "final"]
    assert "finalists" in {run.stage for run in tuning.runs}
    assert winner(tuning, "native") == {"mode": "graphs"}
    result = analyse(tmp_path / "tuning" / "final")
    assert [arm.label for arm in result.experiment.arms] == ["native-0", *tuning.winners]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(5))
def test_the_best_is_found(tmp_path: Path, seed: int) -> None:
    """Of 144 settings of one server, where three pay only together: docs/tuning.md says how many tries that takes."""
    tuning = run(settings(10.0, seed=seed), tmp_path / "tuning")
    assert tuning.state == "finished", tuning.error
    for target in ("native", "triton"):
        found = winner(tuning, target)
        assert right(found)
        assert time_ms(target, found) <= 1.03 * best_ms(target)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_tuning_goes_on(tmp_path: Path) -> None:
    asked = settings(2.0, arms="native", tune={"engine": "torch", "workers": "1,2", "arithmetic": "exact"})
    first = Watched(interrupt_after=1)
    tuning = run(asked, tmp_path / "tuning", first)
    assert tuning.state == "interrupted"
    assert first.leads[0].best is not None
    assert len(tuning.runs[0].scores) > 1
    again = run(asked, tmp_path / "tuning", resume=tuning)
    assert again.state == "finished", again.error
    assert again.runs[: len(tuning.runs)] == tuning.runs
    assert again.contenders[: len(tuning.contenders)] == tuning.contenders
    assert sum(run.seconds for run in again.runs) < 1.2 * 120.0
