"""A ratio is shown from the better arm, whichever way the metric goes and whichever arm is the baseline."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.metrics.claims import ORDER, claim, groups, other_decided_metrics, verdict_words
from loadgen.metrics.comparisons import Outcome, advantage
from loadgen.records.run import Pairing
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run
from tests.unit.loadgen.metrics.test_several_arms import WORKLOADS, compared

LETTERS = {"a": "A", "b": "B"}


@pytest.mark.parametrize(
    ("metric", "ratio", "better", "factor"),
    [
        ("throughput", 2.0, "b", 2.0),
        ("throughput", 0.5, "a", 2.0),
        ("latency_p99", 0.5, "b", 2.0),
        ("latency_p99", 2.0, "a", 2.0),
        ("throughput", 1.0, None, 1.0),
    ],
)
def test_the_better_arm_has_a_factor_of_at_least_one(
    metric: str, ratio: float, better: str | None, factor: float
) -> None:
    lead = advantage(compared("a", "b", ratio, "inconclusive", metric))
    assert lead is not None
    assert (lead.better, lead.factor) == (better, factor)
    assert lead.ci95 == pytest.approx((0.99 * factor, 1.01 * factor), rel=1e-3)
    assert advantage(compared("a", "b", None, "inconclusive", metric)) is None


@pytest.mark.parametrize(
    ("metric", "ratio", "verdict", "said"),
    [
        ("throughput", 0.5, "baseline_better", "A handles 2.00 times the load of B"),
        ("throughput", 2.0, "arm_better", "B handles 2.00 times the load of A"),
        ("latency_p99", 2.0, "baseline_better", "A has 2.00 times lower p99 latency than B"),
        ("latency_p99", 0.5, "arm_better", "B has 2.00 times lower p99 latency than A"),
        ("throughput", 0.98, "inconclusive", "in favour of A"),
        ("throughput", 1.00001, "no_difference", "no meaningful difference (within ±5 %) in throughput (1.00×,"),
    ],
)
def test_a_claim_has_one_direction(metric: str, ratio: float, verdict: Outcome, said: str) -> None:
    text = claim(compared("a", "b", ratio, verdict, metric), margin=0.05)
    assert said in text
    assert "0.5" not in text


def test_a_ratio_that_its_rounds_do_not_determine_says_so_instead_of_bounds() -> None:
    comparison = compared("a", "b", 0.61, "inconclusive")
    two_rounds = msgspec.structs.replace(comparison, ci95=(0.00000006, 44_507_966.9), pairs=2)
    text = claim(two_rounds)
    assert text == "inconclusive in throughput (1.64× in favour of A, not determined by 2 rounds)"


@given(
    exponent=st.floats(-12.0, 12.0),
    spread=st.floats(1.0, 1e6) | st.none(),
    verdict=st.sampled_from(ORDER),
    metric=st.sampled_from(["throughput", "latency_p99"]),
)
def test_a_ratio_of_any_size_is_a_claim(exponent: float, spread: float | None, verdict: Outcome, metric: str) -> None:
    """A thousand times better or more has a comma in its factor."""
    ratio = 10.0**exponent
    comparison = compared("a", "b", ratio, verdict, metric)
    comparison = msgspec.structs.replace(
        comparison, ci95=None if spread is None else (ratio / spread, ratio * spread), reason="why"
    )
    assert claim(comparison, margin=0.05)
    workloads = {workload.name: workload for workload in WORKLOADS}
    assert groups([comparison], workloads, 0.05, LETTERS) or verdict == "invalid"
    minor = [msgspec.structs.replace(comparison, leading=False)]
    assert isinstance(other_decided_metrics(minor, workloads, LETTERS), list)


def test_the_better_arm_is_named_from_a_thousand_times_on() -> None:
    assert "1,234× in favour of B" in claim(
        msgspec.structs.replace(compared("a", "b", 1234.5, "inconclusive"), ci95=None, reason="one round")
    )


def test_verdict_words() -> None:
    pairing = Pairing("a", "b")
    assert [verdict_words(outcome, pairing, 0.05) for outcome in ("arm_better", "baseline_better", "inconclusive")] == [
        "B faster", "A faster", "inconclusive",
    ]  # fmt: skip
    assert verdict_words("no_difference", pairing, 0.05) == "no meaningful difference (within ±5 %)"
    assert verdict_words("no_difference", pairing) == "no meaningful difference"


@pytest.mark.parametrize(("kind", "unit"), [("photographs", "images/s"), ("synthetic", "items/s")])
def test_made_up_inputs_are_not_called_images(tmp_path: Path, kind: str, unit: str) -> None:
    write_run(tmp_path, Plan(pairs=4, requests=80))
    path = tmp_path / "environment.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"inputs": {"kind": kind, "count": 16, "sha256": "0"}}))
    result = analyse(tmp_path)
    assert {comparison.unit for comparison in result.comparisons if comparison.metric == "throughput"} == {unit}
    assert f"1,000 {unit} at this load" in result.verdict.consequence
