"""The bytes of answers of generated tokens: one event of the stream per step, or one document at the end.

An event is put together from bytes that were prepared with its request and from its token ids: no JSON library works
between a token and its client. Each event is one chunk of HTTP's chunked encoding, so that it is one write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import orjson

from servers.language.tokenizer import text_of
from servers.native.errors import HttpError, http_status
from servers.native.http_parser import HttpResponse
from servers.native.token_requests import TokenRequest
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
_JSON = (b"content-type", b"application/json")


class TokenAnswer(Protocol):
    """The answer to one request. A `streams` one gives the bytes of each call at once, others only those of `last`."""

    @property
    def streams(self) -> bool:
        """Whether bytes are sent before the answer is complete."""

    def token(self, token: int) -> bytes:
        """One more token."""

    def tokens(self, tokens: Sequence[int]) -> bytes:
        """Some more tokens."""

    def last(self, tokens: Sequence[int], finish: str) -> bytes:
        """The last tokens, and how the answer finished: the end of the stream, or the body of the response."""

    def failure(self, error: ContractError) -> bytes:
        """The end of a stream that has begun and cannot go on."""


class _EventStream:
    """The frames of a streamed answer: chunks, or nothing to a client of HTTP/1.0."""

    streams = True

    def __init__(self, *, chunked: bool) -> None:
        self._chunked = chunked

    def _framed(self, events: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events

    @property
    def _end(self) -> bytes:
        return _LAST_CHUNK if self._chunked else b""


class CompletionEvents(_EventStream):
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
        ids = b',"token_ids":[%d]' if request.return_token_ids else b""
        usage = b"null"
        if request.continuous_usage:
            usage = b'{"prompt_tokens":%d,"total_tokens":%%d,"completion_tokens":%%d}' % self._prompt_count
        self._quick = request.return_token_ids and request.continuous_usage and chunked
        self._next = (
            self._start.replace(b"%", b"%%")
            + b'{"index":0,"text":" t%d"'
            + ids
            + b',"logprobs":null,"finish_reason":null}],"usage":'
            + usage
            + b"}\n\n"
        )

    def token(self, token: int) -> bytes:
        count = self._count
        if count and self._quick:
            self._count = count = count + 1
            event = self._next % (token, token, self._prompt_count + count, count)
            return b"%x\r\n%b\r\n" % (len(event), event)
        return self._framed(self._event((token,), b"null"))

    def tokens(self, tokens: Sequence[int]) -> bytes:
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
            prompt = b',"prompt_token_ids":%b' % orjson.dumps(list(self._request.prompt)) if first else b""
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


class GenerateEvents(_EventStream):
    """The stream of POST /v2/models/M/generate_stream, as Triton writes it: a single id is not a list."""

    def __init__(self, request: TokenRequest, model: str, version: str, *, chunked: bool = True) -> None:
        super().__init__(chunked=chunked)
        self._prompt_count = len(request.prompt)
        self._begun = False
        self._start = b'data: {"model_name":%b,"model_version":%b' % (orjson.dumps(model), orjson.dumps(version))
        self._next = self._start.replace(b"%", b"%%") + b',"token_ids":%d}\n\n'

    def token(self, token: int) -> bytes:
        if self._begun and self._chunked:
            event = self._next % token
            return b"%x\r\n%b\r\n" % (len(event), event)
        return self._framed(self._event((token,), b""))

    def tokens(self, tokens: Sequence[int]) -> bytes:
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


class _WholeAnswer:
    """Collects an answer that is sent as one document."""

    streams = False

    def __init__(self, request: TokenRequest) -> None:
        self._request = request
        self._ids: list[int] = []

    def token(self, token: int) -> bytes:
        self._ids.append(token)
        return b""

    def tokens(self, tokens: Sequence[int]) -> bytes:
        self._ids += tokens
        return b""

    def failure(self, error: ContractError) -> bytes:
        raise AssertionError(f"nothing of the answer has been sent, so it fails with a status: {error}")


class CompletionDocument(_WholeAnswer):
    """The answer to POST /v1/completions without `stream`."""

    def __init__(self, request: TokenRequest, identity: str, created: int, model: str) -> None:
        super().__init__(request)
        self._fields = {"id": identity, "object": "text_completion", "created": created, "model": model}

    def last(self, tokens: Sequence[int], finish: str) -> bytes:
        self._ids += tokens
        request, ids = self._request, self._ids
        choice: dict[str, object] = {"index": 0, "text": text_of(ids), "logprobs": None, "finish_reason": finish}
        if request.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": list(request.prompt)}
        usage = orjson.Fragment(usage_json(len(request.prompt), len(ids)))
        return orjson.dumps({**self._fields, "choices": [choice], "usage": usage})


class GenerateDocument(_WholeAnswer):
    """The answer to POST /v2/models/M/generate."""

    def __init__(self, request: TokenRequest, model: str, version: str) -> None:
        super().__init__(request)
        self._fields = {"model_name": model, "model_version": version}

    def last(self, tokens: Sequence[int], finish: str) -> bytes:
        self._ids += tokens
        ids = self._ids[0] if len(self._ids) == 1 else self._ids
        counts = {"prompt_tokens": len(self._request.prompt), "token_ids": ids, "finish_reason": finish}
        return orjson.dumps({**self._fields, **counts})


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
)


def completion_error(error: ContractError | HttpError) -> bytes:
    """A failure in OpenAI's form, as JSON in ASCII: its message may quote any text of a client."""
    status = http_status(error)
    by_status = "BadRequestError" if status < 500 else "InternalServerError"
    kind = next((name for cause, name in _ERROR_TYPES if isinstance(error, cause)), by_status)
    message = str(error).encode("utf-8", "replace").decode()
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}})


def completion_refusal(error: ContractError | HttpError) -> HttpResponse:
    """The response to a failed request of POST /v1/completions."""
    status, body = http_status(error), completion_error(error)
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return HttpResponse(status, headers, body)


def document_response(body: bytes) -> HttpResponse:
    """A response with a whole answer."""
    return HttpResponse(200, [_JSON, (b"content-length", b"%d" % len(body))], body)


def _joined(tokens: Sequence[int]) -> bytes:
    return b",".join([b"%d" % token for token in tokens])
