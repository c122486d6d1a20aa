"""What is expected of a server, what it answered, and what was concluded, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

MIB = 1024 * 1024


class Door(StrEnum):
    """The protocol through which a case is sent."""

    HTTP = "http"
    GRPC = "grpc"


class Verdict(StrEnum):
    """The outcome of a case. Only DEVIATES and CRASHED are failures."""

    CONFORMS = "conforms"
    DEVIATES = "deviates"
    CRASHED = "crashed"
    NOT_APPLICABLE = "not applicable"
    SKIPPED = "skipped"


class NotApplicableError(Exception):
    """The case says nothing about this server or model; the message says why."""


class SkippedError(Exception):
    """The server cannot be started, or not in the state that a case wants; the message says why."""


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

    @property
    def good(self) -> bool:
        """Whether the server did what it was asked."""
        return self.status in {"200", "OK"}


@dataclass(frozen=True, slots=True)
class Fact:
    """One condition that is not a status: `ok` is None when it could not be observed."""

    name: str
    ok: bool | None
    seen: str


@dataclass(frozen=True, slots=True)
class Observation:
    """All that was seen of a case. Every answer must meet the case's expectation, every fact must hold."""

    answers: tuple[Answer, ...] = ()
    facts: tuple[Fact, ...] = ()


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
    words_judged: bool = True
    """False where the answer is the RPC library's, before any code of the server runs."""
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
        return ", ".join([*parts, *filter(None, [self.note])])


def expect(*statuses: str, naming: tuple[str, ...] = (), **columns: Any) -> Expectation:
    """The expectation of a row: one of these statuses, and a sentence with one of the words in `naming`."""
    return Expectation(statuses, (naming,) if naming else (), **columns)


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """How much the server's resident memory may grow over a case."""

    retained_bytes: int | None = None
    """After the case, once it has settled."""
    peak_bytes: int | None = None
    """At any moment of the case."""

    def describe(self) -> str:
        """One line for the table."""
        bounds = (("growth", self.retained_bytes), ("peak growth", self.peak_bytes))
        return ", ".join(f"{name} < {size / MIB:g} MiB" for name, size in bounds if size is not None)


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the report."""

    number: str
    title: str
    door: str
    expected: str
    got: str
    verdict: Verdict
    reason: str = ""
    not_observed: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the server has to be mended."""
        return self.verdict in (Verdict.DEVIATES, Verdict.CRASHED)


class ConformanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run over one server, as `--json` writes it."""

    schema: str = "abserve.conformance/1"
    created_at: str
    abserve_version: str
    server: str
    server_title: str
    """How it was launched; the URL of a server that was running already."""
    model: str
    results: tuple[CaseResult, ...]
    stopped: str | None = None
    """Why the run ended before its last case."""

    @property
    def failed(self) -> bool:
        """Whether anything deviates or crashed, or the run could not be finished."""
        return self.stopped is not None or any(result.failed for result in self.results)

    def count(self, verdict: Verdict) -> int:
        """The number of cases with this verdict."""
        return sum(result.verdict is verdict for result in self.results)
