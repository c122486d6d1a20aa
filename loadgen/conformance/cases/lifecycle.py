"""Cases 31 and 32: SIGTERM with work in flight, while loading, with idle connections; and the time before ready."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep

from loadgen.conformance.case import Case
from loadgen.conformance.grpc_calls import finish, infer_message
from loadgen.conformance.launching import LaunchedServer
from loadgen.conformance.occupation import Background, arrived, single_row, wait_for
from loadgen.conformance.records import Answer, Door, Expectation, Fact, NotApplicableError, Observation
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
            server.wait_ready()
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


def _exit(server: LaunchedServer, since: float) -> Fact:
    gone = server.seconds_to_exit(EXIT_SECONDS - (perf_counter() - since))
    seconds = perf_counter() - since
    return Fact("exit within 30 s", gone is not None, f"{seconds:.1f} s" if gone is not None else "still running")


def _terminate_at_work(subject: Subject) -> Observation:
    with _fresh(subject, ready=True) as (server, fresh):
        rows = _rows_of_a_second(fresh)
        data = fresh.infer_bytes(fresh.model.binary(rows))
        running = [Background(fresh, data) for _ in range(IN_FLIGHT)]
        wait_for(lambda: arrived(running), 20.0)
        sleep(ARRIVAL_SECONDS)
        answered_before = sum(request.done for request in running)
        since = server.terminate()
        sleep(ARRIVAL_SECONDS)
        new = fresh.infer(single_row(fresh.model), deadline_s=10.0)
        answers = tuple(request.wait(EXIT_SECONDS) for request in running)
        facts = (
            Fact(
                "work was in flight at the signal",
                True if answered_before < IN_FLIGHT else None,
                f"{IN_FLIGHT - answered_before} of {IN_FLIGHT}",
            ),
            Fact("new ones refused", new.status in {"503", "refused", "reset", "closed"}, new.status),
            _exit(server, since),
        )
    return Observation(answers, facts)


def _terminate_grpc(subject: Subject) -> Observation:
    subject.call()  # before a server is started for nothing
    with _fresh(subject, ready=True) as (server, fresh):
        door = fresh.call()
        message = infer_message(fresh.model, _rows_of_a_second(fresh))
        started = perf_counter()
        futures = [door.start("ModelInfer", message, EXIT_SECONDS) for _ in range(IN_FLIGHT)]
        sleep(2 * ARRIVAL_SECONDS)
        since = server.terminate()
        answers = tuple(finish(future, started) for future in futures)
        facts = (_exit(server, since),)
    return Observation(answers, facts)


def _terminate_loading(subject: Subject) -> Observation:
    with _fresh(subject, ready=False) as (server, fresh):
        sleep(ARRIVAL_SECONDS)
        ready = fresh.http("GET", "/v2/health/ready", deadline_s=1.0).status == "200"
        fact = Fact("it was still loading", None if ready else True, "ready already" if ready else "yes")
        since = server.terminate()
        return Observation(facts=(fact, _exit(server, since)))


def _terminate_idle(subject: Subject) -> Observation:
    with _fresh(subject, ready=True) as (server, fresh):
        connections = [fresh.connect() for _ in range(3)]
        head = f"GET /v2/health/live HTTP/1.1\r\nHost: {fresh.authority}\r\n\r\n".encode()
        answers = tuple(connection.exchange(head, 5.0) for connection in connections)
        since = server.terminate()
        fact = _exit(server, since)
        for connection in connections:
            connection.close()
        return Observation(answers, (fact,))


def _before_ready(subject: Subject) -> Observation:
    answers: list[Answer] = []
    ready_first = False
    with _fresh(subject, ready=False) as (server, fresh):
        body = single_row(fresh.model)
        begun = perf_counter()
        while perf_counter() - begun < LOADING_SECONDS:
            status = fresh.http("GET", "/v2/health/ready", deadline_s=5.0)
            if status.status == "200":
                ready_first = not answers
                break
            if status.came:
                answer = fresh.infer(body)
                # It may have got ready in between; only an answer between two "not ready" ones counts.
                if fresh.http("GET", "/v2/health/ready", deadline_s=5.0).status != "200":
                    answers.append(answer)
            if server.deployment.failure() is not None:
                raise NotApplicableError("the server ended while it was loading")
            sleep(0.05)
    if ready_first:
        raise NotApplicableError("it accepts no connection before it is ready")
    return Observation(tuple(answers), (Fact("ready says not 200", True, f"{len(answers)} times"),))


def _grpc_before_ready(subject: Subject) -> Observation:
    answers: list[Answer] = []
    subject.call()
    with _fresh(subject, ready=False) as (server, fresh):
        door = fresh.call()
        message = infer_message(fresh.model)
        begun = perf_counter()
        while perf_counter() - begun < LOADING_SECONDS:
            before = door.call("ServerReady", b"", 2.0)
            if before.status == "OK" and before.body:  # ready: true is two bytes, false is none
                break
            if before.status == "OK":
                answer = door.infer(message)
                after = door.call("ServerReady", b"", 2.0)
                if after.status == "OK" and not after.body:
                    answers.append(answer)
            if server.deployment.failure() is not None:
                raise NotApplicableError("the server ended while it was loading")
            sleep(0.05)
    if not answers:
        raise NotApplicableError("it accepts no call before it is ready")
    return Observation(tuple(answers))


_ALL_ANSWERED = "all 6 answered, new ones refused, exit ≤ 30 s"

CASES = (
    Case(
        number="31a",
        title=f"SIGTERM with {IN_FLIGHT} requests in flight",
        probe=_terminate_at_work,
        expected=Expectation(statuses=("200",), note=_ALL_ANSWERED),
        setting=OWN_SERVERS,
        destructive=True,
    ),
    Case(
        number="31b",
        title=f"SIGTERM with {IN_FLIGHT} calls in flight",
        door=Door.GRPC,
        probe=_terminate_grpc,
        expected=Expectation(statuses=("OK",), note="all 6 answered, exit ≤ 30 s"),
        setting=OWN_SERVERS,
        destructive=True,
    ),
    Case(
        number="31c",
        title="SIGTERM while loading",
        probe=_terminate_loading,
        expected=Expectation(note="exit ≤ 30 s"),
        setting=OWN_SERVERS,
        destructive=True,
    ),
    Case(
        number="31d",
        title="SIGTERM with live keep-alive connections",
        probe=_terminate_idle,
        expected=Expectation(statuses=("200",), note="exit ≤ 30 s"),
        setting=OWN_SERVERS,
        destructive=True,
    ),
    Case(
        number="32a",
        title="before ready",
        probe=_before_ready,
        expected=Expectation(statuses=("503",), note="ready route ≠ 200"),
        setting=OWN_SERVERS,
    ),
    Case(
        number="32b",
        title="before ready",
        door=Door.GRPC,
        probe=_grpc_before_ready,
        expected=Expectation(statuses=("UNAVAILABLE",), note="ready: false"),
        setting=OWN_SERVERS,
    ),
)
