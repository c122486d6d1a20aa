"""The bytes of streamed answers, and the requests for them, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.language.tokenizer import ids_of
from servers.native.front.token_requests import TokenRequest, parse_completion, parse_generate
from servers.native.http.generation import generation_target
from servers.native.http.token_events import (
    CompletionEvents,
    GenerateEvents,
    WholeAnswer,
    completion_document,
    completion_error,
    generate_document,
)
from servers.native.shared.errors import RefusedError
from servers.protocol.errors import InvalidRequestError, NotFoundError, UnavailableError

VOCABULARY = 1000
pieces = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3), min_size=1, max_size=8)


def unchunked(data: bytes) -> bytes:
    """The content of HTTP's chunks; fails if one is not as long as it says."""
    content = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        content, end, data = content + data[:length], data[length : length + 2], data[length + 2 :]
        assert end == b"\r\n"
    return content


def events(content: bytes) -> list[Any]:
    assert content.endswith(b"\n\n")
    parts = [part.removeprefix(b"data: ") for part in content.split(b"\n\n")[:-1]]
    return ["[DONE]" if part == b"[DONE]" else json.loads(part) for part in parts]


def sent(stream: CompletionEvents | GenerateEvents, tokens: list[list[int]], finish: str) -> bytes:
    """As the front end sends them."""
    return b"".join(map(stream.tokens, tokens[:-1])) + stream.last(tokens[-1], finish)


@given(pieces, st.booleans(), st.booleans(), st.booleans(), st.text(max_size=12))
def test_a_completions_events_hold_every_token_once(
    tokens: list[list[int]], ids: bool, usage: bool, every: bool, model: str
) -> None:
    request = TokenRequest([5, 17], 64, True, True, ids, usage, usage and every)
    data = sent(CompletionEvents(request, 'cmpl-"%d', 1700000000, model), tokens, "length")
    *chunks, done = events(unchunked(data))
    assert done == "[DONE]"
    last = chunks.pop() if usage else None
    flat = [token for piece in tokens for token in piece]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert ids_of("".join(choice["text"] for choice in choices), VOCABULARY) == flat
    if ids:
        assert [choice["token_ids"] for choice in choices] == tokens
        assert choices[0]["prompt_token_ids"] == [5, 17]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(tokens) - 1) + ["length"]
    assert {chunk["model"] for chunk in chunks} == {model}
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    so_far = [sum(map(len, tokens[: place + 1])) for place in range(len(tokens))]
    assert counts == (so_far if usage and every else [None] * len(tokens))
    if last is not None:
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 2, "total_tokens": 2 + len(flat), "completion_tokens": len(flat)}


@given(pieces, st.booleans(), st.text(max_size=12))
def test_generates_events_hold_every_token_once(tokens: list[list[int]], chunked: bool, model: str) -> None:
    request = TokenRequest([5, 17], 64, True, True)
    data = sent(GenerateEvents(request, model, "1", chunked=chunked), tokens, "stop")
    found = events(unchunked(data) if chunked else data)
    assert [event["token_ids"] for event in found] == [piece[0] if len(piece) == 1 else piece for piece in tokens]
    assert [event.get("prompt_tokens") for event in found] == [2] + [None] * (len(tokens) - 1)
    assert [event.get("finish_reason") for event in found] == [None] * (len(tokens) - 1) + ["stop"]


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    error = RefusedError("shutting_down", 'the "server"\nends')
    completion = CompletionEvents(TokenRequest([5], 9, True, True), "x", 0, "m")
    *_, failed, done = events(unchunked(completion.tokens([3]) + completion.failure(error)))
    assert failed["error"] == {
        "message": str(error), "type": "ServiceUnavailableError", "param": None, "code": 503,
    }  # fmt: skip
    assert done == "[DONE]"
    generate = GenerateEvents(TokenRequest([5], 9, True, True), "m", "1")
    assert events(unchunked(generate.tokens([3]) + generate.failure(error)))[-1] == {"error": str(error)}
    assert unchunked(generate.failure(error)).count(b"\n\n") == 1


def test_whole_answers() -> None:
    request = TokenRequest([5, 17], 64, True, False, return_token_ids=True)
    completion = WholeAnswer(partial(completion_document, request, "x", 0, "m"))
    assert completion.tokens([1]) + completion.tokens([2, 3]) == b""
    document = json.loads(completion.last([4], "length"))
    assert document["choices"][0]["token_ids"] == [1, 2, 3, 4]
    assert document["usage"]["completion_tokens"] == 4
    assert json.loads(generate_document(request, "m", "1", [4], "stop"))["token_ids"] == 4


def completion(**fields: object) -> TokenRequest:
    return parse_completion(json.dumps({"prompt": [5], **fields}).encode(), "m", VOCABULARY)


def test_what_a_completion_leaves_out_has_openais_defaults() -> None:
    assert completion() == TokenRequest([5], 16, False, False)
    everything = completion(
        model="m", max_tokens=7, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True, ignore_eos=True, temperature=0.0, n=1, best_of=1, echo=False, suffix=None, logprobs=None,
        stop=None, top_p=1, seed=3, cache_salt="x", user="me", presence_penalty=0, logit_bias={}, min_tokens=0,
    )  # fmt: skip
    assert everything == TokenRequest([5], 7, True, True, True, True, True)
    only_counts = completion(stream=True, stream_options={"continuous_usage_stats": True})
    assert not only_counts.usage  # without include_usage there is none, as with vLLM
    assert not only_counts.continuous_usage


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": True},
        {"n": "1"},
        {"temperature": 1},
        {"echo": True},
        {"echo": 0},
        {"logprobs": 0},
        {"stop": "x"},
    ],
)
def test_what_greedy_decoding_cannot_do_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{next(iter(fields))} "):
        completion(**fields)


def test_another_model_does_not_exist() -> None:
    with pytest.raises(NotFoundError, match="the model 'x' does not exist; this server has 'm'"):
        completion(model="x")


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
))  # fmt: skip
def test_any_value_of_any_field_is_a_request_or_one_sentence(value: object) -> None:
    names = ("prompt", "max_tokens", "ignore_eos", "stream", "stream_options", "return_token_ids", "n", "input_ids")
    for name in names:
        body = json.dumps({"prompt": [5], "input_ids": [5], name: value}).encode()
        for outcome in (
            outcome_of(partial(parse_completion, body, "m", VOCABULARY)),
            outcome_of(partial(parse_generate, body, VOCABULARY, stream=True)),
        ):
            if isinstance(outcome, TokenRequest):
                assert all(type(token) is int for token in outcome.prompt)
                assert 0 <= outcome.max_tokens < 2**31
            else:
                assert "\n" not in outcome


def outcome_of(parse: Callable[[], TokenRequest]) -> TokenRequest | str:
    """The request, or why it is refused."""
    try:
        return parse()
    except (InvalidRequestError, NotFoundError) as error:
        return str(error)


def test_routes() -> None:
    assert generation_target("/v1/completions", "m") == ("m", None)
    assert generation_target("/v2/models/x/generate_stream", "m") == ("x", None)
    assert generation_target("/v2/models/x/versions/1/generate", "m") == ("x", "1")
    for path in ("/v1/completions/", "/v2/models/x/infer", "/v1/models", "/"):
        assert generation_target(path, "m") is None


def test_errors_are_json_whatever_they_quote() -> None:
    document = json.loads(completion_error(UnavailableError("x\ud800\n")))
    assert document["error"]["code"] == 503
