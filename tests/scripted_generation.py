"""A generating engine without a model, for tests of servers and of loops around engines.

Each token is a function of the prompt and of the tokens before it, so that a test knows the right answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from servers.engines.settings import EngineError
from servers.language.engine import Emission, GenerationRequest, check_request

VOCABULARY = 1000
EOS = 0


def next_token(prompt: Sequence[int], position: int) -> int:
    """The token at `position` of the answer to this prompt: an id from 1 to 999."""
    return 1 + (sum(prompt) * 31 + len(prompt) * 7 + position * 101) % (VOCABULARY - 1)


def scripted_answer(prompt: Sequence[int], length: int) -> list[int]:
    """The first `length` tokens of the answer to this prompt."""
    return [next_token(prompt, position) for position in range(length)]


@dataclass
class _ScriptedSlot:
    request: GenerationRequest
    produced: int = 0


@dataclass
class ScriptedEngine:
    """One token per active request and step. `stops_at`: with EOS allowed, answers stop after that many tokens.

    `fails_at`: the step (from 1) that raises `EngineError`. `refused`: prompts that begin with this id end in an error.
    """

    slots: int = 4
    max_length: int = 256
    vocabulary: int = VOCABULARY
    eos: tuple[int, ...] = (EOS,)
    stops_at: int = 8
    fails_at: int = 0
    refused: int = -1
    steps: int = 0
    loaded: bool = False
    closed: bool = False
    _running: dict[int, _ScriptedSlot] = field(default_factory=dict)
    _queue: deque[GenerationRequest] = field(default_factory=deque)

    @property
    def active(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def settings(self) -> dict[str, object]:
        return {"engine": "scripted", "device": "cpu", "precision": "fp32", "slots": self.slots}

    def load(self) -> None:
        self.loaded = True

    def warm_up(self) -> None:
        pass

    def add(self, request: GenerationRequest) -> None:
        check_request(request.prompt, request.max_tokens, self.max_length, self.vocabulary)
        self._queue.append(request)

    def cancel(self, number: int) -> None:
        self._running.pop(number, None)
        self._queue = deque(request for request in self._queue if request.number != number)

    def step(self) -> Sequence[Emission]:
        while self._queue and len(self._running) < self.slots:
            request = self._queue.popleft()
            self._running[request.number] = _ScriptedSlot(request)
        if not self._running:
            return ()
        self.steps += 1
        if self.steps == self.fails_at:
            raise EngineError("the scripted engine failed, as the test asked")
        return [self._emit(slot) for slot in list(self._running.values())]

    def _emit(self, slot: _ScriptedSlot) -> Emission:
        request = slot.request
        if request.prompt[0] == self.refused:
            del self._running[request.number]
            return Emission(request.number, (), "error", "the scripted engine refuses this prompt")
        stops = not request.ignore_eos and slot.produced + 1 == self.stops_at
        token = EOS if stops else next_token(request.prompt, slot.produced)
        slot.produced += 1
        finished = stops or slot.produced == request.max_tokens
        if finished:
            del self._running[request.number]
        return Emission(request.number, (token,), ("stop" if stops else "length") if finished else None)

    def close(self) -> None:
        self.closed = True
        self._running.clear()
        self._queue.clear()
