"""The engine `continuous`: transformers' own continuous batching, as a baseline. It decodes in a thread of its own; a
step here waits for the tokens of that thread's next one.

Its cache of prefixes is off: prompts that repeat would cost nothing. It refuses a request by returning None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from itertools import count
from typing import Any

import transformers

from servers.engines.settings import EngineError
from servers.language.engine import Emission, GenerationRequest, GenerationSettings, check_request
from servers.language.module import build_module
from servers.language.specification import LanguageModel
from servers.language.torch_engine import TorchGeneratingEngine
from servers.models.modules import quiet_transformers

BATCH_TOKENS = {"cpu": 512, "cuda": 2048}
"""Tokens of one step: of prompts, and one of each running answer."""
PAGE_TOKENS = 32
"""Tokens of one page of the cache of keys and values."""
WAIT_S = 0.05
"""So long a step waits for tokens; prompts that are still being read give none."""


class ContinuousEngine(TorchGeneratingEngine):
    """See `GeneratingEngine`, and this module."""

    def __init__(self, model: LanguageModel, settings: GenerationSettings) -> None:
        super().__init__(model, settings)
        self._batch_tokens = max(settings.prefill_chunk or BATCH_TOKENS[self._kind], self.slots)
        self._manager: Any = None
        self._requests: dict[str, GenerationRequest] = {}
        """By the library's name of a request."""
        self._emitted: Counter[str] = Counter()
        """How many tokens of each have been emitted."""
        self._names: dict[int, str] = {}
        self._counter = count()

    @property
    def active(self) -> int:
        return min(len(self._names), self.slots)

    @property
    def waiting(self) -> int:
        return max(len(self._names) - self.slots, 0)

    def settings(self) -> dict[str, object]:
        effective = self._manager.continuous_batching_config
        return {
            **self._settings_of_torch("continuous", transformers.__version__, self._batch_tokens),
            "prefix_cache": bool(effective.allow_block_sharing),
            "speculation": False,
            "graphs": str(effective.use_cuda_graph),
            "attention": str(self._manager.model.config._attn_implementation),
        }

    def load(self) -> None:
        self._prepare_torch()
        module = build_module(self._model, str(self._device), self._precision)
        self._note_devices(module.parameters())
        configuration: Any = transformers.GenerationConfig  # has no annotations
        generation = configuration(do_sample=False, max_new_tokens=self.max_length, eos_token_id=-1, pad_token_id=0)
        with quiet_transformers():
            self._manager = module.init_continuous_batching(
                generation_config=generation, continuous_batching_config=self._batching()
            )
            self._manager.start()

    def warm_up(self) -> None:
        """Generate: the library's own warm-up executes nothing on a CPU."""
        for number in range(-self.slots, 0):
            self.add(GenerationRequest(number, [1 % self.vocabulary] * min(8, self.max_length - 4), 4))
        while self._names:
            self.step()

    def add(self, request: GenerationRequest) -> None:
        check_request(request.prompt, request.max_tokens, self.max_length, self.vocabulary)
        name = f"{request.number}:{next(self._counter)}"
        self._requests[name], self._names[request.number] = request, name
        added = self._manager.add_request(
            list(request.prompt),
            request_id=name,
            max_new_tokens=request.max_tokens,
            streaming=True,
            eos_token_id=-1 if request.ignore_eos else list(self.eos) or -1,
        )
        if added is None:
            self._forget(name)
            raise EngineError("transformers' continuous batching takes no more requests; its thread has stopped")

    def cancel(self, number: int) -> None:
        name = self._names.get(number)
        if name is not None:
            self._forget(name)
            self._manager.cancel_request(name)

    def step(self) -> Sequence[Emission]:
        if not self._names:
            return ()
        emissions = []
        result = self._manager.get_result(timeout=WAIT_S)
        if result is None and not self._manager.is_running():
            raise EngineError(f"transformers' continuous batching ended: {self._failure()}")
        while result is not None:
            emission = self._emission(result)
            if emission is not None:
                emissions.append(emission)
            result = self._manager.get_result(timeout=0)
        return tuple(emissions)

    def close(self) -> None:
        manager, self._manager = self._manager, None
        self._requests.clear()
        self._emitted.clear()
        self._names.clear()
        if manager is not None:
            with quiet_transformers():
                manager.stop(block=True, timeout=10)

    def _batching(self) -> Any:
        """The library's settings. Their names differ between releases."""
        kind = transformers.ContinuousBatchingConfig
        known = {field.name for field in fields(kind)}
        pages = -(-self.max_length // PAGE_TOKENS) + 1
        wanted: dict[str, Any] = {
            "page_size" if "page_size" in known else "block_size": PAGE_TOKENS,
            "num_blocks": self.slots * pages,
            "max_batch_tokens": self._batch_tokens,
            "max_requests_per_batch": self.slots,
            "allow_block_sharing": False,
            "use_cuda_graph": None if self._settings.graphs else False,
        }
        missing = wanted.keys() - known - {"max_requests_per_batch"}
        if missing:
            raise EngineError(
                f"transformers {transformers.__version__} has no {min(missing)} for continuous batching; install 5.17 "
                "or later"
            )
        return kind(**{name: value for name, value in wanted.items() if name in known})

    def _emission(self, result: Any) -> Emission | None:
        """The new tokens of a result; None without any, or if the request was cancelled."""
        name: str = result.request_id
        request = self._requests.get(name)
        if request is None:
            return None
        number = request.number
        if result.error is not None:
            self._forget(name)
            reason = str(result.error).partition("\n")[0] or "without a message"
            return Emission(number, (), "error", f"the engine failed: {reason:.200}")
        tokens = tuple(result.generated_tokens[self._emitted[name] :])
        self._emitted[name] += len(tokens)
        if not result.is_finished():
            return Emission(number, tokens) if tokens else None
        self._forget(name)
        last = result.generated_tokens[-1:]  # it may have come in an earlier result
        stopped = not request.ignore_eos and last and last[0] in self.eos
        return Emission(number, tokens, "stop" if stopped else "length")

    def _forget(self, name: str) -> None:
        del self._names[self._requests.pop(name).number]
        self._emitted.pop(name, None)

    def _failure(self) -> str:
        status = getattr(self._manager, "background_thread_status", None)
        return str(getattr(status, "fatal_error", None) or "its thread has stopped")
