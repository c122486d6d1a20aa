"""Cases 31 and 32: SIGTERM with work in flight, while loading, with idle connections; and the time before ready."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

from loadgen.conformance.case import Case, Infer, Section
from loadgen.conformance.engine_blocker import Background, start, wait_for, wait_until_read
from loadgen.conformance.launching import LaunchedServer
from loadgen.conformance.records import Answer, Door, Fact, NotApplicableError, Observation, expect
from loadgen.conformance.settings import AS_STARTED, OWN_SERVERS
from loadgen.conformance.subject import Subject

IN_FLIGHT = 6
EXIT_SECONDS = 30.0
ARRIVAL_SECONDS = 0.3
LOADING_SECONDS = 120.0


@contextmanager
def _fresh(subject: Subject, *, ready: bool) -> Iterator[tuple[LaunchedServer, Subject]]:
    if subject.launcher is None:
        raise NotApplicableError("needs a server of its own; use --launch")
    server = subject.launcher.start(AS_STARTED)
    try:
        if ready:
            server.await_model(subject.launcher.model)
        fresh = subject.on(server)
        try:
            yield server, fresh
        finally:
            if fresh.grpc is not None:
                fresh.grpc.close()
    finally:
        server.stop()


def _rows_of_a_second(subject: Subject) -> int:
    """As many rows as this machine computes in about a second: six such requests end well within 30 s."""
    most = subject.model.rows(1 << 30)
    answer = subject.infer(subject.model.binary(most), deadline_s=EXIT_SECONDS)
    return max(1, min(most, round(most / max(answer.elapsed_s, 1e-3))))


def _terminate(server: LaunchedServer) -> Callable[[], Fact]:
    """SIGTERM to the server's own process; the result waits until it is gone."""
    os.kill(server.pids()[0], signal.SIGTERM)
    since = perf_counter()

    def observe() -> Fact:
        gone = wait_for(lambda: server.failure() is not None, EXIT_SECONDS - (perf_counter() - since))
        seconds = perf_counter() - since
        return Fact(
            "exit within 30 s", gone and seconds < EXIT_SECONDS, f"{seconds:.1f} s" if gone else "still running"
        )

    return observe


def _at_work(subject: Subject, door: Door) -> Observation:
    with _fresh(subject, ready=True) as (server, fresh):
        request = fresh.model.request(_rows_of_a_second(fresh))
        running = [start(fresh, door, request) for _ in range(IN_FLIGHT)]
        wait_until_read([one for one in running if isinstance(one, Background)])
        sleep(2 * ARRIVAL_SECONDS)
        left = sum(not one.done for one in running)
        exited = _terminate(server)
        facts = []
        if door is Door.HTTP:
            sleep(ARRIVAL_SECONDS)
            new = fresh.infer(fresh.model.binary(1, seed=1), deadline_s=10.0).status
            facts.append(Fact("work was in flight at the signal", left > 0 or None, f"{left} of {IN_FLIGHT}"))
            facts.append(Fact("new ones refused", new in {"503", "refused", "reset", "closed"}, new))
        answers = tuple(one.wait() for one in running)
        return Observation(answers, (*facts, exited()))


def _while_loading(subject: Subject, _: Door) -> Observation:
    with _fresh(subject, ready=False) as (server, fresh):
        sleep(ARRIVAL_SECONDS)
        ready = fresh.http("GET", "/v2/health/ready", deadline_s=1.0).status == "200"
        fact = Fact("it was still loading", None if ready else True, "ready already" if ready else "yes")
        return Observation(facts=(fact, _terminate(server)()))


def _idle(subject: Subject, _: Door) -> Observation:
    with _fresh(subject, ready=True) as (server, fresh):
        connections = [fresh.connect() for _ in range(3)]
        head = f"GET /v2/health/live HTTP/1.1\r\nHost: {fresh.authority}\r\n\r\n".encode()
        answers = tuple(connection.exchange(head, 5.0) for connection in connections)
        fact = _terminate(server)()
        for connection in connections:
            connection.close()
        return Observation(answers, (fact,))


def _before_ready(subject: Subject, door: Door) -> Observation:
    """Inference until the server is ready. An answer counts only between two that say not ready, since the server may
    get ready in between."""
    answers: list[Answer] = []
    with _fresh(subject, ready=False) as (server, fresh):
        begun = perf_counter()
        while perf_counter() - begun < LOADING_SECONDS and not (ready := _ready(fresh, door)):
            if ready is False:
                answer = Infer(lambda _: None).send(fresh, door)
                if _ready(fresh, door) is False:
                    answers.append(answer)
            if server.failure() is not None:
                raise NotApplicableError("the server ended while it was loading")
            sleep(0.05)
    if not answers:
        what = "call" if door is Door.GRPC else "connection"
        raise NotApplicableError(f"it accepts no {what} before it is ready")
    return Observation(tuple(answers), (Fact("ready says not 200", True, f"{len(answers)} times"),))


def _ready(subject: Subject, door: Door) -> bool | None:
    """None where nothing answers."""
    if door is Door.GRPC:
        answer = subject.call().call("ServerReady", b"", 2.0)
        return bool(answer.body) if answer.good else None  # ready: true is two bytes, false is none
    answer = subject.http("GET", "/v2/health/ready", deadline_s=5.0)
    return answer.good if answer.came else None


ANSWERED = expect("200", note="all 6 answered, new ones refused, exit ≤ 30 s")
CALLS_ANSWERED = expect("OK", note="all 6 answered, exit ≤ 30 s")
NOT_READY, GRPC_NOT_READY = expect("503", note="ready route ≠ 200"), expect("UNAVAILABLE", note="ready: false")
ENDS, ENDS_AFTER_200 = expect(note="exit ≤ 30 s"), expect("200", note="exit ≤ 30 s")
OWN: dict[str, Any] = {"setting": OWN_SERVERS}
ENDED = OWN | {"destructive": True}

# fmt: off
CASES = (
    Case("31a", f"SIGTERM with {IN_FLIGHT} requests in flight", _at_work, ANSWERED, **ENDED),
    Case("31b", f"SIGTERM with {IN_FLIGHT} calls in flight", _at_work, CALLS_ANSWERED, Door.GRPC, **ENDED),
    Case("31c", "SIGTERM while loading", _while_loading, ENDS, **ENDED),
    Case("31d", "SIGTERM with live keep-alive connections", _idle, ENDS_AFTER_200, **ENDED),
    Case("32a", "before ready", _before_ready, NOT_READY, **OWN),
    Case("32b", "before ready", _before_ready, GRPC_NOT_READY, Door.GRPC, **OWN),
)
# fmt: on

SECTIONS = (Section("Start and end", "Orchestrators trust SIGTERM and the ready route; accepted work is done.", CASES),)
