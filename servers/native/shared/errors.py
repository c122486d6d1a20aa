"""Why the server refuses a request, how each refusal is counted and answered, and a log for failures that may repeat.

A client that sends the same bad request again and again must not fill a disk, nor take the time of others.
"""

from __future__ import annotations

import sys
import threading
import time

import structlog

from servers.protocol.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)

NOT_RELOADED = "not reloaded: the version before is still served"
REFUSALS = ("not_ready", "queue_full", "expired", "slow_client", "shutting_down")


class RefusedError(UnavailableError):
    """The server cannot take the request now, and it is counted under `reason`, one of `REFUSALS`.

    - not_ready: the model is not loaded and warmed up yet
    - queue_full: as many requests wait as the settings allow
    - expired: the request's timeout, or the server's, passed before the engine took it
    - slow_client: a gRPC message took longer to arrive than the server waits
    - shutting_down: the server has been told to stop
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


class OverLimitError(ContractError):
    """The client's key has as many requests as it may have at a time; the message names the limit."""


class HttpError(Exception):
    """A request that is not read to its end and whose connection then ends; `str(error)` is the client's message. It is
    counted under `reason`; None: under the one that its status implies."""

    def __init__(self, status: int, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = _HTTP_REASONS.get(status, "invalid_request") if reason is None else reason


INTERNAL_ERROR = "internal error, the server's log has the cause"
HOLDS_ENOUGH = "the server's memory for requests is full, send this one again later"

_OUTCOMES: dict[type[ContractError], tuple[str, int, str]] = {
    UnavailableError: ("unavailable", 503, "UNAVAILABLE"),
    InvalidRequestError: ("invalid_request", 400, "INVALID_ARGUMENT"),
    NotFoundError: ("not_found", 404, "NOT_FOUND"),
    TooLargeError: ("too_large", 413, "INVALID_ARGUMENT"),
    UnsupportedError: ("unsupported", 501, "UNIMPLEMENTED"),
    OverLimitError: ("over_limit", 429, "RESOURCE_EXHAUSTED"),
    InternalError: ("internal", 500, "INTERNAL"),
}
"""Triton's mapping of errors, and that of a key's limit: reason, HTTP status and gRPC status."""
FAILURE_REASONS = (*REFUSALS, *(reason for reason, _, _ in _OUTCOMES.values()))
_HTTP_REASONS = {408: "slow_client", 413: "too_large"}


def expired() -> RefusedError:
    return RefusedError("expired", "Request timeout expired")


def shutting_down() -> RefusedError:
    return RefusedError("shutting_down", "the server is shutting down, send the request to another one")


def _outcome(error: ContractError) -> tuple[str, int, str]:
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), _OUTCOMES[InternalError])


def failure_reason(error: ContractError | HttpError) -> str:
    """The label under which a failed request is counted."""
    return error.reason if isinstance(error, HttpError | RefusedError) else _outcome(error)[0]


def http_status(error: ContractError | HttpError) -> int:
    """The HTTP status of a failed request."""
    return error.status if isinstance(error, HttpError) else _outcome(error)[1]


def unread(error: ContractError) -> HttpError:
    """The refusal of a request whose body is not read."""
    return HttpError(http_status(error), str(error), failure_reason(error))


def grpc_status(error: ContractError) -> str:
    """The name of a failed call's gRPC status."""
    return _outcome(error)[2]


LOGGED_EVERY_S = 10.0
MAX_KINDS = 256


class FailureLog:
    """Logs exceptions with their tracebacks, each kind at most every ten seconds; any thread. Failures are of one kind
    if the event, the exception's class and the line that raised it are the same."""

    def __init__(self, name: str) -> None:
        self._log = structlog.get_logger(name)
        self._lock = threading.Lock()
        self._kinds: dict[object, tuple[float, int]] = {}  # when it was logged last, and how many were not since

    def for_client(self, error: Exception, event: str) -> ContractError:
        """The error of a failed request for its client; one that is not a `ContractError` is logged, in its handler."""
        if isinstance(error, ContractError):
            return error
        self.exception(event)
        return InternalError(INTERNAL_ERROR)

    def exception(self, event: str, **fields: object) -> None:
        """Log the exception that is handled now, unless one of its kind was logged just before."""
        now = time.monotonic()
        kind = event, *_origin()
        with self._lock:
            logged, unlogged = self._kinds.get(kind, (-LOGGED_EVERY_S, 0))
            if now < logged + LOGGED_EVERY_S:
                self._kinds[kind] = logged, unlogged + 1
                return
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            self._kinds[kind] = now, 0
        self._log.exception(event, **fields, **({"repeated": unlogged} if unlogged else {}))


def _origin() -> tuple[object, ...]:
    error_class, _, trace = sys.exc_info()
    if trace is None:
        return (error_class,)
    while trace.tb_next is not None:
        trace = trace.tb_next
    return error_class, trace.tb_frame.f_code, trace.tb_lineno
