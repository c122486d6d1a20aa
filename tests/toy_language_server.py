"""A server of streamed tokens without a model: planted times, and each form of stream that real servers send, by flags.

    python -m tests.toy_language_server --port 8000 --usage end --buffer whole

prints its URL and serves until it is told to end. Without flags it answers as vLLM does that was asked for token ids:
the first token comes after 30 ms and each further one 4 ms later. Every token is due at a moment that follows from the
request's arrival, so that lateness does not add up. Answers are a function of the prompt and of `--seed`, which stands
for another model. Flags can be combined; `--like NAME` is a set of them, as public sources describe that server, and
flags beside it are added. Tests use `toy_server(flags)` in their own process, or `toy_process(flags)`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

VOCABULARY = 4096
MODEL = "planted"

FLAGS: dict[str, tuple[Any, str]] = {
    # What is served
    "port": (0, "0: any"),
    "model": (MODEL, "its name"),
    "seed": (0, "another one stands for another model"),
    "routes": ("ids,text,chat,generate", "of ids and text (completions), chat, generate (Triton's), ollama (native)"),
    "models": ("one", "the list: one, several, adapters, empty, or a status as 401 and 404"),
    "key": ("", "refuse requests without this bearer token …"),
    "key-status": (401, "… with this status"),
    "refuse": ("", "requests with one of these fields, NAME,NAME; `max_tokens` wants max_completion_tokens instead"),
    "strict": (False, "refuse all fields that OpenAI does not have"),
    "refuse-like": ("vllm", "the words of a refusal: vllm, openai or fastapi"),
    "in-effect": ("", "settings that it reports, as in engine=slots,fronts=1"),
    # When tokens come
    "first-ms": (30.0, "from the request to the first token"),
    "step-ms": (4.0, "from one token to the next"),
    "jitter-ms": (0.0, "a uniform delay of the whole answer"),
    "gap-share": (0.0, "share of gaps that are longer …"),
    "gap-ms": (300.0, "… by so much"),
    "crowd-ms": (0.0, "more per token for each other request under way"),
    "cache": (False, "a prompt that came before has its first token at once …"),
    "cache-prefix": (0, "… or one with the same first tokens"),
    "cache-hidden": (False, "the usage does not tell of cached tokens"),
    "luck": (0, "the seed of jitter, gaps and faults"),
    # Which tokens, and in which chunks
    "chunk-tokens": (1, "tokens per chunk, which comes with its last token"),
    "first-tokens": (1, "tokens in the first chunk, at the first moment"),
    "early-empty-ms": (0.0, "a chunk without tokens, so much before the first"),
    "empty-every": (0, "a chunk without tokens after every Nth chunk"),
    "stop-share": (0.0, "share of answers that end early, with stop, …"),
    "stop-at": (60, "… after so many tokens"),
    "other-from": (0, "other tokens while so many requests are under way"),
    "swap-every": (0, "every Nth answer has a token of another one"),
    "same-token": (False, "answers repeat one token"),
    "ignore-prompt": (False, "every answer is the same"),
    "prompt-limit": (0, "only the last N tokens of a prompt are read, and the usage says so"),
    "template-tokens": (0, "the chat template adds so many tokens to a prompt"),
    "wrong-echo": (False, "the first id of the prompt comes back changed"),
    # What a chunk says
    "no-ids": (False, "no token ids"),
    "chat-ids": (False, "token ids in a chat, too"),
    "words": ("id", "text of a token: id ( t29), pair ( t29 is two tokens), prose ( word), varied (several lengths)"),
    "cumulative": (False, "each chunk repeats the text so far"),
    "parts": (False, "a chat's content is a list of parts"),
    "tool-call": (False, "a chat's text is the arguments of a tool call"),
    "role-every": (False, "the role in every delta"),
    "reasoning": ("0", "so many of the tokens (8 or 25%) are reasoning …"),
    "reasoning-in": ("reasoning_content", "… in this field of the delta; hidden: counted and not streamed"),
    "usage": ("running", "running (and at the end), end, never, null (in each chunk, and at the end), no-details"),
    "usage-share": (1.0, "share of the tokens that is sent; the usage says all"),
    "usage-claims": (0, "the usage says so many tokens, whatever was sent"),
    "claim-first": (False, "a first chunk without text, at once, whose usage says 1"),
    "usage-choice": (False, "the chunk with the usage at the end has a choice, without text"),
    "finish": ("", "this finish reason"),
    "finish-apart": (False, "the finish reason comes in a chunk without text"),
    "after-finish": (0, "so many tokens follow the finish reason"),
    "changing-id": (False, "each chunk has another id"),
    "choices": (1, "so many choices with the same tokens"),
    "each": ({}, """JSON that is added to each chunk, as in {"error":""}"""),
    # How a stream is written
    "framing": ("chunked", "chunked, length, close or 1.0"),
    "content-type": ("text/event-stream", "empty: no such header"),
    "gzip": (False, "compressed, although not asked for"),
    "header-bytes": (0, "a header of this length"),
    "ndjson": (False, "a line of JSON per chunk instead of events"),
    "lines": ("lf", "lf, crlf or cr"),
    "no-space": (False, "`data:{` without a space"),
    "split-data": (False, "an event's JSON on several data lines"),
    "noise": ("", "before each event, of: " + "comment, ping, empty, retry, json-ping, id"),
    "no-done": (False, "no [DONE]"),
    "after-done": (False, "an event after [DONE]"),
    "repeat-events": (False, "each event is sent twice"),
    "bad-utf8": (False, "a byte in each event that is not UTF-8"),
    "no-terminator": (False, "the connection closes without the last event's blank line and the body's end"),
    "endless": ("", "after the first token this text for ever; \\n is a line feed"),
    # What a proxy does
    "buffer": ("", "of: whole, bytes:N, first:TOKENS or first:10% (held back), last:TOKENS or last:10%, pairs, "
                   "halves:MS (an event in two writes), every:MS, delay:MS"),
    # Faults
    "good-first": (0, "answers before any early stop, other token or fault"),
    "instead": ("", "html, error (status 200), json (not streamed), redirect, empty, or a status as 429 …"),
    "instead-share": (1.0, "… for this share of requests"),
    "refuse-from": (0, "503 while so many requests are under way"),
    "error-every": (0, "every Nth answer is an error event at status 200 …"),
    "error-after": (0, "… after so many tokens"),
    "cut-every": (0, "every Nth answer is cut in the middle of an event"),
}  # fmt: skip

LIKE = {
    "vllm": "--routes ids,text,chat --chat-ids",
    "ollama": "--routes text,chat,ollama --no-ids --words prose --usage end --role-every --finish-apart"
              """ --each '{"system_fingerprint":"fp_ollama"}'""",
    "lm-studio": "--routes text,chat --no-ids --words prose --usage never --role-every --finish-apart --models several",
    "llama.cpp": "--routes ids,text,chat --no-ids --words prose --usage end --finish-apart"
                 """ --each '{"system_fingerprint":"b6497-cd08fc3e"}'""",
    "litellm": "--routes ids,text,chat --no-ids --words prose --usage end --usage-choice --finish-apart --key sk-1234"
               " --key-status 500",
    "tgi": """--routes text,chat --no-ids --words prose --usage end --role-every --no-space --each '{"id":""}'""",
}  # fmt: skip
"""Sources: ollama #4448; lmstudio-bug-tracker #676 and #713; llama.cpp #15444 and #16048; LiteLLM's proxy 1.108.7,
text-generation-inference #2531, #3003 and #1648."""

NOISE = {
    "comment": b": comment\n", "ping": b"event: ping\ndata: {}\n\n", "empty": b"data:\n\n", "retry": b"retry: 3000\n\n",
    "json-ping": b'data: {"type":"ping"}\n\n', "id": b"id: 7\n",
}  # fmt: skip
LINE_ENDS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}
OPENAI_FIELDS = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options", "temperature",
    "top_p", "n", "seed", "stop", "frequency_penalty", "presence_penalty", "logprobs", "user",
}  # fmt: skip


def share(text: str) -> float:
    """A share, as 0.05 or 5%."""
    return float(text.rstrip("%")) / (100.0 if text.endswith("%") else 1.0)


def amount_of(text: str, tokens: int) -> int:
    """A number, or a share of the tokens as 25%."""
    return int(share(text) * (tokens if "%" in text else 1))


def flags(argv: Sequence[str] | str) -> argparse.Namespace:
    """The settings of a server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--like", choices=sorted(LIKE), help="a set of flags")
    for name, (default, meaning) in FLAGS.items():
        kind: dict[str, Any] = {"type": share if name.endswith("-share") else type(default)}
        kind = {"type": json.loads} if default == {} else kind
        kind = {"action": "store_true"} if isinstance(default, bool) else kind
        parser.add_argument(f"--{name}", default=default, help=meaning.replace("%", "%%"), **kind)
    argv = shlex.split(argv) if isinstance(argv, str) else list(argv)
    like = parser.parse_known_args(argv)[0].like
    return parser.parse_args([*shlex.split(LIKE.get(like or "", "")), *argv])


def planted_tokens(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The answer to a prompt: ids from 0 to VOCABULARY - 1."""
    drawn = random.Random(f"{seed} {list(prompt)}")
    return [drawn.randrange(VOCABULARY) for _ in range(count)]


class Piece(NamedTuple):
    """What is written at one moment."""

    at_s: float
    content: bytes
    tokens: int = 0


class Answer:
    """The events of one answer; `cut` once the connection has to close before the answer's end."""

    def __init__(self, server: ToyLanguageServer, path: str, body: dict[str, Any], number: int, at_s: float) -> None:
        self.server, self.settings, self.path, self.number, self.at_s = server, server.settings, path, number, at_s
        self.is_chat = path.endswith(("/chat/completions", "/api/chat"))
        self.is_ollama, self.is_generate = path.startswith("/api/"), path.endswith("/generate_stream")
        self.wants_ids = not self.settings.no_ids and (self.is_generate or bool(body.get("return_token_ids", False)))
        self.wants_ids &= not self.is_chat or self.settings.chat_ids
        self.prompt = prompt_of(body)[-self.settings.prompt_limit :]
        lengths = body.get("max_completion_tokens"), body.get("max_tokens"), body.get("options", {}).get("num_predict")
        self.asked = int(next((length for length in lengths if length is not None), 16))
        self.tokens = self._tokens()
        self.reasoning = amount_of(self.settings.reasoning, len(self.tokens))
        self.finish = self.settings.finish or ("length" if len(self.tokens) == self._sent_if_whole() else "stop")
        self.cached, self.events_made, self.said, self.cut = 0, 0, "", False

    def hits(self, every: int) -> bool:
        """Whether a fault of every Nth answer hits this one."""
        return every > 0 and self.number > 0 and self.number % every == 0

    def _tokens(self) -> list[int]:
        settings, server = self.settings, self.server
        count = self._sent_if_whole()
        if self.number > 0 and server.random.random() < settings.stop_share:
            count = min(count, settings.stop_at)
        is_other = settings.other_from and self.number > 0 and server.under_way >= settings.other_from
        tokens = planted_tokens([] if settings.ignore_prompt else self.prompt, count, settings.seed + bool(is_other))
        if self.hits(settings.swap_every):
            tokens[count // 2] = (tokens[count // 2] + 1) % VOCABULARY
        return tokens[:1] * count if settings.same_token else tokens

    def _sent_if_whole(self) -> int:
        return int(self.asked * self.settings.usage_share)

    def _total(self) -> int:
        return self.asked if self.settings.usage_share < 1.0 else len(self.tokens)

    def pieces(self) -> Iterator[Piece]:
        """The events in their order, each with its moment."""
        settings, draw = self.settings, self.server.random.random
        key = tuple(self.prompt[: settings.cache_prefix or None])
        is_cached = (settings.cache or settings.cache_prefix > 0) and key in self.server.known
        self.server.known.add(key)
        self.cached = len(key) * is_cached
        due_s = self.at_s + (0.0 if is_cached else settings.first_ms) / 1e3 + draw() * settings.jitter_ms / 1e3
        if settings.claim_first or (self.is_chat and not self.is_ollama):
            yield Piece(self.at_s, self._event(0, 0, claims=int(settings.claim_first)))
        if settings.early_empty_ms:
            yield Piece(due_s - settings.early_empty_ms / 1e3, self._event(0, 0))
        sent, ended = 0, False
        for number, count in enumerate(chunks_of(len(self.tokens), settings.first_tokens, settings.chunk_tokens), 1):
            if sent:
                due_s += count * settings.step_ms / 1e3 + (settings.gap_ms / 1e3) * (draw() < settings.gap_share)
            if self.hits(settings.error_every) and sent >= settings.error_after:
                yield Piece(due_s, self._line({"error": "the engine failed" if self.is_generate else FAILED}))
                return
            before, sent = sent, sent + count
            ends = not ended and sent >= len(self.tokens) - settings.after_finish
            ended = ended or ends
            is_hidden = settings.reasoning_in == "hidden" and sent <= self.reasoning
            if is_hidden and sent < len(self.tokens):
                continue
            before = sent if is_hidden else before
            content = self._event(before, sent, self.finish if ends and not settings.finish_apart else None)
            if self.hits(settings.cut_every) and 2 * sent >= len(self.tokens):
                self.cut = True
                yield Piece(due_s, content[: len(content) // 2])
                return
            if settings.empty_every and number % settings.empty_every == 0:
                content += self._event(sent, sent)
            if settings.endless:
                text = settings.endless.replace("\\n", "\n").encode()
                yield Piece(due_s, content, count)
                yield from itertools.repeat(Piece(due_s, text * (1 + 4096 // len(text))))
            if sent == len(self.tokens):
                apart = self._event(sent, sent, self.finish) if settings.finish_apart else b""
                content += apart + self._end()
            yield Piece(due_s, content, count)

    def _event(self, before: int, sent: int, finish: str | None = None, claims: int = 0) -> bytes:
        """The chunk with the tokens from `before` to `sent`."""
        settings = self.settings
        tokens = self.tokens[before:sent]
        text = "".join(word(settings.words, place, self.tokens[place]) for place in range(before, sent))
        self.events_made += 1
        if settings.cumulative:
            text = self.said = self.said + text
        if self.is_ollama:
            return self._line(self._ollama(text, finish))
        if self.is_generate:
            ids: object = tokens[0] if len(tokens) == 1 else tokens
            data: dict[str, Any] = {"model_name": settings.model, "model_version": "1"}
            data |= {"token_ids": ids} if self.wants_ids else {"text_output": text}
            data |= {"prompt_tokens": len(self.prompt)} if self.events_made == 1 and settings.usage != "never" else {}
            return self._line(data | ({"finish_reason": finish} if finish else {}))
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.is_chat:
            choice["delta"] = self._delta(text, is_reasoning=before < self.reasoning)
        else:
            choice["text"] = text
        if self.wants_ids:
            choice["token_ids"] = tokens
        if self.wants_ids and self.events_made == 1:
            choice["prompt_token_ids"] = [self.prompt[0] + settings.wrong_echo, *self.prompt[1:]]
        choices = [choice | {"index": index} for index in range(settings.choices)]
        usage: dict[str, Any] = {"usage": None} if settings.usage == "null" else {}
        if settings.usage in ("running", "no-details"):
            usage = {"usage": self._usage(claims or round(sent / max(settings.usage_share, 1e-9)))}
        return self._line(self._about() | {"choices": choices} | usage)

    def _about(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        number = self.events_made if self.settings.changing_id else self.number
        return {"id": f"cmpl-{number}", "object": kind, "created": 1, "model": self.settings.model}

    def _delta(self, text: str, is_reasoning: bool) -> dict[str, Any]:
        settings = self.settings
        delta: dict[str, Any] = {"role": "assistant"} if settings.role_every or self.events_made == 1 else {}
        if settings.tool_call and text:
            return delta | {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        if is_reasoning and settings.reasoning_in != "hidden" and text:
            return delta | {settings.reasoning_in: text}
        return delta | {"content": [{"type": "text", "text": text}] if settings.parts else text}

    def _ollama(self, text: str, finish: str | None) -> dict[str, Any]:
        words: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.is_chat else {}
        words = words or {"response": text}
        counts = {"done_reason": finish, "prompt_eval_count": len(self.prompt), "eval_count": self._total()}
        return {"model": self.settings.model, "created_at": "2026-01-01T00:00:00Z", **words, "done": finish is not None,
                **(counts if finish else {})}  # fmt: skip

    def _usage(self, count: int) -> dict[str, Any]:
        settings = self.settings
        count = settings.usage_claims or count * settings.choices
        prompt = len(self.prompt) + settings.template_tokens * self.is_chat
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        has_details = settings.usage != "no-details"
        if not settings.cache_hidden:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached} if has_details else None
        if self.reasoning:
            reasoned = {"reasoning_tokens": min(self.reasoning, count)}
            usage["completion_tokens_details"] = reasoned if has_details else None
        return usage

    def _end(self) -> bytes:
        """What follows the last chunk with tokens."""
        settings = self.settings
        if self.is_generate or self.is_ollama:
            return b""
        closing = b"" if settings.no_done or settings.ndjson else self._line("[DONE]")
        if settings.usage != "never":
            choices = [{"index": 0, "text": "", "delta": {}}] if settings.usage_choice else []
            closing = self._line({**self._about(), "choices": choices, "usage": self._usage(self._total())}) + closing
        return closing + (self._line({**self._about(), "choices": []}) if settings.after_done else b"")

    def _line(self, data: dict[str, Any] | str) -> bytes:
        """One event, or a line of JSON."""
        settings = self.settings
        text = (data if isinstance(data, str) else json.dumps(data | settings.each, separators=(",", ":"))).encode()
        text += b" \xff" if settings.bad_utf8 else b""
        if self.is_ollama or settings.ndjson:
            return text + b"\n"
        text = text.replace(b',"', b',\ndata: "') if settings.split_data else text
        event = b"data:" + b" " * (not settings.no_space) + text + b"\n\n"
        noise = b"".join(NOISE[name] for name in settings.noise.split(",") if name)
        return ((noise + event) * (1 + settings.repeat_events)).replace(b"\n", LINE_ENDS[settings.lines])

    def whole(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        text = "".join(word(self.settings.words, place, token) for place, token in enumerate(self.tokens))
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice |= {"token_ids": self.tokens} if self.wants_ids else {}
        usage = {} if self.settings.usage == "never" else {"usage": self._usage(self._total())}
        return {**self._about(), "object": "chat.completion" if self.is_chat else "text_completion",
                "choices": [choice], **usage}  # fmt: skip


FAILED = {"message": "the engine failed"}


def prompt_of(body: dict[str, Any]) -> list[int]:
    """The ids of a prompt: words t29 are ids, and other words have made-up ones."""
    given: Any = body.get("prompt", body.get("input_ids", body.get("text_input", [])))
    if body.get("messages"):
        given = body["messages"][-1]["content"]
        given = given if isinstance(given, str) else "".join(part.get("text", "") for part in given)
    if not isinstance(given, str):
        return [int(token) for token in given]
    return [int(w[1:]) if w[1:].isdigit() else zlib.crc32(w.encode()) % VOCABULARY for w in given.split()] or [0]


def word(kind: str, place: int, token: int) -> str:
    if kind == "pair":
        return str(token) if place % 2 else " t"
    return {"id": f" t{token}", "prose": " word", "varied": " " + "word" * (1 + token % 4)}[kind]


def chunks_of(count: int, first: int, each: int) -> Iterator[int]:
    """The sizes of the chunks of so many tokens."""
    size = first
    while count:
        size = min(size, count)
        yield size
        count -= size
        size = each


def joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        pieces[-1].at_s if pieces else 0.0,
        b"".join(piece.content for piece in pieces),
        sum(piece.tokens for piece in pieces),
    )


Pieces = Iterator[Piece]


def hold_first(pieces: Pieces, tokens: float, _: float) -> Pieces:
    waiting = joined([])
    for piece in pieces:
        waiting = joined([waiting, piece])
        if waiting.tokens >= tokens:
            break
    yield waiting
    yield from pieces


def hold_last(pieces: Pieces, tokens: float, _: float) -> Pieces:
    passed = 0
    for piece in pieces:
        passed += piece.tokens
        yield joined([piece, *pieces]) if passed > tokens else piece


def by_bytes(pieces: Pieces, size: float, _: float) -> Pieces:
    waiting = joined([])
    for piece in pieces:
        waiting = joined([waiting, piece])
        while len(waiting.content) >= size:
            yield waiting._replace(content=waiting.content[: int(size)])
            waiting = Piece(piece.at_s, waiting.content[int(size) :])
    yield waiting


def in_halves(pieces: Pieces, later_ms: float, _: float) -> Pieces:
    for at_s, content, tokens in pieces:
        half = len(content) // 2
        yield Piece(at_s, content[:half])
        yield Piece(at_s + later_ms / 1e3, content[half:], tokens)


def in_turns(pieces: Pieces, each_ms: float, start_s: float) -> Pieces:
    for turn, group in itertools.groupby(pieces, lambda piece: (piece.at_s - start_s) * 1e3 // each_ms):
        yield joined(list(group))._replace(at_s=start_s + (turn + 1) * each_ms / 1e3)


BUFFERS: dict[str, Callable[[Pieces, float, float], Pieces]] = {
    "whole": lambda pieces, *_: iter([joined(list(pieces))]),
    "first": hold_first,
    "last": hold_last,
    "bytes": by_bytes,
    "halves": in_halves,
    "pairs": lambda pieces, *_: (joined([piece, *itertools.islice(pieces, 1)]) for piece in pieces),
    "every": in_turns,
    "delay": lambda pieces, later_ms, _: (piece._replace(at_s=piece.at_s + later_ms / 1e3) for piece in pieces),
}
"""What a proxy passes on, given the pieces of an answer, the rule's number and the moment of the request."""


def document(content: object, status: int = 200, **headers: str) -> bytes:
    """A whole answer; text as HTML, anything else as JSON."""
    text = (content if isinstance(content, str) else json.dumps(content)).encode()
    kind = "text/html" if isinstance(content, str) else "application/json"
    lines = {"Content-Type": kind, "Content-Length": str(len(text)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\n{head}\r\n".encode() + text


def refusal(fields: list[str], like: str) -> bytes:
    """The answer to a request with fields that the server does not take."""
    reasons = [{"type": "extra_forbidden", "loc": ["body", f], "msg": "Extra inputs are not permitted"} for f in fields]
    if like == "fastapi":
        return document({"detail": reasons}, 422)
    if like == "vllm":
        return document({"object": "error", "message": str(reasons), "type": "BadRequestError", "code": 400}, 400)
    words = f"Unrecognized request argument supplied: {fields[0]}"
    if fields[0] == "max_tokens":
        words = (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
    return document({"error": {"message": words, "type": "invalid_request_error", "param": fields[0]}}, 400)


class ToyLanguageServer:
    """The answers of one server."""

    def __init__(self, given: Sequence[str] | str = "") -> None:
        self.settings = flags(given)
        self.random = random.Random(self.settings.luck)
        self.requests, self.under_way = 0, 0
        self.known: set[tuple[int, ...]] = set()
        self.bodies: list[dict[str, Any]] = []
        """Every request's, in the order in which they came."""
        self.url = ""

    def about(self) -> dict[str, object]:
        """What each path answers to GET."""
        name, routes = self.settings.model, self.settings.routes
        model = {"id": name, "object": "model", "max_model_len": 4096}
        adapters = [model | {"root": name, "parent": None}, model | {"id": "lora", "parent": name}]
        lists = {"one": [model], "several": [model, model | {"id": "embedding"}], "empty": [], "adapters": adapters}
        shape = self.settings.models
        listed = {"object": "list", "data": lists[shape]} if shape in lists else None
        paths: dict[str, object] = {} if listed is None else {"/v1/models": listed}
        if "ollama" in routes:
            paths["/api/tags"] = {"models": [{"name": name, "model": name}]}
        if "generate" in routes:
            tensor = {"datatype": "INT32", "shape": [-1]}
            settings = dict(setting.split("=") for setting in self.settings.in_effect.split(",") if setting)
            paths |= {
                "/v2": {"name": "planted", "version": "1", "extensions": ["generate"]},
                "/v2/health/live": {}, "/v2/health/ready": {}, f"/v2/models/{name}/ready": {},
                f"/v2/models/{name}": {
                    "name": name, "versions": ["1"], "platform": "planted",
                    "inputs": [{"name": "input_ids", **tensor}], "outputs": [{"name": "token_ids", **tensor}],
                },
                f"/v2/models/{name}/config": {
                    "name": name, "model_transaction_policy": {"decoupled": True},
                    "parameters": {key: {"string_value": value} for key, value in settings.items()},
                },
            }  # fmt: skip
        return paths

    def refused(self, path: str, body: dict[str, Any], number: int) -> bytes | None:
        """The answer to a request that gets no tokens."""
        settings = self.settings
        routes = settings.routes.split(",")
        of_path = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/api/chat": "ollama",
                   "/api/generate": "ollama"}.get(path, "generate")  # fmt: skip
        if of_path == "completions":
            of_path = "text" if isinstance(body.get("prompt"), str) else "ids"
        if of_path not in routes:
            return document({"error": {"message": f"no {of_path} here"}}, 400 if of_path in ("text", "ids") else 404)
        if body.get("model", settings.model) not in (settings.model, "lora"):
            return document({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        unwanted = set(settings.refuse.split(",")) | (body.keys() - OPENAI_FIELDS if settings.strict else set())
        if fields := [name for name in body if name in unwanted]:
            return refusal(fields, settings.refuse_like)
        is_load = number > 0 and int(body.get("max_tokens") or 16) > 2  # others only settle a connection
        if settings.refuse_from and is_load and self.under_way >= settings.refuse_from:
            return document({"error": {"message": "the queue is full"}}, 503)
        if settings.instead and number > 0 and self.random.random() < settings.instead_share:
            words = {"error": {"message": f"the server answers {settings.instead}", "code": settings.instead}}
            special = {"html": document("<html><title>Log in</title></html>"), "error": document(words),
                       "redirect": document({}, 307, Location="/elsewhere"), "json": None, "empty": None}  # fmt: skip
            return special[settings.instead] if settings.instead in special else document(words, int(settings.instead))
        return None

    async def answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer one request for tokens; False if the connection is to be closed."""
        settings, arrived_s = self.settings, time.monotonic()
        self.requests += 1
        self.bodies.append(body)
        number = self.requests - settings.good_first
        if refused := self.refused(path, body, number):
            writer.write(refused)
            return True
        self.under_way += 1
        try:
            answer = Answer(self, path, body, number, arrived_s)
            streams = body.get("stream", path.startswith("/api/") or answer.is_generate)
            if not streams or settings.instead == "json":
                await until(arrived_s + (settings.first_ms + settings.step_ms * (len(answer.tokens) - 1)) / 1e3)
                writer.write(document(answer.whole()))
                return True
            pieces = answer.pieces() if settings.instead != "empty" else iter(())
            for name, _, amount in (rule.partition(":") for rule in filter(None, settings.buffer.split(","))):
                number = amount_of(amount or "0", len(answer.tokens))
                pieces = BUFFERS[name](pieces, len(answer.tokens) - number if name == "last" else number, arrived_s)
            return await self._stream(answer, pieces, writer)
        finally:
            self.under_way -= 1

    async def _stream(self, answer: Answer, pieces: Iterator[Piece], writer: asyncio.StreamWriter) -> bool:
        settings, framing = self.settings, self.settings.framing
        kind = "application/x-ndjson" if answer.is_ollama or settings.ndjson else settings.content_type
        headers = {"Content-Type": kind, "X-Long": "x" * settings.header_bytes}
        headers |= {"Content-Encoding": "gzip"} if settings.gzip else {}
        headers |= {"Transfer-Encoding": "chunked"} if framing == "chunked" else {}
        if framing == "length":
            whole = list(pieces)
            headers["Content-Length"] = str(sum(len(piece.content) for piece in whole))
            pieces = iter(whole)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value)
        head += "Connection: close\r\n" if framing == "close" else ""
        writer.write(f"HTTP/1.{0 if framing == '1.0' else 1} 200 OK\r\n{head}\r\n".encode())
        press = zlib.compressobj(wbits=31)
        started, late_s = False, 0.0
        for piece in pieces:
            late_s += settings.crowd_ms / 1e3 * (self.under_way - 1) * piece.tokens * started
            started = started or piece.tokens > 0
            await until(piece.at_s + late_s)
            if writer.is_closing():
                return False
            content = piece.content
            if settings.gzip:
                content = press.compress(content) + press.flush(zlib.Z_SYNC_FLUSH)
            if settings.no_terminator and content.endswith(b"[DONE]\n\n"):
                content, answer.cut = content[:-2], True
            writer.write(b"%x\r\n%s\r\n" % (len(content), content) if framing == "chunked" else content)
            if settings.endless:
                await writer.drain()
        end = press.flush() if settings.gzip else b""
        if framing == "chunked" and not answer.cut:
            end = (b"%x\r\n%s\r\n" % (len(end), end) if end else b"") + b"0\r\n\r\n"
        writer.write(end)
        return framing in ("chunked", "length") and not answer.cut

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        about = self.about()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                headers = {name.lower(): value.decode() for name, value in lines.items()}
                body = await reader.readexactly(int(headers.get(b"content-length", "0")))
                if self.settings.key and headers.get(b"authorization") != f"Bearer {self.settings.key}":
                    writer.write(
                        document({"error": {"message": "Incorrect API key provided"}}, self.settings.key_status)
                    )
                elif path.endswith(("/completions", "/generate_stream", "/api/chat", "/api/generate")):
                    if not await self.answer(path, json.loads(body), writer):
                        break
                elif path == "/v1/models" and path not in about:
                    status = int(self.settings.models)
                    writer.write(document({"error": {"message": f"the list of models answers {status}"}}, status))
                elif path in about:
                    writer.write(document(about[path]))
                else:
                    writer.write(document({"error": f"no {path}"}, 404))
                await writer.drain()
        writer.close()

    async def serve(self, ready: threading.Event, ended: asyncio.Event) -> None:
        server = await asyncio.start_server(self.connected, "127.0.0.1", self.settings.port, limit=2**24)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await ended.wait()
        server.close()


async def until(moment_s: float) -> None:
    wait_s = moment_s - time.monotonic()
    if wait_s > 0.0:
        await asyncio.sleep(wait_s)


class PreciseSelector(selectors.SelectSelector):
    """Waits to the microsecond: epoll, which asyncio prefers, rounds each wait up to a whole millisecond."""


def new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(PreciseSelector())


@contextlib.contextmanager
def toy_server(given: Sequence[str] | str = "") -> Iterator[ToyLanguageServer]:
    """A server in a thread of this process, until the end of the block."""
    server, loop, ready = ToyLanguageServer(given), new_loop(), threading.Event()
    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(ready, ended),))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@contextlib.contextmanager
def toy_process(given: str = "") -> Iterator[str]:
    """A server in a process of its own, until the end of the block; yields its URL."""
    command = [sys.executable, __file__, *shlex.split(given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def run(server: ToyLanguageServer) -> None:
    ready, ended = threading.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    serving = asyncio.ensure_future(server.serve(ready, ended))
    while not ready.is_set() and not serving.done():
        await asyncio.sleep(0)
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    await serving


if __name__ == "__main__":
    new_loop().run_until_complete(run(ToyLanguageServer(sys.argv[1:])))
