"""The records of a run: a server's answers, the observed conditions and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

MIB = 1024 * 1024


Protocol = Literal["http", "grpc"]
"""How a case is sent."""


class CaseVerdict(StrEnum):
    """The outcome of a case. Only DEVIATES and CRASHED are failures."""

    CONFORMS = "conforms"
    DEVIATES = "deviates"
    CRASHED = "crashed"
    NOT_APPLICABLE = "not applicable"
    SKIPPED = "skipped"


class NotApplicableError(Exception):
    """The case cannot judge this server or model; the message says why."""


class SkippedError(Exception):
    """The server cannot be started, or not in the state that a case needs; the message says why."""


@dataclass(frozen=True, slots=True)
class Response:
    """The server's answer to one request. `status` is an HTTP status or the name of a gRPC code; without an answer it
    is "closed" (end of stream), "reset", "refused" or "silent" (nothing until the deadline)."""

    status: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    message: str | None = None
    """The gRPC details; over HTTP the error is read from the body."""
    elapsed_s: float = 0.0

    @property
    def received(self) -> bool:
        """Whether the server answered at all."""
        return self.status not in {"closed", "reset", "refused", "silent"}

    @property
    def succeeded(self) -> bool:
        """Whether the server did what it was asked."""
        return self.status in {"200", "OK"}


@dataclass(frozen=True, slots=True)
class Fact:
    """One condition besides the status: `ok` is None when it could not be observed."""

    name: str
    ok: bool | None
    seen: str


Seen = Iterable[Response | Fact]
"""The results of a case. Every answer must meet the case's expectation, every fact must hold."""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the report."""

    number: str
    title: str
    protocol: str
    expected: str
    got: str = ""
    verdict: CaseVerdict
    reason: str = ""
    not_observed: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the server has a fault to correct."""
        return self.verdict in (CaseVerdict.DEVIATES, CaseVerdict.CRASHED)


class ConformanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run against one server, as `--json` writes it."""

    schema: str = "abserve.conformance/2"
    created_at: str
    abserve_version: str
    server: str
    server_title: str
    """How the server was launched, or the URL of one that was already running."""
    model: str
    results: tuple[CaseResult, ...]
    stopped: str | None = None
    """Why the run ended before its last case."""

    @property
    def failed(self) -> bool:
        """Whether anything deviates or crashed, or the run could not be finished."""
        return self.stopped is not None or any(result.failed for result in self.results)

    def count(self, verdict: CaseVerdict) -> int:
        """The number of cases with this verdict."""
        return sum(result.verdict is verdict for result in self.results)
