"""Servers of streamed tokens whose answers are wrong, the real load generator between them: each loses its verdict.

Several faults share a comparison, each in an arm of its own beside the sound baseline A. Nothing here is about time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.measure import load_runner
from loadgen.verdict.result import Result
from tests.truth.streams import compare_streams, failed, users, value


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Truths about answers: each of these arms must lose its verdict."""
    quick = "--first-ms 5 --step-ms 1 --good-first 120"
    arms = (
        quick,
        f"{quick} --stop-share 0.05 --stop-at 20",  # b
        f"{quick} --other-from 6",  # c: another seed's weights from 6 requests on
        f"{quick} --swap-every 2",  # d: one token of another answer now and then
        f"{quick} --error-every 9 --error-after 3",  # e: error events at status 200
        f"{quick} --cut-every 11",  # f
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_runner, "WARM_UP_SECONDS", 0.0)  # the first faults come with the load
        return compare_streams(tmp_path_factory.mktemp("wrong") / "run", arms, users(8, 64, 2))


def test_answers_that_end_early_are_found(wrong: Result) -> None:
    detail = failed(wrong, "answer_lengths").detail
    assert f" of {wrong.names['b']}" in detail
    assert f"of {wrong.names['a']}" not in detail


def test_other_weights_under_load_and_a_swapped_token_are_found(wrong: Result) -> None:
    """The probe before the load, with one prompt at a time, could not see them."""
    detail = failed(wrong, "tokens_agree").detail
    assert f"answers of {wrong.names['c']} have wrong tokens" in detail
    assert f"answers of {wrong.names['d']} have wrong tokens" in detail
    assert "9.8" in detail
    assert f"answers of {wrong.names['a']}" not in detail


def test_error_events_and_cut_streams_fail_and_are_no_tokens(wrong: Result) -> None:
    errors = {s.label: s.errors / s.requests for s in wrong.summaries}
    assert errors["a"] == errors["c"] == 0.0
    assert errors["e"] == pytest.approx(1 / 9, abs=0.03)
    assert errors["f"] == pytest.approx(1 / 11, abs=0.03)
    assert failed(wrong, "request_errors")
    # Three of four tokens of a failed answer had come: they count nowhere.
    for arm in "ae":
        tokens = value(wrong, "output_tokens_per_s", arm) / value(wrong, "throughput", arm)
        assert tokens == pytest.approx(32, rel=0.01), arm
    assert failed(wrong, "finish_reasons")


def test_none_of_these_has_a_verdict(wrong: Result) -> None:
    assert not wrong.valid
    assert {made.verdict for made in wrong.comparisons} == {"invalid"}


def test_an_arm_that_counts_more_than_it_sends_gets_no_load(tmp_path: Path) -> None:
    """Half of the tokens with the usage of all: the probe sees it."""
    quick = "--first-ms 5 --step-ms 1"
    result = compare_streams(tmp_path / "run", (quick, f"{quick} --usage-share 0.5"), users(4, 12, 2))
    assert not result.valid
    assert result.blocks == ()
