"""A sample of a block's answers, kept while it runs and read when it is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np

from loadgen.generator.messages import KeptAnswer, KeptTensor
from loadgen.transport.bodies import AnswerError
from loadgen.transport.inputs import Array

MOST_ROWS = 1
"""Items of one answer that are compared; all of them are looked through for NaN and infinity."""
_MOST_BYTES = 4 * 2**20
"""Of a block's outputs that are passed on, one answer in any case."""


@dataclass(frozen=True, slots=True)
class _Kept:
    request: int
    user: int
    body: int
    first: int
    read: Callable[[], Mapping[str, Array]]


class KeptAnswers:
    """At most so many answers of a block, each request's with the same chance, however many there will be.

    Reservoir sampling by skips (Li, ACM TOMS 20, 1994, algorithm L): which requests are kept follows from the seed
    alone, so a server cannot tell them from the others.
    """

    def __init__(self, most: int, seed: int) -> None:
        self._random = Random(seed)
        self._slots: list[_Kept | None] = [None] * most
        self._following = 0 if most else -1
        self._weight = 1.0

    def slot(self, request: int) -> int | None:
        """Where the answer to this request is to be kept; asked for each request once, in ascending order."""
        if request != self._following:
            return None
        most = len(self._slots)
        if request + 1 < most:
            self._following += 1
            return request
        self._weight *= self._uniform() ** (1.0 / most)
        self._following += 1 + int(math.log(self._uniform()) / math.log1p(-self._weight))
        return request if request < most else self._random.randrange(most)

    def keep(
        self, slot: int, request: int, user: int, body: int, first: int, read: Callable[[], Mapping[str, Array]]
    ) -> None:
        """A copy of the answer; `first` is the number of its first item, `read` decodes it."""
        before = self._slots[slot]
        if before is None or before.request < request:
            self._slots[slot] = _Kept(request, user, body, first, read)

    def read(self) -> tuple[KeptAnswer, ...]:
        """Decode them, with the rows that are to be compared."""
        found: list[KeptAnswer] = []
        left = _MOST_BYTES
        for kept in self._slots:
            if kept is None:
                continue
            answer = self._read(kept)
            left -= sum(len(tensor.data) for tensor in answer.outputs)
            if left < 0 and found:
                break
            found.append(answer)
        return tuple(found)

    def _read(self, kept: _Kept) -> KeptAnswer:
        outputs: list[KeptTensor] = []
        rows: list[int] = []
        error: str | None = None
        try:
            answer = kept.read()
            count = min((len(array) for array in answer.values()), default=0)
            rows = sorted(self._random.sample(range(count), min(count, MOST_ROWS)))
            for name, array in answer.items():
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    error = f"output {name} holds NaN or infinite values"
                outputs.append(packed(name, array[rows]))
        except (AnswerError, TypeError) as exc:  # of an output without a first dimension
            error = str(exc)
        return KeptAnswer(
            request=kept.request, user=kept.user, body=kept.body, first=kept.first, rows=tuple(rows),
            outputs=tuple(outputs), error=error,
        )  # fmt: skip

    def _uniform(self) -> float:
        return 1.0 - self._random.random()  # never 0


def packed(name: str, array: Array) -> KeptTensor:
    """An output as it travels from a process to another."""
    if array.dtype.hasobject:
        data = msgspec.msgpack.encode([bytes(value) for value in array.ravel()])
        return KeptTensor(name=name, dtype="O", shape=array.shape, data=data)
    return KeptTensor(name=name, dtype=array.dtype.str, shape=array.shape, data=array.tobytes())


def unpacked(tensor: KeptTensor) -> Array:
    """The output again."""
    if tensor.dtype == "O":
        array = np.empty(math.prod(tensor.shape), dtype=object)
        array[:] = msgspec.msgpack.decode(tensor.data, type=list[bytes])
        return array.reshape(tensor.shape)
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(tensor.shape)
