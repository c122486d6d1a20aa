"""Cases 31 and 32: SIGTERM with requests in flight, while loading, with idle connections; and requests before ready."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter, sleep
from typing import Any

from loadgen.conformance.case import Case, Section, infer
from loadgen.conformance.cases.queueing import PendingRequest, start, wait_for, wait_until_read
from loadgen.conformance.records import Answer, Fact, NotApplicableError, Protocol, Seen
from loadgen.conformance.servers import OWN_SERVERS
from loadgen.conformance.subject import Subject

IN_FLIGHT = 6
EXIT_SECONDS = 30.0
ARRIVAL_SECONDS = 0.3
LOADING_SECONDS = 120.0


@contextmanager
def _new_server(subject: Subject, *, ready: bool) -> Iterator[Subject]:
    if subject.new_server is None:
        raise NotApplicableError("needs a separate server; use --launch")
    with subject.new_server(ready) as server:
        yield replace(server, model=subject.model)


def _rows_of_a_second(subject: Subject) -> int:
    """The number of rows that this machine computes in about 1 s: six such requests end well within 30 s."""
    most = subject.model.rows(1 << 30)
    answer = subject.infer(subject.model.binary(most), deadline_s=EXIT_SECONDS)
    return max(1, min(most, round(most / max(answer.elapsed_s, 1e-3))))


def _terminate(server: Subject) -> Callable[[], Fact]:
    """Send SIGTERM to the server's main process; the returned function waits until it has ended."""
    os.kill(server.pids()[0], signal.SIGTERM)
    since = perf_counter()

    def exited() -> Fact:
        gone = wait_for(lambda: server.failure() is not None, EXIT_SECONDS - (perf_counter() - since))
        seconds = perf_counter() - since
        seen = f"{seconds:.1f} s" if gone else "still running"
        return Fact("exit within 30 s", gone and seconds < EXIT_SECONDS, seen)

    return exited


def _in_flight(subject: Subject, protocol: Protocol) -> Seen:
    with _new_server(subject, ready=True) as server:
        request = server.model.request(_rows_of_a_second(server))
        running = [start(server, protocol, request) for _ in range(IN_FLIGHT)]
        wait_until_read([one for one in running if isinstance(one, PendingRequest)])
        sleep(2 * ARRIVAL_SECONDS)
        left = sum(not one.done for one in running)
        exited = _terminate(server)
        if protocol is Protocol.HTTP:
            sleep(ARRIVAL_SECONDS)
            new = server.infer(server.model.binary(1, seed=1), deadline_s=10.0).status
            yield Fact("requests in flight at the signal", left > 0 or None, f"{left} of {IN_FLIGHT}")
            yield Fact("new requests refused", new in {"503", "refused", "reset", "closed"}, new)
        for one in running:
            yield one.wait()
        yield exited()


def _while_loading(subject: Subject, _: Protocol) -> Seen:
    with _new_server(subject, ready=False) as server:
        sleep(ARRIVAL_SECONDS)
        ready = server.http("GET", "/v2/health/ready", deadline_s=1.0).status == "200"
        yield Fact("still loading", None if ready else True, "ready already" if ready else "yes")
        yield _terminate(server)()


def _idle(subject: Subject, _: Protocol) -> Seen:
    with _new_server(subject, ready=True) as server:
        connections = [server.connect() for _ in range(3)]
        head = f"GET /v2/health/live HTTP/1.1\r\nHost: {server.authority}\r\n\r\n".encode()
        for connection in connections:
            yield connection.request(head, 5.0)
        yield _terminate(server)()
        for connection in connections:
            connection.close()


def _before_ready(subject: Subject, protocol: Protocol) -> Seen:
    """Inference until the server is ready. An answer counts only if the server is not ready before and after it."""
    answers: list[Answer] = []
    with _new_server(subject, ready=False) as server:
        begun = perf_counter()
        while perf_counter() - begun < LOADING_SECONDS and not (ready := _ready(server, protocol)):
            if ready is False:
                answer = infer(lambda _: None)(server, protocol)
                if _ready(server, protocol) is False:
                    answers.append(answer)
            if server.failure() is not None:
                raise NotApplicableError("the server ended while it was loading")
            sleep(0.05)
    if not answers:
        kind = "calls" if protocol is Protocol.GRPC else "connections"
        raise NotApplicableError(f"it accepts no {kind} before it is ready")
    return answers


def _ready(subject: Subject, protocol: Protocol) -> bool | None:
    """None when nothing answers."""
    if protocol is Protocol.GRPC:
        answer = subject.grpc_client().call("ServerReady", b"", 2.0)
        return bool(answer.body) if answer.good else None  # ready: true takes two bytes, false takes no bytes
    answer = subject.http("GET", "/v2/health/ready", deadline_s=5.0)
    return answer.good if answer.came else None


OWN: dict[str, Any] = {"setting": OWN_SERVERS}
ENDED: dict[str, Any] = OWN | {"destructive": True}
EXITS = ENDED | {"note": "exit ≤ 30 s"}

# fmt: off
CASES = (
    Case("31a", f"SIGTERM with {IN_FLIGHT} requests in flight", _in_flight, "200",
         note="all 6 answered, new ones refused, exit ≤ 30 s", **ENDED),
    Case("31b", f"SIGTERM with {IN_FLIGHT} calls in flight", _in_flight, "OK",
         note="all 6 answered, exit ≤ 30 s", **ENDED),
    Case("31c", "SIGTERM while loading", _while_loading, "", **EXITS),
    Case("31d", "SIGTERM with idle keep-alive connections", _idle, "200", **EXITS),
    Case("32a", "before ready", _before_ready, "503", note="ready route ≠ 200", **OWN),
    Case("32b", "before ready", _before_ready, "UNAVAILABLE", note="ready: false", **OWN),
)
# fmt: on

SECTIONS = (
    Section("Start and end", "Orchestrators rely on SIGTERM and the ready route; accepted requests finish.", CASES),
)
