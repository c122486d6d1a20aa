"""Language models on the wire: the forms of a request, and what a stream of events says.

    completions       POST /v1/completions of OpenAI's API: chunks with text and ids, then the usage, then [DONE]
    generate_stream   POST /v2/models/MODEL/generate_stream of Triton's generate extension: an event per response
    text              completions whose prompt is text
    chat              POST /v1/chat/completions of OpenAI's API: one message of a user, then chunks of the answer

Prompts and answers are token ids; a server that takes text gets the words t0, t1, … for them. A chunk counts as many
tokens as it has ids. Without ids it counts as many as the server's running count of completion tokens grew by; without
that, as many as its text has such words; without those, as one. A chunk without any of them, such as a chat's first one
with only a role, is not a chunk with tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from secrets import token_hex
from typing import Annotated, Any, NamedTuple

import msgspec

from loadgen.client.connection import Address, PreparedRequest, ResponseError
from loadgen.client.event_stream import ReceivedStream
from loadgen.client.http import request_head
from loadgen.documents import one_line
from loadgen.experiment.prompts import MOST_ID, Ids, PromptPlan, PromptShape, Trace
from loadgen.records.run import TEXT_TRANSPORTS, TOKENS_PLACE, TokenTransport
from loadgen.records.tokens import ASSUMED, BY_USAGE, COALESCED, LENGTH, OTHER, STOP, UNKNOWN

_SALT_BYTES = 8
_WORDS = re.compile(r"\s*t\d{1,9}(?:\s+t\d{1,9})*\s*")
_FINISH = {None: UNKNOWN, "length": LENGTH, "stop": STOP, "eos": STOP, "eos_token": STOP, "stop_sequence": STOP}
_DONE = b"[DONE]"

RequestBody = Mapping[str, object]
"""Changes of the fields of a request: a value adds or replaces one, None leaves it out."""
NO_CHANGES: RequestBody = {}
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]


# Requests


def request_fields(transport: TokenTransport, model: str, body: RequestBody) -> dict[str, object]:
    """The fields of a request beside its prompt and its salt, with those of `body`."""
    fields: dict[str, object] = {"max_tokens": TOKENS_PLACE, "ignore_eos": True}
    if transport != "generate_stream":
        fields = {
            "model": model,
            "max_tokens": TOKENS_PLACE,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    return {name: value for name, value in (fields | dict(body)).items() if value is not None}


def takes_salt(transport: TokenTransport, body: RequestBody) -> bool:
    """Whether a request has a salt, which only completions know."""
    return transport in ("completions", "text") and "cache_salt" not in body


def prompt_request(
    transport: TokenTransport, model: str, prompt: Sequence[bytes], max_tokens: int, *, salt: str | None = None,
    body: RequestBody = NO_CHANGES,
) -> PreparedRequest:  # fmt: skip
    """One request without a head. `prompt` is the encoded prompt in three pieces, of which the middle one varies. With
    a salt, which varies too, the prompt is never found in a cache."""
    document: dict[str, object] = {"prompt": "" if transport == "text" else []}
    closing = b'"' if transport == "text" else b"]"
    if transport == "chat":
        document, closing = {"messages": [{"role": "user", "content": ""}]}, b'"}]'
    if transport == "generate_stream":
        document = {"input_ids": []}
    if not takes_salt(transport, body):
        salt = None
    head = msgspec.json.encode(document)[: -len(closing) - 1]
    fields = msgspec.json.encode(request_fields(transport, model, body))
    fields = fields.replace(b'"%b"' % TOKENS_PLACE.encode(), b"%d" % max_tokens)
    tail = closing + b"," * (fields != b"{}") + fields[1:-1]
    before, varying, after = prompt
    pieces: tuple[bytes, ...] = (head + before, varying, after + tail + b"}")
    if salt is not None:
        pieces = (head + before, varying, after + tail + b',"cache_salt":"', salt.encode(), b'"}')
    return PreparedRequest(b"", b"".join(pieces), sum(map(len, prompt)), pieces, max_tokens)


def stream_path(transport: TokenTransport, address: Address, model: str) -> str:
    """The route to which prompts go."""
    if transport == "generate_stream":
        return f"{address.model_path(model)}/generate_stream"
    return address.openai_path("chat/completions" if transport == "chat" else "completions")


def for_stream(request: PreparedRequest, transport: TokenTransport, address: Address, model: str) -> PreparedRequest:
    """The request with the head for one server; the body is shared."""
    path = stream_path(transport, address, model)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    return replace(request, head=request_head("POST", path, address, content_length=len(request.body), headers=headers))


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """The requests of one shape or of a trace, and the numbers that make each of them new."""

    requests: tuple[PreparedRequest, ...]
    prepared: tuple[Ids, ...]
    """The prompt of each, without the ids that are made from a number."""
    shapes: tuple[PromptShape, ...]
    """The shape of each."""
    plan: PromptPlan
    salted: bool
    numbers: Iterator[int]

    def patches(self, body: int) -> tuple[int, Sequence[bytes]]:
        """The number of the next request, and the bytes at the places that vary."""
        number = next(self.numbers)
        patch = self.plan.patch(number, self.plan.varying(self.shapes[body]))
        return number, [patch, token_hex(_SALT_BYTES).encode()] if self.salted else [patch]

    def prompt(self, body: int, number: int) -> Ids:
        """The prompt that was sent with this body and this number."""
        return self.plan.with_number(self.prepared[body], self.shapes[body], number)

    def replay(self, number: int) -> PreparedPrompts:
        """The same requests, all with this number: those of one replay of a trace, by any number of processes."""
        return replace(self, numbers=repeat(number))


def in_form_of(transport: TokenTransport, plan: PromptPlan) -> PromptPlan:
    """The plan with prompts as the transport takes them: ids, or words."""
    return msgspec.structs.replace(plan, text=transport in TEXT_TRANSPORTS)


def prepare_prompts(
    transport: TokenTransport, model: str, plan: PromptPlan, shape: PromptShape, numbers: Iterator[int],
    body: RequestBody = NO_CHANGES,
) -> PreparedPrompts:  # fmt: skip
    """Encode the bodies of a shape. Prompts with a shared prefix have no salt, so that servers may share it. Raises
    `PromptError`."""
    plan = in_form_of(transport, plan)
    salted = takes_salt(transport, body) and not shape.shared_prefix
    prepared = plan.prepared(shape)
    requests = tuple(_encoded(transport, model, plan, shape, ids, body, salted=salted) for ids in prepared)
    return PreparedPrompts(requests, prepared, (shape,) * len(prepared), plan, salted, numbers)


def prepare_trace(
    transport: TokenTransport, model: str, plan: PromptPlan, trace: Trace, numbers: Iterator[int],
    body: RequestBody = NO_CHANGES,
) -> PreparedPrompts:  # fmt: skip
    """Encode a body for every request of a trace. They have no salt, so that servers may share what has the same
    hashes. Raises `PromptError`."""
    plan = in_form_of(transport, plan)
    shapes = tuple(request.shape for request in trace.requests())
    for shape in set(shapes):
        plan.require(shape)
    prepared = tuple(plan.traced(place, request) for place, request in enumerate(trace.requests()))
    requests = tuple(
        _encoded(transport, model, plan, shape, ids, body, salted=False)
        for shape, ids in zip(shapes, prepared, strict=True)
    )
    return PreparedPrompts(requests, prepared, shapes, plan, False, numbers)


def _encoded(
    transport: TokenTransport, model: str, plan: PromptPlan, shape: PromptShape, ids: Ids, body: RequestBody, *,
    salted: bool,
) -> PreparedRequest:  # fmt: skip
    separator = b" " if plan.text else b","
    start, count = shape.shared_prefix, plan.varying(shape)
    before, after = plan.encode(ids[:start]), plan.encode(ids[start + count :])
    pieces = (before + separator if before else b"", plan.patch(0, count), separator + after if after else b"")
    salt = "0" * 2 * _SALT_BYTES if salted else None
    return prompt_request(transport, model, pieces, shape.output_tokens, salt=salt, body=body)


# Answers


class UsageCounts(msgspec.Struct, frozen=True):
    """The usage that a server reports."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk of a chat adds to the message. A reasoning model's thoughts are tokens like others."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class ChoicePart(msgspec.Struct, frozen=True):
    """What a chunk of a completion or of a chat adds to the answer."""

    index: int = 0
    text: str | None = None
    delta: ChatDelta | None = None
    token_ids: list[TokenId] | TokenId | None = None
    prompt_token_ids: list[TokenId] | None = None
    finish_reason: str | None = None


class AnswerEvent(msgspec.Struct, frozen=True):
    """The data of an event, of either protocol."""

    choices: list[ChoicePart] | None = None
    usage: UsageCounts | None = None
    error: Any = None
    token_ids: list[TokenId] | TokenId | None = None
    text: str | list[str] | None = msgspec.field(default=None, name="text_output")
    prompt_tokens: list[Count] | Count | None = None
    prompt_token_ids: list[TokenId] | None = None
    finish_reason: str | list[str] | None = None
    object: str | None = None
    message: str | None = None


class TokenChunk(NamedTuple):
    """One chunk with tokens."""

    tokens: int
    at_ns: int
    flags: int


@dataclass(slots=True)
class StreamedAnswer:
    """What a stream says. Counts that the server does not report are -1."""

    chunks: list[TokenChunk] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """The ids of the answer, of the chunks that have them."""
    output_tokens: int = 0
    prompt_ids: list[int] | None = None
    """The prompt as the server echoes it."""
    prompt_tokens: int = -1
    usage_tokens: int = -1
    cached_tokens: int = -1
    finish_reason: str | None = None
    error: str | None = None
    """Why it is not an answer: an error event, or an event that cannot be read."""
    ended: bool = False
    """Whether the server said that it is the end: [DONE] or a finish reason."""
    torn: bool = False
    """Whether it ended inside an event."""
    sends_ids: bool = False
    """Whether the server sends ids, so that a chunk without any has no tokens."""
    sent_ns: int = 0

    @property
    def has_ids(self) -> bool:
        """Whether every token came with its id."""
        return 0 < self.output_tokens == len(self.ids)

    @property
    def counted(self) -> bool:
        """Whether all tokens were counted; without ids, counts and words chunks are counted instead."""
        return self.usage_tokens >= 0 or not any(chunk.flags & ASSUMED for chunk in self.chunks)

    @property
    def finish(self) -> int:
        """The code of the finish reason in `ANSWER_DTYPE`."""
        return _FINISH.get(self.finish_reason, OTHER)

    def fault(self, asked: int, failure: str | None = None, *, of_any_length: bool = False) -> str | None:
        """Why this is not a good answer of `asked` tokens, as a sentence; None if it is. `failure` is that of the
        connection."""
        progress = f"{self.output_tokens:,} of {asked:,} tokens"
        if failure is not None:
            return f"{failure} (after {progress})" if self.output_tokens else failure
        if self.error is not None:
            return f"{self.error} (after {progress})" if self.output_tokens else self.error
        if self.torn:
            return f"the stream ended inside an event after {progress}"
        if self.output_tokens == asked or (not self.counted and self.finish == LENGTH):
            return None
        if of_any_length and self.output_tokens:
            return None
        if not self.ended:
            return f"the stream ended without a finish reason after {progress}"
        reason = self.finish_reason
        words = "no finish reason" if reason is None else f"finish reason {one_line(reason, 40)}"
        return f"answered {progress} ({words})"


_DECODER = msgspec.json.Decoder(AnswerEvent)


def read_answer_stream(stream: ReceivedStream) -> StreamedAnswer:
    """Take a stream apart; what cannot be read ends it with an `error`."""
    answer = StreamedAnswer()
    try:
        events = stream.events()
    except ResponseError as exc:
        answer.error = str(exc)
        return answer
    last_read = -1
    for number, (kind, data, read, ended) in enumerate(events):
        if data == _DONE:
            answer.ended = True
            break
        try:
            event = _DECODER.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
            if not ended:
                answer.torn = True
                break
            answer.error = f"event {number + 1:,} of the stream cannot be read: {one_line(str(exc), 100)}"
            return answer
        if (error := _error(kind, event)) is not None:
            answer.error = f"error event: {error}"
            return answer
        tokens, flags = _add(answer, event)
        if tokens:
            flags |= COALESCED if read == last_read else 0
            last_read = read
            answer.output_tokens += tokens
            answer.chunks.append(TokenChunk(tokens, stream.moments[read], flags))
    _assume_rest(answer)
    return answer


def _error(kind: bytes, event: AnswerEvent) -> str | None:
    """The server's words for an error, if the event is one."""
    words = event.error
    if words is None and (event.object == "error" or kind == b"error"):
        words = event.message or "without a message"
    if isinstance(words, dict):
        words = words.get("message", words)
    return None if words is None else one_line(str(words), 200)


def _add(answer: StreamedAnswer, event: AnswerEvent) -> tuple[int, int]:
    """Add one event; returns its tokens and the flags that say how they were counted."""
    choice = next((part for part in event.choices or () if part.index == 0), None)
    part, delta = choice or event, None if choice is None else choice.delta
    usage, counts = event.usage, event.prompt_tokens
    if counts is not None and counts != []:
        answer.prompt_tokens = counts if isinstance(counts, int) else counts[0]
    if usage is not None:
        _add_usage(answer, usage)
    for echo in (event.prompt_token_ids, part.prompt_token_ids):
        if echo is not None:
            answer.prompt_ids = echo
    text, reason = _joined(part.text) if delta is None else delta.text, _joined(part.finish_reason)
    if reason:
        answer.finish_reason, answer.ended = reason, True
    if (ids := part.token_ids) is not None:
        added = [ids] if isinstance(ids, int) else ids
        answer.ids += added
        answer.sends_ids = answer.sends_ids or bool(added)
        return len(added), 0
    if answer.sends_ids or event.choices == []:  # without choices it is the usage of the whole answer
        return 0, 0
    if delta is not None and delta.role is not None and not text and not reason:
        return 0, 0  # what it is the role of has yet to come, whatever the server's count says
    if usage is not None and usage.completion_tokens is not None:
        return max(0, usage.completion_tokens - answer.output_tokens), BY_USAGE
    if not text:
        return 0, 0
    if delta is None and _WORDS.fullmatch(text):
        words = [int(word[1:]) for word in text.split()]
        answer.ids += words
        return len(words), 0
    return 1, ASSUMED


def _joined(words: str | list[str] | None) -> str:
    return "".join(words) if isinstance(words, list) else words or ""


def _add_usage(answer: StreamedAnswer, usage: UsageCounts) -> None:
    if usage.prompt_tokens is not None:
        answer.prompt_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        answer.usage_tokens = usage.completion_tokens
    cached = (usage.prompt_tokens_details or {}).get("cached_tokens")
    if isinstance(cached, int) and 0 <= cached <= MOST_ID:
        answer.cached_tokens = cached


def _assume_rest(answer: StreamedAnswer) -> None:
    """Where chunks were counted as one token each and the server reports a larger total, the last one has the rest."""
    rest = answer.usage_tokens - answer.output_tokens
    if rest > 0 and answer.chunks and answer.chunks[-1].flags & ASSUMED:
        last = answer.chunks[-1]
        answer.chunks[-1] = last._replace(tokens=last.tokens + rest)
        answer.output_tokens += rest
