"""Short ways to write probes: a body or a message in, its answer out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from loadgen.conformance.case import Probe
from loadgen.conformance.model import Body, Model
from loadgen.conformance.records import Expectation, Observation
from loadgen.conformance.subject import Subject

BAD = Expectation(statuses=("400",))
BAD_GRPC = Expectation(statuses=("INVALID_ARGUMENT",))
FINE = Expectation(statuses=("200",))
FINE_GRPC = Expectation(statuses=("OK",))


def refusal(*mentions: tuple[str, ...], statuses: tuple[str, ...] = ("400",)) -> Expectation:
    """An error that names these words."""
    return Expectation(statuses=statuses, mentions=mentions)


def grpc_refusal(*mentions: tuple[str, ...], statuses: tuple[str, ...] = ("INVALID_ARGUMENT",)) -> Expectation:
    """The same through gRPC."""
    return Expectation(statuses=statuses, mentions=mentions)


def infers(*builds: Callable[[Model], Body]) -> Probe:
    """Each body on a connection of its own."""
    return lambda subject: Observation(tuple(subject.infer(build(subject.model)) for build in builds))


def grpc_infers(*builds: Callable[[Model], Any]) -> Probe:
    """Each message as a call of its own."""
    return lambda subject: Observation(tuple(subject.call().infer(build(subject.model)) for build in builds))


def raw_requests(build: Callable[[Subject], Iterable[bytes | Iterable[bytes]]]) -> Probe:
    """Each item as the bytes of one connection."""
    return lambda subject: Observation(tuple(subject.raw(data) for data in build(subject)))


def requests(*lines: tuple[str, str]) -> Probe:
    """Method and path, `{model}` filled in; verbs with a body send an empty one."""

    def probe(subject: Subject) -> Observation:
        return Observation(
            tuple(
                subject.http(
                    method,
                    path.replace("{model}", subject.model.name),
                    body=b"" if method in {"POST", "PUT", "PATCH"} else None,
                )
                for method, path in lines
            )
        )

    return probe
