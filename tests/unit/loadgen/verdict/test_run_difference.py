"""`abserve diff`: what counts as a change, what refuses, and what each exit status means."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from loadgen.base.quantities import counted
from loadgen.entry import build
from loadgen.metrics.comparisons import Comparison, Method, roughen
from loadgen.report.contents import _sides
from loadgen.stats.estimates import critical_t
from loadgen.stats.tails import Round, estimate_tail_ratio
from loadgen.verdict import run_difference
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from loadgen.verdict.run_difference import ComparisonChange, PropertyDifference, compare_runs
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run
from tests.unit.loadgen.metrics.test_several_arms import compared

PLAN = Plan(pairs=4, requests=60, batches=(8,))
SLOWER_B = Plan(
    pairs=4, requests=60, batches=(8,), seed=8, b=SimulatedArm(6.5, 7.8, 2.5, reports_http=False, ready_s=5.5)
)
"""B takes 1.3 times as long for its work; another seed is another day."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    plans = {"old": PLAN, "again": Plan(pairs=4, requests=60, batches=(8,), seed=9), "slower": SLOWER_B}
    return {name: write_run(folder / name, plan) for name, plan in plans.items()}


def diff(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(build(), ["diff", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def in_other_place(run: Path, to: Path, **changes: object) -> Path:
    """The result of a run, as if from elsewhere."""
    result = analyse(run)
    assert result.environment is not None
    environment = msgspec.structs.replace(result.environment, **changes)
    to.write_bytes(encode_result(msgspec.structs.replace(result, environment=environment)))
    return to


def test_a_planted_change_is_found_where_it_is_and_named_for_the_arm_that_gained(runs: dict[str, Path]) -> None:
    status, output = diff(runs["old"], runs["slower"], "--json")
    assert status == 3
    document = json.loads(output)
    assert document["schema"] == "abserve.diff/2"
    changes = {(c["scenario"], c["metric"]): c for c in document["comparisons"]}
    main = changes["concurrent(16)", "throughput"]
    assert (main["outcome"], main["better_for"]) == ("changed", "a")
    assert main["change_ci95"][0] < 1 / 1.3 < main["change_ci95"][1]
    assert changes["concurrent(16)", "latency_p50"]["change"] == pytest.approx(1.3, rel=0.05)
    assert changes["cold-start", "time_to_ready"]["outcome"] == "no change shown"
    unmeasured = changes["single", "latency_p99"]
    assert unmeasured["outcome"] == "not comparable"
    assert "not measured in the old run" in unmeasured["reason"]


def test_the_same_plan_on_another_day_shows_no_change(runs: dict[str, Path]) -> None:
    status, output = diff(runs["old"], runs["again"])
    assert status == 0, output
    assert "No change shown in any of" in output
    assert "with --restarts 5 or more" in output
    status, markdown = diff(runs["old"], runs["again"], "--markdown")
    assert status == 0
    assert "| concurrent(16) | throughput |" in markdown
    for told in (output, markdown):
        assert "Not compared" in told
        assert "p99 latency in single" in told, "which one it is"
        assert "not measured in the old run: p99 latency needs 662 samples per arm" in told


def test_the_interval_is_welchs(runs: dict[str, Path]) -> None:
    """Against SciPy's Welch test of the pairs' log ratios, spread as widely as each run's interval allows for."""
    old, new = analyse(runs["old"]), analyse(runs["slower"])

    def ratios(result: Result) -> np.ndarray:
        (comparison,) = [c for c in result.comparisons if (c.workload, c.metric) == ("concurrent(16)", "throughput")]
        assert comparison.error_log is not None
        logs = np.log(comparison.ratios)
        wider = comparison.error_log / float(stats.sem(logs))
        assert wider > 1.0
        return np.asarray(logs.mean() + wider * (logs - logs.mean()))

    reference = stats.ttest_ind(ratios(new), ratios(old), equal_var=False)
    expected = np.exp(reference.confidence_interval(0.95))
    change = next(
        c for c in compare_runs(old, new).comparisons if (c.workload, c.metric) == ("concurrent(16)", "throughput")
    )
    assert change.change_ci95 == pytest.approx(tuple(expected))


def percentile(ratio: float, ci95: tuple[float, float], degrees: float = 11.0) -> Comparison:
    """A p99 whose interval comes from order statistics."""
    return msgspec.structs.replace(
        compared("a", "b", ratio, "inconclusive", "latency_p99"),
        ci95=ci95, method="order statistics", pairs=12, degrees=degrees,
        error_log=math.log(ci95[1] / ci95[0]) / 2.0 / critical_t(degrees, 0.05),
    )  # fmt: skip


def change(result: Result, old: Comparison, new: Comparison) -> ComparisonChange:
    runs = (msgspec.structs.replace(result, comparisons=(compared_metric,)) for compared_metric in (old, new))
    (changed,) = compare_runs(*runs, allow_different=True).comparisons
    return changed


def test_each_side_of_a_percentiles_interval_meets_the_side_it_faces(runs: dict[str, Path]) -> None:
    """Both could be 30 times as large by their intervals, and the new one is: no change is shown. With the mean of both
    sides as a standard error it would be."""
    result = analyse(runs["old"])
    old, new = percentile(1.0, (0.97, 60.0)), percentile(30.0, (29.0, 31.0))
    changed = change(result, old, new)
    below = math.hypot(math.log(30.0 / 29.0), math.log(60.0))
    above = math.hypot(math.log(31.0 / 30.0), math.log(1.0 / 0.97))
    assert changed.change_ci95 == pytest.approx((30.0 * math.exp(-below), 30.0 * math.exp(above)), rel=1e-6)
    assert changed.outcome == "no change shown"
    assert change(result, new, old).outcome == "no change shown", "either way round"
    shown_by_t = math.log(30.0) / math.hypot(old.error_log or 0.0, new.error_log or 0.0)
    assert 2.0 * stats.t.sf(shown_by_t, 11.0) < 0.01

    large = change(result, percentile(1.0, (0.97, 1.2)), percentile(30.0, (20.0, 900.0)))
    assert (large.outcome, large.better_for) == ("changed", "a")
    assert large.p_adjusted is not None
    assert large.p_adjusted < 1e-6


def test_symmetric_intervals_of_percentiles_agree_with_t(runs: dict[str, Path]) -> None:
    result = analyse(runs["old"])
    changed = change(result, percentile(1.0, (0.9, 1 / 0.9)), percentile(1.5, (1.5 * 0.9, 1.5 / 0.9)))
    error = math.log(1 / 0.9) * math.sqrt(2.0) / critical_t(11.0, 0.05)
    assert changed.p_adjusted == pytest.approx(2.0 * stats.t.sf(math.log(1.5) / error, 11.0), rel=1e-3)


def test_identical_runs_with_rare_stalls_are_rarely_called_changed() -> None:
    """0.8 to 1.2 % of the requests stall, so that the p99 of a run lies below the stalls or among them by chance.

    Student's t called up to 7 % changed, and at p < 0.5 %, as Holm's adjustment for ten
    comparisons asks for, up to 4 %."""
    rng = np.random.default_rng(32)
    for share in (0.008, 0.012):
        tested = [run_difference._test(stalling(rng, share), stalling(rng, share)) for _ in range(60)]
        excluded = [ci95 is not None and not ci95[0] <= 1.0 <= ci95[1] for _, ci95, _, _ in tested]
        assert sum(excluded) <= 3
        assert sum(p is not None and p < 0.005 for _, _, p, _ in tested) <= 1


def stalling(rng: np.random.Generator, share: float) -> Comparison:
    """The p99 of two identical arms over 12 rounds of 300 requests."""

    def requests() -> np.ndarray:
        return rng.lognormal(2.3, 0.05, 300) * math.exp(rng.normal(0.0, 0.02)) + 500.0 * (rng.random(300) < share)

    rounds = [Round(requests(), requests(), unit=number) for number in range(12)]
    estimate, _ = estimate_tail_ratio(rounds, 0.99, 0.05)
    return msgspec.structs.replace(
        compared("a", "b", estimate.ratio, "inconclusive", "latency_p99"),
        ci95=estimate.ci95, method="order statistics", pairs=12, error_log=estimate.error_log, degrees=estimate.degrees,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["t over pairs", "order statistics"])
@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "no change shown"), (1.5, "changed")])
def test_what_others_took_from_two_rough_runs_adds_up(
    runs: dict[str, Path], method: Method, factor: float, outcome: str
) -> None:
    """Half of the machine is taken from B in the old run and from A in the new one: B is four times as fast beside A as
    before, and nothing has changed. The root of the squares of both would leave 2.7 times."""

    def rough(ratio: float) -> Comparison:
        error = 0.01 / critical_t(5, 0.05)
        measured = msgspec.structs.replace(
            compared("a", "b", ratio, "inconclusive"), ci95=(ratio * math.exp(-0.01), ratio * math.exp(0.01)),
            method=method, error_log=error, degrees=5.0, p_value=1e-6, p_adjusted=1e-6,
        )  # fmt: skip
        (widened,) = roughen([measured], {"single": {"a": 0.5, "b": 0.5}}, 0.05)
        return widened

    changed = change(analyse(runs["old"]), rough(0.5), rough(2.0 * factor))
    assert changed.outcome == outcome
    assert changed.change_ci95 is not None
    assert changed.change_ci95[0] == pytest.approx(factor * math.exp(-0.01 * math.sqrt(2.0)), rel=2e-3)


def test_other_environments_are_refused_by_name_unless_told(runs: dict[str, Path], tmp_path: Path) -> None:
    old = analyse(runs["old"]).environment
    assert old is not None
    elsewhere = in_other_place(
        runs["again"],
        tmp_path / "elsewhere.json",
        host=old.host | {"cpu_model": "Other CPU 3.0 GHz"},
        packages=old.packages | {"torch": "2.16.0"},
        gpu={"devices": [{"name": "NVIDIA H200"}]},
    )
    status, output = diff(runs["old"], elsewhere)
    assert status == 1
    assert "Not compared: the runs differ in cpu_model, GPU 0, torch." in output
    for line in ("cpu_model: Simulated CPU 2.0 GHz → Other CPU 3.0 GHz", "torch: 2.15.0 → 2.16.0"):
        assert line in output
    status, output = diff(runs["old"], elsewhere, "--allow-different-environments")
    assert status == 0
    assert "a change may have another cause" in output


@pytest.mark.parametrize(("pages", "refused"), [(40, ()), (2_000_000, ("memory",))])
def test_memory_is_another_only_where_it_is_more_than_a_boot_changes(
    runs: dict[str, Path], tmp_path: Path, pages: int, refused: tuple[str, ...]
) -> None:
    old = analyse(runs["old"])
    assert old.environment is not None
    size = old.environment.host["memory_bytes"]
    assert isinstance(size, int)
    host = old.environment.host | {"memory_bytes": size - 4096 * pages}
    new = read_result(in_other_place(runs["again"], tmp_path / "booted.json", host=host))
    assert compare_runs(old, new).refused == refused


def test_another_load_is_another_environment_and_another_setting_of_an_arm_is_not(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    longer = write_run(tmp_path / "longer", Plan(pairs=4, requests=80, batches=(8,)))
    assert diff(runs["old"], longer)[0] == 1
    setting = Plan(pairs=4, requests=60, batches=(8,), seed=9, b_settings={"max-queue-delay-us": "500"})
    status, output = diff(runs["old"], write_run(tmp_path / "setting", setting))
    assert status == 0
    assert "b: max-queue-delay-us: 500, in the new run only" in output
    assert "unknown" not in output


def test_an_invalid_run_gives_nothing_to_compare(runs: dict[str, Path], tmp_path: Path) -> None:
    wrong = write_run(tmp_path / "wrong", Plan(pairs=4, requests=60, batches=(8,), parity_cosine=0.9))
    status, output = diff(runs["old"], wrong)
    assert status == 1
    assert "Nothing can be compared" in output


def test_what_is_no_run_is_a_usage_error(runs: dict[str, Path], tmp_path: Path) -> None:
    status, output = diff(runs["old"], tmp_path)
    assert status == 2
    assert "holds no run" in output


def test_without_names_the_last_run_meets_the_one_before_it_of_the_same_question(
    runs: dict[str, Path], three: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert diff()[0] == 2
    days = {"first": runs["old"], "second": runs["slower"], "others": next(iter(three.values())), "last": runs["again"]}
    for day, (name, path) in enumerate(days.items(), start=1):
        (tmp_path / "results" / name).mkdir(parents=True)
        in_other_place(path, tmp_path / "results" / name / "result.json", started_at=f"2026-01-0{day}T00:00:00Z")
    for arguments, pair in (
        ((), ("results/second", "results/last")),
        (("results/second",), ("results/first", "results/second")),
        (("results/second/result.json",), ("results/first", "results/second")),
    ):
        status, output = diff(*arguments, "--json")
        document = json.loads(output[output.index("{") :])
        assert status == 3
        assert tuple(str(Path(document[side]).resolve().relative_to(tmp_path)) for side in ("old", "new")) == pair
    for alone in ("results/first", "results/others"):
        status, output = diff(alone)
        assert (status, "give OLD and NEW" in output) == (2, True)
    assert "results/none does not exist" in diff("results/none")[1]
    final = tmp_path / "results/tuning/final"
    final.mkdir(parents=True)
    (final.parent / "tuning.json").touch()
    in_other_place(runs["slower"], final / "result.json", started_at="2026-01-09T00:00:00Z")
    assert "results/last and" in diff("results/tuning")[1]


FAST = SimulatedArm(3.0, 4.0, 1.5)
SLOWER_C = SimulatedArm(3.9, 5.2, 1.5)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A, B and C; C takes 1.3 times as long for its work in the second run."""
    folder = tmp_path_factory.mktemp("three")
    plans = {
        "old": Plan(pairs=6, requests=60, batches=(8,), others=(FAST,)),
        "slower": Plan(pairs=6, requests=60, batches=(8,), seed=8, others=(SLOWER_C,)),
    }
    return {name: write_run(folder / name, plan) for name, plan in plans.items()}


def test_of_three_arms_the_one_that_changed_is_named_with_those_that_gained_on_it(three: dict[str, Path]) -> None:
    status, output = diff(three["old"], three["slower"], "--json")
    assert status == 3
    document = json.loads(output)["comparisons"]
    loads = {
        (c["baseline"], c["arm"]): (c["outcome"], c["better_for"])
        for c in document
        if (c["scenario"], c["metric"]) == ("single", "throughput")
    }
    assert loads == {
        ("a", "b"): ("no change shown", None),
        ("a", "c"): ("changed", "a"),
        ("b", "c"): ("changed", "b"),
    }
    _, markdown = diff(three["old"], three["slower"], "--markdown")
    assert "| scenario | metric | arms | old | new |" in markdown
    assert "| single | throughput | C/A |" in markdown
    assert "better for B" in markdown
    _, text = diff(three["old"], three["slower"])
    assert "A gained" in text
    assert "p99 latency in single (C/A)" in text, "which one was not compared"


def test_arms_are_matched_by_their_labels_and_a_further_one_stands_alone(
    three: dict[str, Path], tmp_path: Path
) -> None:
    two = write_run(tmp_path / "two", Plan(pairs=6, requests=60, batches=(8,), seed=9))
    status, output = diff(two, three["old"], "--json")
    assert status == 0, output
    document = json.loads(output)
    assert document["refused"] == []
    changes = {(c["scenario"], c["metric"], c["baseline"], c["arm"]): c for c in document["comparisons"]}
    assert changes["single", "throughput", "a", "b"]["outcome"] == "no change shown"
    for pairing in (("a", "c"), ("b", "c")):
        alone = changes["single", "throughput", *pairing]
        assert (alone["outcome"], alone["reason"]) == ("not comparable", "the old run has no arm C")
    assert {"name": "c: target", "kind": "arm", "old": None, "new": "native"} in document["differences"]


def test_another_baseline_is_not_comparable(three: dict[str, Path], tmp_path: Path) -> None:
    write_run(tmp_path / "turned", Plan(pairs=6, requests=60, batches=(8,), seed=8, others=(FAST,)))
    path = tmp_path / "turned" / "experiment.json"
    experiment = json.loads(path.read_text())
    a, b, c = experiment["arms"]
    path.write_text(json.dumps(experiment | {"arms": [b, a, c]}))
    status, output = diff(three["old"], path.parent, "--json")
    document = json.loads(output)["comparisons"]
    outcomes = {(c["baseline"], c["arm"], c["reason"]) for c in document if c["metric"] == "throughput"}
    turned = "the baseline was A and is B"
    assert {("a", "b", turned), ("b", "a", turned)} <= outcomes
    assert status == 0, "B and C are compared in both runs, if only to rank them"


def test_a_workload_of_one_run_is_named_with_its_run_and_figures_are_rounded() -> None:
    def section(old: str | None, new: str | None) -> str:
        return _sides(PropertyDifference(kind="load", name="workload single", old=old, new=new))

    assert section("1 request, 0.756 s per block", None) == "1 request, 0.756 s per block, in the old run only"
    assert section(None, "1") == "1, in the new run only"
    assert section("a", "b") == "a → b"


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1 minute"), (1.0, "1 minute"), (2, "2 minutes"), (0.5, "0.5 minutes"), (0, "0 minutes"),
     (1200, "1,200 minutes")],
)  # fmt: skip
def test_a_count_has_its_noun_in_the_right_number(count: float, text: str) -> None:
    assert counted(count, "minute") == text
