"""Every error of the contract has its status and its reason."""

from __future__ import annotations

import json
from copy import copy

import pytest

from servers.native.http.parser import infer_target, refusal
from servers.native.shared import errors as native
from servers.protocol import errors as contract


@pytest.mark.parametrize("kind", sorted(contract.ContractError.__subclasses__(), key=str))
def test_each_error_has_a_reason_of_its_own_and_a_status(kind):
    assert native.failure_reason(kind("x")) in native.FAILURE_REASONS
    assert (native.failure_reason(kind("x")) == "internal") == (kind is contract.InternalError)
    assert (native.http_status(kind("x")) == 500) == (kind is contract.InternalError)


@pytest.mark.parametrize("reason", native.REFUSALS)
def test_a_refusal_has_its_reason_also_as_a_copy(reason):
    for error in (native.RefusedError(reason, "later"), copy(native.RefusedError(reason, "later"))):
        assert native.failure_reason(error) == reason
        assert native.http_status(error) == 503
        assert str(error) == "later"


def test_a_message_may_hold_anything_that_a_client_sent():
    message = "bad \ud800 \x00 \r\n é"
    assert json.loads(refusal(native.HttpError(400, message)).body) == {"error": message}


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v2/models/m/infer", ("m", None)),
        ("/v2/models/m/versions/2/infer", ("m", "2")),
        ("/v2/models/m/stats", None),
        ("/v2/models/m/infer/", None),
        ("/v2/models/a/b/infer", None),
        ("", None),
    ],
)
def test_inference_paths(path, target):
    assert infer_target(path) == target
