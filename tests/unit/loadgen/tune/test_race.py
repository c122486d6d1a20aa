"""The whole procedure with simulated runs and a clock that they move: stages, time, failures, interruptions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest

from loadgen.experiment.tuning import TuneSettings
from loadgen.records.run import Experiment, Label, RunState
from loadgen.records.store import RunStore
from loadgen.records.tuning import ANCHOR, Contender, Score, Space, TunableSetting, Tuning, TuningRun
from loadgen.tune import race
from loadgen.tune.files import read_tuning
from loadgen.tune.progress import lead_in_words
from loadgen.tune.race import RaceProgress, TuningRace, forecast, seconds_of
from loadgen.tune.search import RaceLead
from tests.truth import tuned_server
from tests.truth.tuned_server import right, time_ms

SPACES = tuple(msgspec.convert(tuned_server.space(target), Space) for target in ("native", "triton"))
NOISE = 0.01
MEASURED = Score(contender=ANCHOR, log_ratio=0.0, error=NOISE, value=1.0)
"""The anchor of a run."""


class Machine:
    """Runs take 10 s and 9 s per arm, half of it for the load; the final as long as it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, slower: float = 1.0) -> None:
        self.now_s, self.slower = 1000.0, slower
        self.experiments: list[Experiment] = []
        self.finals: list[Experiment] = []
        self.before_run: Callable[[Experiment], tuple[TuningRun, RunState] | None] = lambda _: None
        self.final_state = "finished"
        monkeypatch.setattr(race, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(race, "screen", self.screen)

    def screen(self, experiment: Experiment, folder: Path, *_: object, **__: object) -> tuple[TuningRun, RunState]:
        assert experiment.screening
        assert experiment.labels[0] == ANCHOR
        RunStore(folder).write(msgspec.structs.replace(experiment, processes=3))
        self.experiments.append(experiment)
        seconds = self.slower * (10.0 + 9.0 * len(experiment.arms))
        self.now_s += seconds
        if (planned := self.before_run(experiment)) is not None:
            return planned
        rng = random.Random(str((experiment.seed, experiment.labels)))
        out = {arm.label: "It is wrong." for arm in experiment.arms if not right(arm.settings)}
        scores = [
            Score(contender=arm.label, log_ratio=lead(arm.target, arm.settings) + rng.gauss(0.0, NOISE), error=NOISE,
                  value=1.0)
            for arm in experiment.arms[1:] if arm.label not in out
        ]  # fmt: skip
        shown = judged(scores, out, load_seconds=seconds / 2.0)
        return msgspec.structs.replace(shown, folder=folder.name), RunState(state="finished", phase="finished")

    def compare(self, experiment: Experiment, folder: Path) -> RunState | None:
        RunStore(folder).write(experiment)
        assert not experiment.screening
        self.finals.append(experiment)
        self.now_s += 60.0 * (experiment.minutes or 0.0)
        return RunState(state=self.final_state, phase="finished")  # type: ignore[arg-type]


def judged(
    scores: Iterable[Score], out: dict[Label, str], problem: str | None = None, load_seconds: float = 0.0
) -> TuningRun:
    """What a run shows, with the anchor if it counts."""
    anchor = MEASURED if problem is None else None
    return TuningRun(folder="run", stage="screening", scores=tuple(scores), out=out, problem=problem, anchor=anchor,
                     load_seconds=load_seconds)  # fmt: skip


def lead(target: str, given: Mapping[str, str]) -> float:
    return math.log(time_ms("native", {}) / time_ms(target, given))


def settings(minutes: float = 30.0, **more: object) -> TuneSettings:
    return TuneSettings.model_validate({"model": "planted", "minutes": minutes, **more})


def run(
    machine: Machine,
    folder: Path,
    asked: TuneSettings | None = None,
    resume: Tuning | None = None,
    spaces: tuple[Space, ...] = SPACES,
) -> Tuning:
    asked = asked or settings()
    tuning = TuningRace(asked, spaces, folder, RaceProgress(), machine.compare, resume=resume).run()
    assert read_tuning(folder) == tuning
    return tuning


def chosen(tuning: Tuning) -> dict[str, dict[str, str]]:
    return {c.target: c.settings for c in tuning.contenders if c.name in tuning.winners}


@pytest.mark.parametrize(("minutes", "slower"), [(12.0, 1.0), (30.0, 0.6), (30.0, 2.0), (60.0, 1.0)])
def test_the_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, slower: float) -> None:
    machine = Machine(monkeypatch, slower=slower)
    began_s = machine.now_s
    tuning = run(machine, tmp_path / "t", settings(minutes))
    assert tuning.state == "finished", tuning.error
    assert machine.now_s - began_s == pytest.approx(60.0 * minutes, rel=0.1)
    assert (machine.finals[0].minutes or 0.0) * 60.0 >= 0.9 * seconds_of(minutes)["final"]


@pytest.mark.parametrize("is_searched", [True, False])
def test_where_padding_is_searched_nothing_pads_by_the_comparisons_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_searched: bool
) -> None:
    """Else a contender without padding would be the same server as one with it."""
    padding = TunableSetting(name="pad-to", default="none", values=("none", "32,64"))
    spaces = tuple(msgspec.structs.replace(s, settings=(*s.settings, padding)) for s in SPACES)
    machine = Machine(monkeypatch)
    run(machine, tmp_path / "t", spaces=spaces if is_searched else SPACES)
    expected = () if is_searched else None
    assert {experiment.pad_to for experiment in (*machine.experiments, *machine.finals)} == {expected}


@pytest.mark.parametrize(("slower", "starts"), [(1.0, 5), (4.0, 3), (12.0, 1)])
def test_the_final_starts_its_servers_as_often_as_its_time_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float, starts: int
) -> None:
    machine = Machine(monkeypatch, slower=slower)
    tuning = run(machine, tmp_path / "t", settings(30.0))
    assert [final.restarts for final in machine.finals] == [starts]
    stages = {entry.stage for entry in tuning.runs}
    assert ("finalists" in stages) == (starts > 1)
    assert set(machine.finals[0].labels) == {"native-0", "triton-0", *tuning.winners}


def test_what_is_chosen_is_measured_freshly_and_compared_with_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    tuning = run(machine, tmp_path / "t", settings(60.0))
    stages = [entry.stage for entry in tuning.runs]
    assert stages == sorted(stages, key=["screening", "finalists", "settings", "final"].index)
    assert set(stages) == {"screening", "finalists", "settings", "final"}
    measured = {score.contender for entry in tuning.runs if entry.stage == "finalists" for score in entry.scores}
    assert set(tuning.winners) <= measured
    (final,) = machine.finals
    assert set(final.labels) == {"native-0", "triton-0", *tuning.winners}
    for target, found in chosen(tuning).items():
        assert right(found)
        assert time_ms(target, found) < time_ms(target, {})
    seeds = [experiment.seed for experiment in machine.experiments]
    assert len(set(seeds)) == len(seeds)
    assert [experiment.processes for experiment in machine.experiments[:2]] == [0, 3]


def test_a_contender_that_is_out_never_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    tuning = run(machine, tmp_path / "t")
    gone: set[Label] = set()
    for entry, experiment in zip(tuning.runs, machine.experiments, strict=False):
        assert not gone & set(experiment.labels)
        gone |= entry.out.keys()
    assert gone
    assert not gone & set(machine.finals[0].labels)


def test_a_tuning_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(Machine(monkeypatch), tmp_path / "whole")
    machine = Machine(monkeypatch)

    def interrupt(_: Experiment) -> None:
        if len(machine.experiments) == 4:
            raise KeyboardInterrupt

    machine.before_run = interrupt
    part = run(machine, tmp_path / "part")
    assert part.state == "interrupted"
    assert len(part.runs) == 3
    machine.before_run = lambda _: None
    again = run(machine, tmp_path / "part", resume=part)
    assert again.state == "finished"
    for one, other in zip(again.runs[:3], whole.runs[:3], strict=True):
        assert one == other
    assert again.contenders[:10] == whole.contenders[:10]
    assert len({entry.folder for entry in again.runs}) == len(again.runs)


def test_the_finalists_stay_those_that_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the runs by which the next one is planned were so slow that none would be chosen now."""
    machine = Machine(monkeypatch)

    def interrupt(_: Experiment) -> None:
        if (tmp_path / "t/tuning.json").exists() and read_tuning(tmp_path / "t").finalists:
            raise KeyboardInterrupt

    machine.before_run = interrupt
    part = run(machine, tmp_path / "t", settings(60.0))
    assert part.finalists
    slow_runs = tuple(msgspec.structs.replace(entry, seconds=100.0 * entry.seconds) for entry in part.runs)
    machine.before_run = lambda _: None
    again = run(machine, tmp_path / "t", settings(60.0), resume=msgspec.structs.replace(part, runs=slow_runs))
    measured = {s.contender for entry in again.runs if entry.stage == "finalists" for s in entry.scores}
    assert measured == {*part.finalists} - {"native-0"}


def test_a_final_that_was_interrupted_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.final_state = "interrupted"
    part = run(machine, tmp_path / "t")
    assert part.state == "interrupted"
    assert part.winners
    before = len(machine.experiments)
    machine.final_state = "finished"
    again = run(machine, tmp_path / "t", resume=part)
    assert again.state == "finished"
    assert len(machine.experiments) == before
    assert machine.finals[0].arms == machine.finals[1].arms
    assert (tmp_path / "t" / "final-2" / "experiment.json").exists()


def busy(experiment: Experiment) -> tuple[TuningRun, RunState]:
    return judged((), {}, "Other programs used the CPU."), RunState(state="finished", phase="finished")


def test_a_run_on_a_busy_machine_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.before_run = lambda experiment: busy(experiment) if len(machine.experiments) == 2 else None
    tuning = run(machine, tmp_path / "t")
    assert tuning.state == "finished"
    assert tuning.runs[1].problem is not None
    assert set(machine.experiments[1].labels) & set(machine.experiments[2].labels) > {ANCHOR}


def test_a_machine_that_stays_busy_ends_the_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.before_run = busy
    tuning = run(machine, tmp_path / "t")
    assert tuning.state == "failed"
    assert "Other programs used the CPU" in (tuning.error or "")
    assert len(tuning.runs) == race.TRIES


def test_contenders_that_are_never_measured_do_not_hold_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender but the defaults is out."""
    machine = Machine(monkeypatch)

    def only_defaults(experiment: Experiment) -> tuple[TuningRun, RunState]:
        out = {arm.label: "It did not start." for arm in experiment.arms[1:] if arm.settings}
        scores = [
            Score(contender=arm.label, log_ratio=0.0, error=NOISE, value=1.0)
            for arm in experiment.arms[1:] if not arm.settings
        ]  # fmt: skip
        return judged(scores, out), RunState(state="finished", phase="finished")

    machine.before_run = only_defaults
    tuning = run(machine, tmp_path / "t")
    assert tuning.state == "finished", tuning.error
    assert set(tuning.winners) == {"native-0", "triton-0"}
    assert machine.finals[0].labels == ("native-0", "triton-0")


def slow(experiment: Experiment) -> tuple[TuningRun, RunState]:
    """Whatever changes a setting is a tenth slower."""
    scores = [
        Score(contender=arm.label, log_ratio=-0.1 * bool(arm.settings), error=NOISE, value=1.0)
        for arm in experiment.arms[1:]
    ]
    return judged(scores, {}), RunState(state="finished", phase="finished")


def test_a_single_server_whose_defaults_do_best_has_a_final_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the best of what was tried, so that the answer is a comparison."""
    machine = Machine(monkeypatch)
    machine.before_run = slow
    tuning = run(machine, tmp_path / "t", settings(arms="native"), spaces=SPACES[:1])
    assert tuning.state == "finished", tuning.error
    (final,) = machine.finals
    assert final.labels == ("native-0", *tuning.winners)
    assert len(final.labels) == 2


def test_of_two_servers_one_of_which_is_out_the_other_has_a_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)

    def no_triton(experiment: Experiment) -> tuple[TuningRun, RunState]:
        measured, state = slow(experiment)
        out = {arm.label: "It did not start." for arm in experiment.arms if arm.target == "triton"}
        scores = tuple(score for score in measured.scores if score.contender not in out)
        return msgspec.structs.replace(measured, scores=scores, out=out), state

    machine.before_run = no_triton
    tuning = run(machine, tmp_path / "t")
    assert tuning.state == "finished", tuning.error
    labels = machine.finals[0].labels
    assert labels[0] == "native-0"
    assert len(labels) == 2
    assert {label.partition("-")[0] for label in labels} == {"native"}


def test_a_single_server_of_which_only_the_defaults_work_ends_with_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)

    def none(experiment: Experiment) -> tuple[TuningRun, RunState]:
        out = {arm.label: "It did not start." for arm in experiment.arms[1:]}
        return judged((), out), RunState(state="finished", phase="finished")

    machine.before_run = none
    tuning = run(machine, tmp_path / "t", settings(arms="native"), spaces=SPACES[:1])
    assert tuning.state == "failed"
    assert "native-0" in (tuning.error or "")
    assert not machine.finals


def test_a_winner_that_fails_while_a_setting_is_put_back_is_no_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    lost: list[Label] = []

    def fails(experiment: Experiment) -> tuple[TuningRun, RunState] | None:
        stored = read_tuning(tmp_path / "t")
        if not stored.winners or lost:
            return None
        lost.append(next(label for label in experiment.labels if label in stored.winners))
        others = [
            Score(contender=label, log_ratio=0.0, error=NOISE, value=1.0)
            for label in experiment.labels[1:] if label not in lost
        ]  # fmt: skip
        out = {lost[0]: "It did not start."}
        return judged(others, out), RunState(state="finished", phase="finished")

    machine.before_run = fails
    tuning = run(machine, tmp_path / "t", settings(60.0))
    assert lost
    assert lost[0] not in tuning.winners
    assert set(tuning.winners) <= set(machine.finals[0].labels)


def test_nothing_that_can_be_measured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)

    def none(experiment: Experiment) -> tuple[TuningRun, RunState]:
        out = {arm.label: "It did not start." for arm in experiment.arms[1:]}
        return judged((), out, "No arm is left."), RunState(state="failed", phase="starting", error="no arm is left")

    machine.before_run = none
    tuning = run(machine, tmp_path / "t", settings(8.0))
    assert tuning.state == "failed"
    assert "It did not start." in (tuning.error or "")


def test_a_forecast_counts_screenings() -> None:
    few, many = forecast(12.0, 5), forecast(60.0, 5)
    assert few[0] >= 1
    assert many[0] > 2 * few[0]
    assert many[1] == 5 * many[0]


def test_the_line_of_a_target_says_why_it_has_no_best() -> None:
    out = (Contender(name="triton-0", target="triton", settings={}), "Wrong answers.")
    leads = (RaceLead("triton", tried, (out,) * count) for tried, count in ((0, 0), (3, 0), (3, 1), (2, 2)))
    lines = {lead_in_words(lead, 128) for lead in leads}
    assert lines == {
        "triton: nothing measured yet; 0 of 128 contenders tried",
        "triton: nothing keeps the limit so far; 3 of 128 contenders tried",
        "triton: nothing keeps the limit so far; 3 of 128 contenders tried, 1 out",
        "triton: all are out; 2 of 128 contenders tried, 2 out",
    }
