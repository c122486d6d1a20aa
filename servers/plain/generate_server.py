"""A language model with FastAPI, uvicorn and transformers' generate(), as most people write it.

Each request calls model.generate() in a thread of its own, and a streamer passes every token to the event loop. There
is no lock, no queue and no batch: concurrent requests share the processor. A client that leaves its stream ends its
generate() at the next token. Streams are server-sent events, in OpenAI's form on /v1/completions and in Triton's on
generate_stream.
"""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field, StrictInt
from starlette.exceptions import HTTPException
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from servers.language.engine import check_request
from servers.language.tokenizer import ids_of, text_of
from servers.plain.language_report import PlainLanguageModel, add_language_routes, openai_error
from servers.plain.settings import of_process


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionBody(BaseModel):
    """What would change the tokens has the one value that greedy search allows; other fields are ignored."""

    model: str | None = None
    prompt: list[StrictInt] | str
    max_tokens: StrictInt = Field(16, ge=1)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    temperature: Literal[0, None] = None
    frequency_penalty: Literal[0, None] = None
    presence_penalty: Literal[0, None] = None
    repetition_penalty: Literal[1, None] = None
    n: Literal[1, None] = None
    best_of: Literal[1, None] = None
    echo: Literal[False, None] = None
    suffix: None = None
    stop: None = None
    min_tokens: Literal[0, None] = None
    logprobs: None = None


class GenerateBody(BaseModel):
    input_ids: list[StrictInt] | StrictInt
    max_tokens: StrictInt = Field(ge=1)
    ignore_eos: bool = True


class Generation(BaseStreamer):
    """One call of generate() in a thread of its own, which calls `put` and `end`; made on the event loop."""

    def __init__(self, model: PlainLanguageModel, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        check_request(prompt, max_tokens, model.max_length, model.vocabulary)
        self.prompt, self.max_tokens, self.eos = prompt, max_tokens, () if ignore_eos else model.eos
        self.queue: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.loop, self.left, self.has_prompt = asyncio.get_running_loop(), False, False
        threading.Thread(target=self.generate, args=(model,), daemon=True).start()

    def generate(self, model: PlainLanguageModel) -> None:
        ids = torch.tensor([self.prompt], device=model.device)
        try:
            model.module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.max_tokens,
                do_sample=False,
                eos_token_id=list(self.eos) or None,  # none: EOS is a token like any other, and is not masked
                stopping_criteria=StoppingCriteriaList([self.has_left]),
                streamer=self,
            )
        except Exception as exc:  # noqa: BLE001 - it ends this stream, and the server goes on
            self.pass_on(exc)

    def has_left(self, ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.full((len(ids),), self.left, device=ids.device)

    def put(self, value: torch.Tensor) -> None:
        if self.has_prompt:
            self.pass_on(int(value))
        self.has_prompt = True  # generate() puts the prompt first

    def end(self) -> None:
        self.pass_on(None)

    def pass_on(self, item: int | Exception | None) -> None:
        self.loop.call_soon_threadsafe(self.queue.put_nowait, item)

    def usage(self, count: int) -> dict[str, int]:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    async def tokens(self) -> AsyncIterator[tuple[int, str | None]]:
        """Each token as it comes, the last one with its finish reason."""
        try:
            for count in range(1, self.max_tokens + 1):
                item = await self.queue.get()
                if item is None or isinstance(item, Exception):
                    raise RuntimeError("generate() ended early") from item
                finish = "stop" if item in self.eos else "length" if count == self.max_tokens else None
                yield item, finish
                if finish:
                    return
        finally:
            self.left = True


def event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


async def completion_events(generation: Generation, head: dict[str, Any], body: CompletionBody) -> AsyncIterator[str]:
    """OpenAI's stream: one chunk per token, the usage, and [DONE]."""
    options, count = body.stream_options or StreamOptions(), 0
    try:
        async for token, finish in generation.tokens():
            count += 1
            choice = {"index": 0, "text": text_of([token], first=count == 1), "logprobs": None, "finish_reason": finish}
            if body.return_token_ids:
                choice |= {"token_ids": [token]} | ({"prompt_token_ids": generation.prompt} if count == 1 else {})
            usage = {"usage": generation.usage(count)} if options.continuous_usage_stats else {}
            yield event({**head, "choices": [choice], **usage})
        if options.include_usage:
            yield event({**head, "choices": [], "usage": generation.usage(count)})
    except RuntimeError as exc:
        yield event(openai_error(500, str(exc)))
    yield "data: [DONE]\n\n"


async def completion(generation: Generation, head: dict[str, Any], body: CompletionBody) -> dict[str, Any]:
    """OpenAI's answer in one piece."""
    tokens = [part async for part in generation.tokens()]
    ids, finish = [token for token, _ in tokens], tokens[-1][1]
    choice = {"index": 0, "text": text_of(ids), "logprobs": None, "finish_reason": finish}
    if body.return_token_ids:
        choice |= {"token_ids": ids, "prompt_token_ids": generation.prompt}
    return {**head, "choices": [choice], "usage": generation.usage(len(ids))}


async def generate_events(generation: Generation, head: dict[str, Any]) -> AsyncIterator[str]:
    """Triton's stream: one event per token, which is a number there, since Triton writes a single element so."""
    first: dict[str, Any] = {"prompt_tokens": len(generation.prompt)}
    try:
        async for token, finish in generation.tokens():
            yield event({**head, "token_ids": token, **first, **({"finish_reason": finish} if finish else {})})
            first = {}
    except RuntimeError as exc:
        yield event({"error": str(exc)})


def main() -> None:
    model = PlainLanguageModel(of_process())
    app = FastAPI()
    add_language_routes(app, model)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        if body.model not in (None, model.name):
            raise HTTPException(404, f"the model {body.model} does not exist; this server has {model.name}")
        prompt = ids_of(body.prompt, model.vocabulary) if isinstance(body.prompt, str) else body.prompt
        generation = Generation(model, prompt, body.max_tokens, body.ignore_eos)
        head: dict[str, Any] = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}
        head |= {"created": int(time.time()), "model": model.name}
        if not body.stream:
            return JSONResponse(await completion(generation, head, body))
        return StreamingResponse(completion_events(generation, head, body), media_type="text/event-stream")

    @app.post(f"/v2/models/{model.name}/generate_stream")
    async def generate_stream(body: GenerateBody) -> Response:
        prompt = body.input_ids if isinstance(body.input_ids, list) else [body.input_ids]
        generation = Generation(model, prompt, body.max_tokens, body.ignore_eos)
        head = {"model_name": model.name, "model_version": "1"}
        return StreamingResponse(generate_events(generation, head), media_type="text/event-stream")

    settings = model.settings
    uvicorn.run(
        app, host=settings.host, port=settings.http_port, log_level="warning", ssl_certfile=settings.tls_certificate
    )


if __name__ == "__main__":
    main()
