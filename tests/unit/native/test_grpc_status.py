"""Every error has a status of its own choosing, and its sentence always fits into the trailers."""

from __future__ import annotations

import grpc
import pytest

from servers.contract import errors
from servers.native.errors import QueueFullError
from servers.native.grpc_server import details_of, status_of


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidRequestError, "INVALID_ARGUMENT"),
        (errors.NotFoundError, "NOT_FOUND"),
        (errors.TooLargeError, "INVALID_ARGUMENT"),
        (errors.UnavailableError, "UNAVAILABLE"),
        (QueueFullError, "UNAVAILABLE"),
        (errors.UnsupportedError, "UNIMPLEMENTED"),
        (errors.InternalError, "INTERNAL"),
        (errors.ContractError, "INTERNAL"),
    ],
)
def test_triton_s_mapping(kind, status):
    assert status_of(kind("x")) is grpc.StatusCode[status]


def test_every_direct_kind_of_error_is_in_the_table():
    """A kind that is forgotten would be answered as the server's own fault."""
    own_fault = {
        kind for kind in errors.ContractError.__subclasses__() if status_of(kind("x")) is grpc.StatusCode.INTERNAL
    }
    assert {kind.__name__ for kind in own_fault} == {"InternalError"}


def test_long_sentences_are_cut():
    assert details_of(errors.InvalidRequestError("short")) == "short"
    assert len(details_of(errors.InvalidRequestError("é" * 5000))) == 1000
