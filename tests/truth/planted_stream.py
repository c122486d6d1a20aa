"""A real server of streamed tokens with no model, whose schedule is planted.

It speaks `POST /v1/completions`, `POST /v1/chat/completions` and `POST /v2/models/planted/generate_stream`. Run as a
program it prints its port and serves until it is told to end; `python planted_stream.py --help` lists what can be
planted. Without options an answer's first token comes after 5 ms and each further one 2 ms later. Every token is due at
a moment that follows from the request's arrival, so that lateness does not add up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

MODEL, VOCABULARY = "planted", 4096


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=5.0, help="from the request to the first token")
    parser.add_argument("--step-ms", type=float, default=2.0, help="from one token to the next")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="a uniform delay of the whole answer")
    parser.add_argument("--chunk-tokens", type=int, default=1, help="tokens per chunk, which comes with its last token")
    parser.add_argument("--first-tokens", type=int, default=1, help="tokens in the first chunk, at the first moment")
    parser.add_argument("--early-empty-ms", type=float, default=0.0, help="a chunk without tokens, so much earlier")
    parser.add_argument("--gap-share", type=float, default=0.0, help="of gaps that are longer …")
    parser.add_argument("--gap-ms", type=float, default=300.0, help="… by so much")
    parser.add_argument("--usage-share", type=float, default=1.0, help="of the tokens are sent, usage says all")
    parser.add_argument("--stop-share", type=float, default=0.0, help="of answers that end early, with stop, …")
    parser.add_argument("--stop-at", type=int, default=60, help="… after so many tokens")
    parser.add_argument("--cache", action="store_true", help="a prompt that came before has its first token at once …")
    parser.add_argument("--cache-prefix", type=int, default=0, help="… or one with the same first tokens")
    parser.add_argument("--cache-hidden", action="store_true", help="the usage does not tell of cached tokens")
    parser.add_argument("--other-from", type=int, default=0, help="other tokens while so many requests are under way")
    parser.add_argument("--swap-every", type=int, default=0, help="every Nth answer has a token of another one")
    parser.add_argument("--error-every", type=int, default=0, help="every Nth answer is an error event at status 200")
    parser.add_argument("--error-after", type=int, default=0, help="… after so many tokens")
    parser.add_argument("--good-first", type=int, default=0, help="answers before any early stop, other token or error")
    parser.add_argument("--crowd-ms", type=float, default=0.0, help="more per token for each other request under way")
    parser.add_argument("--refuse-from", type=int, default=0, help="503 while so many requests are under way")
    parser.add_argument("--cut-every", type=int, default=0, help="every Nth answer is cut in the middle of an event")
    parser.add_argument("--same-every", type=int, default=0, help="all answers repeat one token, if 1")
    parser.add_argument("--ignore-prompt", action="store_true", help="every answer is the same")
    parser.add_argument("--wrong-echo", action="store_true", help="the first id of the prompt comes back changed")
    parser.add_argument("--no-ids", action="store_true", help="text alone")
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--prose", action="store_true", help="text that is no words t0, t1, …")
    parser.add_argument("--text-only", action="store_true", help="prompts of ids and generate_stream are refused")
    parser.add_argument("--chat-only", action="store_true", help="there is no other route than chat")
    parser.add_argument("--crlf", action="store_true", help="events end with CR LF CR LF, with comments between them")
    parser.add_argument("--in-effect", default="", help="settings that it reports, as in engine=slots,fronts=1")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def planted_tokens(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """The answer to a prompt: ids from 0 to VOCABULARY - 1."""
    drawn = random.Random(f"{seed} {prompt}")
    return [drawn.randrange(VOCABULARY) for _ in range(count)]


class PlantedStream:
    """The answers of one server."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.requests = 0
        self.under_way = 0
        self.known: set[tuple[int, ...]] = set()
        self.prompts: list[list[int]] = []
        """Every prompt, in the order in which they came."""
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False if the connection is to be closed."""
        settings, arrived_s = self.settings, time.monotonic()
        self.requests += 1
        number = self.requests - settings.good_first
        completions = path.endswith("/completions")
        given = body.get("prompt", body.get("input_ids", body.get("text_input", [])))
        is_chat = path.endswith("/chat/completions")
        given = body["messages"][0]["content"] if is_chat else given
        if (settings.chat_only and not is_chat) or (settings.text_only and not isinstance(given, str)):
            writer.write(document({"error": {"message": "no such prompt here"}}, "400 Bad Request"))
            return True
        prompt = [int(word[1:]) for word in given.split()] if isinstance(given, str) else list(given)
        self.prompts.append(prompt)
        self.bodies.append(body)
        is_load = number > 0 and int(body["max_tokens"]) > 2  # others only settle a connection
        if settings.refuse_from and is_load and self.under_way >= settings.refuse_from:
            writer.write(document({"error": {"message": "the queue is full"}}, "503 Service Unavailable"))
            return True
        self.under_way += 1
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            forms = completions, is_chat
            return await self._stream(number, forms, prompt, int(body["max_tokens"]), arrived_s, writer)
        finally:
            self.under_way -= 1

    async def _stream(
        self, number: int, forms: tuple[bool, bool], prompt: list[int], asked: int, arrived_s: float,
        writer: asyncio.StreamWriter,
    ) -> bool:  # fmt: skip
        settings = self.settings
        key = tuple(prompt[: settings.cache_prefix] if settings.cache_prefix else prompt)
        cached = (settings.cache or settings.cache_prefix > 0) and key in self.known
        self.known.add(key)
        tokens = self._tokens(number, prompt, asked)
        finish = "stop" if len(tokens) < asked and settings.usage_share == 1.0 else "length"
        first_s = arrived_s + (0.0 if cached else settings.first_ms) / 1e3
        first_s += self.random.random() * settings.jitter_ms / 1e3
        form = Form(*forms, settings, prompt, asked if settings.usage_share < 1.0 else len(tokens), len(key) * cached)
        if form.is_chat:
            writer.write(chunk(form.event([], 0, None)))
        if settings.early_empty_ms:
            await until(first_s - settings.early_empty_ms / 1e3)
            writer.write(chunk(form.event([], 0, None)))
        sent, due_s = 0, first_s
        for count in pieces(len(tokens), settings.first_tokens, settings.chunk_tokens):
            if sent:
                due_s += count * (settings.step_ms + settings.crowd_ms * (self.under_way - 1)) / 1e3
                if self.random.random() < settings.gap_share:
                    due_s += settings.gap_ms / 1e3
            await until(due_s)
            if (
                settings.error_every
                and number > 0
                and number % settings.error_every == 0
                and sent >= settings.error_after
            ):
                writer.write(chunk(form.error("the engine failed")) + b"0\r\n\r\n")
                return True
            sent += count
            ended = sent == len(tokens)
            event = form.event(tokens[sent - count : sent], sent, finish if ended else None)
            if settings.cut_every and number > 0 and number % settings.cut_every == 0 and 2 * sent >= len(tokens):
                writer.write(chunk(event[: len(event) // 2]))
                return False
            writer.write(chunk(event) + (chunk(form.end()) + b"0\r\n\r\n" if ended and form.end() else b""))
            if ended and not form.end():
                writer.write(b"0\r\n\r\n")
        return True

    def _tokens(self, number: int, prompt: list[int], asked: int) -> list[int]:
        settings = self.settings
        count = int(asked * settings.usage_share)
        if number > 0 and self.random.random() < settings.stop_share:
            count = min(count, settings.stop_at)
        other = settings.other_from and number > 0 and self.under_way >= settings.other_from
        tokens = planted_tokens([] if settings.ignore_prompt else prompt, count, 1 if other else 0)
        if settings.swap_every and number > 0 and number % settings.swap_every == 0:
            tokens[count // 2] = (tokens[count // 2] + 1) % VOCABULARY
        return [tokens[0]] * count if settings.same_every else tokens


class Form:
    """The events of one answer in one of the two protocols."""

    def __init__(
        self, completions: bool, is_chat: bool, settings: argparse.Namespace, prompt: list[int], total: int, cached: int
    ) -> None:
        self.completions, self.is_chat = completions, is_chat
        self.settings, self.prompt, self.total, self.cached = settings, prompt, total, cached
        self.echoes = True

    def event(self, tokens: list[int], sent: int, finish: str | None) -> bytes:
        settings = self.settings
        words = "".join(f" {'word' if settings.prose else f't{token}'}" for token in tokens)
        if not self.completions:
            ids: object = tokens[0] if len(tokens) == 1 else tokens
            data: dict[str, Any] = {"model_name": MODEL, "model_version": "1"}
            data |= {"text_output": words} if settings.no_ids else {"token_ids": ids}
            data |= {"prompt_tokens": len(self.prompt)} if self.echoes and not settings.no_usage else {}
            data |= {"finish_reason": finish} if finish else {}
            self.echoes = False
            return self._event(data)
        choice: dict[str, Any] = {"index": 0, "text": words, "logprobs": None, "finish_reason": finish}
        if self.is_chat:
            choice["delta"] = {"content": choice.pop("text")} | ({} if tokens else {"role": "assistant"})
        if not settings.no_ids and not self.is_chat:
            choice["token_ids"] = tokens
            if self.echoes:
                echo = list(self.prompt)
                echo[0] += settings.wrong_echo
                choice["prompt_token_ids"] = echo
                self.echoes = False
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        data = {"id": "cmpl-1", "object": kind, "created": 1, "model": MODEL, "choices": [choice]}
        if not settings.no_usage:
            data["usage"] = self._usage(round(sent / max(settings.usage_share, 1e-9)))
        return self._event(data)

    def end(self) -> bytes:
        """What follows the last chunk with tokens."""
        if not self.completions:
            return b""
        usage = {"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": self._usage(self.total)}
        return (b"" if self.settings.no_usage else self._event(usage)) + self._lines(b"data: [DONE]")

    def error(self, message: str) -> bytes:
        return self._event({"error": {"message": message} if self.completions else message})

    def _usage(self, count: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(self.prompt), "completion_tokens": count}
        usage["total_tokens"] = len(self.prompt) + count
        if not self.settings.cache_hidden:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage

    def _event(self, data: dict[str, Any]) -> bytes:
        return self._lines(b"data: " + json.dumps(data, separators=(",", ":")).encode())

    def _lines(self, line: bytes) -> bytes:
        return b": comment\r\n" + line + b"\r\n\r\n" if self.settings.crlf else line + b"\n\n"


def pieces(count: int, first: int, each: int) -> Iterator[int]:
    """The sizes of the chunks of so many tokens."""
    size = first
    while count:
        size = min(size, count)
        yield size
        count -= size
        size = each


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def document(content: object, status: str = "200 OK") -> bytes:
    text = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


async def until(moment_s: float) -> None:
    wait_s = moment_s - time.monotonic()
    if wait_s > 0.0:
        await asyncio.sleep(wait_s)


ABOUT: dict[str, object] = {
    "/v2": {"name": "planted", "version": "1", "extensions": ["generate"]},
    "/v2/health/live": {},
    "/v2/health/ready": {},
    f"/v2/models/{MODEL}": {
        "name": MODEL,
        "versions": ["1"],
        "platform": "planted",
        "inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [-1]}],
        "outputs": [{"name": "token_ids", "datatype": "INT32", "shape": [-1]}],
    },
    f"/v2/models/{MODEL}/ready": {},
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]},
}


def config(in_effect: str) -> dict[str, object]:
    settings = dict(setting.split("=") for setting in in_effect.split(",") if setting)
    parameters = {name: {"string_value": value} for name, value in settings.items()}
    return {"name": MODEL, "model_transaction_policy": {"decoupled": True}, "parameters": parameters}


async def start(planted: PlantedStream, port: int = 0) -> tuple[asyncio.Server, int]:
    """Serve on this event loop; returns the server and its port."""
    about = {**ABOUT, f"/v2/models/{MODEL}/config": config(planted.settings.in_effect)}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                body = await reader.readexactly(int(lines.get(b"content-length", b"0")))
                if path.endswith(("/completions", "/generate_stream")):
                    if not await planted.answer(path, json.loads(body), writer):
                        break
                elif path in about:
                    writer.write(document(about[path]))
                else:
                    writer.write(document({"error": f"no {path}"}, "404 Not Found"))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=2**24)
    return server, int(server.sockets[0].getsockname()[1])


async def serve(settings: argparse.Namespace) -> None:
    server, port = await start(PlantedStream(settings), settings.port)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await ended.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(options(sys.argv[1:])))
