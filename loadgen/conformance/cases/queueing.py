"""Cases 14, 22 and 28 to 30: what happens to requests that wait, share a batch, or whose clients give up."""

from __future__ import annotations

from time import sleep
from typing import Any

import numpy as np

from loadgen.conformance.case import Case, Infer, Section
from loadgen.conformance.engine_blocker import Background, EngineBlocker, PendingCall, start, wait_for
from loadgen.conformance.model import InferenceRequest
from loadgen.conformance.records import Answer, Door, Fact, NotApplicableError, Observation, expect
from loadgen.conformance.settings import SMALL_QUEUE, SMALL_QUEUES
from loadgen.conformance.subject import Subject, output_difference
from loadgen.conformance.wire import all_read

VICTIMS = 4
FLOOD = 12
ARRIVAL_SECONDS = 5.0
PROMPT_SECONDS = 0.5
TIMEOUT_US = 50_000
CLIENT_DEADLINE_SECONDS = 0.2
MERGED_TOLERANCE = 1e-4
MERGE_ROUNDS = 5


def _leave(subject: Subject, _: Door) -> Observation:
    request = subject.infer_bytes(subject.model.binary(1, seed=1))

    def abandon() -> tuple[Answer, ...]:
        connections = [subject.connect() for _ in range(VICTIMS)]
        for connection in connections:
            connection.send(request)
        # They have to be in the queue when their clients leave, not in a socket's buffer.
        wait_for(lambda: all_read(connections), ARRIVAL_SECONDS)
        sleep(0.2)
        for index, connection in enumerate(connections):
            connection.close(abruptly=index % 2 == 0)
        return ()

    return _abandoned(subject, abandon)


def _cancel(subject: Subject, _: Door) -> Observation:
    def abandon() -> tuple[Answer, ...]:
        calls = [PendingCall(subject, subject.model.request(seed=1), 30.0) for _ in range(VICTIMS)]
        sleep(0.1)
        for call in calls:
            call.future.cancel()
        return tuple(call.wait() for call in calls)

    return _abandoned(subject, abandon)


def _pass_the_deadline(subject: Subject, _: Door) -> Observation:
    def abandon() -> tuple[Answer, ...]:
        request = subject.model.request(seed=1)
        calls = [PendingCall(subject, request, CLIENT_DEADLINE_SECONDS) for _ in range(VICTIMS)]
        return tuple(call.wait() for call in calls)

    return _abandoned(subject, abandon)


def _abandoned(subject: Subject, abandon: Any) -> Observation:
    """Requests of clients that give up while the engine is busy: they must not be executed."""
    blocker = EngineBlocker(subject)
    before = _settled(subject)
    with blocker:
        answers = abandon()
        in_time = blocker.busy
    executed = _settled(subject) - before - blocker.rows_executed
    if not in_time:
        raise NotApplicableError("the queue was empty before the clients had left; launch a slower engine")
    # Fewer rows than were answered would mean that the statistics cannot be relied on.
    seen = f"{executed} of {VICTIMS} requests without client executed"
    return Observation(answers, (Fact("dropped before the engine", None if executed < 0 else executed == 0, seen),))


def _settled(subject: Subject) -> int:
    """Rows executed so far, once the statistics do not move any more."""
    last = subject.statistics()

    def still() -> bool:
        nonlocal last
        sleep(0.25)
        previous, last = last, subject.statistics()
        return previous == last

    wait_for(still, 20.0)
    return last["inference_count"]


def _flood(subject: Subject, door: Door) -> Observation:
    """More requests than the queue holds, while the engine is busy and health is asked."""
    health: list[Answer] = []
    with EngineBlocker(subject, limit=SMALL_QUEUE) as blocker:
        flood = [start(subject, door, subject.model.request(seed=1)) for _ in range(FLOOD)]
        while blocker.busy and door is Door.HTTP:
            health += [subject.http("GET", f"/v2/health/{kind}", deadline_s=5.0) for kind in ("live", "ready")]
            sleep(0.02)
        answers = [one.wait() for one in flood]
    refused = tuple(answer for answer in answers if not answer.good)
    facts = [Fact("some are refused", bool(refused), f"{len(refused)} of {FLOOD}")]
    if door is Door.HTTP:
        slowest = max((answer.elapsed_s for answer in refused), default=0.0)
        shed = [answer for answer in health if answer.status != "200" or answer.elapsed_s > 1.0]
        facts.append(Fact("at once", slowest < PROMPT_SECONDS, f"slowest {slowest * 1e3:.0f} ms"))
        facts.append(Fact("health never shed", not shed, f"{len(shed)} of {len(health)} refused or slow"))
    return Observation(refused, tuple(facts))


def _queue_timeout(subject: Subject, door: Door) -> Observation:
    def spoil(request: InferenceRequest) -> None:
        request.document["parameters"] |= {"timeout": TIMEOUT_US}

    with EngineBlocker(subject) as blocker:
        answer = Infer(spoil).send(subject, door)
        ok = blocker.busy and answer.elapsed_s < TIMEOUT_US / 1e6 + PROMPT_SECONDS
    seen = f"after {answer.elapsed_s * 1e3:.0f} ms with a timeout of {TIMEOUT_US / 1e3:g} ms"
    return Observation((answer,), (Fact("promptly", ok, seen),))


def _poisoned_batch(subject: Subject, _: Door) -> Observation:
    """One request of NaN among others that are sent at the same moment; the others' answers are their solo ones."""
    model = subject.model
    if not model.batches or any(tensor.datatype not in {"FP32", "FP64"} for tensor in model.inputs):
        raise NotApplicableError("needs a batching model of FP32 or FP64 inputs")
    bodies = [model.binary(1, seed) for seed in range(1, 6)]
    solo = [subject.infer(body) for body in bodies]
    poison = model.request(arrays=[np.full_like(array, np.nan) for array in model.arrays(1)]).body()
    answers: list[Answer] = []
    moved: list[str] = []
    before = subject.statistics()["execution_count"]
    for _round in range(MERGE_ROUNDS):
        running = [Background(subject, subject.infer_bytes(body)) for body in (*bodies[:2], poison, *bodies[2:])]
        merged = [background.wait() for background in running]
        del merged[2]
        answers += merged
        differences = (output_difference(a, b, MERGED_TOLERANCE) for a, b in zip(solo, merged, strict=True))
        moved += filter(None, differences)
    executed, requests = subject.statistics()["execution_count"] - before, MERGE_ROUNDS * (len(bodies) + 1)
    equal = Fact("the others equal their solo results", not moved, moved[0] if moved else "yes")
    merging = Fact("batches were merged", executed < requests or None, f"{executed} executions of {requests} requests")
    return Observation(tuple(answers), (equal, merging))


TIMEOUT_WORDS = ("timeout", "timed out", "expired")
DROPPED = expect(note="dropped before it reaches the engine")
AS_ALONE = expect("200", note="the other rows equal their solo results")
SHED = expect("503", headers=("Retry-After",), note="at once; health never shed")
EXPIRED = expect("503", naming=TIMEOUT_WORDS, note="promptly")
GRPC_EXPIRED = expect("UNAVAILABLE", naming=TIMEOUT_WORDS, note="promptly")
CANCELLED, OVERDUE = (expect(status, note="not started") for status in ("CANCELLED", "DEADLINE_EXCEEDED"))

# fmt: off
CASES = (
    Case("14", "client leaves while queued", _leave, DROPPED, destructive=True),
    Case("22", "one NaN row inside a merged batch", _poisoned_batch, AS_ALONE),
    Case("28a", "queue full", _flood, SHED, setting=SMALL_QUEUES, destructive=True),
    Case("28b", "queue full", _flood, expect("UNAVAILABLE"), Door.GRPC, setting=SMALL_QUEUES, destructive=True),
    Case("29a", "queue timeout", _queue_timeout, EXPIRED, destructive=True),
    Case("29b", "queue timeout", _queue_timeout, GRPC_EXPIRED, Door.GRPC, destructive=True),
    Case("30a", "cancelled while queued", _cancel, CANCELLED, Door.GRPC, destructive=True),
    Case("30b", "client deadline while queued", _pass_the_deadline, OVERDUE, Door.GRPC, destructive=True),
)
# fmt: on

SECTIONS = (Section("Queue and batch", "Abandoned work is not executed; a request harms no other.", CASES),)
