"""Cases 36 to 46: language models, which stream token ids, over generate_stream, completions and ModelStreamInfer."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic, perf_counter, sleep
from typing import Any, Literal

import grpc

from loadgen.client.connection import model_path
from loadgen.client.generation import NO_CHANGES, request_fields
from loadgen.conformance.case import Case, Send, Theme
from loadgen.conformance.model import GOLDEN_PROMPT, events_of, stream_problem
from loadgen.conformance.records import Fact, NotApplicableError, Protocol, Response, Seen
from loadgen.conformance.servers import Setting, Subject
from loadgen.conformance.wire import messages, request_head

Route = Literal["generate_stream", "completions"]
RouteSend = Callable[[Subject, Route], Response | Seen]
ROUTES: tuple[tuple[Route, str], ...] = (("generate_stream", ""), ("completions", "c"))
ERROR_EVENT = "error event"
"""The status of a stream that holds an error: Triton answers a model's refusal with status 200."""
ERROR_MESSAGE = "error message"
"""The status of a gRPC stream that holds an error of a request."""
REFUSED = f"400 or {ERROR_EVENT}"
COUNT = 5
HUGE = 2**31 - 1
LEAVING_CLIENTS = 8
DEAF_CLIENTS = 4
DEAF_SECONDS = 1.0
FREE_SECONDS = 5.0
CROWD = 16
SLOT_SERIES = ("slots_in_use", "num_requests_running", "slots_active")
_QUEUE = {"queue-size": "2", "slots": "1"}
SHORT_TOKEN_QUEUES = Setting("one slot and a small queue", {"native": _QUEUE, "triton": _QUEUE}, anywhere=False)


def _document(subject: Subject, route: Route, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A valid request with these fields changed; `prompt` is the prompt on either route."""
    changed = {"prompt": GOLDEN_PROMPT, "max_tokens": COUNT, **fields}
    if route == "generate_stream":
        changed["input_ids"] = changed.pop("prompt")
    return request_fields(route, subject.model.name, NO_CHANGES) | changed


def _path(subject: Subject, route: Route) -> str:
    return "/v1/completions" if route == "completions" else f"{model_path(subject.model.name)}/generate_stream"


def _bytes(subject: Subject, route: Route, fields: Mapping[str, Any] | bytes) -> bytes:
    """A request with these fields changed, or with this body."""
    body = fields if isinstance(fields, bytes) else json.dumps(_document(subject, route, fields)).encode()
    headers = {"Content-Type": "application/json"}
    return request_head("POST", _path(subject, route), subject.authority, headers, len(body)) + body


def _require(subject: Subject, route: Route) -> None:
    """Raise `NotApplicableError` if the server does not have the route."""
    if subject.raw(_bytes(subject, route, {"max_tokens": 1})).status in ("404", "405"):
        raise NotApplicableError(f"the server does not have {_path(subject, route)}")


def _send(subject: Subject, route: Route, fields: Mapping[str, Any] | bytes) -> Response:
    """One request, its answer with the error as a message wherever that is."""
    _require(subject, route)
    return judged(subject.raw(_bytes(subject, route, fields)))


def _long_request(subject: Subject, route: Route) -> bytes:
    """A request for the longest answer."""
    _require(subject, route)
    return _bytes(subject, route, {"max_tokens": _longest(subject)})


def judged(response: Response) -> Response:
    """An error of either form as the answer's message; an error in a stream as a status of its own."""
    if response.status == "200":
        problem = stream_problem(response.body)
        return response if problem is None else replace(response, status=ERROR_EVENT, message=problem)
    try:
        error = json.loads(response.body)["error"]
        return replace(response, message=str(error["message"])) if isinstance(error, dict) else response
    except (ValueError, KeyError, TypeError, RecursionError):
        return response


def tokens(**fields: Any) -> RouteSend:
    """A request with these fields changed."""
    return lambda subject, route: _send(subject, route, fields)


def malformed(content: bytes) -> RouteSend:
    """A body that is not a request."""
    return lambda subject, route: _send(subject, route, content)


def on(route: Route, send: RouteSend) -> Send:
    """What a case sends, over one route."""
    return lambda subject, _protocol: send(subject, route)


def over_each(number: str, title: str, *sends: RouteSend, expected: str = REFUSED, **more: Any) -> list[Case]:
    """One case for each route; the number of the one over completions ends in c."""
    return [
        Case(f"{number}{letter}", f"{title} ({route})", tuple(on(route, send) for send in sends), expected, **more)
        for route, letter in ROUTES
    ]


def answer_is_whole(subject: Subject, route: Route) -> Seen:
    """A valid request: as many tokens as asked, the prompt counted, a finish reason, an end."""
    response = _send(subject, route, {})
    yield response
    if response.status != "200":
        return
    events = [event for event in events_of(response.body) if event != "[DONE]"]
    ids: list[int] = []
    finishes: list[Any] = []
    for event in events:
        for part in event.get("choices", [event]):
            found = part.get("token_ids", [])
            ids += found if isinstance(found, list) else [found]
            finishes.append(part.get("finish_reason"))
    yield Fact(f"{COUNT} token ids", len(ids) == COUNT, str(len(ids)))
    yield Fact("finish reason length", "length" in finishes or ["length"] in finishes, str(finishes[-1:]))
    counts = [event.get("prompt_tokens", (event.get("usage") or {}).get("prompt_tokens")) for event in events]
    told = [count[0] if isinstance(count, list) else count for count in counts if count is not None]
    seen = str(told[0]) if told else "no count"
    yield Fact("prompt tokens counted", told[:1] == [len(GOLDEN_PROMPT)], seen)
    if route == "completions":
        yield Fact("the stream ends with [DONE]", response.body.rstrip().endswith(b"data: [DONE]"), "")


def half_read(subject: Subject, route: Route) -> Seen:
    """Clients that leave in the middle of their streams: the slots are free, and others are answered."""
    data = _long_request(subject, route)
    for number in range(LEAVING_CLIENTS):
        connection = subject.connect()
        began = connection.send(data) and connection.receives_within(FREE_SECONDS)
        connection.close(abruptly=number % 2 == 1)
        if not began:
            yield Fact("streams begin", False, f"nothing came within {FREE_SECONDS:g} s")
    yield _slots_are_freed(subject)
    yield _send(subject, route, {})


def deaf(subject: Subject, route: Route) -> Seen:
    """Clients that do not read what they have asked for."""
    data = _long_request(subject, route)
    with ExitStack() as stack:
        for _number in range(DEAF_CLIENTS):
            stack.enter_context(subject.connect()).send(data)
        sleep(DEAF_SECONDS)
    yield _send(subject, route, {})


def crowd(subject: Subject, route: Route) -> Iterator[Response | Fact]:
    """More requests at once than one slot and a queue of two take."""
    data = _long_request(subject, route)
    statuses = []
    with ExitStack() as stack:
        connections = [stack.enter_context(subject.connect()) for _ in range(CROWD)]
        for connection in connections:
            connection.send(data)
        for connection in connections:
            response = judged(connection.request(b"", FREE_SECONDS * CROWD))
            statuses.append(response.status)
            yield response
    refused = sum(status in ("503", ERROR_EVENT) for status in statuses)
    yield Fact("some are refused and some are answered", 0 < refused < CROWD, f"{refused} of {CROWD} refused")


# Over gRPC


def _message(subject: Subject, request_id: str = "", **fields: Any) -> Any:
    """A valid request with the values of these tensors changed; None leaves one out."""
    made = messages.ModelInferRequest(model_name=subject.model.name, id=request_id)
    tensors = {"input_ids": GOLDEN_PROMPT, "max_tokens": (COUNT,), "ignore_eos": (True,), **fields}
    for name, values in tensors.items():
        if values is None:
            continue
        made.inputs.add(name=name, datatype="BOOL" if name == "ignore_eos" else "INT32", shape=[len(values)])
        made.raw_input_contents.append(struct.pack(f"<{len(values)}{'?' if name == 'ignore_eos' else 'i'}", *values))
    return made


def _streamed(subject: Subject, *sent: Any) -> tuple[list[Any], Response]:
    """All responses to requests of one stream, and how it ended: with the first error message, if it holds one."""
    started, replies = perf_counter(), []
    try:
        for content in subject.grpc_client().stream("ModelStreamInfer", sent):
            replies.append(messages.ModelStreamInferResponse.FromString(content))
    except grpc.RpcError as exc:
        error: Any = exc
        return replies, Response(error.code().name, message=error.details() or "", elapsed_s=perf_counter() - started)
    errors = [reply.error_message for reply in replies if reply.error_message]
    elapsed_s = perf_counter() - started
    return replies, Response(ERROR_MESSAGE, message=errors[0], elapsed_s=elapsed_s) if errors else Response("OK")


def grpc_tokens(**fields: Any) -> Send:
    """A request with these tensors changed."""
    return lambda subject, _: _streamed(subject, _message(subject, **fields))[1]


def _ids(replies: Iterable[Any], request_id: str = "") -> list[int]:
    """The token ids of one request."""
    ids: list[int] = []
    for reply in replies:
        answer = reply.infer_response
        for output, content in zip(answer.outputs, answer.raw_output_contents, strict=False):
            if output.name == "token_ids" and answer.id == request_id:
                ids += struct.unpack(f"<{len(content) // 4}i", content)
    return ids


def grpc_answer_is_whole(subject: Subject, _protocol: Protocol) -> Seen:
    """A valid request: as many tokens as asked, the prompt counted, a finish reason, one final response at the end."""
    replies, response = _streamed(subject, _message(subject, "a"))
    yield response
    outputs: dict[str, list[tuple[int, bytes]]] = {}
    for number, reply in enumerate(replies):
        answer = reply.infer_response
        for output, content in zip(answer.outputs, answer.raw_output_contents, strict=False):
            outputs.setdefault(output.name, []).append((number, content))
    found = _ids(replies, "a")
    yield Fact(f"{COUNT} token ids with the request's id", len(found) == COUNT, str(len(found)))
    counted = outputs.get("prompt_tokens", [])
    told = [(place, struct.unpack("<i", content)[0]) for place, content in counted]
    yield Fact("prompt tokens counted in the first response", told == [(0, len(GOLDEN_PROMPT))], str(told))
    finishes = [content[4:].decode("utf-8", "replace") for _, content in outputs.get("finish_reason", [])]
    yield Fact("finish reason length", finishes == ["length"], str(finishes))
    finals = [reply.infer_response.parameters["triton_final_response"].bool_param for reply in replies]
    yield Fact("only the last response is final", finals[-1:] == [True] and sum(finals) == 1, str(finals))


def grpc_side_by_side(subject: Subject, _protocol: Protocol) -> Seen:
    """A wrong request between two right ones of one stream: an error of its own."""
    sent = [_message(subject, "a"), _message(subject, "b", input_ids=(HUGE,)), _message(subject, "c")]
    replies, response = _streamed(subject, *sent)
    yield response
    for name in ("a", "c"):
        count = len(_ids(replies, name))
        yield Fact(f"{COUNT} token ids of request {name}", count == COUNT, str(count))
    named = [reply.infer_response.id for reply in replies if reply.error_message]
    yield Fact("the error has the id of its request", named == ["b"], str(named))


def grpc_half_read(subject: Subject, _protocol: Protocol) -> Seen:
    """Clients that cancel in the middle of their streams: the slots are free, and others are answered."""
    for _ in range(LEAVING_CLIENTS):
        call = subject.grpc_client().stream("ModelStreamInfer", [_message(subject, max_tokens=(_longest(subject),))])
        try:
            next(call)
        except (grpc.RpcError, StopIteration):
            yield Fact("streams begin", False, "no response came")
        call.cancel()
    yield _slots_are_freed(subject)
    yield _streamed(subject, _message(subject))[1]


def grpc_deaf(subject: Subject, _protocol: Protocol) -> Seen:
    """Clients that do not take the responses that they have asked for."""
    sent = [_message(subject, max_tokens=(_longest(subject),))]
    calls = [subject.grpc_client().stream("ModelStreamInfer", sent) for _ in range(DEAF_CLIENTS)]
    sleep(DEAF_SECONDS)
    for call in calls:
        call.cancel()
    yield _streamed(subject, _message(subject))[1]


def grpc_crowd(subject: Subject, _protocol: Protocol) -> Seen:
    """More requests in one stream than one slot and a queue of two take."""
    sent = [_message(subject, str(number), max_tokens=(_longest(subject),)) for number in range(CROWD)]
    replies, response = _streamed(subject, *sent)
    yield response
    refused = sum(bool(reply.error_message) for reply in replies)
    answered = sum(bool(_ids(replies, str(number))) for number in range(CROWD))
    seen = f"{refused} of {CROWD} refused, {answered} answered"
    yield Fact("some are refused and some are answered", refused > 0 < answered and refused + answered == CROWD, seen)


def _slots_are_freed(subject: Subject) -> Fact:
    """Whether the slots become free soon."""
    deadline = monotonic() + FREE_SECONDS
    while (used := _slots_in_use(subject)) and monotonic() < deadline:
        sleep(0.02)
    seen = "the server's metrics do not say" if used is None else f"{used:g} in use"
    return Fact(f"all slots free within {FREE_SECONDS:g} s", None if used is None else used == 0, seen)


def _longest(subject: Subject) -> int:
    """The most tokens that an answer to the golden prompt may have, at most 512; 32 if the server does not say."""
    limit = subject.model.parameters.get("max_length", "")
    return min(512, int(limit) - len(GOLDEN_PROMPT)) if limit.isdigit() else 32


def _slots_in_use(subject: Subject) -> float | None:
    samples = subject.metrics() or {}
    values = [value for series, value in samples.items() if any(name in series for name in SLOT_SERIES)]
    return sum(values) if values else None


OVER_GRPC = (
    Case("36g", "A valid request is answered whole (ModelStreamInfer)", grpc_answer_is_whole, "OK"),
    Case(
        "37g",
        "Token ids that do not exist (ModelStreamInfer)",
        (grpc_tokens(input_ids=(HUGE,)), grpc_tokens(input_ids=(-1,))),
        ERROR_MESSAGE,
    ),
    Case(
        "38g",
        "An empty prompt, or none (ModelStreamInfer)",
        (grpc_tokens(input_ids=()), grpc_tokens(input_ids=None)),
        ERROR_MESSAGE,
    ),
    Case(
        "39g",
        "More tokens than the model takes (ModelStreamInfer)",
        (grpc_tokens(max_tokens=(HUGE,)), grpc_tokens(input_ids=(5,) * 300_000)),
        f"{ERROR_MESSAGE} or RESOURCE_EXHAUSTED",
    ),
    Case(
        "40g",
        "max_tokens 0, negative or missing (ModelStreamInfer)",
        (grpc_tokens(max_tokens=(0,)), grpc_tokens(max_tokens=(-1,)), grpc_tokens(max_tokens=None)),
        ERROR_MESSAGE,
    ),
    Case("43g", "Clients that cancel in the middle of a stream (ModelStreamInfer)", grpc_half_read, "OK"),
    Case("44g", "Clients that do not read their streams (ModelStreamInfer)", grpc_deaf, "OK", peak_mib=64),
    Case(
        "45g",
        "More requests than may wait (ModelStreamInfer)",
        grpc_crowd,
        f"OK or {ERROR_MESSAGE}",
        setting=SHORT_TOKEN_QUEUES,
    ),
    Case("46g", "An error of one request of a stream leaves the others alone", grpc_side_by_side, ERROR_MESSAGE),
)
OVER_HTTP = (
    *over_each("36", "A valid request is answered whole", answer_is_whole, expected="200"),
    *over_each(
        "37",
        "Token ids that do not exist",
        *(tokens(prompt=prompt) for prompt in ([HUGE], [-1], [5.5], ["x"], [2**70], [None])),
    ),
    *over_each("38", "An empty prompt, or none", tokens(prompt=[]), tokens(prompt=None), tokens(prompt={})),
    *over_each(
        "39",
        "More tokens than the model takes",
        tokens(max_tokens=HUGE),
        tokens(prompt=[5] * 300_000),
        expected=f"400 or 413 or {ERROR_EVENT}",
    ),
    *over_each("40", "max_tokens 0, negative or not a number", *(tokens(max_tokens=n) for n in (0, -1, "x"))),
    *over_each("41", "Two answers to one prompt", tokens(n=2), naming=("n ", "n=", "n:", "'n'", "best_of")),
    *over_each("42", "JSON that is not a request", malformed(b"{"), malformed(b"[]"), malformed(b"\xff\xfe")),
    *over_each("43", "Clients that leave in the middle of a stream", half_read, expected="200"),
    *over_each("44", "Clients that do not read their streams", deaf, expected="200", peak_mib=64),
    *over_each(
        "45", "More requests than may wait", crowd, expected=f"200 or 503 or {ERROR_EVENT}", setting=SHORT_TOKEN_QUEUES
    ),
)
CASES = tuple(sorted((*OVER_HTTP, *OVER_GRPC), key=lambda case: case.order))
LANGUAGE = Theme(
    "Language models",
    "A stream that holds an error, ends early or counts other tokens than it sends makes a comparison worthless; a "
    "client that leaves must not keep its slot, and a prompt that cannot be answered must not stop the loop that all "
    "share.",
    CASES,
)
