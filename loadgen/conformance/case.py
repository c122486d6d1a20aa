"""One case as a row of a table: the requests that are sent, the answers that must come back, and the verdict."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Concatenate, ParamSpec

from loadgen.base.documents import one_line
from loadgen.client.connection import quoted
from loadgen.conformance.model import Body, InferenceRequest, json_body
from loadgen.conformance.records import (
    CaseVerdict,
    Fact,
    NotApplicableError,
    Protocol,
    Response,
    Seen,
    SkippedError,
)
from loadgen.conformance.servers import DEFAULTS, Setting, Subject
from loadgen.conformance.wire import infer_message, messages

P = ParamSpec("P")
Send = Callable[[Subject, Protocol], Response | Seen]
Condition = Callable[[Subject, Sequence[Response]], Fact]


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `number` is a requirement's number and, for one of several cases, a letter: "6b". `send` holds one or
    several requests, each sent alone; a function may also send many and yield answers and facts."""

    number: str
    title: str
    send: Send | tuple[Send, ...]
    expected: str
    """The statuses that are right, with " or " between them: HTTP statuses, or gRPC codes for a case over gRPC."""
    _: KW_ONLY
    note: str = ""
    """Shown to readers: further expectations."""
    naming: tuple[str, ...] = ()
    """The error must hold one of these words, in upper or lower case."""
    numbers: int = 0
    """How many different numbers the error must hold, such as the expected and the received bytes."""
    headers: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    """Texts that the error must not show, besides paths and tracebacks, which it never may."""
    check_words: bool = True
    """False if the error comes from the RPC library, before any code of the server runs."""
    facts: tuple[Condition, ...] = ()
    """Conditions observed after the last answer."""
    setting: Setting = DEFAULTS
    retained_mib: int | None = None
    """How much the server's resident memory may have grown after the case, once it has settled."""
    peak_mib: int | None = None
    """How much it may grow at any moment of the case."""
    warm_up: Callable[[Subject], object] | None = None
    """Sent before memory is read, for buffers that a server allocates once and keeps."""
    destructive: bool = False
    """Loads, blocks or may crash the server: sent to another machine only if its owner allows it."""

    @property
    def protocol(self) -> Protocol:
        """gRPC if gRPC codes are expected."""
        return "grpc" if self.expected[:1].isalpha() else "http"

    @property
    def statuses(self) -> tuple[str, ...]:
        """The statuses that are right; empty if the case is judged by other conditions."""
        return tuple(self.expected.split(" or ")) if self.expected else ()

    @property
    def order(self) -> tuple[int, str]:
        """The requirement's number, then the letter."""
        digits = self.number.rstrip("abcdefghijklmnopqrstuvwxyz")
        return int(digits), self.number[len(digits) :]

    def describe(self) -> str:
        """The expectation in one line."""
        parts = [
            self.expected,
            f"names {self.naming[0]}" if self.naming else "",
            f"gives {self.numbers} numbers" if self.numbers else "",
            *(f"has {name}" for name in self.headers),
            self.note,
            f"memory growth < {self.retained_mib} MiB" if self.retained_mib else "",
            f"peak memory growth < {self.peak_mib} MiB" if self.peak_mib else "",
        ]
        return ", ".join(filter(None, parts))

    def observe(self, subject: Subject) -> list[Response | Fact]:
        """Send it. Raises `NotApplicableError`, `SkippedError`."""
        if self.protocol == "grpc":
            subject.grpc_client()
        seen: list[Response | Fact] = []
        try:
            for send in self.send if isinstance(self.send, tuple) else (self.send,):
                sent = send(subject, self.protocol)
                seen += [sent] if isinstance(sent, Response) else sent
            responses = [observed for observed in seen if isinstance(observed, Response)]
            return seen + [fact(subject, responses) for fact in self.facts]
        except OSError as exc:  # the connection of a case was cut; whether the server is alive is checked next
            return [*seen, Fact("the case could be sent", False, str(exc))]
        except (NotApplicableError, SkippedError):
            raise
        except Exception as exc:  # noqa: BLE001 (an answer in an impossible form costs its case, not the run)
            return [*seen, Fact("the answers can be read", False, f"{type(exc).__name__}: {one_line(str(exc))}")]


@dataclass(frozen=True, slots=True)
class Theme:
    """Cases of one theme, and why a server must answer them like this."""

    title: str
    why: str
    cases: tuple[Case, ...]


def http(line: str, document: Any = None) -> Send:
    """An HTTP request "METHOD /path" with a JSON document or an empty body; `{model}` stands for the model's name."""
    method, path = line.split(" ", 1)
    empty = b"" if method in {"POST", "PUT", "PATCH"} else None

    def send(subject: Subject, _: Protocol) -> Response:
        place = path.replace("{model}", quoted(subject.model.name))
        if document is None:
            return subject.http(method, place, body=empty)
        body = json_body(document)
        return subject.http(method, place, headers=body.headers, body=body.content)

    return send


def infer(content: object) -> Callable[[Subject, Protocol], Response]:
    """An inference request: its content, or a function that changes a valid request in place or returns the content."""

    def send(subject: Subject, protocol: Protocol) -> Response:
        made, path = content, subject.model.path
        if callable(content):
            request = subject.model.request()
            made = content(request)
            if made is None:
                made, path = request, request.path
        if protocol == "grpc":
            message = infer_message(made) if isinstance(made, InferenceRequest) else made
            return subject.grpc_client().call("ModelInfer", message)
        if isinstance(made, InferenceRequest):
            made = made.body()
        return subject.infer(made if isinstance(made, Body) else json_body(made), path=path)

    return send


def grpc(method: str, content: dict[str, Any] | bytes) -> Send:
    """A gRPC call: the fields of its request, or bytes that replace the message; "{model}" is the model's name."""

    def send(subject: Subject, _: Protocol) -> Response:
        message: Any = content
        if isinstance(content, dict):
            fields = {name: subject.model.name if value == "{model}" else value for name, value in content.items()}
            message = getattr(messages, f"{method}Request")(**fields)
        return subject.grpc_client().call(method, message)

    return send


def raw(data: bytes, deadline_s: float = 20.0) -> Send:
    """Bytes on a new connection; `{path}` is the route of inference, `{host}` the Host header."""
    return lambda subject, _: subject.raw(filled_in(data, subject), deadline_s)


def filled_in(data: bytes, subject: Subject) -> bytes:
    """The bytes with the inference route and the host filled in."""
    path, host = subject.model.path.encode(), subject.authority.encode()
    return data.replace(b"{path}", path).replace(b"{host}", host)


def infers(*contents: object) -> tuple[Send, ...]:
    """Several inference requests."""
    return tuple(infer(content) for content in contents)


def changes(
    function: Callable[Concatenate[InferenceRequest, P], object],
) -> Callable[P, Callable[[Subject, Protocol], Response]]:
    """Turn a function that changes a request into one for rows: `named(request, name)` is written `named("x")`."""
    return lambda *args, **kwargs: infer(lambda request: function(request, *args, **kwargs))


def over_both(number: str, title: str, send: Send | tuple[Send, ...], *naming: str) -> tuple[Case, Case]:
    """Two cases with one refusal: over HTTP, and over gRPC with a number that ends in g."""
    return (
        Case(number, title, send, "400", naming=naming),
        Case(f"{number}g", title, send, "INVALID_ARGUMENT", naming=naming),
    )


_TRACES = (
    re.compile(r"Traceback \(most recent call"),
    re.compile(r'File "[^"]+", line \d+'),
    re.compile(r"\.(?:py|cc|cpp|cu)[:(]\d+"),
)
_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.+-]+/)+[\w.+-]+")
_NUMBER = re.compile(r"\d+")
_LONGEST_SHOWN = 110


def judge(case: Case, seen: Seen, extra: Iterable[Fact] = ()) -> tuple[CaseVerdict, str, str, tuple[str, ...]]:
    """The verdict, a description of the results, the reasons against the server, and the facts not observed."""
    seen = list(seen)
    responses = [observed for observed in seen if isinstance(observed, Response)]
    own_facts = [observed for observed in seen if isinstance(observed, Fact)]
    facts = [*own_facts, *extra]
    reasons = list(dict.fromkeys(problem for response in responses for problem in problems(case, response)))
    reasons += [f"{fact.name}: {fact.seen}" for fact in facts if fact.ok is False]
    not_observed = tuple(f"{fact.name}: {fact.seen}" for fact in facts if fact.ok is None)
    # The text shown for a status is that of a wrong answer, if there is one.
    worst_first = sorted(responses, key=lambda response: not problems(case, response))
    got = describe(worst_first) or "; ".join(f"{fact.name}: {fact.seen}" for fact in own_facts)
    if not reasons and not responses and not any(fact.ok for fact in own_facts):
        return CaseVerdict.NOT_APPLICABLE, got, "nothing could be observed", not_observed
    return (CaseVerdict.DEVIATES if reasons else CaseVerdict.CONFORMS), got, "; ".join(reasons), not_observed


def problems(case: Case, response: Response) -> list[str]:
    """Every way in which the answer is wrong; empty when it is as expected."""
    faults = []
    if case.expected and response.status not in case.statuses:
        faults.append(f"{response.status} instead of {case.expected}")
    if not response.received:
        return faults
    faults += [f"no {name} header" for name in case.headers if name.lower() not in response.headers]
    if response.succeeded:
        return faults
    text, problem = error_sentence(response)
    if case.check_words and problem:
        faults.append(problem)
    if response.status in case.statuses:
        if case.naming and not any(word.lower() in text.lower() for word in case.naming):
            faults.append(f"the error does not name {case.naming[0]}")
        if len(set(_NUMBER.findall(text))) < case.numbers:
            faults.append(f"the error does not give {case.numbers} numbers")
    return faults + leaks(text, case.secrets)


def error_sentence(response: Response) -> tuple[str, str | None]:
    """The error's text, and how it breaks the protocol (None if it does not)."""
    if response.message is not None:
        return response.message, _sentence_problem(response.message)
    text = response.body.decode("utf-8", "replace")
    if not response.body:
        return "", "the error has no body"
    try:
        document = json.loads(response.body)
    except (ValueError, RecursionError):
        return text, "the error is not JSON"
    if not isinstance(document, dict) or not isinstance(document.get("error"), str):
        return text, 'the error is not {"error": text}'
    if not response.headers.get("content-type", "").startswith("application/json"):
        return document["error"], "the error's Content-Type is not application/json"
    if set(document) != {"error"}:
        return text, "the error has members besides error"
    return document["error"], _sentence_problem(document["error"])


def leaks(text: str, secrets: Iterable[str]) -> list[str]:
    """Internals that the error shows to the client."""
    faults = []
    if any(pattern.search(text) for pattern in _TRACES):
        faults.append("the error shows a traceback or a source line")
    elif any(not path.startswith("/v2") for path in _PATH.findall(text)):
        faults.append("the error shows a path")
    if any(secret in text for secret in secrets):
        faults.append("the error echoes the shared-memory key")
    return faults


def describe(responses: Iterable[Response]) -> str:
    """Each distinct status with its first error, most frequent first."""
    counts: Counter[str] = Counter()
    words: dict[str, str] = {}
    for response in responses:
        counts[response.status] += 1
        if response.received and not response.succeeded:
            line = " ".join(error_sentence(response)[0].split())
            shown = line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 1] + "…"
            words.setdefault(response.status, shown)
    parts = []
    for status, count in counts.most_common():
        text = f"{count}×{status}" if counts.total() > 1 else status
        parts.append(f"{text} {words[status]}" if words.get(status) else text)
    return "; ".join(parts)


def _sentence_problem(text: str) -> str | None:
    if not text.strip():
        return "the error is empty"
    return "the error is more than one line" if "\n" in text.strip() else None
