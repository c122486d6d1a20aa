"""The headline: at most 25 words whatever the run, who leads by how much, and what does not fit is left out last."""

from __future__ import annotations

import msgspec
import pytest

from loadgen.records.run import Label
from loadgen.verdict.headline import MOST_WORDS, headline, word_count
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import SimulatedArm, write_run
from tests.golden.test_golden_reports import PLANS

NAMES = {"a": "native torch fp32", "b": "Triton 2.51, python backend"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return {name: analyse(write_run(tmp_path_factory.mktemp(name), plan)) for name, plan in PLANS.items()}


def made(result: Result, cause: str = "", names: dict[Label, str] | None = None) -> str:
    return headline(
        result.experiment, names or result.titles, result.comparisons, result.verdict.rankings, result.checks, cause
    )


@pytest.mark.parametrize("name", PLANS)
def test_it_has_at_most_25_words_and_the_result_holds_it(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert 0 < word_count(result.headline) <= MOST_WORDS == 25
    assert result.headline.endswith(".")


def test_it_says_who_leads_by_how_much_and_where_the_other_does(results: dict[str, Result]) -> None:
    assert results["decided"].headline == (
        "B (Triton) serves 1.47× the images/s of A (native) at concurrency 16 (95 % interval 1.35–1.60); "
        "B leads in 7 of 8 workloads, A in 1."
    )
    assert results["identical"].headline.startswith("No winner between A (native) and B (Triton): no meaningful")


def test_a_run_that_is_not_valid_says_so_before_it_names_a_leader(results: dict[str, Result]) -> None:
    assert results["killed"].headline.startswith("No verdict on 1 of 8 workloads; otherwise B (Triton) serves")
    assert results["no-parity"].headline.startswith("No verdict: ")
    assert "serves" not in results["no-parity"].headline


@pytest.mark.parametrize(
    ("cause", "kept"),
    [
        (", of which 5.1× is B's queue delay", ", of which 5.1× is B's queue delay"),
        (", with different precision (A FP32, B FP16)", ", with different precision"),
        (", with " + " and ".join(["different precision (A FP32, B FP16)"] * 5), ""),
    ],
)
def test_what_explains_the_lead_comes_before_what_other_workloads_show(
    results: dict[str, Result], cause: str, kept: str
) -> None:
    text = made(results["decided"], cause)
    assert word_count(text) <= MOST_WORDS
    assert kept in text
    assert text.startswith("B")
    assert "1.35–1.60" in text, "the interval stays"
    assert "; A leads elsewhere" in text or "A in 1" in text, "and so does the workload that the other arm wins"


def test_arms_of_the_same_kind_and_long_addresses_are_named_by_their_letters(results: dict[str, Result]) -> None:
    same = made(results["decided"], names={"a": "native torch", "b": "native onnxruntime"})
    assert same.startswith("B serves 1.47× the images/s of A at concurrency 16")
    addresses = made(
        results["decided"], names={"a": "http://127.0.0.1:8000", "b": "https://models.example:443/xxxxxxxxxxxxxxxxxxxx"}
    )
    assert addresses.startswith("B serves")
    short = made(results["decided"], names={"a": "http://127.0.0.1:8000", "b": "http://127.0.0.1:9000"})
    assert short.startswith("B (127.0.0.1:9000) serves 1.47× the images/s of A (127.0.0.1:8000)")


def test_of_several_arms_it_names_the_best_and_the_next_that_it_beats(results: dict[str, Result]) -> None:
    text = results["four-arms"].headline
    assert text.startswith("B and C lead at concurrency 16, not separated: B serves 1.46× the images/s of A")


def test_a_detail_that_is_too_long_is_not_the_headline(results: dict[str, Result]) -> None:
    result = results["no-parity"]
    long = tuple(
        msgspec.structs.replace(check, detail="word " * 60, title="title " * 60) if check.ok is not True else check
        for check in result.checks
    )
    text = made(msgspec.structs.replace(result, checks=long))
    assert text == "No verdict."


def test_no_winner_counts_what_is_equal_and_what_is_open(results: dict[str, Result]) -> None:
    assert made(results["identical"]).endswith("in 3 of 8 workloads, inconclusive in 5.")
    assert SimulatedArm() == PLANS["identical"].a == PLANS["identical"].b


def test_what_is_decided_about_the_load_served_comes_before_a_leading_metric_without_a_winner(
    results: dict[str, Result],
) -> None:
    """Tokens per second were decided where TPOT leads, and the headline began with "No winner"."""
    result = results["identical"]
    decided = tuple(
        msgspec.structs.replace(c, metric="latency_p50", leading=True)
        if c.leading
        else msgspec.structs.replace(c, metric="throughput", higher_is_better=True, unit="images/s", ratio=1.06,
                                     ci95=(1.04, 1.08), verdict="arm_better")
        if (c.workload, c.metric) == ("concurrent(16)", "latency_p50")
        else c
        for c in result.comparisons
    )  # fmt: skip
    text = made(msgspec.structs.replace(result, comparisons=decided), names={"a": "native", "b": "triton"})
    assert text.startswith("B (triton) serves 1.06× the images/s of A (native) at concurrency 16")
    against = tuple(
        msgspec.structs.replace(c, verdict="baseline_better", ratio=0.5, ci95=(0.4, 0.6), metric="throughput")
        if (c.workload, c.metric) == ("single", "latency_p90")
        else c
        for c in decided
    )
    assert made(msgspec.structs.replace(result, comparisons=against)).startswith("No winner")
