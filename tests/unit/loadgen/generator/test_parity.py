"""How answers are compared."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.run.parity import ParityError, compare_answers, mixed_batches

REFERENCE = np.random.default_rng(0).standard_normal((6, 512))


def case(answer: np.ndarray, reference: np.ndarray = REFERENCE):
    return compare_answers("x", "reference", {"embedding": reference}, {"embedding": answer})


def test_equal_answers_agree_whatever_their_length() -> None:
    found = case(REFERENCE.copy())
    assert (found.ok, found.images, found.max_abs) == (True, 6, 0.0)
    assert found.cosine_min == pytest.approx(1.0)


def test_one_wrong_row_among_good_ones_is_found() -> None:
    answer = REFERENCE.copy()
    answer[4] = REFERENCE[3]
    found = case(answer)
    assert not found.ok
    assert found.cosine_min < 0.5


def test_the_threshold_is_0_999() -> None:
    def turned(cosine: float) -> np.ndarray:
        across = np.random.default_rng(1).standard_normal(512)
        row = REFERENCE[0]
        across -= row * (across @ row) / (row @ row)
        across *= np.linalg.norm(row) / np.linalg.norm(across)
        answer = REFERENCE.copy()
        answer[0] = cosine * row + np.sqrt(1 - cosine**2) * across
        return answer

    assert case(turned(0.9991)).ok
    assert not case(turned(0.9989)).ok


def test_zero_against_something_is_no_agreement() -> None:
    assert not case(np.zeros_like(REFERENCE)).ok
    assert case(np.zeros((2, 3)), np.zeros((2, 3))).ok


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (REFERENCE[:3], r"shape \(3, 512\) instead of \(6, 512\)"),
        (np.where(np.arange(512) == 7, np.nan, REFERENCE), "NaN or infinite"),
    ],
)
def test_what_cannot_be_compared_says_why(answer: np.ndarray, words: str) -> None:
    with pytest.raises(ParityError, match=words):
        case(answer)


def test_empty_answers_of_both_arms_are_no_agreement() -> None:
    with pytest.raises(ParityError, match="empty"):
        case(np.zeros((0, 512)), np.zeros((0, 512)))


def test_other_outputs_are_told() -> None:
    with pytest.raises(ParityError, match="outputs"):
        compare_answers("x", "alone", {"embedding": REFERENCE}, {"logits": REFERENCE})


@pytest.mark.parametrize(("items", "limit"), [(18, 32), (6, 32), (18, 4), (1, 1)])
def test_mixed_batches_stay_within_the_limits_and_never_repeat_an_image_inside(items: int, limit: int) -> None:
    batches = mixed_batches(items, limit)
    assert all(len(set(batch)) == len(batch) <= min(items, limit) for batch in batches)
    assert {item for batch in batches for item in batch} == set(range(min(items, sum(map(len, batches)))))
    if limit > 1 and items > 1:
        assert len({len(batch) for batch in batches}) > 1
