"""Keeps a random sample of a block's answers while it runs; they are decoded after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from random import Random

import msgspec
import numpy as np

from loadgen.client.bodies import AnswerError
from loadgen.client.inputs import Array, byte_array
from loadgen.generator.messages import KeptAnswer, KeptTensor

MOST_ROWS = 1
"""Items of one answer that are compared; all of them are searched for NaN and infinity."""
_MOST_BYTES = 4 * 2**20
"""Limit of a block's kept outputs; the first answer is kept whatever its size."""


class KeptAnswers:
    """At most `most` answers of a block; each request has the same chance, however many there will be.

    Reservoir sampling by skips (Li, ACM TOMS 20, 1994, algorithm L). The seed alone decides which answers are kept, so
    a server cannot recognise their requests.
    """

    def __init__(self, most: int, seed: int) -> None:
        self._random = Random(seed)
        self._slots: list[tuple[int, Callable[[], KeptAnswer]] | None] = [None] * most
        """The number of each kept request, and what decodes its answer."""
        self._following = 0 if most else -1
        self._weight = 1.0

    def slot(self, request: int) -> int | None:
        """The slot for the answer to this request, None to drop it; called once per request, in ascending order."""
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
        """Keep an answer, unless the slot holds that of a later request. `first` is the number of its first item;
        `read` decodes it."""
        before = self._slots[slot]
        if before is None or before[0] < request:
            self._slots[slot] = request, partial(self._decode, request, user, body, first, read)

    def read(self) -> tuple[KeptAnswer, ...]:
        """Decode the kept answers, with the rows that are compared."""
        found: list[KeptAnswer] = []
        left = _MOST_BYTES
        for kept in self._slots:
            if kept is None:
                continue
            answer = kept[1]()
            left -= sum(len(tensor.data) for tensor in answer.outputs)
            if left < 0 and found:
                break
            found.append(answer)
        return tuple(found)

    def _decode(
        self, request: int, user: int, body: int, first: int, read: Callable[[], Mapping[str, Array]]
    ) -> KeptAnswer:
        outputs: list[KeptTensor] = []
        rows: list[int] = []
        error: str | None = None
        try:
            answer = read()
            count = min((len(array) for array in answer.values()), default=0)
            rows = sorted(self._random.sample(range(count), min(count, MOST_ROWS)))
            for name, array in answer.items():
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    error = f"output {name} holds NaN or infinite values"
                outputs.append(packed(name, array[rows]))
        except (AnswerError, TypeError) as exc:  # TypeError: an output without dimensions
            error = str(exc)
        return KeptAnswer(
            request=request, user=user, body=body, first=first, rows=tuple(rows), outputs=tuple(outputs), error=error
        )

    def _uniform(self) -> float:
        return 1.0 - self._random.random()  # never 0


def packed(name: str, array: Array) -> KeptTensor:
    if array.dtype.hasobject:
        data = msgspec.msgpack.encode([bytes(value) for value in array.ravel().tolist()])
        return KeptTensor(name=name, dtype="O", shape=array.shape, data=data)
    return KeptTensor(name=name, dtype=array.dtype.str, shape=array.shape, data=array.tobytes())


def unpacked(tensor: KeptTensor) -> Array:
    if tensor.dtype == "O":
        return byte_array(msgspec.msgpack.decode(tensor.data, type=list[bytes])).reshape(tensor.shape)
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(tensor.shape)
