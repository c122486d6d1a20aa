"""The prompts that a language model is sent: token ids from a seed, so that each can be made again from its numbers.

A workload has a few prepared prompts (`body_count`). Two requests never carry the same one: the first ids after a
shared prefix are made from the request's number, so a cache of prompts finds nothing from the first id on. These ids
are written with a fixed width, so that a prepared body is sent with a few bytes exchanged. Successive numbers give ids
that look random: multiplying by a number without a common factor permutes all numbers below the capacity.

Of a trace of lengths (`loadgen.records.imported.TraceLine`) prompts share what has the same hashes. All requests of one
replay have the same number, so that nothing is shared between replays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.records.run import body_count
from loadgen.records.tokens import MOST_TOKENS

MOST_ID = 2**31 - 1
_CAPACITY_BITS = 40
"""At least 2⁴⁰ different prompts, where the vocabulary and the length allow."""
_MOST_VARYING = 10
_TRACE_BLOCK = 512
"""Tokens that a hash of a trace stands for."""

UNKNOWN_IDS = (100, 999)
"""Ids for prompts where the vocabulary is unknown: any tokenizer has that many, and its special ids are elsewhere."""

Ids = npt.NDArray[np.int32]


class PromptError(ValueError):
    """Prompts cannot be made as asked; the message says why and what to change."""


class PromptShape(msgspec.Struct, frozen=True):
    """The lengths of a workload's prompts and answers, in tokens. The first `shared_prefix` tokens of all its prompts
    are the same."""

    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    shared_prefix: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0


SETTLING = PromptShape(8, 2)
"""The small request that every user has answered before a block."""


class PromptPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the prompts of a run, but for the requests' numbers."""

    low: Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]
    """The smallest id in a prompt."""
    high: Annotated[int, msgspec.Meta(ge=1, le=MOST_ID)]
    """The largest one."""
    seed: int
    shapes: tuple[PromptShape, ...] = ()
    """The shapes for which bodies are prepared."""
    text: bool = False
    """Whether prompts are sent as words, "t5 t17 …", because the server takes no ids."""

    @property
    def vocabulary(self) -> int:
        """How many different ids prompts are made of."""
        return self.high - self.low + 1

    @property
    def width(self) -> int:
        """Digits of the largest id."""
        return len(str(self.high))

    def varying(self, shape: PromptShape) -> int:
        """How many ids of a prompt are made from its number."""
        own = shape.prompt_tokens - shape.shared_prefix
        return min(own, _MOST_VARYING, math.ceil(_CAPACITY_BITS / math.log2(self.vocabulary)))

    def require(self, shape: PromptShape) -> None:
        """Raises `PromptError` for prompts that cannot differ from each other."""
        if self.vocabulary < 2:
            raise PromptError("prompts need at least two token ids; the model's vocabulary leaves fewer")
        if shape.shared_prefix >= shape.prompt_tokens:
            raise PromptError(
                f"a shared prefix of {shape.shared_prefix:,} tokens leaves nothing of a prompt of "
                f"{shape.prompt_tokens:,} that differs; make the prompt longer or the prefix shorter"
            )

    def prepared(self, shape: PromptShape) -> tuple[Ids, ...]:
        """The prepared prompts of a shape, one per body. The ids made from a number are 0 here."""
        self.require(shape)
        return tuple(self._base(shape, body) for body in range(body_count(1)))

    def _base(self, shape: PromptShape, body: int) -> Ids:
        prefix = self._ids(shape.shared_prefix, 0, 0, 0)
        varying = np.zeros(self.varying(shape), dtype=np.int32)
        rest = shape.prompt_tokens - len(prefix) - len(varying)
        return np.concatenate([prefix, varying, self._ids(rest, 1 + body, shape.prompt_tokens, shape.output_tokens)])

    def prompt(self, shape: PromptShape, body: int, number: int) -> Ids:
        """The prompt of the request that was sent with this body and this number."""
        return self.with_number(self._base(shape, body), shape, number)

    def with_number(self, prepared: Ids, shape: PromptShape, number: int) -> Ids:
        """A prepared prompt with the ids that are made from a number."""
        ids, count = prepared.copy(), self.varying(shape)
        ids[shape.shared_prefix : shape.shared_prefix + count] = self.numbered(number, count)
        return ids

    def traced(self, place: int, length: int, hash_ids: Sequence[int]) -> Ids:
        """The prompt of a trace's request, which is the one at this place, before a number is put in."""
        blocks = [self._ids(_TRACE_BLOCK, 0, 1, number) for number in hash_ids[: -(-length // _TRACE_BLOCK)]]
        rest = max(0, length - len(blocks) * _TRACE_BLOCK)
        return np.concatenate([*blocks, self._ids(rest, 0, 2, place)])[:length]

    def numbered(self, number: int, count: int) -> list[int]:
        """The `count` ids that are made from a number: different ones for all numbers below the capacity."""
        vocabulary, low = self.vocabulary, self.low
        value = number * _multiplier(vocabulary, count) % vocabulary**count
        ids = []
        for _ in range(count):
            value, digit = divmod(value, vocabulary)
            ids.append(low + digit)
        return ids

    def patch(self, number: int, count: int) -> bytes:
        """The ids made from a number, encoded as they stand in a body: all patches of a count have the same length."""
        ids, width = self.numbered(number, count), self.width
        if self.text:
            return " ".join([f"t{number:<{width}d}" for number in ids]).encode()
        return ",".join([f"{number:>{width}d}" for number in ids]).encode()

    def encode(self, ids: Ids) -> bytes:
        """Ids as they stand in a body, without brackets or quotes."""
        if self.text:
            return " ".join([f"t{number}" for number in ids.tolist()]).encode()
        return ",".join(map(str, ids.tolist())).encode()

    def _ids(self, count: int, *key: int) -> Ids:
        random = np.random.default_rng([self.seed & (2**64 - 1), *key])
        return random.integers(self.low, self.high + 1, count, dtype=np.int32)


@cache
def _multiplier(vocabulary: int, count: int) -> int:
    """A number near the golden ratio of the capacity that has no factor in common with it."""
    multiplier = int(vocabulary**count * 0.6180339887)
    while math.gcd(multiplier, vocabulary) != 1:
        multiplier += 1
    return max(1, multiplier)
