"""The bytes of answers of generated tokens: one event of the stream per step, or one document at the end.

An event is put together from bytes that were prepared with its request and from its token ids: no JSON library works
between a token and its client. Each event is one chunk of HTTP's chunked encoding, so that it is one write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import orjson

from servers.language.tokenizer import text_of
from servers.native.front.token_requests import TokenRequest
from servers.native.shared.errors import HttpError, OverLimitError, http_status
from servers.protocol.errors import (
    ContractError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)

STREAM_HEADERS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
_DONE = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"


class EventStream(ABC):
    """A streamed answer. Its events are chunks, but not for a client of HTTP/1.0."""

    def __init__(self, *, chunked: bool) -> None:
        self._chunked = chunked

    @abstractmethod
    def tokens(self, tokens: Sequence[int]) -> bytes:
        """What to send for some more tokens."""

    @abstractmethod
    def last(self, tokens: Sequence[int], finish: str) -> bytes:
        """The end of the stream: the last tokens, and how the answer finished."""

    @abstractmethod
    def failure(self, error: ContractError) -> bytes:
        """The end of a stream that has begun and cannot go on."""

    @property
    def comment(self) -> bytes:
        """An event that clients pass over."""
        return self._framed(b":\n\n")

    def _framed(self, events: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events

    @property
    def _end(self) -> bytes:
        return _LAST_CHUNK if self._chunked else b""


class CompletionEvents(EventStream):
    """The stream of POST /v1/completions, as vLLM writes it."""

    def __init__(self, request: TokenRequest, identity: str, created: int, model: str, *, chunked: bool = True) -> None:
        super().__init__(chunked=chunked)
        self._request = request
        self._start = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            orjson.dumps(identity),
            created,
            orjson.dumps(model),
        )
        self._prompt_count = len(request.prompt)
        self._count = 0
        self._quick = request.return_token_ids and request.continuous_usage and chunked
        self._next = (
            self._start.replace(b"%", b"%%")
            + b'{"index":0,"text":" t%d","token_ids":[%d],"logprobs":null,"finish_reason":null}],'
            + b'"usage":{"prompt_tokens":%d,"total_tokens":%%d,"completion_tokens":%%d}}\n\n' % self._prompt_count
        )

    def tokens(self, tokens: Sequence[int]) -> bytes:
        count = self._count
        if count and self._quick and len(tokens) == 1:
            self._count = count = count + 1
            token = tokens[0]
            event = self._next % (token, token, self._prompt_count + count, count)
            return b"%x\r\n%b\r\n" % (len(event), event)
        return self._framed(self._event(tokens, b"null"))

    def last(self, tokens: Sequence[int], finish: str) -> bytes:
        event = self._event(tokens, b'"%b"' % finish.encode())
        if self._request.usage:
            event += b'%b],"usage":%b}\n\n' % (self._start, self._usage())
        return self._framed(event + _DONE) + self._end

    def failure(self, error: ContractError) -> bytes:
        return self._framed(b"data: %b\n\n%b" % (completion_error(error), _DONE)) + self._end

    def _event(self, tokens: Sequence[int], finish: bytes) -> bytes:
        first = not self._count
        self._count += len(tokens)
        text = text_of(tokens, first=first).encode()
        ids = b""
        if self._request.return_token_ids:
            prompt = b',"prompt_token_ids":%b' % orjson.dumps(self._request.prompt) if first else b""
            ids = b'%b,"token_ids":[%b]' % (prompt, _joined(tokens))
        usage = self._usage() if self._request.continuous_usage else b"null"
        return b'%b{"index":0,"text":"%b"%b,"logprobs":null,"finish_reason":%b}],"usage":%b}\n\n' % (
            self._start,
            text,
            ids,
            finish,
            usage,
        )

    def _usage(self) -> bytes:
        return usage_json(self._prompt_count, self._count)


class GenerateEvents(EventStream):
    """The stream of POST /v2/models/M/generate_stream, as Triton writes it: a single id is not a list."""

    def __init__(self, request: TokenRequest, model: str, version: str, *, chunked: bool = True) -> None:
        super().__init__(chunked=chunked)
        self._prompt_count = len(request.prompt)
        self._begun = False
        self._start = b'data: {"model_name":%b,"model_version":%b' % (orjson.dumps(model), orjson.dumps(version))
        self._next = self._start.replace(b"%", b"%%") + b',"token_ids":%d}\n\n'

    def tokens(self, tokens: Sequence[int]) -> bytes:
        if self._begun and self._chunked and len(tokens) == 1:
            event = self._next % tokens[0]
            return b"%x\r\n%b\r\n" % (len(event), event)
        return self._framed(self._event(tokens, b""))

    def last(self, tokens: Sequence[int], finish: str) -> bytes:
        return self._framed(self._event(tokens, b',"finish_reason":"%b"' % finish.encode())) + self._end

    def failure(self, error: ContractError) -> bytes:
        return self._framed(b"data: %b\n\n" % orjson.dumps({"error": str(error)})) + self._end

    def _event(self, tokens: Sequence[int], finish: bytes) -> bytes:
        prompt = b"" if self._begun else b',"prompt_tokens":%d' % self._prompt_count
        self._begun = True
        ids = b"%d" % tokens[0] if len(tokens) == 1 else b"[%b]" % _joined(tokens)
        return b'%b%b,"token_ids":%b%b}\n\n' % (self._start, prompt, ids, finish)


class WholeAnswer:
    """Collects an answer that is sent at its end."""

    def __init__(self, document: Callable[[list[int], str], bytes]) -> None:
        """`document` makes the response's body of all tokens and of how the answer finished."""
        self._document = document
        self._ids: list[int] = []

    def tokens(self, tokens: Sequence[int]) -> bytes:
        """Nothing is sent yet."""
        self._ids += tokens
        return b""

    def last(self, tokens: Sequence[int], finish: str) -> bytes:
        """The body of the response."""
        self._ids += tokens
        return self._document(self._ids, finish)


def completion_document(
    request: TokenRequest, identity: str, created: int, model: str, ids: list[int], finish: str
) -> bytes:
    """The answer to POST /v1/completions without `stream`."""
    choice: dict[str, object] = {"index": 0, "text": text_of(ids), "logprobs": None, "finish_reason": finish}
    if request.return_token_ids:
        choice |= {"token_ids": ids, "prompt_token_ids": request.prompt}
    usage = orjson.Fragment(usage_json(len(request.prompt), len(ids)))
    head = {"id": identity, "object": "text_completion", "created": created, "model": model}
    return orjson.dumps({**head, "choices": [choice], "usage": usage})


def generate_document(request: TokenRequest, model: str, version: str, ids: list[int], finish: str) -> bytes:
    """The answer to POST /v2/models/M/generate: a single id is not a list."""
    token_ids = ids[0] if len(ids) == 1 else ids
    counts = {"prompt_tokens": len(request.prompt), "token_ids": token_ids, "finish_reason": finish}
    return orjson.dumps({"model_name": model, "model_version": version, **counts})


def usage_json(prompt_tokens: int, completion_tokens: int) -> bytes:
    """OpenAI's token counts."""
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
        prompt_tokens,
        prompt_tokens + completion_tokens,
        completion_tokens,
    )


_ERROR_TYPES: tuple[tuple[type[ContractError], str], ...] = (
    (NotFoundError, "NotFoundError"),
    (InvalidRequestError, "BadRequestError"),
    (TooLargeError, "BadRequestError"),
    (UnsupportedError, "BadRequestError"),
    (UnavailableError, "ServiceUnavailableError"),
    (OverLimitError, "RateLimitError"),
)


def completion_error(error: ContractError | HttpError) -> bytes:
    """A failure in OpenAI's form, as JSON in ASCII: its message may quote any text of a client."""
    status = http_status(error)
    by_status = "BadRequestError" if status < 500 else "InternalServerError"
    kind = next((name for cause, name in _ERROR_TYPES if isinstance(error, cause)), by_status)
    message = str(error).encode("utf-8", "replace").decode()
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}})


def _joined(tokens: Sequence[int]) -> bytes:
    return b",".join([b"%d" % token for token in tokens])
