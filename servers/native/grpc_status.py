"""The one table from an error to a gRPC status: Triton's mapping, as the HTTP door holds the one to HTTP."""

from __future__ import annotations

import grpc

from servers.contract.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.native.errors import CallDeadlineError

MAX_DETAILS = 1000
"""Characters: a client takes 8 KiB of trailers, in which one character may need twelve bytes."""

_STATUS: tuple[tuple[type[ContractError], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (TooLargeError, grpc.StatusCode.INVALID_ARGUMENT),
    (CallDeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    (InternalError, grpc.StatusCode.INTERNAL),
)


def status_of(error: ContractError) -> grpc.StatusCode:
    """The status that a client gets."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def details_of(error: ContractError) -> str:
    """The sentence that a client gets, never too long to arrive."""
    message = str(error)
    return message if len(message) <= MAX_DETAILS else message[: MAX_DETAILS - 1] + "…"
