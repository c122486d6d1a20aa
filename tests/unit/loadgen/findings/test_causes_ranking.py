"""Causes are ranked by what taking each away changes: planted effects come back with their arm, share and interval."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from loadgen.findings.causes import (
    AS_IS,
    WITHOUT,
    Ablation,
    CauseEffect,
    CauseName,
    CausesFound,
    MeanDifference,
    MeasuredEffect,
    Untested,
    WorkloadCauses,
    combine,
    difference,
    measure_effect,
    rank_causes,
    with_verdicts,
)
from loadgen.metrics.breakdown import ArmStages, LatencyBreakdown, StageDifference
from loadgen.metrics.comparisons import Comparison, Outcome
from loadgen.records.probes import Variant
from loadgen.records.run import ArmRequest, Experiment, Label, Pairing, Workload
from tests.truth.simulated_runs import block
from tests.unit.loadgen.metrics.test_several_arms import compared

AB = Pairing("a", "b")
WORKLOAD = Workload(
    scenario="batched", batch_size=32, concurrency=1, requests=9, seconds=1.0, max_seconds=9.0, rounds=4
)


def rounds_of(first: float, second: float, count: int = 4, noise: float = 0.02) -> list[tuple[float, float]]:
    """Pairs with exactly these means, and some spread."""
    assert count % 4 == 0
    signs = [((-1) ** i, 1 if i % 4 < 2 else -1) for i in range(count)]
    return [(first + noise * sign, second + noise * other) for sign, other in signs]


def gap(a: float, b: float) -> list[tuple[float, float]]:
    return rounds_of(a, b, 8)


def effect(cause: CauseName, label: Label, as_is: float, without: float, noise: float = 0.02) -> MeasuredEffect:
    saved = difference(rounds_of(without, as_is, noise=noise))
    assert saved is not None
    record = CauseEffect(
        label=label, changed=f"{cause} removed", as_is_ms=as_is, without_ms=without, saved_ms=saved.mean_ms,
        ci95_ms=saved.ci95_ms, ratio=as_is / without, ratio_ci95=None, pairs=4, folder=f"causes/00-{cause}-{label}",
    )  # fmt: skip
    return MeasuredEffect(cause, record, saved)


def ranked(
    pairs: list[tuple[float, float]],
    effects: list[MeasuredEffect],
    untested: tuple[Untested, ...] = (),
    breakdown: LatencyBreakdown | None = None,
    comparable: bool = True,
    pairing: Pairing = AB,
    verdict: Outcome | None = None,
) -> WorkloadCauses:
    """With the verdict that the arm with the shorter requests is the better one, unless another is given."""
    causes = rank_causes(WORKLOAD, pairing, pairs, effects, untested, breakdown)
    assert causes is not None
    verdict = verdict or ("baseline_better" if causes.slower == pairing.arm else "arm_better")
    comparison = msgspec.structs.replace(compared(*pairing, 0.5, verdict), workload=WORKLOAD.name, reason="a reason")
    return judged(causes, [comparison], comparable=comparable)


def judged(causes: WorkloadCauses, leading: list[Comparison], *, comparable: bool = True) -> WorkloadCauses:
    payloads = {label: None if comparable else f"payload of {label}" for label in causes.pairing}
    experiment = Experiment(
        arms=tuple(ArmRequest(label=label, target="native", payload=payload) for label, payload in payloads.items()),
        model="m", weights="random:0", payload="fp32", transport="http", workloads=(WORKLOAD,), preset="quick", seed=0,
        equivalence_margin=0.03, threads=1,
    )  # fmt: skip
    return with_verdicts(CausesFound(workloads=(causes,)), experiment, leading).workloads[0]


def test_the_sentence_of_a_difference_with_three_causes() -> None:
    """A takes 10 ms, B 20: of B's 10 more, 7.1 are its transfer, 1.8 its queue delay, 0.6 its compute."""
    effects = [
        effect("queue_delay", "a", 10.0, 9.0),
        effect("queue_delay", "b", 20.0, 17.2),
        effect("transfer", "a", 10.0, 7.0),
        effect("transfer", "b", 20.0, 9.9),
        effect("compute", "a", 10.0, 4.0),
        effect("compute", "b", 20.0, 13.4),
    ]
    causes = ranked(gap(10.0, 20.0), effects)
    assert [cause.name for cause in causes.causes] == ["transfer", "queue_delay", "compute"]
    assert causes.sentence == (
        "A is 2.00× faster than B at batch 32 (10.0 ms less per request): 71 % payload transfer, 18 % queue delay, "
        "6 % compute, 5 % unattributed."
    )
    assert causes.slower == "b"
    shares = sum(cause.share or 0.0 for cause in causes.causes) + (causes.unattributed_share or 0.0)
    assert shares == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("invalid", "No verdict at batch 32; requests took 10.0 ms on A and 20.0 ms on B on average: 110 %"),
        ("inconclusive", "No winner at batch 32; requests took"),
        ("no_difference", "No winner at batch 32; requests took"),
        ("arm_better", "B wins at batch 32; requests took"),
    ],
)
def test_no_arm_is_called_faster_that_the_verdict_does_not_name(verdict: Outcome, said: str) -> None:
    """Tails may decide for the arm whose requests take longer on average."""
    causes = ranked(gap(10.0, 20.0), [effect("queue_delay", "b", 20.0, 9.0)], verdict=verdict)
    assert causes.sentence.startswith(said)
    assert "faster" not in " ".join((causes.sentence, *causes.notes))


def test_without_a_comparison_there_is_no_verdict() -> None:
    causes = rank_causes(WORKLOAD, AB, gap(10.0, 20.0), [], [], None)
    assert causes is not None
    assert judged(causes, []).sentence.startswith("No verdict at batch 32")


def test_the_faster_arm_is_the_subject() -> None:
    causes = ranked(gap(20.0, 10.0), [effect("queue_delay", "a", 20.0, 10.0)])
    assert causes.sentence.startswith(
        "B is 2.00× faster than A at batch 32 (10.0 ms less per request): 100 % queue delay of A"
    )
    assert causes.causes[0].difference_ms == pytest.approx(-10.0, abs=0.2)


def test_a_cause_of_the_faster_arm_works_against_the_difference() -> None:
    effects = [effect("queue_delay", "b", 20.0, 9.0), effect("payload", "a", 10.0, 9.0)]
    causes = ranked(gap(10.0, 20.0), effects, comparable=False)
    assert causes.sentence.startswith("Requests to A are 2.00× faster than requests to B at batch 32")
    assert ": 110 % queue delay of B" in causes.sentence
    assert "−10 % payload format of A" in causes.sentence
    assert any("the arm with the shorter requests" in note for note in causes.notes)


def test_an_arm_that_is_slower_without_its_work_has_no_share_and_neither_has_the_other() -> None:
    """A published run: computing nothing made A 0.58 ms slower, which counted as a part of what B's engine costs."""
    variant = Variant(payload="fp32", transport="http", settings={})
    ablation = Ablation(
        number=0, cause="compute", label="a", changed="engine torch → null", as_is=variant, without=variant,
        workloads=(WORKLOAD,),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    blocks = [
        block(rng, n, WORKLOAD.name, n, label, 0, ms + 0.02 * (n % 2))
        for n in range(4)
        for label, ms in ((AS_IS, 2.4), (WITHOUT, 3.0))
    ]
    failed = measure_effect(ablation, WORKLOAD.name, blocks)
    assert isinstance(failed, Untested)
    assert failed.not_measurable
    kept = measure_effect(msgspec.structs.replace(ablation, cause="queue_delay"), WORKLOAD.name, blocks)
    assert isinstance(kept, MeasuredEffect), "a batch may form worse without the wait"
    causes = ranked(gap(10.0, 17.8), [effect("compute", "b", 17.8, 14.9)], (failed,))
    (compute,) = causes.causes
    assert (compute.share, compute.difference_ms, compute.found) == (None, None, False)
    assert causes.unattributed_share == pytest.approx(1.0)
    assert "compute" not in causes.sentence
    assert any(note.startswith("Not measurable: compute") for note in causes.notes)


def test_a_payload_of_both_arms_is_named_once() -> None:
    causes = ranked(gap(10.0, 20.0), [effect("payload", "a", 10.0, 8.0), effect("payload", "b", 20.0, 13.0)])
    assert "50 % payload format (payload removed), 50 % unattributed." in causes.sentence


def test_what_is_within_the_noise_counts_for_nothing() -> None:
    causes = ranked(gap(10.0, 20.0), [effect("compute", "b", 20.0, 20.0, noise=0.5)])
    assert [cause.found for cause in causes.causes] == [False]
    assert causes.sentence.endswith("none of the tested causes explains it.")
    assert causes.unattributed_ms == pytest.approx(causes.difference_ms)
    assert causes.notes == ("Within the noise: compute.",)


def test_a_difference_within_the_noise_is_shared_by_no_cause() -> None:
    causes = ranked([(10.0, 12.0), (12.0, 10.5)], [effect("queue_delay", "b", 11.0, 1.0)])
    assert "within the noise" in causes.sentence
    assert causes.causes[0].share is None
    assert causes.causes[0].found


def test_a_machine_that_changed_its_speed_is_said() -> None:
    causes = ranked(gap(10.0, 20.0), [effect("queue_delay", "b", 30.0, 15.0), effect("compute", "a", 10.4, 2.0)])
    (note,) = [note for note in causes.notes if "drifted" in note]
    assert "(B: 1.50× its earlier time)" in note


def test_an_arm_that_left_its_payload_is_not_held_to_its_own_blocks() -> None:
    effects = [effect("payload", "a", 10.0, 5.0), effect("transfer", "a", 5.0, 4.0)]
    assert not any("drifted" in note for note in ranked(gap(10.0, 20.0), effects).notes)


BREAKDOWN = LatencyBreakdown(
    workload="batched(32)",
    baseline="a",
    arm="b",
    baseline_stages=ArmStages(label="a", requests=1, client_requests=1, client_total_ms=10.0, stages_ms={}),
    arm_stages=ArmStages(label="b", requests=1, client_requests=1, client_total_ms=20.0, stages_ms={}),
    difference_ms=10.0,
    differences=(StageDifference(stage="queue", difference_ms=8.3, share=0.83),),
)


def test_what_was_not_tested_is_named_with_what_the_breakdown_suggests() -> None:
    away = Untested(cause="queue_delay", label="b", reason="B is at http://b, which is not started by us")
    causes = ranked(gap(10.0, 20.0), [], (away,), BREAKDOWN)
    (cause,) = causes.causes
    assert (cause.difference_ms, cause.found, cause.inferred_ms) == (None, False, 8.3)
    (note,) = causes.notes
    assert note.startswith("Not tested: queue delay (B: B is at http://b, which is not started by us).")
    assert "suggests +8.30 ms on B" in note


def test_one_arm_tested_and_one_not_is_half_known() -> None:
    away = Untested(cause="queue_delay", label="b", reason="given by URL")
    causes = ranked(gap(10.0, 20.0), [effect("queue_delay", "a", 10.0, 8.0)], (away,), BREAKDOWN)
    assert causes.causes[0].difference_ms == pytest.approx(-2.0, abs=0.1)
    assert causes.causes[0].inferred_ms == 8.3
    assert any("Not tested: queue delay (B: given by URL)" in note for note in causes.notes)


def test_nothing_to_take_away_is_a_known_zero() -> None:
    moot = tuple(Untested(cause="compute", label=label, reason="null", moot=True) for label in ("a", "b"))
    causes = ranked(gap(10.0, 20.0), [effect("queue_delay", "b", 20.0, 10.0)], moot)
    compute = next(cause for cause in causes.causes if cause.name == "compute")
    assert (compute.difference_ms, compute.found, compute.inferred_ms) == (0.0, False, None)
    assert causes.notes == ()


def test_of_three_arms_the_effects_of_the_two_count() -> None:
    """What an arm beside the pairing costs neither adds to the difference nor is said."""
    effects = [effect("queue_delay", "old", 10.0, 8.0), effect("queue_delay", "c", 20.0, 15.0)]
    beside = [effect("queue_delay", "b", 90.0, 9.0), effect("compute", "b", 90.0, 9.0)]
    away = tuple(Untested(cause="compute", label=label, reason="given by URL") for label in ("b", "c"))
    causes = ranked(gap(10.0, 20.0), [*effects, *beside], away, pairing=Pairing("old", "c"))
    assert (causes.baseline, causes.arm, causes.slower) == ("old", "c", "c")
    assert causes.sentence.startswith(
        "old is 2.00× faster than C at batch 32 (10.0 ms less per request): 30 % queue delay,"
    )
    queue, compute = causes.causes
    assert queue.difference_ms == pytest.approx(3.0, abs=0.1)
    assert [entry.label for entry in queue.effects] == ["old", "c"]
    assert ([entry.label for entry in compute.untested], compute.effects) == (["c"], ())
    assert causes.notes == ("Not tested: compute (C: given by URL).",)


def test_a_difference_of_which_nothing_was_tested_yet() -> None:
    assert (
        ranked(gap(10.0, 20.0), []).sentence
        == "A is 2.00× faster than B at batch 32 (10.0 ms less per request): no cause was tested."
    )


def test_without_pairs_there_is_nothing_to_explain() -> None:
    assert rank_causes(WORKLOAD, AB, [], [], [], None) is None


def test_one_pair_has_no_interval_and_sees_nothing() -> None:
    alone = difference([(1.0, 9.0)])
    assert alone is not None
    assert (alone.mean_ms, alone.ci95_ms, alone.seen) == (8.0, None, False)
    assert combine([(1.0, alone), (1.0, MeanDifference(1.0, 0.1, 3.0))]).ci95_ms is None


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Effects of both arms with unequal noise, 4 pairs each: Welch's interval of B − A, 2,000 seeded trials."""
    rng = np.random.default_rng(11)
    covered = 0
    trials = 2000
    for _ in range(trials):
        parts = []
        for weight, true, noise in ((1.0, 3.0, 0.5), (-1.0, 1.0, 0.2)):
            saved = difference([(0.0, float(value)) for value in true + noise * rng.standard_normal(4)])
            assert saved is not None
            parts.append((weight, saved))
        low, high = combine(parts).ci95_ms or (0.0, 0.0)
        covered += low <= 2.0 <= high
    assert 0.94 <= covered / trials <= 0.98
