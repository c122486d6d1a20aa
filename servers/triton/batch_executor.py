"""Executes the requests of one merged batch as one execution of an engine; imports nothing of Triton.

The decoder's threads first decode all images of the batch. A request with a bad image, a size or a value that the model
does not take gets its error and leaves the batch; the others are executed without it. If the engine fails, each request
is executed alone, so that only the cause of the failure fails.

The engine merges the requests (`Engine.start`): torch on CUDA copies them to the device from where they lie, others
copy them once on the host, or not at all for a batch of one request. Responses are parts of the engine's output arrays,
which belong to the caller: no copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servers.engines.interface import Engine
from servers.engines.padding import BatchKey, batch_key, padding_of
from servers.models.images import ImageDecoder, ImageError
from servers.models.specification import ModelSpecification
from servers.protocol.errors import InvalidRequestError
from servers.protocol.records import ModelSignature
from servers.protocol.tensors import Array


class BatchExecutor:
    """Executes batches on one engine. Not thread-safe, as the engine. A specification with JPEG requests needs a
    `decoder`; the engine executes `specification.executed`. `pad_to` are the sizes to which requests of different sizes
    are padded (see `servers.engines.padding`)."""

    def __init__(
        self,
        engine: Engine,
        specification: ModelSpecification,
        max_batch_size: int,
        decoder: ImageDecoder | None = None,
        pad_to: Sequence[int] = (),
    ) -> None:
        self._engine = engine
        self._decoder = decoder
        self._files = specification.inputs[0].name
        executed = specification.executed
        self._signature = ModelSignature(
            *(executed.name, executed.version, executed.inputs, executed.outputs, max_batch_size),
            *(executed.axes, executed.id_counts),
        )
        self._names = [tensor.name for tensor in executed.inputs]
        self._padding = padding_of(executed, pad_to)

    def execute(self, requests: Sequence[Mapping[str, Array]]) -> list[dict[str, Array] | Exception]:
        """One response per request, in order. A request has one array per input; together they have at most
        `max_batch_size` rows. An `ImageError` or `InvalidRequestError` is the request's fault, another exception the
        engine's. Rows do not influence each other: the NaN of a request stays in its own response."""
        if self._decoder is None:
            prepared = [self._checked(request) for request in requests]
        else:
            prepared = self._decode(self._decoder, requests)
        answers: list[dict[str, Array] | Exception] = []
        groups: dict[BatchKey, list[int]] = {}
        for index, inputs in enumerate(prepared):
            if isinstance(inputs, Exception):
                answers.append(inputs)
            else:
                answers.append({})
                key = batch_key(((name, array.shape) for name, array in inputs.items()), self._padding)
                groups.setdefault(key, []).append(index)
        for indices in groups.values():
            results = self._infer([inputs for index in indices if not isinstance(inputs := prepared[index], Exception)])
            for index, answer in zip(indices, results, strict=True):
                answers[index] = answer
        return answers

    def _checked(self, request: Mapping[str, Array]) -> Mapping[str, Array] | Exception:
        try:
            self._signature.check_sizes({name: array.shape for name, array in request.items()})
            self._signature.check_values(request)
            if self._engine.checks_values:
                self._engine.check_values(request)
        except InvalidRequestError as error:
            return error
        return request

    def _decode(
        self, decoder: ImageDecoder, requests: Sequence[Mapping[str, Array]]
    ) -> list[Mapping[str, Array] | Exception]:
        begun = [decoder.start(request[self._files]) for request in requests]
        decoded: list[Mapping[str, Array] | Exception] = []
        for decoding in begun:
            try:
                decoded.append({self._names[0]: decoding.result()})
            except ImageError as error:
                decoded.append(error)
        return decoded

    def _infer(self, requests: Sequence[Mapping[str, Array]]) -> Sequence[dict[str, Array] | Exception]:
        """Execute requests that share a batch key."""
        try:
            return self._engine.start(requests, self._padding)()
        except Exception as error:  # noqa: BLE001  the caller answers and logs it
            if len(requests) == 1:
                return [error]
            return [self._infer([request])[0] for request in requests]
