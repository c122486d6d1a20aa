"""Language models on the wire: the forms of a request, and what a stream of events says.

    completions       POST /v1/completions of OpenAI's API: chunks with text and ids, then the usage, then [DONE]
    generate_stream   POST /v2/models/MODEL/generate_stream of Triton's generate extension: an event per response
    text              completions whose prompt is text
    chat              POST /v1/chat/completions of OpenAI's API: one message of a user, then chunks of the answer

Prompts and answers are token ids; a server that takes text gets the words t0, t1, … for them. How the tokens of an
answer are counted, and at which times, stands at `_AnswerReading`; what follows from it in `loadgen.metrics.tokens`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise, repeat
from operator import attrgetter
from secrets import token_hex
from typing import Annotated, Any, NamedTuple, Self

import msgspec

from loadgen.base.documents import one_line
from loadgen.client.connection import Address, Exchange, PreparedRequest, ResponseError, server_words, unasked_coding
from loadgen.client.event_stream import ReceivedStream, StreamEvent
from loadgen.client.http import request_head
from loadgen.experiment.prompts import MOST_ID, Ids, PromptPlan, PromptShape
from loadgen.records.run import TOKENS_PLACE
from loadgen.records.targets import ROUTES, TokenTransport
from loadgen.records.tokens import (
    BY_EVENTS,
    BY_IDS,
    BY_LENGTH,
    BY_RUNNING_USAGE,
    BY_TOTAL_USAGE,
    BY_WORDS,
    LENGTH,
    OTHER,
    STOP,
    UNCOUNTED,
    UNKNOWN,
)

_SALT_BYTES = 8
_WORDS = re.compile(r"\s*t\d{1,9}(?:\s+t\d{1,9})*\s*")
_FINISH = {
    None: UNKNOWN, "length": LENGTH, "max_tokens": LENGTH, "stop": STOP, "eos": STOP, "eos_token": STOP,
    "stop_sequence": STOP,
}  # fmt: skip
_DONE = b"[DONE]"
_SHOWN_BYTES = 400
MORE_TOKENS = 64
"""So many more tokens than asked for are read of an answer: enough to say that it is too long."""
FASTEST_TOKEN_NS = 20_000
"""The least time that a model takes for a token of one answer. The nominal bandwidth of an H200 allows 55 µs for GPT-2
small, whose weights are read for each."""
WITHOUT_TEXT = 16
"""So many tokens of an answer may have no text, such as those that end one."""
_NOT_TEXT = frozenset({"role", "id", "type", "index", "format", "signature"})
"""Fields in a chat's delta whose strings are no part of the answer."""
_THOUGHTS = ("reason", "think")
"""How the names of fields begin that hold the thoughts of a reasoning model."""
_THINKS = "<think"
"""How the text of a model begins that writes its thoughts into the answer."""
_LEAST_REPEATING = 3

RequestBody = Mapping[str, object]
"""Changes of the fields of a request: a value adds or replaces one, None leaves it out."""
NO_CHANGES: RequestBody = {}
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]


# Requests


def _openai_fields(model: str) -> dict[str, object]:
    return {
        "model": model,
        "max_tokens": TOKENS_PLACE,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How one transport asks for tokens. A prompt stands before `closing` at the end of `document`."""

    document: Mapping[str, object]
    closing: bytes
    path: Callable[[Address, str], str] = lambda address, _: address.openai_path("completions")
    """The route, given the server and the model."""
    fields: Callable[[str], dict[str, object]] = _openai_fields
    """The usual fields beside the prompt and the salt, given the model."""
    takes_salt: bool = False
    """Whether requests may have a salt."""


PROMPT_FORMS: Mapping[TokenTransport, PromptForm] = {
    "completions": PromptForm({"prompt": []}, b"]", takes_salt=True),
    "generate_stream": PromptForm(
        {"input_ids": []}, b"]", lambda address, model: f"{address.model_path(model)}/generate_stream",
        lambda _: {"max_tokens": TOKENS_PLACE, "ignore_eos": True},
    ),
    "text": PromptForm({"prompt": ""}, b'"', takes_salt=True),
    "chat": PromptForm(
        {"messages": [{"role": "user", "content": ""}]}, b'"}]',
        lambda address, _: address.openai_path("chat/completions"),
    ),
}  # fmt: skip


def request_fields(transport: TokenTransport, model: str, body: RequestBody) -> dict[str, object]:
    """The fields of a request beside its prompt and its salt, with those of `body`."""
    fields = PROMPT_FORMS[transport].fields(model) | dict(body)
    return {name: value for name, value in fields.items() if value is not None}


def takes_salt(transport: TokenTransport, body: RequestBody) -> bool:
    """Whether a request has a salt."""
    return PROMPT_FORMS[transport].takes_salt and "cache_salt" not in body


def prompt_request(
    transport: TokenTransport, model: str, prompt: Sequence[bytes], max_tokens: int, *, salt: str | None = None,
    body: RequestBody = NO_CHANGES,
) -> PreparedRequest:  # fmt: skip
    """One request without a head. `prompt` is the encoded prompt in three pieces, of which the middle one varies. With
    a salt, which varies too, the prompt is never found in a cache."""
    form = PROMPT_FORMS[transport]
    if not takes_salt(transport, body):
        salt = None
    head = msgspec.json.encode(form.document)[: -len(form.closing) - 1]
    fields = msgspec.json.encode(request_fields(transport, model, body))
    fields = fields.replace(b'"%b"' % TOKENS_PLACE.encode(), b"%d" % max_tokens)
    tail = form.closing + b"," * (fields != b"{}") + fields[1:-1]
    before, varying, after = prompt
    pieces: tuple[bytes, ...] = (head + before, varying, after + tail + b"}")
    if salt is not None:
        pieces = (head + before, varying, after + tail + b',"cache_salt":"', salt.encode(), b'"}')
    return PreparedRequest(b"", b"".join(pieces), sum(map(len, prompt)), pieces, max_tokens)


def for_stream(request: PreparedRequest, transport: TokenTransport, address: Address, model: str) -> PreparedRequest:
    """The request with the head for one server; the body is shared."""
    path = PROMPT_FORMS[transport].path(address, model)
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

    def window(self, first: int, count: int, number: int) -> Self:
        """The requests of one replay, all with this number, by any number of processes."""
        block = slice(first, first + count)
        return replace(
            self, requests=self.requests[block], prepared=self.prepared[block], shapes=self.shapes[block],
            numbers=repeat(number),
        )  # fmt: skip


def in_form_of(transport: TokenTransport, plan: PromptPlan) -> PromptPlan:
    """The plan with prompts as the transport takes them: ids, or words."""
    return msgspec.structs.replace(plan, text=ROUTES[transport].is_text)


def prepare_prompts(
    transport: TokenTransport, model: str, plan: PromptPlan, shape: PromptShape, numbers: Iterator[int],
    body: RequestBody = NO_CHANGES,
) -> PreparedPrompts:  # fmt: skip
    """Encode the bodies of a shape. Prompts with a shared prefix have no salt, so that servers may share it. Raises
    `PromptError`."""
    plan = in_form_of(transport, plan)
    salted = takes_salt(transport, body) and not shape.shared_prefix
    prepared = plan.prepared(shape)
    requests = tuple(encoded(transport, model, plan, shape, ids, body, salted=salted) for ids in prepared)
    return PreparedPrompts(requests, prepared, (shape,) * len(prepared), plan, salted, numbers)


def encoded(
    transport: TokenTransport, model: str, plan: PromptPlan, shape: PromptShape, ids: Ids, body: RequestBody, *,
    salted: bool,
) -> PreparedRequest:  # fmt: skip
    """The body of one prompt, with the place of the ids that are made from its number."""
    separator = b" " if plan.text else b","
    start, count = shape.shared_prefix, plan.varying(shape)
    before, after = plan.encode(ids[:start]), plan.encode(ids[start + count :])
    pieces = (before + separator if before else b"", plan.patch(0, count), separator + after if after else b"")
    salt = "0" * 2 * _SALT_BYTES if salted else None
    return prompt_request(transport, model, pieces, shape.output_tokens, salt=salt, body=body)


# Answers


class TokenChunk(NamedTuple):
    """What one read brought of an answer: all its events together, since they have one time. What further reads brought
    faster than a model makes tokens (`FASTEST_TOKEN_NS`) was there already and belongs to it."""

    tokens: int
    at_ns: int
    events: int
    """Events with a part of the answer in it."""


@dataclass(slots=True)
class StreamedAnswer:
    """What a stream says. Counts that the server does not report are -1."""

    chunks: list[TokenChunk] = field(default_factory=list)
    """The chunks with tokens."""
    ids: list[int] = field(default_factory=list)
    """The ids of the answer, of the tokens that have them."""
    text: str = ""
    output_tokens: int = 0
    counted: int = UNCOUNTED
    """How the tokens were counted: a code of `loadgen.records.tokens`."""
    hidden_tokens: int = 0
    """Tokens that the server counts and did not stream, such as thoughts that it keeps to itself."""
    prompt_ids: list[int] | None = None
    """The prompt as the server echoes it."""
    prompt_tokens: int = -1
    usage_tokens: int = -1
    cached_tokens: int = -1
    finish_reason: str | None = None
    error: str | None = None
    """Why it is not an answer: an error event, an event that cannot be read, or a contradiction."""
    ended: bool = False
    """Whether the server said that it is the end: [DONE] or a finish reason."""
    torn: bool = False
    """Whether it ended inside an event."""
    sent_ns: int = 0

    @property
    def has_ids(self) -> bool:
        """Whether every token came with its id."""
        return 0 < self.output_tokens == len(self.ids)

    @property
    def text_bytes(self) -> int:
        """The size of the text in UTF-8."""
        return len(self.text.encode("utf-8", "replace"))

    @property
    def finish(self) -> int:
        """The code of the finish reason in `ANSWER_DTYPE`."""
        return _FINISH.get(self.finish_reason, OTHER)

    def fault(self, asked: int, failure: str | None = None, *, of_any_length: bool = False) -> str | None:
        """Why this is not a good answer of `asked` tokens, as a sentence; None if it is. `failure` is that of the
        connection."""
        progress = f"{self.output_tokens:,} of {asked:,} tokens"
        for reason in (failure, self.error):
            if reason is not None:
                return f"{reason} (after {progress})" if self.output_tokens else reason
        if self.torn:
            return f"the stream ended inside an event after {progress}"
        if self.output_tokens == asked or (of_any_length and (self.output_tokens or self.hidden_tokens)):
            return None
        if self.usage_tokens > 0 and not self.chunks:
            return f"the server counts {self.usage_tokens:,} tokens and sent neither text nor ids"
        if not self.ended:
            return f"the stream ended without a finish reason after {progress}"
        reason = self.finish_reason
        words = "no finish reason" if reason is None else f"finish reason {one_line(reason, 40)}"
        return f"answered {progress} ({words})"


class _UnusableAnswerError(Exception):
    """The stream is not an answer; the message says why."""


def read_answer_stream(stream: ReceivedStream, asked: int) -> StreamedAnswer:
    """Take the stream of an answer of `asked` tokens apart; what cannot be used ends it with an `error`."""
    reading = _AnswerReading(asked)
    answer = reading.answer
    try:
        for number, event in enumerate(stream.events(), 1):
            if event.data.strip() == _DONE:
                answer.ended = True
                break
            document = _document(event)
            if document is not None:
                reading.add(document, event)
            elif not event.ended:
                answer.torn = True
                break
            else:
                _require_other_reader(event, number)
    except (ResponseError, _UnusableAnswerError) as exc:
        answer.error = str(exc)
    if answer.error is None and not (reading.events or answer.ended or answer.torn):
        answer.error = _not_a_stream(stream)
    reading.finish(stream.moments)
    return answer


def _document(event: StreamEvent) -> dict[str, Any] | None:
    """The JSON object of an event; None if it is not one. JSON that only Python accepts (NaN, half of a surrogate pair)
    is read too, since such values stand in fields that nobody here needs."""
    try:
        document = msgspec.json.decode(event.data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        try:
            document = json.loads(event.data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
    return document if isinstance(document, dict) else None


def _require_other_reader(event: StreamEvent, number: int) -> None:
    """Raises `_UnusableAnswerError` for an event without JSON, unless its kind says that it is for others: a ping."""
    if event.kind in (b"", b"message", b"error"):
        kind = "error event" if event.kind == b"error" else f"event {number:,} of the stream is no JSON object"
        raise _UnusableAnswerError(f"{kind}: {one_line(event.data[:_SHOWN_BYTES].decode('utf-8', 'replace'))}")


def _not_a_stream(stream: ReceivedStream) -> str | None:
    """Why a good response without a single event is not an answer; None if it is an empty stream."""
    response = Exchange()
    response.status, response.head, response.body = 200, stream.head, memoryview(stream.body())
    if (fault := unasked_coding(response)) is not None:
        return f"the answer cannot be read: {fault}"
    kind = one_line(response.header("content-type") or "", 60)
    if not response.body or kind.startswith("text/event-stream"):
        return None
    return f"the answer is not a stream of events{f' ({kind})' if kind else ''}: {server_words(response)}"


@dataclass(slots=True)
class _Part:
    """What one event adds to an answer."""

    text: str
    read: int
    tokens: int = 0


class _AnswerReading:
    """Reads the events of one answer, and counts its tokens when all are there.

    Ids are counted as they come. Without ids the server's count decides, running or at the end: the tokens by which it
    has grown are spread over the texts that came since, in proportion to their bytes; a count that comes without text
    belongs to the next text. Without a count the words t0, t1, … count, or else the finish reason `length` says that
    the answer has as many tokens as asked for, or else each event with text counts as one.
    """

    def __init__(self, asked: int) -> None:
        self.answer = StreamedAnswer()
        self.events = 0
        """Events that hold a JSON object."""
        self._asked = asked
        self._most = asked + MORE_TOKENS
        self._parts: list[_Part] = []
        self._counted = 0
        """Tokens of the server's count that have a place."""
        self._since = 0
        """The first part after that count."""
        self._counts = 0
        """How often the server's count grew with a text."""
        self._claimed_in: int | None = None
        """The read with the last count that grew without a text."""
        self._words: list[int] | None = []
        """The ids of the words; None if one of the texts is something else."""
        self._sends_ids = self._shows_thoughts = False
        self._thoughts = 0
        """Tokens of the thoughts, by the server's count."""
        self._id: str | None = None

    def add(self, document: dict[str, Any], event: StreamEvent) -> None:
        """Add the document of an event. Raises `_UnusableAnswerError`."""
        answer = self.answer
        self.events += 1
        if (error := _error(event.kind, document)) is not None:
            raise _UnusableAnswerError(f"error event: {error}")
        if isinstance(name := document.get("id"), str) and name:
            if self._id not in (None, name):
                raise _UnusableAnswerError("two answers are mixed in the stream: the id of its events changes")
            self._id = name
        choices = document.get("choices")
        part = document
        if isinstance(choices, list):
            part = next((each for each in choices if isinstance(each, dict) and not each.get("index")), {})
        for echo in (document.get("prompt_token_ids"), part.get("prompt_token_ids")):
            if isinstance(echo, list):
                answer.prompt_ids = _ids(echo)
        text, ids = self._text(part), part.get("token_ids")
        added = [] if ids is None else _ids(ids)
        if (text or added) and answer.finish_reason is not None:
            raise _UnusableAnswerError(f"tokens come after the finish reason {one_line(answer.finish_reason, 40)}")
        if ids is not None:
            answer.ids += added
            self._sends_ids = self._sends_ids or bool(added)
            self._refuse_more_than_asked(len(answer.ids))
        if text or added:
            self._parts.append(_Part(text, event.read, len(added)))
            self._add_words(text, in_chat=isinstance(part.get("delta"), dict))
        self._add_usage(document, event, has_text=bool(text))
        if reason := _joined(part.get("finish_reason")):
            answer.finish_reason, answer.ended = reason, True

    def _text(self, part: dict[str, Any]) -> str:
        """All text in a choice or an event. A delta, or the message of an answer that is not a stream, may hold it in
        any field: the message, thoughts, arguments of a call; twice the same is one text under two names."""
        delta = part.get("delta", part.get("message"))
        if not isinstance(delta, dict):
            return _joined(part.get("text")) or _joined(part.get("text_output"))
        texts: dict[str, None] = {}
        for name, value in delta.items():
            if name not in _NOT_TEXT and (text := _all_text(value)):
                texts[text] = None
                self._shows_thoughts |= name.startswith(_THOUGHTS)
        return "".join(texts)

    def _add_words(self, text: str, *, in_chat: bool) -> None:
        """The words t0, t1, … stand for ids where the prompt was made of them; a chat's template adds others."""
        if self._words is not None and text:
            if in_chat or not _WORDS.fullmatch(text):
                self._words = None
            else:
                self._words += [int(word[1:]) for word in text.split()]

    def _add_usage(self, document: dict[str, Any], event: StreamEvent, *, has_text: bool) -> None:
        """Triton's answers hold the size of the prompt, OpenAI's all counts. Raises `_UnusableAnswerError`."""
        answer, usage = self.answer, document.get("usage")
        counts = document.get("prompt_tokens")
        prompt = counts[0] if isinstance(counts, list) and counts else counts
        if not isinstance(usage, dict):
            answer.prompt_tokens = _count(prompt, answer.prompt_tokens)
            return
        answer.prompt_tokens = _count(usage.get("prompt_tokens", prompt), answer.prompt_tokens)
        answer.usage_tokens = _count(usage.get("completion_tokens"), answer.usage_tokens)
        answer.cached_tokens = _count(_detail(usage, "prompt", "cached_tokens"), answer.cached_tokens)
        self._thoughts = _count(_detail(usage, "completion", "reasoning_tokens"), self._thoughts)
        self._refuse_more_than_asked(answer.usage_tokens)
        if answer.usage_tokens <= self._counted or self._sends_ids:
            return
        if has_text:
            self._counts += 1
            self._place(answer.usage_tokens)
        else:
            self._claimed_in = event.read

    def _refuse_more_than_asked(self, tokens: int) -> None:
        if tokens > self._most:
            raise _UnusableAnswerError(
                f"the answer has more than {self._most:,} tokens, where {self._asked:,} were asked for"
            )

    def _place(self, count: int) -> None:
        """Spread the tokens up to `count` over the texts since the last count."""
        texts = [part.text for part in self._parts[self._since :]]
        for part, tokens in zip(self._parts[self._since :], _shares(texts, count - self._counted), strict=True):
            part.tokens += tokens
        self._counted, self._since = count, len(self._parts)

    def finish(self, moments: Sequence[int]) -> None:
        """Count the tokens, and join what came with one read to a chunk. `moments` are the times of the reads."""
        answer, parts = self.answer, self._parts
        answer.text = "".join(part.text for part in parts)
        total = answer.usage_tokens
        if self._sends_ids:
            answer.counted = BY_IDS
        elif parts and total > 0:
            self._count_by_usage(total)
        elif total > 0:  # a short answer may be all thoughts
            answer.hidden_tokens = min(self._thoughts, total)
        elif parts and self._words:
            answer.counted, answer.ids = BY_WORDS, self._words
            for part in parts:
                part.tokens = len(part.text.split())
        elif parts and answer.finish == LENGTH:
            answer.counted = BY_LENGTH
            self._place(self._asked)
        elif parts:
            answer.counted = BY_EVENTS
            for part in parts:
                part.tokens = 1
        for read, of_read in groupby((part for part in parts if part.tokens), key=attrgetter("read")):
            sizes = [part.tokens for part in of_read]
            chunk, before = TokenChunk(sum(sizes), moments[read], len(sizes)), answer.chunks[-1:]
            if before and chunk.at_ns - before[0].at_ns < FASTEST_TOKEN_NS * chunk.tokens:
                answer.chunks.pop()
                chunk = TokenChunk(before[0].tokens + chunk.tokens, chunk.at_ns, before[0].events + chunk.events)
            answer.output_tokens += sum(sizes)
            answer.chunks.append(chunk)

    def _count_by_usage(self, total: int) -> None:
        answer, parts = self.answer, self._parts
        answer.counted = BY_RUNNING_USAGE if self._counts > 1 and 2 * self._counts >= len(parts) else BY_TOTAL_USAGE
        if self._words is not None and len(self._words) == total:
            answer.ids = self._words
        if not self._shows_thoughts and not answer.text.lstrip().startswith(_THINKS):
            answer.hidden_tokens = min(self._thoughts, total - 1)
        shown = total - answer.hidden_tokens
        if answer.error is None and total < self._counted:
            answer.error = f"the server's counts contradict each other: {self._counted:,} tokens, then {total:,}"
        elif answer.error is None and shown > answer.text_bytes + WITHOUT_TEXT:  # others have a byte of text at least
            answer.error = f"the server counts {shown:,} tokens and sent {answer.text_bytes:,} bytes of text"
        if not self._counted:
            self._place(shown)
            parts[0].tokens += answer.hidden_tokens
        elif self._since < len(parts):
            self._place(max(total, self._counted))
        elif total > self._counted and self._claimed_in is not None:  # tokens without text at the end
            parts.append(_Part("", self._claimed_in, total - self._counted))


def _shares(texts: Sequence[str], count: int) -> list[int]:
    """`count` tokens in proportion to the bytes of the texts. Texts each of which repeats all before it count as what
    they add."""
    sizes = [len(text.encode("utf-8", "replace")) for text in texts]
    repeats = len(texts) >= _LEAST_REPEATING and len(texts[-1]) > len(texts[0])
    if repeats and all(text.startswith(before) for before, text in pairwise(texts)):
        sizes = [size - before for before, size in pairwise([0, *sizes])]
    total = sum(sizes)
    until = [-(-count * size // total) for size in accumulate(sizes)]  # rounded up, so that the first has a token
    return [end - start for start, end in pairwise([0, *until])]


def _error(kind: bytes, document: dict[str, Any]) -> str | None:
    """The server's words for an error, if the event is one. Servers that send the field always leave it empty."""
    words = document.get("error")
    if isinstance(words, dict):
        words = (words.get("message") or words) if any(words.values()) else None
    if not words and (document.get("object") == "error" or kind == b"error"):
        words = document.get("message") or document.get("detail") or "without a message"
    return one_line(str(words), 200) if words else None


def _all_text(value: object) -> str:
    """The text of a field: a string, or the strings in its parts that are text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_all_text, value))
    if isinstance(value, dict):
        return "".join(_all_text(part) for name, part in value.items() if name not in _NOT_TEXT)
    return ""


def _ids(values: object) -> list[int]:
    """Token ids, of which a single one may stand alone. Raises `_UnusableAnswerError`."""
    ids: list[Any] = values if isinstance(values, list) else [values]
    if not all(type(each) is int and 0 <= each <= MOST_ID for each in ids):
        raise _UnusableAnswerError("the answer has token ids that are not valid")
    return ids


def _count(value: object, otherwise: int) -> int:
    """A count that a server reports; `otherwise` if it reports none. Raises `_UnusableAnswerError`."""
    if type(value) is not int:
        return otherwise
    if not 0 <= value <= MOST_ID:
        raise _UnusableAnswerError(f"the server counts {value:,} tokens")
    return value


def _detail(usage: dict[str, Any], of: str, name: str) -> object:
    details = usage.get(f"{of}_tokens_details")
    return details.get(name) if isinstance(details, dict) else None


def _joined(words: object) -> str:
    if isinstance(words, list):
        return "".join(word for word in words if isinstance(word, str))
    return words if isinstance(words, str) else ""
