"""Restarts as units, weighted adjustment, the noise floor, and what a run says of all that."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.checks.noise_floor import apply_floor, find_floor, floor_of, floor_of_arm
from loadgen.checks.registry import Judgement
from loadgen.checks.run import answers_from_memory, repeated_requests
from loadgen.measure.machine import MachineRecordError
from loadgen.measure.noise_floor import make_floor, own_floors, read_floors, store_floor
from loadgen.metrics.comparisons import Comparison
from loadgen.metrics.facts import Facts
from loadgen.records.machine import FloorEntry, NoiseFloor
from loadgen.records.probes import CacheProbe
from loadgen.records.run import Label
from loadgen.records.store import StoredRun, read_run
from loadgen.stats.estimates import critical_t
from loadgen.stats.ratios import adjust_holm, between_restarts, estimate_ratio, estimate_restarts
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run
from tests.unit.loadgen.checks.test_fairness import EXPERIMENT


def floor(difference: float, scenario: str = "single", metric: str = "throughput") -> NoiseFloor:
    entry = FloorEntry(workload=scenario, metric=metric, difference=difference, pairs=12)
    return NoiseFloor(
        fingerprint="0" * 12, servers="", title="x", made_at="2026-03-02T10:00:00Z", restarts=6, entries=(entry,)
    )


def floor_in(directory: Path, difference: float, label: Label = "a", **changes: Any) -> NoiseFloor:
    """Of an arm of a stored run, in `single`."""
    run = read_run(directory)
    key = floor_of_arm(run.experiment, run.experiment.arm(label), run.arms)
    changes = {"entries": floor(difference).entries, "made_at": "2026-03-02T10:00:00Z", "restarts": 6, **changes}
    return msgspec.structs.replace(key, **changes)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spread_over_restarts(directory: Path, restarts: int, pairs: int) -> None:
    edit_json(directory / "experiment.json", restarts=restarts)
    (directory / "answers.json").unlink()
    for path in (directory / "blocks").glob("*.json"):
        edit_json(path, restart=json.loads(path.read_text())["round"] * restarts // pairs)


def test_each_restart_is_one_observation() -> None:
    groups = [[1.00, 1.02], [1.10, 1.12], [1.05, 1.07]]
    estimate = estimate_restarts(groups, 0.05)
    means = [math.sqrt(a * b) for a, b in groups]
    assert estimate.pairs == 6
    assert estimate.ci95 == pytest.approx(estimate_ratio(means, 0.05).ci95)
    assert estimate_restarts([groups[0]], 0.05) == estimate_ratio(groups[0], 0.05)
    assert estimate_restarts([[1.0, 0.0], [1.0, 1.1]], 0.05).ci95 is None


def test_the_spread_of_a_restart_is_told_from_that_of_the_pairs() -> None:
    rng = np.random.default_rng(3)
    starts = rng.normal(0.0, 0.05, size=(400, 1))
    both = np.exp(starts + rng.normal(0.0, 0.02, size=(400, 4))).tolist()
    only_pairs = np.exp(rng.normal(0.0, 0.02, size=(400, 4))).tolist()
    assert between_restarts(both) == pytest.approx(0.05, rel=0.1)
    spread = between_restarts(only_pairs)
    assert spread is not None
    assert spread < 0.005
    assert between_restarts([[1.0, 1.1]]) is None


def test_a_run_that_ended_in_its_first_start_does_not_claim_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=4, requests=40, state="interrupted", cut_after=50))
    edit_json(tmp_path / "experiment.json", restarts=3)
    result = analyse(tmp_path)
    assert result.stopping is not None
    assert result.stopping.sentence.startswith("Ended early, after ")
    assert "starts" not in result.stopping.sentence
    assert result.stopping.coverage.startswith("The servers were started once")
    (check,) = [check for check in result.checks if check.name == "restarts"]
    assert (check.value, check.detail.partition(",")[0]) == (1, "the servers were started once")


def test_equal_weights_are_holm_and_unequal_ones_divide_the_five_per_cent() -> None:
    p_values = [0.01, None, 0.04, 0.03]
    assert adjust_holm(p_values, [2.0, 2.0, 2.0, 2.0]) == pytest.approx(adjust_holm(p_values))
    heavy = adjust_holm([0.03, 0.03], [0.9, 0.1])
    assert heavy == pytest.approx([0.03 / 0.9, 0.03 / 0.9])
    light = adjust_holm([0.03, 0.03], [0.1, 0.9])
    assert light == pytest.approx(heavy[::-1])


def test_a_run_over_restarts_says_so(tmp_path: Path) -> None:
    directory = write_run(tmp_path, Plan(pairs=6))
    once = analyse(directory)
    assert "started once" in (once.stopping.coverage if once.stopping else "")
    assert next(c for c in once.checks if c.name == "restarts").ok is False
    spread_over_restarts(directory, 6, 6)
    result = analyse(directory)
    leading = next(c for c in result.comparisons if c.leading and c.workload == "single")
    assert (leading.method, leading.restarts) == ("t over restarts", 6)
    assert next(c for c in result.checks if c.name == "restarts").ok is True
    assert result.stopping is not None
    assert "over 6 starts" in result.stopping.sentence
    assert all(c.method == "t over pairs" for c in result.comparisons if c.workload == "cold-start")


def test_the_floor_of_restarts_is_a_prediction_interval_around_no_difference() -> None:
    groups = [[math.exp(v)] for v in (0.01, -0.02, 0.03)]
    root = math.sqrt((0.01**2 + 0.02**2 + 0.03**2) / 3)
    assert floor_of(groups) == pytest.approx(critical_t(3, 0.05) * root)


def test_the_floor_of_one_start_is_the_far_end_of_its_interval() -> None:
    ratios = [1.01, 1.03, 1.00, 1.02]
    interval = estimate_ratio(ratios, 0.05).ci95
    assert interval is not None
    assert floor_of([ratios]) == pytest.approx(math.log(interval[1]))
    assert floor_of([[1.0]]) is None


def test_a_floor_counts_for_its_workload_and_metric_only() -> None:
    floors = [floor(0.01), floor(0.02), floor(0.03, "batched(8)"), floor(0.2, "batched(8)", "latency_p99")]
    assert find_floor(floors, "single", "throughput") == 0.02
    assert find_floor(floors, "concurrent(4)", "throughput") is None
    assert find_floor(floors, "single", "latency_p99") is None


def test_no_claim_goes_below_the_floor(tmp_path: Path) -> None:
    """B serves a sixth more, alone: a winner over a floor of 5 %, none over one of 50 %."""
    directory = write_run(tmp_path)

    def judged(difference: float) -> tuple[Result, Comparison]:
        store_floors(directory, floor_in(directory, difference))
        result = analyse(directory)
        return result, single(result)

    result, above = judged(0.05)
    assert (above.verdict, above.noise_floor) == ("arm_better", 0.05)
    assert "5.0 %" in result.noise_floor_sentence
    result, within = judged(0.5)
    assert within.verdict == "inconclusive"
    assert "within this machine's noise floor: identical arms differ by up to 50 %" in (within.reason or "")
    assert "no verdict on single" in next(c for c in result.checks if c.name == "noise_floor").detail


@pytest.mark.parametrize("label", ["a", "b"])
def test_the_floor_of_either_arm_counts(tmp_path: Path, label: Label) -> None:
    directory = write_run(tmp_path)
    store_floors(directory, floor_in(directory, 0.5, label))
    assert single(analyse(directory)).verdict == "inconclusive"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "another"},
        {"payload": "uint8"},
        {"transport": "grpc"},
        {"title": "another"},
        {"settings": {"max-queue-delay-us": "9"}},
        {"servers": "gpu.example"},
        {"entries": floor(0.5, "batched(3)").entries},
        {"model": None, "payload": None, "transport": None, "settings": {}},
    ],
)
def test_the_floor_of_something_else_silences_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = write_run(tmp_path)
    store_floors(directory, floor_in(directory, 0.5, **changes))
    result = analyse(directory)
    assert (single(result).verdict, single(result).noise_floor) == ("arm_better", None)
    (check,) = [check for check in result.checks if check.name == "noise_floor"]
    assert check.ok is None
    for text in (check.detail, result.noise_floor_sentence):
        assert "never measured for these arms, model, payload, transport and workloads" in text


def test_workloads_without_a_floor_are_named(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    store_floors(directory, floor_in(directory, 0.01))
    result = analyse(directory)
    others = [c.workload for c in result.comparisons if c.leading and c.workload != "single"]
    assert others
    assert f"Not measured in {', '.join(others)}." in result.noise_floor_sentence


def store_floors(directory: Path, *floors: NoiseFloor) -> None:
    (directory / "noise_floors.json").write_bytes(msgspec.json.encode(floors))


def single(result: Result) -> Comparison:
    return next(c for c in result.comparisons if (c.workload, c.metric) == ("single", "throughput"))


def test_nor_is_equivalence_claimed_below_it(tmp_path: Path) -> None:
    arm = SimulatedArm()
    result = analyse(write_run(tmp_path, Plan(a=arm, b=arm, seed=5, block_noise=0.002)))
    equivalent = [c for c in result.comparisons if c.verdict == "no_difference" and c.metric == "throughput"]
    assert equivalent
    (applied,) = apply_floor(equivalent[:1], {"b": [floor(0.08, equivalent[0].workload)]}, 0.05)
    assert applied.verdict == "inconclusive"
    assert "below this machine's noise floor" in (applied.reason or "")


def test_without_a_floor_the_command_is_named(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path))
    assert "abserve noise-floor" in result.noise_floor_sentence
    assert next(c for c in result.checks if c.name == "noise_floor").ok is None


def test_a_floor_is_kept_for_its_machine_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = write_run(tmp_path / "run", Plan(pairs=6))
    different = analyse(directory)
    with pytest.raises(MachineRecordError, match="compares different arms"):
        make_floor(different)
    arm = json.loads((directory / "experiment.json").read_text())["arms"][0]
    edit_json(directory / "experiment.json", arms=[arm, arm | {"label": "b"}])
    spread_over_restarts(directory, 6, 6)
    result = analyse(directory)
    assert "compared with itself" in result.noise_floor_sentence
    made = make_floor(result)
    assert made.restarts == 6
    assert {entry.metric for entry in made.entries} >= {"throughput", "latency_p50"}
    path = store_floor(made)
    store_floor(msgspec.structs.replace(made, title="another"))
    store_floor(made)
    assert [kept_floor.title for kept_floor in read_floors(path)] == ["another", made.title]
    environment = result.environment
    assert environment is not None
    assert len(own_floors(environment, result.experiment)) == 2
    elsewhere = msgspec.structs.replace(environment, host={**environment.host, "cpu_model": "another"})
    assert own_floors(elsewhere, result.experiment) == ()
    remote = msgspec.structs.replace(result.experiment.baseline, target="http://gpu.example:8000")
    assert own_floors(environment, msgspec.structs.replace(result.experiment, arms=(remote, remote))) == ()
    path.write_text("{}")
    with pytest.raises(MachineRecordError, match="remove the file"):
        store_floor(made)
    (damaged,) = own_floors(environment, result.experiment)
    other = write_run(tmp_path / "other")
    store_floors(other, damaged)
    told = analyse(other)
    for text in (told.noise_floor_sentence, next(c for c in told.checks if c.name == "noise_floor").detail):
        assert f"cannot read the noise floors in {path}" in text
        assert "never measured" not in text


def test_a_later_floor_keeps_what_the_earlier_has_of_other_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both = floor(0.01).entries + floor(0.02, "batched(8)").entries
    store_floor(msgspec.structs.replace(floor(0.0), entries=both))
    path = store_floor(floor(0.05))
    assert [[entry.difference for entry in kept_floor.entries] for kept_floor in read_floors(path)] == [[0.02], [0.05]]


def repeated(*probes: CacheProbe) -> list[Judgement]:
    return list(repeated_requests.find(Facts(StoredRun(Path(), EXPERIMENT, records={CacheProbe: probes}))))


def probe(
    label: Label,
    *,
    seed: int = 0,
    noise: float = 0.1,
    cached_from: int = 9,
    left: float = 1.0,
    error: str | None = None,
) -> CacheProbe:
    """24 groups on a server that takes a millisecond, slows down over time and pauses now and then, but answers from
    memory in `left` of its time from the N-th request for the same on."""
    random = np.random.default_rng(seed)
    times = 1e6 * np.exp(noise * random.standard_normal((24, 6)) + 0.02 * np.arange(24)[:, None])
    times *= np.where(random.random(times.shape) < 0.02, 5.0, 1.0)
    times[:, [number for number in range(6) if number + 1 >= cached_from]] *= left
    fresh, repeated = times[:, 0].astype(int).tolist(), times[:, 1:].astype(int).ravel().tolist()
    return CacheProbe(
        label=label, fresh_ns=() if error else tuple(fresh), repeated_ns=() if error else tuple(repeated), error=error
    )


@pytest.mark.parametrize(
    ("b", "ok", "detail"),
    [
        (probe("b"), True, "on Triton"),
        (probe("b", cached_from=2, left=0.3), False, "on Triton"),
        (probe("b", cached_from=3, left=0.1), False, "on Triton"),
        (probe("b", cached_from=2, left=0.66), False, "on Triton"),
        (probe("b", cached_from=3, left=0.66, noise=0.2), False, "on Triton"),
        (probe("b", cached_from=2, left=0.97, noise=0.005), True, "on Triton"),
        (probe("b", error="HTTP 500"), None, "HTTP 500"),
    ],
)
def test_an_arm_that_repeats_itself_from_memory_is_found(b: CacheProbe, ok: bool | None, detail: str) -> None:
    (check,) = repeated(probe("a", seed=1), b)
    assert check.ok is ok
    assert detail in check.detail
    assert repeated() == []


def test_a_first_request_that_waits_for_a_core_was_not_followed_by_a_cache() -> None:
    """On a busy machine, whose figures these are, the verdict was taken away from one run in ten."""
    late = [8_000_000 if place % 3 else 5_700_000 for place in range(24)]
    (check,) = repeated(CacheProbe(label="b", fresh_ns=tuple(late), repeated_ns=(5_700_000,) * 120))
    assert check.ok
    assert check.value == pytest.approx(5.7 / 8.0)


@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0])
def test_servers_that_compute_every_answer_are_hardly_ever_taken_for_caches(noise: float) -> None:
    """At most 1 % of the probes may be taken for one, and 1 of 300 servers, whose second probe counts as well."""
    probes = [probe("a", seed=seed, noise=noise) for seed in range(3000)]
    caches = list(filter(answers_from_memory, probes))
    seconds = (probe("a", seed=seed, noise=noise) for seed in range(3000, 3030))
    assert len(caches) <= 30
    both = [
        msgspec.structs.replace(
            first, fresh_ns=first.fresh_ns + second.fresh_ns, repeated_ns=first.repeated_ns + second.repeated_ns
        )
        for first, second in zip(caches, seconds, strict=False)
    ]
    assert sum(map(answers_from_memory, both)) <= 10


def test_caches_are_found_in_noise() -> None:
    """From the third request on, and one that saves a third of the time, with a spread of 20 %."""
    for plan in ({"cached_from": 3, "left": 0.1}, {"cached_from": 2, "left": 0.66}):
        caches = sum(answers_from_memory(probe("b", seed=seed, noise=0.2, **plan)) for seed in range(50))  # type: ignore[arg-type]
        assert caches >= 49, plan


def test_the_family_of_a_run_until_decided_is_what_was_planned(tmp_path: Path) -> None:
    """p99 has too few samples everywhere; its share of the 5 % is not given to the others, or early looks were easy."""
    directory = write_run(tmp_path, Plan(requests=60))
    edit_json(directory / "experiment.json", until_decided=True, time_limit_minutes=1.0)
    planned = analyse(directory).comparisons
    tested = [c for c in planned if c.p_value is not None]
    assert not any(c.metric == "latency_p99" for c in tested)
    leading = sum(c.leading for c in planned)

    def needed(c: Comparison) -> float:
        """The p over the share of the 5 %."""
        return (c.p_value or 0.0) / (0.8 / leading if c.leading else 0.2 / (len(planned) - leading))

    first = min(tested, key=needed)
    assert first.p_adjusted == pytest.approx(min(1.0, needed(first)))
    assert all(c.minimal_detectable_effect is None for c in tested if c.method.startswith("anytime"))
