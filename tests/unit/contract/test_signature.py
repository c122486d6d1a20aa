"""A request is checked against the model before anything is queued."""

from __future__ import annotations

import numpy as np
import pytest

from servers.contract.errors import InvalidRequestError
from servers.contract.records import InferRequest, InputTensor, ModelSignature, RequestedOutput
from servers.contract.tensors import TensorSpec

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
