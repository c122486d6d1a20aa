"""Language models over gRPC as users ask them: unmodified tritonclient, threaded and with asyncio."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

SECONDS = 30


def inputs(prompt: Sequence[int], max_tokens: int | None, ignore_eos: bool | None = True) -> list[triton.InferInput]:
    """The tensors of one request."""
    tensors = [triton.InferInput("input_ids", [len(prompt)], "INT32").set_data_from_numpy(np.array(prompt, np.int32))]
    if max_tokens is not None:
        most = np.array([max_tokens], np.int32)
        tensors.append(triton.InferInput("max_tokens", [1], "INT32").set_data_from_numpy(most))
    if ignore_eos is not None:
        ignored = np.array([ignore_eos])
        tensors.append(triton.InferInput("ignore_eos", [1], "BOOL").set_data_from_numpy(ignored))
    return tensors


@dataclass
class Streamed:
    """The answer to one request, from its responses."""

    tokens: list[int] = field(default_factory=list)
    responses: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    """One for each response that tells it, of which the first must be the only one."""
    first_tells_prompt: bool = False
    finish: str | None = None
    final: bool = False

    def add(self, result: Any) -> None:
        assert not self.final, "a response follows the final one"
        self.responses += 1
        self.tokens += [] if result.as_numpy("token_ids") is None else result.as_numpy("token_ids").tolist()
        if (count := result.as_numpy("prompt_tokens")) is not None:
            self.prompt_tokens += count.tolist()
            self.first_tells_prompt = self.responses == 1
        if (finish := result.as_numpy("finish_reason")) is not None:
            self.finish = finish[0].decode()
        self.final = result.get_response().parameters["triton_final_response"].bool_param


@contextmanager
def stream(
    address: str, headers: dict[str, str] | None = None
) -> Iterator[tuple[triton.InferenceServerClient, queue.SimpleQueue[Any]]]:
    """A client whose stream is open, and its results and errors as they come."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: arrived.put(result if error is None else error), headers=headers)
        yield client, arrived
        client.stop_stream()


def collect(arrived: queue.SimpleQueue[Any], requests: int) -> tuple[dict[str, Streamed], list[str], list[str]]:
    """The answers by id, the errors, and the ids in the order of the responses, until so many requests have ended."""
    answers: dict[str, Streamed] = {}
    errors: list[str] = []
    order: list[str] = []
    while sum(answer.final for answer in answers.values()) + len(errors) < requests:
        result = arrived.get(timeout=SECONDS)
        if isinstance(result, Exception):
            errors.append(str(result))
            continue
        order.append(result.get_response().id)
        answers.setdefault(order[-1], Streamed()).add(result)
    return answers, errors, order


async def stream_with_asyncio(
    address: str, requests: Sequence[dict[str, Any]]
) -> tuple[dict[str, Streamed], list[str]]:
    """The answers by id, and the errors."""
    answers: dict[str, Streamed] = {}
    errors: list[str] = []

    async def sent() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield request

    async with triton_aio.InferenceServerClient(address) as client:
        async for result, error in client.stream_infer(sent(), stream_timeout=SECONDS):
            if error is not None:
                errors.append(str(error))
            else:
                answers.setdefault(result.get_response().id, Streamed()).add(result)
    return answers, errors
