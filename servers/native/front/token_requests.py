"""Requests for generated tokens, as JSON: OpenAI's completions, and Triton's generate extension.

Completions take what vLLM takes: a prompt of token ids or of words t0, t1, …, `ignore_eos`, `return_token_ids`. Tokens
are chosen greedily and each prompt gets one answer; a field that asks for anything else is refused in one sentence.
Fields that change nothing then, such as `seed` or `cache_salt`, are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from servers.language.tokenizer import ids_of
from servers.protocol.errors import InvalidRequestError, NotFoundError
from servers.protocol.records import shown
from servers.protocol.values import parse_json

T = TypeVar("T", int, bool)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
MAX_COUNT = 2**31 - 1

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]

_ONE_ANSWER = "must be 1: each prompt gets one answer"
_GREEDY = "must be 0: tokens are chosen greedily"
_PENALTY = "must be 0: tokens are chosen by their logits alone"
_UNSUPPORTED = "is not supported; leave it out"
_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), _ONE_ANSWER),
    "best_of": ((1,), _ONE_ANSWER),
    "echo": ((False,), "must be false: an answer does not repeat its prompt"),
    "suffix": (("",), _UNSUPPORTED),
    "logprobs": ((), _UNSUPPORTED),
    "prompt_logprobs": ((), _UNSUPPORTED),
    "stop": (("", []), "is not supported; bound the answer with max_tokens"),
    "stop_token_ids": (([],), "is not supported; bound the answer with max_tokens"),
    "min_tokens": ((0,), "must be 0; send ignore_eos for answers of max_tokens tokens"),
    "temperature": ((0,), _GREEDY),
    "presence_penalty": ((0,), _PENALTY),
    "frequency_penalty": ((0,), _PENALTY),
    "repetition_penalty": ((1,), "must be 1: tokens are chosen by their logits alone"),
    "logit_bias": (({},), _UNSUPPORTED),
    "use_beam_search": ((False,), "must be false: tokens are chosen greedily"),
}
"""By field: the values that ask for nothing special, besides null, and why every other one is refused."""


_Sampling: Any = msgspec.defstruct("_Sampling", [(name, Any, None) for name in _NEUTRAL])


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Completion(_Sampling):  # type: ignore[misc]  # made at run time
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    model: str | None = None
    max_tokens: TokenCount | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None


class _Generate(_Sampling):  # type: ignore[misc]  # made at run time
    input_ids: list[TokenId] | TokenId | None = None
    text_input: str | None = None
    max_tokens: TokenCount | list[TokenCount] | None = None
    ignore_eos: bool | list[bool] | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)
_GENERATE = msgspec.json.Decoder(_Generate)
_IDS = msgspec.json.Decoder(list[TokenId])
_TEXT = msgspec.json.Decoder(str)
_SEVERAL = msgspec.json.Decoder(list[Any])


class TokenRequest(msgspec.Struct, frozen=True):
    """A request of either route, not yet checked against the model's limits.

    `usage` and `continuous_usage` ask for the token counts in a chunk of their own, and in every chunk.
    """

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    stream: bool
    return_token_ids: bool = False
    usage: bool = False
    continuous_usage: bool = False


def parse_completion(body: bytes, model: str, vocabulary: int) -> TokenRequest:
    """The request of POST /v1/completions. Raises `InvalidRequestError`, and `NotFoundError` for another model."""
    completion = parse_json(body, _COMPLETION)
    if completion.model is not None and completion.model != model:
        raise NotFoundError(f"the model {shown(completion.model)} does not exist; this server has {model!r}")
    _check_neutral(completion)
    options = completion.stream_options or _StreamOptions()
    stream = bool(completion.stream)
    if completion.stream_options is not None and not stream:
        raise InvalidRequestError("stream_options is for streamed answers; send stream: true or leave it out")
    return TokenRequest(
        prompt=_prompt(completion.prompt, vocabulary),
        max_tokens=DEFAULT_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens,
        ignore_eos=bool(completion.ignore_eos),
        stream=stream,
        return_token_ids=bool(completion.return_token_ids),
        usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage) and bool(options.continuous_usage_stats),
    )


def parse_generate(body: bytes, vocabulary: int, *, stream: bool) -> TokenRequest:
    """The request of POST /v2/models/M/generate and /generate_stream. Raises `InvalidRequestError`."""
    generate = parse_json(body, _GENERATE)
    _check_neutral(generate)
    ids = generate.input_ids
    if (ids is None) == (generate.text_input is None):
        raise InvalidRequestError("send the prompt's token ids as 'input_ids', such as [5, 17]")
    if ids is None:
        ids = ids_of(generate.text_input or "", vocabulary)
    max_tokens = _single("max_tokens", generate.max_tokens, DEFAULT_MAX_TOKENS)
    ignore_eos = _single("ignore_eos", generate.ignore_eos, True)
    return TokenRequest([ids] if isinstance(ids, int) else ids, max_tokens, ignore_eos, stream)


def _prompt(raw: msgspec.Raw, vocabulary: int) -> list[int]:
    """The ids of a prompt: ids, words, or one of both in a list."""
    text = bytes(raw).lstrip()
    if text.startswith(b'"'):
        return ids_of(parse_json(text, _TEXT, "the prompt"), vocabulary)
    if not text.startswith(b"["):
        raise InvalidRequestError("the prompt must be a list of token ids, such as [5, 17], or their words 't5 t17'")
    if text[1:].lstrip()[:1] not in (b"[", b'"'):
        return parse_json(text, _IDS, "the prompt")
    prompts = parse_json(text, _SEVERAL, "the prompt")
    if len(prompts) != 1:
        raise InvalidRequestError(f"the request has {len(prompts)} prompts; send each prompt in a request of its own")
    if isinstance(prompts[0], str):
        return ids_of(prompts[0], vocabulary)
    return parse_json(prompts[0], _IDS, "the prompt")


def _single(name: str, value: T | list[T] | None, default: T) -> T:
    """A value, alone or as a list of one element, as tensors are sent."""
    if not isinstance(value, list):
        return default if value is None else value
    if len(value) != 1:
        raise InvalidRequestError(f"{name} must have one value, and has {len(value)}")
    return value[0]


def _check_neutral(request: Any) -> None:
    """Raises `InvalidRequestError` for the first field that asks for something that the server does not do."""
    for name, (neutral, problem) in _NEUTRAL.items():
        value = getattr(request, name)
        # 1 is 1.0, but True is not 1.
        same = (value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
        if value is not None and not any(same):
            raise InvalidRequestError(f"{name} {problem}")
