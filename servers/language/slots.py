"""The engine `slots`: static KV slots, continuous batching, prompts in pieces beside the running answers.

The requests that decode have the slots 0 … n-1, at most one prompt that is partly read has slot n. When an answer
ends, the last slot moves into its place, so that no step computes a row without a request. A step takes one token of
every request that decodes and some tokens of prompts, in the order of arrival: a long prompt delays the others by one
piece per token and never by the whole of it. Unless `prefill_chunk` says how many these are, a GPU measures when it
warms up how many lengthen a step to twice its time.

The tokens that a step chooses stay on the device, where the next step reads them. On a GPU they reach the host one step
late, while the next step runs: the host never waits for an idle device. Then a request that stops at EOS has one token
computed in vain, which nobody sees.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from servers.engines.settings import EngineError
from servers.language.decoder import DecoderWeights, decoder_weights
from servers.language.engine import Emission, GenerationRequest, GenerationSettings, check_request
from servers.language.forward import PromptPiece, SlotForward, StepPlan, TorchForward
from servers.language.module import build_module
from servers.language.specification import LanguageModel
from servers.language.torch_engine import TorchGeneratingEngine
from servers.models.specification import reason_of

PREFILL_CHUNK = {"cpu": 32, "cuda": 128}
"""Tokens of prompts per step that lengthen it to about twice its time."""
ALONE = 4
"""A piece is up to so many times larger while no answer is running that it could delay."""


class _Generation:
    """A request that has a slot or waits for one."""

    __slots__ = ("finished", "length", "produced", "request")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.length = 0
        """Tokens whose keys and values are in the slot."""
        self.produced = 0
        """Tokens that started steps choose, in the slot's device memory or on their way to the host."""
        self.finished = False
        """Nothing more is to be emitted."""


@dataclass(slots=True)
class _Flight:
    """A started step whose tokens are on their way to the host."""

    generations: Sequence[_Generation]
    """By token."""
    ends: Sequence[bool]
    """By token: whether it is the last one that the request asked for."""
    tokens: Any
    """A tensor, or what else has `tolist`."""
    arrived: torch.cuda.Event | None

    def fetch(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens


class SlotsEngine(TorchGeneratingEngine):
    """See `GeneratingEngine`, and this module."""

    name = "slots"

    def __init__(self, model: LanguageModel, settings: GenerationSettings) -> None:
        super().__init__(model, settings)
        self._chunk = settings.prefill_chunk or PREFILL_CHUNK[self._kind]
        self._eos = frozenset(model.eos)
        self._late = self._kind == "cuda"
        self._waiting: deque[_Generation] = deque()
        self._decoding: list[_Generation] = []
        """Row and slot i."""
        self._reading: _Generation | None = None
        """The request whose prompt is partly read, in the slot after those that decode."""
        self._generations: dict[int, _Generation] = {}
        self._flights: deque[_Flight] = deque()
        self._arrivals: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        """Pinned memory for the tokens of a step on a GPU, and the event after their copy; used in turns."""
        self._forward: SlotForward | None = None

    @property
    def active(self) -> int:
        """Requests with a slot, and those whose last tokens have not reached the host."""
        return len(self._generations) - len(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def settings(self) -> dict[str, object]:
        assert self._forward is not None
        chunk = self._forward.prompt_tokens_beside(self.slots) or self._chunk
        return {
            **self._settings_of_torch(self.name, torch.__version__, chunk),
            "cache_bytes": self._forward.cache_bytes,
            "prefix_cache": False,
            "speculation": False,
            **self._forward.describe(),
        }

    def load(self) -> None:
        self._prepare_torch()
        weights = self._load_weights()
        self._note_devices(weights.tensors())
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the matrices that were joined
        try:
            self._forward = self._make_forward(weights)
        except RuntimeError as exc:  # torch's error of a full GPU is one, and so is JAX's
            if "memory" not in str(exc):
                raise
            raise EngineError(
                f"there is no memory for {self.slots} slots of {self.max_length} tokens; use fewer --slots or a "
                "smaller --max-length"
            ) from exc

    def _load_weights(self) -> DecoderWeights:
        return decoder_weights(build_module(self._model, str(self._device), self._precision))

    def _make_forward(self, weights: DecoderWeights) -> SlotForward:
        if self._device.type != "cuda" or not self._settings.graphs:
            return TorchForward(weights, self.slots, self.max_length)
        try:
            from servers.language.triton_forward import TritonForward
        except ImportError as exc:
            raise EngineError(
                "the slots engine needs Triton on a GPU, which comes with torch; use --no-graphs"
            ) from exc
        return TritonForward(weights, self.slots, self.max_length, self._settings.prefill_chunk, self._chunk * ALONE)

    def warm_up(self) -> None:
        assert self._forward is not None
        self._forward.warm_up()
        # What torch and transformers have made lives as long as the process: a full collection took a quarter of a
        # second to find that out again, in which no answer got a token.
        gc.collect()
        gc.freeze()

    def add(self, request: GenerationRequest) -> None:
        check_request(request.prompt, request.max_tokens, self.max_length, self.vocabulary)
        generation = _Generation(request)
        self._generations[request.number] = generation
        self._waiting.append(generation)

    def cancel(self, number: int) -> None:
        generation = self._generations.pop(number, None)
        if generation is not None:
            generation.finished = True
            self._release(generation)

    def step(self) -> Sequence[Emission]:
        try:
            if self._decoding or self._reading or self._waiting:
                self._start()
                behind = 1 if self._late else 0
            else:
                behind = 0
            emissions: list[Emission] = []
            while len(self._flights) > behind:
                self._finish(self._flights.popleft(), emissions)
        except RuntimeError as exc:  # torch's errors, out of memory among them
            raise EngineError(f"a step failed: {reason_of(exc)}") from exc
        return tuple(emissions)

    def close(self) -> None:
        self._waiting.clear()
        self._decoding.clear()
        self._flights.clear()
        self._generations.clear()
        self._reading = self._forward = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _start(self) -> None:
        """Start one step, and give its rows the slots of the next one."""
        assert self._forward is not None
        rows = list(self._decoding)
        pieces, read = self._take_pieces()
        plan = StepPlan([generation.length for generation in rows], pieces)
        chosen = self._forward.step(plan)
        chosen_for = rows + [generation for generation, piece in zip(read, pieces, strict=True) if piece.last]
        for generation, piece in zip(read, pieces, strict=True):
            generation.length += len(piece.ids)
            if piece.last:
                self._decoding.append(generation)
        for generation in rows:
            generation.length += 1
        ends = []
        for generation in chosen_for:
            generation.produced += 1
            ends.append(generation.produced == generation.request.max_tokens)
        self._flights.append(_Flight(chosen_for, ends, *self._on_the_way(chosen)))
        for generation, ended in zip(reversed(chosen_for), reversed(ends), strict=True):
            if ended:
                self._release(generation)

    def _take_pieces(self) -> tuple[list[PromptPiece], list[_Generation]]:
        """The next tokens of prompts, first of the one that is partly read, and whose they are."""
        assert self._forward is not None
        alignment, most = self._forward.alignment, self._forward.most_pieces
        slot = len(self._decoding)
        left = self._forward.prompt_tokens_beside(slot) or self._chunk if slot else self._chunk * ALONE
        pieces: list[PromptPiece] = []
        read: list[_Generation] = []
        while left > 0 and len(pieces) < most:
            if self._reading is not None:
                generation, self._reading = self._reading, None
            elif self._waiting and slot < self.slots:
                generation = self._waiting.popleft()
            else:
                break
            prompt, start = generation.request.prompt, generation.length
            ids = prompt[start : start + left]
            last = start + len(ids) == len(prompt)
            pieces.append(PromptPiece(slot, start, ids, last))
            read.append(generation)
            left -= -(-len(ids) // alignment) * alignment
            slot += 1
            if not last:
                self._reading = generation
                break
        return pieces, read

    def _on_the_way(self, chosen: Any) -> tuple[Any, torch.cuda.Event | None]:
        """The tokens of a step as `_Flight` has them."""
        if self._device.type == "cpu":
            return chosen, None
        if not self._arrivals:  # at most two flights at a time
            assert self._forward is not None
            for _ in range(3):
                room = torch.empty(self.slots + self._forward.most_pieces, dtype=chosen.dtype, pin_memory=True)
                self._arrivals.append((room, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        room, arrived = self._arrivals[0]
        self._arrivals.rotate()
        host = room[: len(chosen)]
        host.copy_(chosen, non_blocking=True)
        arrived.record()
        return host, arrived

    def _finish(self, flight: _Flight, emissions: list[Emission]) -> None:
        """Wait for the tokens of a step and emit them."""
        for generation, ended, token in zip(flight.generations, flight.ends, flight.fetch(), strict=False):
            if generation.finished:
                continue
            request = generation.request
            finish: Literal["length", "stop"] | None = "length" if ended else None
            if token in self._eos and not request.ignore_eos:
                finish = "stop"
            if finish:
                generation.finished = True
                del self._generations[request.number]
                self._release(generation)
            emissions.append(Emission(request.number, (token,), finish))

    def _release(self, generation: _Generation) -> None:
        """Take the slot of a request, or its place among the waiting, without waiting for steps that run."""
        assert self._forward is not None
        if generation in self._decoding:
            slot, last = self._decoding.index(generation), len(self._decoding) - 1
            moved = self._decoding.pop()
            if moved is not generation:
                self._decoding[slot] = moved
                self._forward.move(last, slot, moved.length)
            if self._reading is not None:  # its slot follows those that decode
                self._forward.move(last + 1, last, self._reading.length)
        elif generation is self._reading:
            self._reading = None
        elif generation in self._waiting:
            self._waiting.remove(generation)
