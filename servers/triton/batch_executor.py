"""Executes the requests of one merged batch as one execution of an engine. Knows nothing of Triton.

The decoder's threads first decode all images of the batch. A request with a bad image gets its error and leaves the
batch; the others are executed without it.

Input bytes are copied once, into a staging array that lives as long as the model, or not at all for a batch of one
request. Responses are row ranges of the engine's output arrays, which belong to the caller: no copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from servers.contract.tensors import Array, TensorSpec
from servers.engines.interface import Engine
from servers.models.image_decoder import ImageDecoder
from servers.models.preprocessing import ImageError
from servers.models.specification import ModelSpecification


class BatchExecutor:
    """One engine and its staging arrays; like an engine not thread-safe.

    A specification with JPEG requests needs a `decoder`; the engine executes `specification.executed`.
    """

    def __init__(
        self,
        engine: Engine,
        specification: ModelSpecification,
        max_batch_size: int,
        decoder: ImageDecoder | None = None,
    ) -> None:
        self._engine = engine
        self._decoder = decoder
        self._files = specification.inputs[0].name
        inputs = specification.executed.inputs
        self._names = [tensor.name for tensor in inputs]
        self._staging = {tensor.name: _staging(tensor, max_batch_size) for tensor in inputs}

    def execute(self, requests: Sequence[Mapping[str, Array]]) -> list[dict[str, Array] | ImageError]:
        """One response per request, in order. A request has one array per input, all at most `max_batch_size` rows.

        Rows do not influence each other: the NaN of a request stays in its own response.
        """
        if self._decoder is None:
            return list(self._infer(requests))
        decoded = self._decode(self._decoder, requests)
        answers = iter(self._infer([inputs for inputs in decoded if not isinstance(inputs, ImageError)]))
        return [inputs if isinstance(inputs, ImageError) else next(answers) for inputs in decoded]

    def _decode(
        self, decoder: ImageDecoder, requests: Sequence[Mapping[str, Array]]
    ) -> list[Mapping[str, Array] | ImageError]:
        begun = [decoder.start(request[self._files]) for request in requests]
        decoded: list[Mapping[str, Array] | ImageError] = []
        for decoding in begun:
            try:
                decoded.append({self._names[0]: decoding.result()})
            except ImageError as error:
                decoded.append(error)
        return decoded

    def _infer(self, requests: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        if not requests:
            return []
        if len(requests) == 1:
            return [dict(self._engine.infer(requests[0]))]
        outputs = self._engine.infer({name: self._merge(name, requests) for name in self._names})
        answers = []
        start = 0
        for request in requests:
            end = start + len(request[self._names[0]])
            answers.append({name: array[start:end] for name, array in outputs.items()})
            start = end
        return answers

    def _merge(self, name: str, requests: Sequence[Mapping[str, Array]]) -> Array:
        parts = [request[name] for request in requests]
        staging = self._staging[name]
        if staging is None:
            return np.concatenate(parts)
        return np.concatenate(parts, out=staging[: sum(map(len, parts))])


def _staging(tensor: TensorSpec, max_batch_size: int) -> Array | None:
    """None if an item's size is not fixed. Filled once, so that no request pays for the first page faults."""
    if tensor.dtype.hasobject or any(dim < 0 for dim in tensor.item_shape):
        return None
    array = np.empty((max_batch_size, *tensor.item_shape), tensor.dtype)
    array.fill(0)
    return array
