"""A request is checked against the model before anything is queued."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from servers.protocol.errors import InvalidRequestError
from servers.protocol.records import InferRequest, InputTensor, ModelSignature, RequestedOutput
from servers.protocol.tensors import Axis, TensorSpec

SIGNATURE = ModelSignature(
    "m",
    "1",
    (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "INT32", (-1, -1))),
    (TensorSpec("y", "FP32", (-1, 2)),),
    max_batch_size=4,
)


def tensor(name: str, datatype: str, *shape: int) -> InputTensor:
    return InputTensor(name, datatype, shape, np.zeros(shape, np.float32 if datatype == "FP32" else np.int32))


GOOD = (tensor("a", "FP32", 3, 2), tensor("b", "INT32", 3, 7))


AXIS = Axis("length", 4, 6, {"ids": 1, "mask": 2, "y": 1})
OF_IDS = ModelSignature(
    "m",
    "1",
    (TensorSpec("ids", "INT32", (-1, -1)), TensorSpec("mask", "INT32", (-1, 2, -1))),
    (TensorSpec("y", "FP32", (-1, -1)),),
    max_batch_size=4,
    axes=(AXIS,),
    id_counts={"ids": 10},
)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ((1, 7), (1, 2, 7), "the length size of model 'm' is at most 6, got 7"),
        ((1, 3), (1, 2, 4), "inputs of model 'm' differ in their length size: 'ids' 3, 'mask' 4"),
    ],
)
def test_sizes_beyond_a_models_axis_are_refused(ids: tuple[int, ...], mask: tuple[int, ...], message: str) -> None:
    request = InferRequest("", (tensor("ids", "INT32", *ids), tensor("mask", "INT32", *mask)))
    with pytest.raises(InvalidRequestError, match=message):
        OF_IDS.validate(request)
    OF_IDS.validate(InferRequest("", (tensor("ids", "INT32", 1, 6), tensor("mask", "INT32", 1, 2, 6))))


def test_a_size_of_0_is_for_the_model_to_judge_unless_all_of_it_would_be_padding() -> None:
    """Triton takes it wherever a dimension varies."""
    request = InferRequest("", (tensor("ids", "INT32", 1, 0), tensor("mask", "INT32", 1, 2, 0)))
    assert OF_IDS.validate(request)[1]["ids"].shape == (1, 0)
    SIGNATURE.validate(InferRequest("", (GOOD[0], tensor("b", "INT32", 3, 0))))
    padded = dataclasses.replace(OF_IDS, axes=(dataclasses.replace(AXIS, padding={"ids": 0, "mask": 0}),))
    with pytest.raises(InvalidRequestError, match=r"input 'ids' of model 'm' has no elements: \[1,0\]"):
        padded.validate(request)


def test_an_empty_input_is_one_of_a_model_that_takes_no_values_there() -> None:
    signature = ModelSignature("m", "1", (TensorSpec("x", "INT32", (-1, 2, 0)),), OF_IDS.outputs, max_batch_size=4)
    rows, arrays = signature.validate(InferRequest("", (tensor("x", "INT32", 3, 2, 0),)))
    assert (rows, arrays["x"].shape) == (3, (3, 2, 0))


@pytest.mark.parametrize("wrong", [-1, 10])
def test_an_id_that_the_model_does_not_know_is_refused(wrong: int) -> None:
    OF_IDS.check_values({"ids": np.array([[0, 9]])})
    with pytest.raises(InvalidRequestError, match=f"input 'ids' of model 'm' holds {wrong}, its ids are 0 to 9"):
        OF_IDS.check_values({"ids": np.array([[0, wrong, 3]])})


def test_a_model_of_a_datatype_that_the_protocol_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor x: BF16 is not one of BOOL, .*, FP64, BYTES"):
        TensorSpec("x", "BF16", (-1, 2))


def test_a_good_request_gives_its_rows_and_arrays() -> None:
    rows, arrays = SIGNATURE.validate(InferRequest("", GOOD, (RequestedOutput("y", True),)))
    assert rows == 3
    assert arrays["b"] is GOOD[1].data


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((GOOD[0],), r"expected 2 inputs but got 1 inputs .* missing 'b'"),
        ((), "expected 2 inputs but got 0"),
        ((*GOOD, tensor("c", "FP32", 3, 2)), "unexpected inference input 'c'"),
        ((GOOD[0], GOOD[0]), "more than once"),
        ((tensor("a", "INT32", 3, 2),), "'INT32', but model 'm' expects 'FP32'"),
        ((tensor("a", "FP32", 3, 5),), r"expected \[-1,2\], got \[3,5\]"),
        ((tensor("a", "FP32", 3, 2, 1),), r"expected \[-1,2\], got \[3,2,1\]"),
        ((tensor("a", "FP32"),), r"got \[\]"),
        ((tensor("a", "FP32", 0, 2),), "between 1 and 4 for 'm', got 0"),
        ((tensor("a", "FP32", 5, 2),), "between 1 and 4 for 'm', got 5"),
        ((GOOD[0], tensor("b", "INT32", 2, 7)), "different batch sizes, 3 and 2"),
    ],
)
def test_each_contradiction_is_named(inputs: tuple[InputTensor, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SIGNATURE.validate(InferRequest("", inputs))


def test_outputs_are_checked() -> None:
    with pytest.raises(InvalidRequestError, match=r"unexpected inference output 'z' .* expected 'y'"):
        SIGNATURE.validate(InferRequest("", GOOD, (RequestedOutput("z", True),)))
    with pytest.raises(InvalidRequestError, match="more than once"):
        SIGNATURE.validate(InferRequest("", GOOD, (RequestedOutput("y", True),) * 2))
