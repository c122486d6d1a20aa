"""How answers are compared by the kind of the output."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.stats.agreement import agree, all_alike, tolerance_for, tolerance_of, tolerances_for

RANDOM = np.random.default_rng(7)
LOGITS = RANDOM.standard_normal((8, 1000)).astype("f4")
FP32, FP16 = tolerance_of(["fp32"]), tolerance_of(["fp16"])


def rounded(array: np.ndarray, error: float) -> np.ndarray:
    return (array + error * RANDOM.standard_normal(array.shape)).astype(array.dtype)


@pytest.mark.parametrize("kind", ["embedding", "logits", "tensor"])
def test_rounding_agrees_and_a_wrong_size_does_not(kind: str) -> None:
    rule = tolerance_for(kind, "FP32", FP16)
    assert agree(LOGITS, rounded(LOGITS, 1.5e-3), rule).fault is None
    for wrong in (100 * LOGITS, LOGITS / 3, -LOGITS, np.zeros_like(LOGITS)):
        assert "relative error" in str(agree(LOGITS, wrong, rule).fault)
    near_one, seven = np.full((4, 1), 1.1, "f4"), np.full((4, 1), 7.0, "f4")
    assert agree(near_one, seven, rule).fault is not None


@pytest.mark.parametrize("kind", ["embedding", "logits", "tensor"])
@pytest.mark.parametrize(("times", "agrees"), [(6.0, True), (12.0, False)])
def test_one_element_of_many_may_differ_by_eight_times_as_much_as_its_vector(
    kind: str, times: float, agrees: bool
) -> None:
    rule, other = tolerance_for(kind, "FP32", FP16), LOGITS.copy()
    middle = np.argsort(LOGITS[3])[500]  # neither large nor among the highest
    other[3, middle] += times * rule.relative
    agreement = agree(LOGITS, other, rule)
    assert agreement.relative < rule.relative
    assert (agreement.fault is None) == agrees


def test_another_top_class_is_wrong_only_beyond_what_rounding_explains() -> None:
    rule = tolerance_for("logits", "FP32", FP16)
    near = np.tile(np.linspace(0.0, 1.0, 10, dtype="f4"), (4, 1))
    near[:, 8] = near[:, 9] - 0.002
    swapped = near.copy()
    swapped[0, 8] += 0.004
    agreement = agree(near, swapped, rule)
    assert (agreement.fault, agreement.top1, agreement.top5) == (None, 0.75, 1.0)
    far, other = LOGITS.copy(), LOGITS.copy()
    far[0, 3:5], other[0, 3:5] = (10.0, 9.7), (9.84, 9.86)
    agreement = agree(far, other, rule)
    assert agreement.relative < FP16.relative, "in the length of the vector it is hardly seen"
    assert agreement.top1 == 7 / 8
    assert "class 4 in the top 1, which the reference puts 0.3 below it; rounding explains 0.16" in str(agreement.fault)


def test_the_top_five_are_compared_where_there_are_more_classes() -> None:
    rule = tolerance_for("logits", "FP32", FP16)
    six = np.array([[6.0, 5.0, 4.0, 3.0, 2.0, 1.9995]], "f4")
    other = six.copy()
    other[0, 4:] = 1.9995, 2.0
    agreement = agree(six, other, rule)
    assert (agreement.fault, agreement.top1, agreement.top5) == (None, 1.0, 0.0)
    assert agree(six[:, :5], six[:, :5], rule).top5 is None
    assert agree(six[:, :1], six[:, :1], rule).top1 is None


def test_a_short_embedding_keeps_its_direction() -> None:
    """Its error is small beside the others and as long as itself."""
    vectors = RANDOM.standard_normal((16, 64)).astype("f4")
    vectors[3] *= 0.002
    turned = vectors.copy()
    turned[3] = -vectors[3]
    assert agree(vectors, turned, tolerance_for("tensor", "FP32", FP16)).relative < 0.01
    assert "cosine of -1.0" in str(agree(vectors, turned, tolerance_for("embedding", "FP32", FP16)).fault)


def test_each_vector_of_a_sequence_counts_by_itself() -> None:
    tokens = RANDOM.standard_normal((1, 2000, 32)).astype("f4")
    one_token = tokens.copy()
    one_token[0, 77] *= 1.02
    assert agree(tokens, one_token, tolerance_for("tensor", "FP32", FP16)).fault is None
    assert agree(tokens, one_token, tolerance_for("embedding", "FP32", FP16)).fault is not None


def test_labels_integers_and_texts_are_equal_or_wrong() -> None:
    labels = np.array([[3], [5]])
    for kind, datatype in (("labels", "INT64"), (None, "INT64"), ("tensor", "BOOL"), ("labels", "FP32")):
        assert tolerance_for(kind, datatype, FP16).kind == "labels"
    agreement = agree(labels, labels + 1, tolerance_for(None, "INT64", FP16))
    assert (agreement.fault, agreement.absolute) == ("is 4 instead of 3", 1.0)
    assert agree(labels, labels.copy(), tolerance_for(None, "INT64", FP16)).fault is None
    assert tolerance_for("logits", "BYTES", FP16).kind == "labels"
    assert tolerance_for("embedding", "INT8", FP16).kind == "embedding"


def test_an_output_of_fewer_bits_may_be_rounded_once_more_on_each_side() -> None:
    rules = tolerances_for({"a": "FP32", "b": "FP16", "c": "BF16", "d": "INT32"}, {"a": "logits", "e": "labels"}, FP32)
    assert {name: rule.kind for name, rule in rules.items()} == {
        "a": "logits", "b": "tensor", "c": "tensor", "d": "labels",
    }  # fmt: skip
    values = RANDOM.standard_normal((4, 100)).astype("f4")
    halves = values.astype("f2").astype("f4")
    assert agree(values, halves, rules["b"]).fault is None
    assert agree(values, halves, rules["a"]).fault is not None
    assert rules["c"].relative == pytest.approx(1e-4 + 2 * 2.0**-8)


@pytest.mark.parametrize("kind", ["embedding", "logits", "labels", "tensor"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_agrees(kind: str, value: float) -> None:
    broken = np.where(np.arange(1000) == 3, value, LOGITS)
    for expected, actual in ((LOGITS, broken), (broken, LOGITS), (broken, broken.copy())):
        assert agree(expected, actual, tolerance_for(kind, "FP32", FP16)).fault == "holds NaN or infinite values"


def test_answers_that_are_alike() -> None:
    assert all_alike([np.zeros((1, 4)), np.zeros((1, 6))])
    assert not all_alike([np.zeros((1, 4)), np.ones((1, 4))])
    assert not all_alike([np.zeros((1, 4))]), "one answer says nothing"
