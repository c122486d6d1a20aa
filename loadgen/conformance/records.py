"""What is expected of a server, what it answered, and what was concluded, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

MIB = 1024 * 1024


class Door(StrEnum):
    """Through which protocol a case is sent."""

    HTTP = "http"
    GRPC = "grpc"


class Verdict(StrEnum):
    """What became of a case. Only DEVIATES and CRASHED are failures."""

    CONFORMS = "conforms"
    DEVIATES = "deviates"
    CRASHED = "crashed"
    NOT_APPLICABLE = "not applicable"
    SKIPPED = "skipped"


class NotApplicableError(Exception):
    """The case says nothing about this server or model; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `status` is an HTTP status or a gRPC code's name; without an answer it says what came instead:
    "closed" (end of stream), "reset", "refused" or "silent" (nothing until the deadline)."""

    status: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    message: str | None = None
    """The gRPC details; over HTTP the error is read from the body."""
    elapsed_s: float = 0.0

    @property
    def came(self) -> bool:
        """Whether the server answered at all."""
        return self.status not in {"closed", "reset", "refused", "silent"}


@dataclass(frozen=True, slots=True)
class Fact:
    """One condition that is not a status: `ok` is None when it could not be observed."""

    name: str
    ok: bool | None
    seen: str


@dataclass(frozen=True, slots=True)
class Observation:
    """All that a case's probe saw. Every answer must meet the case's expectation, every fact must hold."""

    answers: tuple[Answer, ...] = ()
    facts: tuple[Fact, ...] = ()


class ErrorBody(StrEnum):
    """How strictly the body of a refusal is read."""

    PROTOCOL = "protocol"
    """`{"error": "<one sentence>"}` over HTTP, a sentence in the details over gRPC."""
    FRAMEWORK = "framework"
    """The answer is the RPC framework's own, before any server code runs: its words are not judged."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What each answer of a case must be."""

    statuses: tuple[str, ...] = ()
    mentions: tuple[tuple[str, ...], ...] = ()
    """Of each group at least one word must be in the error's sentence, upper and lower case alike."""
    numbers: int = 0
    """How many different numbers the sentence must hold, such as the bytes expected and the bytes that came."""
    headers: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    """What must not come back, besides paths and tracebacks, which never may."""
    error_body: ErrorBody = ErrorBody.PROTOCOL
    note: str = ""
    """For people: what is expected beyond the statuses."""

    def describe(self) -> str:
        """One line for the table."""
        parts = [" or ".join(self.statuses)] if self.statuses else []
        if self.mentions:
            parts.append("naming " + ", ".join(group[0] for group in self.mentions))
        if self.numbers:
            parts.append(f"with {self.numbers} numbers")
        if self.headers:
            parts.append("with " + ", ".join(self.headers))
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """How much the server's resident memory may grow over a case."""

    retained_bytes: int | None = None
    """After the case, once it has settled."""
    peak_bytes: int | None = None
    """At any moment of the case."""

    def describe(self) -> str:
        """For the expected column."""
        parts = []
        if self.retained_bytes is not None:
            parts.append(f"growth < {self.retained_bytes / MIB:g} MiB")
        if self.peak_bytes is not None:
            parts.append(f"peak growth < {self.peak_bytes / MIB:g} MiB")
        return ", ".join(parts)


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    number: str
    title: str
    door: str
    expected: str
    got: str
    verdict: Verdict
    reason: str = ""
    not_observed: tuple[str, ...] = ()
    seconds: float = 0.0


class ConformanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run over one server: what `--json` writes."""

    schema: str = "abserve.conformance/1"
    created_at: str
    abserve_version: str
    server: str
    server_title: str
    """How it was launched; the URL for somebody else's."""
    model: str
    results: tuple[CaseResult, ...]
    stopped: str | None = None
    """Why the run ended before its last case."""

    @property
    def failed(self) -> bool:
        """Whether anything deviates or crashed, or the run could not be finished."""
        return self.stopped is not None or any(
            result.verdict in (Verdict.DEVIATES, Verdict.CRASHED) for result in self.results
        )

    def count(self, verdict: Verdict) -> int:
        """How many cases ended so."""
        return sum(result.verdict is verdict for result in self.results)
