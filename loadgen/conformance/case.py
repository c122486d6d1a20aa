"""One case as a row of a table: what is sent, what must come back; and how each kind of row is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Concatenate, ParamSpec

from loadgen.conformance.grpc_calls import infer_message, messages
from loadgen.conformance.model import Body, InferenceRequest, json_body
from loadgen.conformance.records import Answer, Door, Expectation, Fact, MemoryBound, Observation, expect
from loadgen.conformance.settings import AS_STARTED, Setting
from loadgen.conformance.subject import Subject

P = ParamSpec("P")
Probe = Callable[[Subject, Door], Observation]
Condition = Callable[[Subject, tuple[Answer, ...]], Fact]
Spoil = Callable[[InferenceRequest], object]
"""Changes a valid request in place, or returns what is sent instead: a body, JSON, or a gRPC message."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An HTTP request: "METHOD /path", with a JSON document where one is given. Verbs with a body send an empty one."""

    line: str
    document: Any = None

    def send(self, subject: Subject, _: Door) -> Answer:
        """`{model}` in the line is the model's name."""
        method, path = self.line.replace("{model}", subject.model.name).split(" ", 1)
        if self.document is not None:
            body = json_body(self.document)
            return subject.http(method, path, headers=body.headers, body=body.content)
        return subject.http(method, path, body=b"" if method in {"POST", "PUT", "PATCH"} else None)


@dataclass(frozen=True, slots=True)
class Infer:
    """An inference request: the content of its body or message, or how a valid request is spoilt."""

    content: object

    def send(self, subject: Subject, door: Door) -> Answer:
        """Through either protocol."""
        grpc = subject.call() if door is Door.GRPC else None
        content, path = self.content, subject.model.path
        if callable(content):
            request = subject.model.request()
            content = content(request)
            if content is None:
                content, path = request, request.path
        if grpc is not None:
            return grpc.infer(infer_message(content) if isinstance(content, InferenceRequest) else content)
        if isinstance(content, InferenceRequest):
            content = content.body()
        return subject.infer(content if isinstance(content, Body) else json_body(content), path=path)


@dataclass(frozen=True, slots=True)
class Call:
    """A gRPC call: the fields of its request, or bytes in place of a message."""

    method: str
    content: dict[str, Any] | bytes

    def send(self, subject: Subject, _: Door) -> Answer:
        """`{model}` as a value is the model's name."""
        grpc, content = subject.call(), self.content
        if isinstance(content, bytes):
            return grpc.call(self.method, content)
        fields = {name: subject.model.name if value == "{model}" else value for name, value in content.items()}
        return grpc.call(self.method, getattr(messages, f"{self.method}Request")(**fields))


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes on a connection of their own; `{path}` is the route of inference, `{host}` the Host header."""

    data: bytes
    deadline_s: float = 20.0

    def written(self, subject: Subject) -> bytes:
        """With route and host filled in."""
        path, host = subject.model.path.encode(), subject.authority.encode()
        return self.data.replace(b"{path}", path).replace(b"{host}", host)

    def send(self, subject: Subject, _: Door) -> Answer:
        """Without anything added."""
        return subject.raw(self.written(subject), self.deadline_s)


Sent = Ask | Infer | Call | Raw


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `number` is the reference's number and, for one of several, a letter: "6b". `send` holds requests, each
    sent alone, or is a function where that is not enough."""

    number: str
    title: str
    send: Sent | tuple[Sent, ...] | Probe
    expected: Expectation
    door: Door = Door.HTTP
    _: KW_ONLY
    facts: tuple[Condition, ...] = ()
    """Conditions besides the expectation, observed after the last answer."""
    setting: Setting = AS_STARTED
    memory: MemoryBound | None = None
    warm_up: Callable[[Subject], object] | None = None
    """Sent before memory is read, for what a server allocates once and keeps."""
    destructive: bool = False
    """Loads, blocks or may end the server: never sent to another machine unless its owner allows it."""

    @property
    def order(self) -> tuple[int, str]:
        """The reference's number, then the letter."""
        digits = self.number.rstrip("abcdefghijklmnopqrstuvwxyz")
        return int(digits), self.number[len(digits) :]

    def describe(self) -> str:
        """What is expected, in one line."""
        parts = (self.expected.describe(), self.memory.describe() if self.memory else "")
        return "; ".join(part for part in parts if part)

    def observe(self, subject: Subject) -> Observation:
        """Send it. Raises `NotApplicableError`, `SkippedError`, `OSError`."""
        if self.door is Door.GRPC:
            subject.call()
        if callable(self.send):
            return self.send(subject, self.door)
        requests = self.send if isinstance(self.send, tuple) else (self.send,)
        answers = tuple(request.send(subject, self.door) for request in requests)
        return Observation(answers, tuple(fact(subject, answers) for fact in self.facts))


@dataclass(frozen=True, slots=True)
class Section:
    """Cases of one theme, and why a server must answer them so."""

    title: str
    why: str
    cases: tuple[Case, ...]


def spoils(function: Callable[Concatenate[InferenceRequest, P], object]) -> Callable[P, Infer]:
    """A function of a request and more becomes one that makes rows: `named(request, name)` is written `named("x")`."""
    return lambda *args, **kwargs: Infer(lambda request: function(request, *args, **kwargs))


def probes(function: Callable[Concatenate[Subject, Door, P], Observation]) -> Callable[P, Probe]:
    """The same for a probe: `flood(subject, door, count)` is written `flood(9)` in a row."""
    return lambda *args, **kwargs: lambda subject, door: function(subject, door, *args, **kwargs)


def infers(*contents: object) -> tuple[Infer, ...]:
    """Inference requests with these contents."""
    return tuple(Infer(content) for content in contents)


def both(number: str, title: str, sent: Infer | tuple[Infer, ...], *naming: str) -> tuple[Case, Case]:
    """The same refusal through HTTP and gRPC; the gRPC case has a g at its end."""
    return (
        Case(number, title, sent, expect("400", naming=naming)),
        Case(f"{number}g", title, sent, expect("INVALID_ARGUMENT", naming=naming), Door.GRPC),
    )
