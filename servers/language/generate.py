"""The engine `generate`: transformers' `generate()` on batches that do not change, as people write it; a baseline.

Requests that wait when none is running, with prompts of one length, become the next batch. It ends with its longest
answer, and requests that come meanwhile wait. `generate()` runs in a thread of its own; a step here waits for its next
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from threading import Thread
from typing import Any

import torch
import transformers
from torch import Tensor

from servers.engines.settings import EngineError
from servers.language.engine import Emission, GenerationRequest, GenerationSettings, check_request
from servers.language.module import build_module
from servers.language.specification import LanguageModel
from servers.language.torch_engine import TorchGeneratingEngine
from servers.models.modules import quiet_transformers


class GenerateEngine(TorchGeneratingEngine):
    """See `GeneratingEngine`, and this module."""

    def __init__(self, model: LanguageModel, settings: GenerationSettings) -> None:
        super().__init__(model, settings)
        self._module: Any = None
        self._batch: _GenerateCall | None = None
        self._queue: list[GenerationRequest] = []

    @property
    def active(self) -> int:
        return 0 if self._batch is None else len(self._batch.left)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def settings(self) -> dict[str, object]:
        return {
            **self._settings_of_torch("generate", transformers.__version__, self.max_length),
            "prefix_cache": False,
            "speculation": False,
            "attention": str(self._module.config._attn_implementation),
        }

    def load(self) -> None:
        self._prepare_torch()
        self._module = build_module(self._model, str(self._device), self._precision)
        self._note_devices(self._module.parameters())

    def warm_up(self) -> None:
        self.add(GenerationRequest(-1, [1 % self.vocabulary], 2))
        while self.active or self.waiting:
            self.step()

    def add(self, request: GenerationRequest) -> None:
        check_request(request.prompt, request.max_tokens, self)
        self._queue.append(request)

    def cancel(self, number: int) -> None:
        self._queue[:] = [request for request in self._queue if request.number != number]
        if self._batch is not None:
            self._batch.left.pop(number, None)

    def step(self) -> Sequence[Emission]:
        if self._batch is None:
            if not self._queue:
                return ()
            length = len(self._queue[0].prompt)
            chosen = [request for request in self._queue if len(request.prompt) == length][: self.slots]
            self._queue[:] = [request for request in self._queue if request not in chosen]
            self._batch = _GenerateCall(self._module, chosen)
        batch = self._batch
        tokens = batch.next_tokens()
        emissions = []
        if tokens is not None:
            for request, token in zip(batch.requests, tokens, strict=True):
                if request.number in batch.left:
                    emissions.append(batch.emission(request, token, self.eos))
        if tokens is None or not batch.left:
            batch.stop()
            self._batch = None
        return tuple(emissions)

    def close(self) -> None:
        if self._batch is not None:
            self._batch.stop()
        self._batch = self._module = None
        self._queue.clear()


class _GenerateCall:
    """One call of `generate()` in its thread; `left` are the requests that want more tokens, with how many."""

    def __init__(self, module: Any, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        self._prompts_came = False
        self.left = {request.number: request.max_tokens for request in requests}
        self._tokens: Queue[list[int] | BaseException | None] = Queue()
        self._thread = Thread(target=self._generate, args=(module,), name="generate", daemon=True)
        self._thread.start()

    def next_tokens(self) -> list[int] | None:
        """The next token of every request; None at the end. Raises `EngineError`."""
        got = self._tokens.get()
        if isinstance(got, BaseException):
            raise EngineError(f"generate() failed: {str(got).splitlines()[0]:.200}") from got
        return got

    def emission(self, request: GenerationRequest, token: int, eos: Sequence[int]) -> Emission:
        self.left[request.number] -= 1
        stopped = not request.ignore_eos and token in eos
        if not stopped and self.left[request.number]:
            return Emission(request.number, (token,))
        del self.left[request.number]
        return Emission(request.number, (token,), "stop" if stopped else "length")

    def stop(self) -> None:
        """End `generate()` at its next token, and wait for it."""
        self.left.clear()
        self._thread.join()

    # As a streamer of transformers: the prompts first, then each step's tokens.

    def put(self, tokens: Tensor) -> None:
        if self._prompts_came:
            self._tokens.put(tokens.tolist())
        self._prompts_came = True

    def end(self) -> None:
        self._tokens.put(None)

    def _generate(self, module: Any) -> None:
        ids = torch.tensor([list(request.prompt) for request in self.requests], device=module.device)

        def nobody_waits(input_ids: Tensor, _: object, **__: object) -> Tensor:
            return torch.full((len(input_ids),), not self.left, device=input_ids.device)

        try:
            with quiet_transformers():
                module.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=max(request.max_tokens for request in self.requests),
                    eos_token_id=None,
                    pad_token_id=0,
                    streamer=self,
                    stopping_criteria=transformers.StoppingCriteriaList([nobody_waits]),
                )
        except BaseException as exc:  # noqa: BLE001  the caller's thread hears of it
            self._tokens.put(exc)
