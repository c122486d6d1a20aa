"""Why the server turns a request away, beyond what the contract knows.

    ContractError
    ├── UnavailableError
    │   ├── NotReadyError        loading, or failed
    │   ├── QueueFullError       the bounded queue is full
    │   ├── RequestExpiredError  its timeout passed while it was queued
    │   │   └── CallDeadlineError    its gRPC call's own deadline did
    │   ├── SlowClientError      its gRPC message did not arrive in time
    │   └── ShuttingDownError    accepted work is being finished, new work is not taken
    └── ClientGoneError          nobody is left to answer; never sent, counted on its own

`failure_reason` names each for the metrics; each front end maps the contract's types to its own status.
"""

from __future__ import annotations

from servers.contract.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)


class NotReadyError(UnavailableError):
    """The model is not loaded and warmed up yet."""


class QueueFullError(UnavailableError):
    """As many requests wait already as the settings allow."""


class RequestExpiredError(UnavailableError):
    """The request's own timeout, or the server's, ended before the engine could take it."""


class CallDeadlineError(RequestExpiredError):
    """The deadline that the caller set for its call ended before the engine could take it."""


class SlowClientError(UnavailableError):
    """A gRPC message took longer to arrive than the server waits."""


class ShuttingDownError(UnavailableError):
    """The server has been told to stop."""


class ClientGoneError(ContractError):
    """The client closed its connection before the answer."""


INTERNAL_ERROR = "internal error, the server's log has it"
EXPIRED = "Request timeout expired"
SHUTTING_DOWN = "the server is shutting down, send the request to another one"

_REASONS: tuple[tuple[type[ContractError], str], ...] = (
    (NotReadyError, "not_ready"),
    (QueueFullError, "queue_full"),
    (RequestExpiredError, "expired"),
    (SlowClientError, "slow_client"),
    (ShuttingDownError, "shutting_down"),
    (UnavailableError, "unavailable"),
    (InvalidRequestError, "invalid_request"),
    (NotFoundError, "not_found"),
    (TooLargeError, "too_large"),
    (UnsupportedError, "unsupported"),
    (InternalError, "internal"),
)
FAILURE_REASONS = tuple(reason for _, reason in _REASONS)


def failure_reason(error: ContractError) -> str:
    """The label under which a failed request is counted."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "internal")
