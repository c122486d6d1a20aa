"""How answers are compared."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.client.inputs import SampleInputs
from loadgen.client.outputs import AnswerError
from loadgen.measure.answers import batches_to_send, compare_answers, mixed_batches
from loadgen.records.run import ParityCase
from loadgen.stats.agreement import Tolerance, tolerance_of, tolerances_for

REFERENCE = np.random.default_rng(0).standard_normal((6, 512))
FP32, FP16 = tolerance_of(["fp32"]), tolerance_of(["fp16", "fp32"])
DATATYPES = {np.dtype("f2"): "FP16", np.dtype("f4"): "FP32", np.dtype("f8"): "FP64", np.dtype("O"): "BYTES"}


def rows(name: str, array: np.ndarray) -> list[dict[str, np.ndarray]]:
    return [{name: array[place : place + 1]} for place in range(len(array))]


def case(
    answer: np.ndarray, reference: np.ndarray = REFERENCE, tolerance: Tolerance = FP32, kind: str = "tensor"
) -> ParityCase:
    rules = tolerances_for({"y": DATATYPES.get(reference.dtype, "INT64")}, {"y": kind} if kind else {}, tolerance)
    return compare_answers("x", rows("y", reference), rows("y", answer), label="b", kind="reference", rules=rules)


def test_equal_answers_agree_whatever_their_length() -> None:
    parity_case = case(REFERENCE.copy())
    assert (parity_case.ok, parity_case.images, parity_case.max_abs) == (True, 6, 0.0)
    assert parity_case.cosine_min == pytest.approx(1.0)


def test_one_value_per_item_may_be_a_list_of_one() -> None:
    """Triton has no output without dimensions."""
    values = REFERENCE[:, 0]
    assert case(values[:, np.newaxis], values).ok
    assert case(values, values[:, np.newaxis]).ok
    assert not case(values[:, np.newaxis] + 1, values).ok


def test_one_wrong_row_among_good_ones_is_found() -> None:
    answer = REFERENCE.copy()
    answer[4] = REFERENCE[3]
    parity_case = case(answer)
    assert not parity_case.ok
    assert parity_case.cosine_min < 0.5


def rounded(error: float, seed: int = 1) -> np.ndarray:
    """Every element off by a normal deviation of that size."""
    return REFERENCE * (1 + error * np.random.default_rng(seed).standard_normal(REFERENCE.shape))


def test_the_tolerance_is_that_of_the_coarser_precision() -> None:
    assert case(rounded(1e-5)).ok
    assert not case(rounded(1.5e-3)).ok
    assert case(rounded(1.5e-3), tolerance=FP16).ok, "what FP16 differs by on a GPU"
    assert not case(rounded(2e-2), tolerance=FP16).ok
    assert case(rounded(2e-2), tolerance=tolerance_of(["bf16", "fp32"])).ok
    assert (FP32.precision, FP16.precision, tolerance_of(["tf32", "fp32"]).precision) == ("fp32", "fp16", "tf32")
    unknown = tolerance_of(["fp32", None])
    assert (unknown.precision, unknown.relative) == ("unknown", FP16.relative)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        (np.full((4, 1), 1.1), np.full((4, 1), 7.0)),
        (REFERENCE, 100 * REFERENCE),
        (REFERENCE, REFERENCE / 3),
        (np.tile(REFERENCE, 400), np.where(np.arange(512 * 400) == 7, 0.0, np.tile(REFERENCE, 400))),
    ],
    ids=["one value", "times 100", "a third", "one element of 200,000 missing"],
)
def test_what_the_cosine_does_not_see(reference: np.ndarray, answer: np.ndarray) -> None:
    parity_case = case(answer, reference, FP16)
    assert parity_case.cosine_min == pytest.approx(1.0, abs=1e-4)
    assert not parity_case.ok
    assert parity_case.output == "y"


def test_what_cancels_to_nearly_nothing_may_keep_the_rounding_of_what_cancelled() -> None:
    """A logit of 0.002 beside others of about 3: rounding turns its sign, and its cosine to −1."""
    reference = np.array([[3.0], [-2.5], [0.002], [3.5]])
    assert case(reference + np.array([[0.0], [0.0], [-0.004], [0.0]]), reference, FP16).ok
    assert not case(reference + np.array([[0.0], [0.0], [0.3], [0.0]]), reference, FP16).ok


def test_byte_strings_are_equal_or_not() -> None:
    words = np.array([[b"cat"], [b"dog"]], dtype=object)
    assert case(words.copy(), words, kind="").ok
    parity_case = case(words[::-1], words, kind="")
    assert not parity_case.ok
    assert parity_case.fault == "is b'dog' instead of b'cat'"


def test_zero_against_something_is_no_agreement() -> None:
    assert not case(np.zeros_like(REFERENCE)).ok
    assert case(np.zeros((2, 3)), np.zeros((2, 3))).ok


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (REFERENCE[:, :3], r"shape \(3,\) instead of \(512,\)"),
        (np.where(np.arange(512) == 7, np.nan, REFERENCE), "NaN or infinite"),
        (np.where(np.arange(512) == 7, np.inf, REFERENCE), "NaN or infinite"),
    ],
)
def test_what_cannot_be_compared_says_why(answer: np.ndarray, words: str) -> None:
    for kind in ("tensor", "embedding", "logits", "labels"):
        with pytest.raises(AnswerError, match=words):
            case(answer, kind=kind)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_same_nan_on_both_sides_is_no_agreement(value: float) -> None:
    both = np.where(np.arange(512) == 7, value, REFERENCE)
    with pytest.raises(AnswerError, match="NaN or infinite"):
        case(both.copy(), both)


@pytest.mark.parametrize("kind", ["tensor", "embedding", "logits", "labels", ""])
def test_empty_answers_equal_empty_ones_and_no_others(kind: str) -> None:
    """A detector that finds no boxes."""
    for shape in ((2, 0), (2, 0, 4), (2, 3, 0)):
        for dtype in ("f4", "i8", "O"):
            parity_case = case(np.empty(shape, dtype), np.empty(shape, dtype), kind=kind)
            assert (parity_case.ok, parity_case.max_abs, parity_case.cosine_min) == (True, 0.0, 1.0)
    rules = tolerances_for({"y": "FP32"}, {"y": kind}, FP32)
    empty, other = [{"y": np.empty((1, 0, 4), "f4")}], [{"y": np.ones((1, 2, 4), "f4")}]
    for kept, answered in ((empty, other), (other, empty)):
        for way in ("reference", "alone"):
            with pytest.raises(AnswerError, match="shape"):
                compare_answers("x", kept, answered, label="b", kind=way, rules=rules)


def test_other_outputs_are_told() -> None:
    with pytest.raises(AnswerError, match="outputs"):
        compare_answers("x", rows("embedding", REFERENCE), rows("logits", REFERENCE), label="b", kind="alone", rules={})


def test_an_item_that_was_padded_in_its_batch_is_compared_as_far_as_it_goes_alone() -> None:
    alone = REFERENCE.reshape(1, 6, 512)
    padded = np.concatenate([alone, np.ones((1, 2, 512))], axis=1)
    rules = tolerances_for({"y": "FP64"}, {"y": "embedding"}, FP32)
    parity_case = compare_answers("x", [{"y": alone}], [{"y": padded}], label="b", kind="alone", rules=rules)
    assert parity_case.ok
    with pytest.raises(AnswerError, match="shape"):
        compare_answers("x", [{"y": alone}], [{"y": padded}], label="b", kind="reference", rules=rules)


@pytest.mark.parametrize(("items", "limit"), [(18, 32), (6, 32), (18, 4), (1, 1)])
def test_mixed_batches_stay_within_the_limits_and_never_repeat_an_image_inside(items: int, limit: int) -> None:
    batches = mixed_batches([range(items)], limit)
    assert all(len(set(batch)) == len(batch) <= min(items, limit) for batch in batches)
    assert {item for batch in batches for item in batch} == set(range(min(items, sum(map(len, batches)))))
    if limit > 1 and items > 1:
        assert len({len(batch) for batch in batches}) > 1


def sequences(mixed: bool) -> SampleInputs:
    """Eight items of length 3, four of 5."""
    lengths = (3,) * 8 + (5,) * 4
    shapes = tuple((length,) for length in lengths)
    return SampleInputs({"x": np.zeros((12, 5), "f4")}, "token ids", "sequence", lengths, {"x": shapes}, mixed)


def test_a_batch_of_every_size_is_sent_at_every_length() -> None:
    sent = batches_to_send(sequences(mixed=True), {1, 6}, {3, 5}, range(99))
    assert list(sent)[1:] == ["one batch of 6, length 3", "one batch of 6, length 5"]
    assert set(sent["one batch of 6, length 5"][0]) == {8, 9, 10, 11}
    (mixed,) = [batches for name, batches in sent.items() if name.startswith("mixed")]
    assert any(set(batch) & set(range(8)) and set(batch) & set(range(8, 12)) for batch in mixed)


def test_items_that_cannot_share_a_request_never_do() -> None:
    for batches in batches_to_send(sequences(mixed=False), {1, 6}, (), range(99)).values():
        for batch in batches:
            assert set(batch) <= set(range(8)) or set(batch) <= set(range(8, 12))
