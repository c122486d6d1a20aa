"""Cases 14, 22 and 28 to 30: what happens to requests that wait, share a batch, or whose clients give up."""

from __future__ import annotations

from time import perf_counter, sleep

import numpy as np

from loadgen.conformance.case import Case
from loadgen.conformance.grpc_calls import finish, infer_message
from loadgen.conformance.occupation import Background, Occupation, single_row, wait_for
from loadgen.conformance.records import Answer, Door, Expectation, Fact, NotApplicableError, Observation
from loadgen.conformance.settings import SMALL_QUEUE, SMALL_QUEUES
from loadgen.conformance.subject import Subject, output_difference
from loadgen.conformance.wire import all_read

VICTIMS = 4
FLOOD = 12
ARRIVAL_SECONDS = 5.0
PROMPT_SECONDS = 0.5
TIMEOUT_US = 50_000
MERGED_TOLERANCE = 1e-4
MERGE_ROUNDS = 5


def _leave_while_queued(subject: Subject) -> Observation:
    occupation = Occupation(subject)
    before = _settled(subject)
    with occupation:
        request = subject.infer_bytes(single_row(subject.model))
        connections = [subject.connect() for _ in range(VICTIMS)]
        for connection in connections:
            connection.send(request)
        # They have to be in the queue when their clients leave, not in a socket's buffer.
        wait_for(lambda: all_read(connections), ARRIVAL_SECONDS)
        sleep(0.2)
        for index, connection in enumerate(connections):
            connection.close(abruptly=index % 2 == 0)
        left_in_time = occupation.busy
    executed = _settled(subject) - before - occupation.rows_executed
    return Observation(facts=(_dropped(executed, left_in_time),))


def _dropped(executed: int, in_time: bool) -> Fact:
    if not in_time:
        raise NotApplicableError("the queue was empty before the clients had left; launch a slower engine")
    # Fewer rows than were answered would mean that the statistics cannot be relied on.
    seen = f"{executed} of {VICTIMS} requests without client executed"
    return Fact("dropped before the engine", None if executed < 0 else executed == 0, seen)


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


def _given_up(subject: Subject, *, cancel: bool) -> Observation:
    door = subject.call()
    occupation = Occupation(subject)
    before = _settled(subject)
    with occupation:
        started = perf_counter()
        message = infer_message(subject.model, seed=1)
        futures = [door.start("ModelInfer", message, 30.0 if cancel else 0.2) for _ in range(VICTIMS)]
        if cancel:
            sleep(0.1)
            for future in futures:
                future.cancel()
        answers = tuple(finish(future, started) for future in futures)
        in_time = occupation.busy
    executed = _settled(subject) - before - occupation.rows_executed
    return Observation(answers, (_dropped(executed, in_time),))


def _flood(subject: Subject) -> Observation:
    """More requests than the queue holds, while the engine is busy and health is asked."""
    request = subject.infer_bytes(single_row(subject.model))
    health: list[Answer] = []
    with Occupation(subject, limit=SMALL_QUEUE) as occupation:
        flood = [Background(subject, request) for _ in range(FLOOD)]
        while occupation.busy:
            health += [subject.http("GET", f"/v2/health/{kind}", deadline_s=5.0) for kind in ("live", "ready")]
            sleep(0.02)
    answers = [background.wait() for background in flood]
    refused = [answer for answer in answers if answer.status != "200"]
    slowest = max((answer.elapsed_s for answer in refused), default=0.0)
    shed = [answer for answer in health if answer.status != "200" or answer.elapsed_s > 1.0]
    return Observation(
        tuple(refused),
        (
            Fact("some are refused", bool(refused), f"{len(refused)} of {FLOOD}"),
            Fact("at once", slowest < PROMPT_SECONDS, f"slowest {slowest * 1e3:.0f} ms"),
            Fact("health never shed", not shed, f"{len(shed)} of {len(health)} refused or slow"),
        ),
    )


def _grpc_flood(subject: Subject) -> Observation:
    door = subject.call()
    message = infer_message(subject.model, seed=1)
    with Occupation(subject, limit=SMALL_QUEUE):
        started = perf_counter()
        futures = [door.start("ModelInfer", message, 30.0) for _ in range(FLOOD)]
        answers = [finish(future, started) for future in futures]
    refused = tuple(answer for answer in answers if answer.status != "OK")
    return Observation(refused, (Fact("some are refused", bool(refused), f"{len(refused)} of {FLOOD}"),))


def _queue_timeout(subject: Subject) -> Observation:
    body = subject.model.binary(1, 1, parameters={"binary_data_output": True, "timeout": TIMEOUT_US})
    with Occupation(subject) as occupation:
        answer = subject.infer(body, deadline_s=30.0)
        in_time = occupation.busy
    return Observation((answer,), (_prompt(answer, in_time),))


def _grpc_queue_timeout(subject: Subject) -> Observation:
    message = infer_message(subject.model, seed=1)
    message.parameters["timeout"].int64_param = TIMEOUT_US
    door = subject.call()
    with Occupation(subject) as occupation:
        answer = door.infer(message)
        in_time = occupation.busy
    return Observation((answer,), (_prompt(answer, in_time),))


def _prompt(answer: Answer, in_time: bool) -> Fact:
    ok = in_time and answer.elapsed_s < TIMEOUT_US / 1e6 + PROMPT_SECONDS
    return Fact("promptly", ok, f"after {answer.elapsed_s * 1e3:.0f} ms with a timeout of {TIMEOUT_US / 1e3:g} ms")


def _poisoned_batch(subject: Subject) -> Observation:
    """One request of NaN among others that are sent at the same moment; the others' answers are their solo ones."""
    model = subject.model
    if not model.batches or any(tensor.datatype not in {"FP32", "FP64"} for tensor in model.inputs):
        raise NotApplicableError("needs a batching model of FP32 or FP64 inputs")
    bodies = [model.binary(1, seed) for seed in range(1, 6)]
    solo = [subject.infer(body) for body in bodies]
    poison = model.binary_of([np.full_like(array, np.nan) for array in model.arrays(1).values()], 1)
    answers: list[Answer] = []
    moved: list[str] = []
    before = subject.statistics()
    for _ in range(MERGE_ROUNDS):
        every = [*bodies[:2], poison, *bodies[2:]]
        running = [Background(subject, subject.infer_bytes(body)) for body in every]
        merged = [background.wait() for background in running]
        del merged[2]
        answers += merged
        differences = (output_difference(a, b, MERGED_TOLERANCE) for a, b in zip(solo, merged, strict=True))
        moved += [difference for difference in differences if difference]
    after = subject.statistics()
    executed = after["execution_count"] - before["execution_count"]
    merged_at_all = executed < MERGE_ROUNDS * (len(bodies) + 1)
    return Observation(
        tuple(answers),
        (
            Fact("the others equal their solo results", not moved, moved[0] if moved else "yes"),
            Fact(
                "batches were merged",
                True if merged_at_all else None,
                f"{executed} executions of {MERGE_ROUNDS * (len(bodies) + 1)} requests",
            ),
        ),
    )


CASES = (
    Case(
        number="14",
        title="client leaves while queued",
        probe=_leave_while_queued,
        expected=Expectation(note="dropped before it reaches the engine"),
        destructive=True,
    ),
    Case(
        number="22",
        title="one NaN row inside a merged batch",
        probe=_poisoned_batch,
        expected=Expectation(statuses=("200",), note="the other rows equal their solo results"),
    ),
    Case(
        number="28a",
        title="queue full",
        probe=_flood,
        expected=Expectation(statuses=("503",), headers=("Retry-After",), note="at once; health never shed"),
        setting=SMALL_QUEUES,
        destructive=True,
    ),
    Case(
        number="28b",
        title="queue full",
        door=Door.GRPC,
        probe=_grpc_flood,
        expected=Expectation(statuses=("UNAVAILABLE",)),
        setting=SMALL_QUEUES,
        destructive=True,
    ),
    Case(
        number="29a",
        title="queue timeout",
        probe=_queue_timeout,
        expected=Expectation(statuses=("503",), mentions=(("timeout", "timed out", "expired"),), note="promptly"),
        destructive=True,
    ),
    Case(
        number="29b",
        title="queue timeout",
        door=Door.GRPC,
        probe=_grpc_queue_timeout,
        expected=Expectation(
            statuses=("UNAVAILABLE",), mentions=(("timeout", "timed out", "expired"),), note="promptly"
        ),
        destructive=True,
    ),
    Case(
        number="30a",
        title="cancelled while queued",
        door=Door.GRPC,
        probe=lambda subject: _given_up(subject, cancel=True),
        expected=Expectation(statuses=("CANCELLED",), note="not started"),
        destructive=True,
    ),
    Case(
        number="30b",
        title="client deadline while queued",
        door=Door.GRPC,
        probe=lambda subject: _given_up(subject, cancel=False),
        expected=Expectation(statuses=("DEADLINE_EXCEEDED",), note="not started"),
        destructive=True,
    ),
)
