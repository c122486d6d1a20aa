"""A screening goes on without arms that fail before the load, and says which arm failed under it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.checks.registry import invalidating
from loadgen.experiment.plan import SCREENING
from loadgen.experiment.tuning import TuneSettings
from loadgen.measure.preparation import Prepared
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.probes import AnswersCompared, CacheProbe
from loadgen.records.run import ArmRequest, Experiment, ParityRecord, Workload
from loadgen.records.store import read_run
from loadgen.tune.screening import judge
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import FAKE_ABSERVE, blocks, descendants, make_experiment, stored

LOAD = Workload(scenario="concurrent", batch_size=1, concurrency=4, requests=40, seconds=0.1, max_seconds=5.0, rounds=2)


def contender(label: str, **settings: str) -> ArmRequest:
    return ArmRequest(label=label, target="native", settings={k.replace("_", "-"): v for k, v in settings.items()})


def screening(*arms: ArmRequest) -> Experiment:
    first, *others = arms
    return make_experiment(
        a=contender("anchor"), b=first, others=others, workloads=(LOAD,), screening=True, processes=1
    )


def run(experiment: Experiment, out: Path, prepared: Prepared | None = None):
    before = descendants()
    state = run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE, prepared=prepared)
    assert descendants() <= before
    return state


def test_arms_that_fail_before_the_load_cost_only_themselves(tmp_path: Path) -> None:
    asked = screening(
        contender("crash", crash="true"),
        contender("wrong", wrong="true"),
        contender("empty", empty="true"),
        contender("refusing", error_every="1"),
        contender("lonely", error_above="1", delay_ms="50"),
        contender("good"),
    )
    state = run(asked, tmp_path / "run")
    assert state.state == "finished", state
    experiment = stored(tmp_path / "run" / "experiment.json", Experiment)
    assert experiment.labels == ("anchor", "good")
    assert "cannot open the model" in experiment.failed_arms["crash"]
    assert "other answers" in experiment.failed_arms["wrong"]
    assert "503" in experiment.failed_arms["refusing"]
    assert "inputs of the parity check" in experiment.failed_arms["lonely"], "they are sent at once"
    assert set(experiment.failed_arms) == {"crash", "wrong", "empty", "refusing", "lonely"}
    parity = stored(tmp_path / "run" / "parity.json", ParityRecord)
    assert parity.ok
    assert {case.label for case in parity.cases} == {"anchor", "good"}
    assert {(block.label, block.round) for block in blocks(tmp_path / "run")} == {
        (label, number) for label in ("anchor", "good") for number in (0, 1)
    }
    compared = stored(tmp_path / "run" / "answers.json", tuple[AnswersCompared, ...])
    assert {record.answers for record in compared} == {SCREENING.answers}
    assert not (tmp_path / "run" / CacheProbe.FILE).exists()
    assert analyse(tmp_path / "run").experiment.labels == ("anchor", "good")


def test_a_comparison_still_ends_with_the_failure_of_an_arm(tmp_path: Path) -> None:
    asked = msgspec.structs.replace(screening(contender("wrong", wrong="true"), contender("good")), screening=False)
    state = run(asked, tmp_path / "run")
    assert state.state == "failed"
    assert "same answers" in str(state.error)


def test_an_arm_that_dies_under_load_is_named(tmp_path: Path) -> None:
    state = run(screening(contender("dying", die_after="75"), contender("good")), tmp_path / "run")
    assert (state.state, state.failed_arm) == ("failed", "dying")


def test_wrong_answers_under_load_are_blamed_on_their_arm(tmp_path: Path) -> None:
    """Its parity is right: 6 inputs alone, and each of them again in mixed batches, which are not merged."""
    asked = screening(contender("hollow", hollow_every="2", good_first="70"), contender("good"))
    state = run(asked, tmp_path / "run")
    assert state.state == "finished", state
    blamed = {check.arms for check in invalidating(analyse(tmp_path / "run").checks) if check.arms}
    assert blamed == {("hollow",)}


def test_a_slow_arm_does_not_make_all_blocks_long(tmp_path: Path) -> None:
    asked = screening(contender("slow", delay_ms="600"), contender("good", delay_ms="20"))
    asked = msgspec.structs.replace(asked, arms=(contender("anchor", delay_ms="20"), *asked.arms[1:]))
    state = run(
        msgspec.structs.replace(asked, workloads=(msgspec.structs.replace(LOAD, requests=1),)), tmp_path / "run"
    )
    assert state.state == "finished", state
    (workload,) = stored(tmp_path / "run" / "experiment.json", Experiment).workloads
    assert workload.seconds < 0.6
    judged = judge(read_run(tmp_path / "run"), analyse(tmp_path / "run"), TuneSettings())
    assert judged.problem is None
    scores = {score.contender: score.log_ratio for score in judged.scores}
    assert abs(scores["good"]) < 0.7
    assert "slow" in judged.out or scores["slow"] < -1.0


def test_what_an_interrupted_screening_measured_counts(tmp_path: Path) -> None:
    """A resumed tuning does not measure it again."""

    class Interrupted(RunProgress):
        blocks = 0

        def block_done(self, *_: object) -> None:
            self.blocks += 1
            if self.blocks == 4:
                raise KeyboardInterrupt

    asked = screening(contender("good"))
    state = run_experiment(asked, tmp_path / "run", Interrupted(), abserve=FAKE_ABSERVE)
    assert state.state == "interrupted"
    judged = judge(read_run(tmp_path / "run"), analyse(tmp_path / "run"), TuneSettings())
    assert (judged.problem, [score.contender for score in judged.scores]) == (None, ["good"])


def test_without_an_arm_that_is_left_the_run_fails(tmp_path: Path) -> None:
    state = run(screening(contender("crash", crash="true"), contender("wrong", wrong="true")), tmp_path / "run")
    assert state.state == "failed"
    assert "no arm is left" in str(state.error)
    assert stored(tmp_path / "run" / "experiment.json", Experiment).failed_arms.keys() == {"crash", "wrong"}


def test_the_second_run_uses_the_samples_of_the_first(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path / "samples")
    assert run(screening(contender("good")), tmp_path / "1", prepared).state == "finished"
    made = {path: path.stat().st_mtime_ns for path in prepared.samples.iterdir()}
    assert made
    assert run(screening(contender("good")), tmp_path / "2", prepared).state == "finished"
    assert {path: path.stat().st_mtime_ns for path in prepared.samples.iterdir()} == made


def test_the_load_takes_no_longer_than_what_came_before_it(tmp_path: Path) -> None:
    asked = screening(contender("good"))
    state = run(
        msgspec.structs.replace(asked, workloads=(msgspec.structs.replace(LOAD, requests=1, rounds=500),)),
        tmp_path / "run",
    )
    assert state.state == "finished", state
    (workload,) = stored(tmp_path / "run" / "experiment.json", Experiment).workloads
    assert (SCREENING.least_rounds or 0) <= workload.rounds < 500
