"""Requests of different sizes share a batch, which is padded, and get their own sizes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.engines.padding import Padding, Staging, batch_key, divide, padding_of, parse_pad_to
from servers.engines.settings import EngineError
from servers.models.registry import get_specification
from servers.protocol.tensors import Array, Axis

BERT = get_specification("transformers:distilbert-base-uncased")
AXIS = Axis("length", 4, 64, {"ids": 1, "mask": 2, "hidden": 1}, {"ids": 9, "mask": 0})
PADDING = Padding(AXIS, (4, 8, 16))


def request(rows: int, length: int, value: int = 1) -> dict[str, Array]:
    """Two inputs with the axis in different places, and one without it."""
    return {
        "ids": np.full((rows, length), value, np.int64),
        "mask": np.full((rows, 2, length), value, np.int32),
        "scale": np.full((rows, 3), value, np.float32),
    }


def key(inputs: dict[str, Array], padding: Padding | None = PADDING) -> Any:
    return batch_key(((name, array.shape) for name, array in inputs.items()), padding)


@pytest.mark.parametrize(("text", "sizes"), [("", ()), ("none", ()), ("64, 32,64", (32, 64)), ("8", (8,))])
def test_the_option_is_a_list_in_any_order(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_pad_to(text) == sizes


@pytest.mark.parametrize("text", ["0", "-1", "a", "32,", "1.5", "9" * 30])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="sizes of at least 1"):
        parse_pad_to(text)


def test_sizes_that_the_model_does_not_have_are_refused() -> None:
    assert padding_of(BERT, ()) is None
    padding = padding_of(BERT, (32, 512))
    assert padding is not None
    assert padding.sizes == (32, 512)
    with pytest.raises(EngineError, match="--pad-to 513: the largest sequence of distilbert_base_uncased is 512"):
        padding_of(BERT, (32, 513))
    with pytest.raises(EngineError, match="items of torchvision_resnet50 cannot be padded"):
        padding_of(get_specification("torchvision:resnet50"), (32,))


def test_sizes_share_a_key_up_to_the_largest_listed_one() -> None:
    assert key(request(1, 3)) == key(request(2, 16))
    assert key(request(1, 17)) == key(request(2, 17))
    assert len({key(request(1, length)) for length in (16, 17, 18)}) == 3
    assert key(request(1, 3)) != key({**request(1, 3), "scale": np.zeros((1, 4))})
    assert key(request(1, 3), None) != key(request(1, 4), None)


def test_a_batch_is_padded_to_the_listed_size_with_the_models_values() -> None:
    merged = Staging().gather([request(2, 3), request(1, 5, value=2)], PADDING)
    assert merged["ids"].tolist() == [[1] * 3 + [9] * 5] * 2 + [[2] * 5 + [9] * 3]
    assert merged["mask"].tolist() == [[[1] * 3 + [0] * 5] * 2] * 2 + [[[2] * 5 + [0] * 3] * 2]
    assert merged["scale"].tolist() == [[1] * 3] * 2 + [[2] * 3]
    assert all(array.flags.c_contiguous for array in merged.values())


def test_one_request_is_copied_only_to_be_padded() -> None:
    staging = Staging()
    for length in (8, 17):  # a listed size, and one beyond them
        whole = request(2, length)
        assert staging.gather([whole], PADDING) is whole
    assert staging.gather([request(2, 7)], PADDING)["ids"].tolist() == [[1] * 7 + [9]] * 2


def test_equal_requests_beyond_the_listed_sizes_are_not_padded() -> None:
    merged = Staging().gather([request(1, 33), request(1, 33)], PADDING)
    assert (merged["ids"] == 1).all()
    assert merged["ids"].shape == (2, 33)


def test_elements_of_any_length_are_padded_with_empty_ones() -> None:
    words = np.array([[b"a", b"b"]], object)
    padding = Padding(Axis("words", 2, 8, {"text": 1}, {"text": 0}), (4,))
    assert Staging().gather([{"text": words}], padding)["text"].tolist() == [[b"a", b"b", b"", b""]]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20)), min_size=1, max_size=6))
def test_what_goes_in_comes_out_for_each_request(wanted: list[tuple[int, int]]) -> None:
    requests = [request(rows, length, value=index) for index, (rows, length) in enumerate(wanted)]
    same = [one for one in requests if key(one) == key(requests[0])]
    merged = Staging().gather(same, PADDING)
    outputs = {"hidden": np.repeat(merged["ids"][:, :, None], 2, axis=2), "pooled": merged["scale"]}
    answers = divide(outputs, [len(one["ids"]) for one in same], [one["ids"].shape[1] for one in same], PADDING)
    for one, answer in zip(same, answers, strict=True):
        np.testing.assert_array_equal(answer["hidden"], np.repeat(one["ids"][:, :, None], 2, axis=2))
        np.testing.assert_array_equal(answer["pooled"], one["scale"])


def test_another_number_of_rows_than_asked_for_is_an_error() -> None:
    with pytest.raises(ValueError, match="batch of 3"):
        divide({"y": np.zeros((2, 1))}, [1, 2])
