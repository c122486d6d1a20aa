"""What counts as the model's answer, by the kind of output."""

from __future__ import annotations

import numpy as np
import pytest

from servers.engines.agreement import LOSSY, TOLERANCE, Disagreement, disagreement
from servers.models.specification import ModelSpecification, OutputKind
from servers.protocol.tensors import TensorSpec


def specification(kind: OutputKind, datatype: str = "FP32", width: int = 64) -> ModelSpecification:
    def load(_source: object) -> object:
        raise NotImplementedError

    return ModelSpecification(
        name="m",
        title="m",
        version="1",
        inputs=(TensorSpec("x", "FP32", (-1, 4)),),
        outputs=(TensorSpec("y", datatype, (-1, width)),),
        max_batch_size=4,
        load_module=load,  # type: ignore[arg-type]
        kinds={"y": kind},
    )


def answers(rows: int = 6, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)


def compared(kind: OutputKind, want: np.ndarray, got: np.ndarray, precision: str = "fp32") -> Disagreement:
    datatype = {"float32": "FP32", "int64": "INT64", "bool": "BOOL"}[want.dtype.name]
    return disagreement(specification(kind, datatype, want.shape[-1]), {"y": want}, {"y": got}, precision)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("kind", ["embedding", "logits", "tensor"])
def test_rounding_of_the_precision_agrees(kind: OutputKind, precision: str) -> None:
    want = answers()
    noise = np.random.default_rng(1).standard_normal(want.shape) * TOLERANCE[precision] / 10
    found = compared(kind, want, (want * (1 + noise)).astype(np.float32), precision)
    assert found.fault is None
    assert 0 < found.outputs["y"].relative_error < TOLERANCE[precision]  # type: ignore[operator]
    assert found.cosine_min is not None
    assert found.cosine_min > 1 - (TOLERANCE[precision] / 10) ** 2


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("kind", ["embedding", "logits", "tensor"])
@pytest.mark.parametrize("spoilt", ["scaled", "one value", "zeros", "swapped", "nan", "infinite", "shape", "dtype"])
def test_a_wrong_answer_is_a_fault(kind: OutputKind, precision: str, spoilt: str) -> None:
    want = answers()
    got = want.copy()
    if spoilt == "scaled":
        got *= 100
    elif spoilt == "one value":
        got[3, 5] = want[3].max() * 1.5
    elif spoilt == "zeros":
        got[2] = 0
    elif spoilt == "swapped":
        want = (1 + want * 1e-3).astype(np.float32)  # all answers lie within the tolerance of FP16
        got = want[[0, 2, 1, 3, 4, 5]]
    elif spoilt == "nan":
        got[5, 0] = np.nan
    elif spoilt == "infinite":
        got[5, 0] = np.inf
    elif spoilt == "shape":
        got = got[:, :-1]
    else:
        got = got.astype(np.float64)
    assert compared(kind, want, got, precision).fault is not None


def test_one_number_per_row_is_compared_by_its_size() -> None:
    """A cosine between single numbers is 1 whatever they are."""
    want = np.array([[1.1], [1e-6], [0.9]], np.float32)
    assert compared("tensor", want, want + np.float32(1e-5)).fault is None
    for kind in ("embedding", "logits", "tensor"):
        assert compared(kind, want, np.array([[7.0], [0], [0.9]], np.float32)).fault is not None


def test_zeros_agree_with_zeros_only() -> None:
    want = np.zeros((2, 4), np.float32)
    assert compared("embedding", want, want.copy()).fault is None
    assert compared("tensor", want, want + np.float32(1e-9)).fault is not None


def test_integers_booleans_and_labels_are_equal() -> None:
    want = np.arange(6, dtype=np.int64).reshape(3, 2)
    assert compared("tensor", want, want.copy()).fault is None
    assert "1 of 6" in str(compared("tensor", want, np.where(want == 5, 6, want)).fault)
    assert compared("labels", want, want + 1).outputs["y"].max_abs == 1
    assert compared("tensor", want > 2, want > 3).fault is not None
    scores = answers()
    assert compared("labels", scores, scores * np.float32(1.00001)).fault is not None


def test_the_highest_class_counts_where_its_lead_is_clear() -> None:
    want = np.array([[0, 1, 9], [5, 4.9999, 0]], np.float32)  # the second row is undecided in FP16
    got = np.array([[0, 1, 9], [4.9999, 5, 0]], np.float32)
    found = compared("logits", want, got, "fp16")
    assert (found.fault, found.outputs["y"].top1) == (None, 1)
    undecided = compared("logits", want[1:], got[1:], "fp16")
    assert undecided.outputs["y"].top1 is None


@pytest.mark.parametrize("precision", LOSSY)
def test_the_loss_of_a_lossy_precision_is_shown_and_only_garbage_is_a_fault(precision: str) -> None:
    want = answers()
    lossy = (want + 0.2 * np.random.default_rng(1).standard_normal(want.shape)).astype(np.float32)
    found = compared("logits", want, lossy, precision)
    assert found.fault is None
    assert found.top1 == np.mean(want.argmax(1) == lossy.argmax(1)) < 1  # every row counts
    assert compared("logits", want, lossy, "bf16").fault is not None
    for kind in ("embedding", "logits", "tensor"):
        assert compared(kind, want, answers()[::-1].copy(), precision).fault is not None
        assert compared(kind, want, np.zeros_like(want), precision).fault is not None
    labels = np.arange(10, dtype=np.int64).reshape(5, 2)
    few, many = labels.copy(), labels + 1
    few[0, 0] = 7
    assert (compared("labels", labels, few, precision).fault, compared("labels", labels, few, precision).top1) == (
        None,
        0.9,
    )
    assert "10 of 10" in str(compared("labels", labels, many, precision).fault)
    assert "1 of 10" in str(compared("labels", labels, few, "bf16").fault)


def test_a_missing_output_and_an_unknown_expectation_are_faults() -> None:
    want = answers()
    assert disagreement(specification("tensor"), {"y": want}, {}, "fp32").fault == "y is missing"
    broken = want.copy()
    broken[0, 0] = np.nan
    assert "should contain NaN" in str(compared("tensor", broken, want).fault)
