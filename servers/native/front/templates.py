"""Request templates: the decoded and checked form of requests that repeat, without their ids and their tensors' values.

Load clients send the same bytes around every tensor, and the meaning of a request whose tensors are binary data or in
shared memory depends only on these bytes, on the model, and on what is registered at that moment. So a template keeps
the result of the first decoding: over HTTP by the bytes of the JSON header without its id, over gRPC by those around
the tensors (see `grpc/messages`). Not cached: values in JSON, timeouts, BYTES, and shared-memory inputs that several
threads read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self, TypeVar

import numpy as np
import orjson

from servers.engines.padding import BatchKey, Padding, batch_key
from servers.native.shared.interface import QueuedRequest
from servers.protocol.codec import HEADER_LENGTH, encode_response, write_output
from servers.protocol.records import (
    FindWindow,
    InferRequest,
    InferResponse,
    ModelSignature,
    OutputTensor,
    RegionReference,
    RegionWindow,
    RequestedOutput,
)
from servers.protocol.tensors import Array, like

INLINE_READ_BYTES = 2**20
"""More bytes of system shared memory than this are read in threads."""
KEPT_TEMPLATES = 256
KEPT_BYTES = 4096
"""Requests with more bytes around their tensors are decoded each time."""
_KEPT_ANSWERS = 8

Shapes = tuple[tuple[int, ...], ...]


_InputPlace = tuple[str, np.dtype[np.generic], tuple[int, ...], int | RegionReference]
"""An input's name, dtype and shape, and where its bytes begin in the request's content, counted as `Repeated` says, or
its piece of shared memory."""

C = TypeVar("C")


@dataclass(eq=False, slots=True)
class Template:
    """A request without its id and its values."""

    rows: int
    key: BatchKey
    _inputs: tuple[_InputPlace, ...]
    _outputs: tuple[tuple[str, RegionReference | None], ...]
    _answers: dict[Any, Any] = field(default_factory=dict)
    fixed_id: bytes | None = None
    """The request's id, where it is a part of the template."""

    @classmethod
    def of(
        cls, request: InferRequest, starts: Sequence[int], signature: ModelSignature, padding: Padding | None
    ) -> Self | None:
        """The template of a decoded request, None if it must be decoded each time.

        `starts` are the places in its content where the inputs outside of shared memory begin. Raises `ContractError`.
        """
        specs = signature.outputs
        requested = request.outputs or [RequestedOutput(spec.name, request.binary_output) for spec in specs]
        if (
            "timeout" in request.parameters
            or any(spec.datatype == "BYTES" for spec in specs)
            or not all(output.binary or output.window is not None for output in requested)
            or any(item.datatype == "BYTES" or not item.data.size or _is_long(item.window) for item in request.inputs)
        ):
            return None
        rows, _ = signature.validate(request)
        left = iter(starts)
        inputs = tuple(
            (item.name, item.data.dtype, item.shape, next(left) if item.window is None else item.window.reference)
            for item in request.inputs
        )
        outputs = tuple(
            (output.name, None if output.window is None else output.window.reference) for output in requested
        )
        key = batch_key(((item.name, item.shape) for item in request.inputs), padding)
        return cls(rows, key, inputs, outputs)

    def queued(
        self,
        content: memoryview,
        offset: int,
        find: FindWindow,
        deadline_ns: int | None,
        waiter: Callable[[QueuedRequest], None] | None,
    ) -> QueuedRequest:
        """The request with the values of `content`, of which its arrays are views; `offset`: see `Repeated`.

        Inputs in system shared memory are copied into the server's own. Raises `ContractError`.
        """
        arrays: dict[str, Array] = {}
        on_device: dict[str, tuple[str, int, int]] = {}
        for name, dtype, shape, place in self._inputs:
            if isinstance(place, int):
                arrays[name] = np.ndarray(shape, dtype, content, offset + place)
                continue
            window = find(place)
            if window.on_device:
                on_device[name] = window.place
                arrays[name] = like(dtype, shape)
            else:
                window.fetch()
                arrays[name] = np.ndarray(shape, dtype, window.view())
        queued = QueuedRequest(arrays, self.rows, self.key, deadline_ns, waiter)
        if on_device:
            queued.device_inputs = on_device
        return queued

    def targets(self, queued: QueuedRequest, find: FindWindow) -> Mapping[str, RegionWindow]:
        """The shared memory for outputs, of which the engine writes that on a GPU. Raises `ContractError`."""
        windows = {name: find(reference) for name, reference in self._outputs if reference is not None}
        on_device = {name: window.place for name, window in windows.items() if window.on_device}
        if on_device:
            queued.device_outputs = on_device
        return windows

    def data(
        self,
        outputs: Mapping[str, Array],
        targets: Mapping[str, RegionWindow],
        content: Callable[[Array], C],
        nothing: C,
    ) -> list[C]:
        """Each output's `content`; `nothing` for those in shared memory, to which they are written.

        Raises `ContractError`.
        """
        pieces = []
        for name, reference in self._outputs:
            if reference is None:
                pieces.append(content(outputs[name]))
                continue
            if not targets[name].on_device:
                write_output(targets[name], outputs[name])
            pieces.append(nothing)
        return pieces

    def shapes(self, outputs: Mapping[str, Array]) -> Shapes:
        """Everything between the outputs' bytes is the same for the same shapes."""
        return tuple([outputs[name].shape for name, _ in self._outputs])

    def keep_answer(self, key: Any, answer: Any) -> None:
        """Remember what is between the outputs' bytes, under a key with their shapes."""
        if len(self._answers) < _KEPT_ANSWERS:
            self._answers[key] = answer

    def response(self, outputs: Mapping[str, Array], signature: ModelSignature) -> InferResponse:
        """The whole response to a request without an id."""
        datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        tensors = []
        for name, place in self._outputs:
            array = outputs[name]
            reference = None if place is None else RegionReference(place.region, array.nbytes, place.offset)
            tensors.append(OutputTensor(name, datatypes[name], array, True, reference))
        return InferResponse(signature.name, signature.version, "", tuple(tensors))


T = TypeVar("T", bound=Template)


Repeated = tuple[T, bytes, int]
"""What a request has in common with those before it, and what it has not beside the values of its tensors.

Its id as the response writes it, empty without one; and the place from which those of its tensors count, since they
move with the id.
"""


def _is_long(window: RegionWindow | None) -> bool:
    return window is not None and not window.on_device and window.reference.byte_size > INLINE_READ_BYTES


VIEW_FROM_BYTES = 16 * 1024
_OK_LINE = b"HTTP/1.1 200 OK\r\n"
_ID_KEY = b'"id"'
_ID = re.compile(rb'"id"\s*:\s*"([ !#-\[\]-~]+)"')
"""An id that JSON writes unchanged; any other one is a part of the template."""


class RequestTemplate(Template):
    """The request that one JSON header makes with any id, and with tensors of one size behind it."""

    __slots__ = ()

    def answer(
        self,
        outputs: Mapping[str, Array],
        targets: Mapping[str, RegionWindow],
        signature: ModelSignature,
        common: bytes,
        request_id: bytes,
    ) -> bytes:
        """The bytes of the response, with the header lines `common`. Raises `ContractError`."""
        data: list[bytes | memoryview] = self.data(outputs, targets, _content, b"")
        shapes = self.shapes(outputs)
        surroundings = self._answers.get(shapes)
        if surroundings is None:
            content, json_bytes = encode_response(self.response(outputs, signature))
            document = content[:json_bytes]
            surroundings = _head(json_bytes, len(content)) + document, document, json_bytes, len(content)
            self.keep_answer(shapes, surroundings)
        prefix, document, json_bytes, size = surroundings
        if request_id:
            member = b'"id":"%b",' % request_id
            if json_bytes is not None:
                json_bytes += len(member)
            prefix = b"".join([_head(json_bytes, size + len(member)), b"{", member, document[1:]])
        return b"".join([_OK_LINE, common, prefix, *data])


def _content(array: Array) -> bytes | memoryview:
    """An array's bytes, as a view where copying them costs more than that."""
    if array.nbytes >= VIEW_FROM_BYTES and array.flags.c_contiguous:
        return array.data.cast("B")
    return array.tobytes()


def _head(json_bytes: int | None, size: int) -> bytes:
    """The header lines of a response of `size` bytes, of which so many are JSON; None: all."""
    if json_bytes is None:
        return b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % size
    return b"content-type: application/octet-stream\r\n%b: %d\r\ncontent-length: %d\r\n\r\n" % (
        _HEADER_LENGTH,
        json_bytes,
        size,
    )


_HEADER_LENGTH = HEADER_LENGTH.lower().encode()


def split_id(header: bytes) -> tuple[bytes, bytes]:
    """The header without its only id, and this: empty if there is none that can be told so.

    The quotation mark behind the id is left out, too: the rest is no JSON, so no other header is the same.
    Whether it is the request's id, and not a parameter of that name, only decoding says; the rest of the header decides
    that, so it holds for every value.
    """
    place = header.find(_ID_KEY)
    match = None if place < 0 else _ID.match(header, place)
    if match is None or header.find(_ID_KEY, match.end()) >= 0 or b"\\" in header:
        return header, b""
    start, end = match.span(1)
    return header[:start] + header[end + 1 :], match[1]


class TemplateCache:
    """The latest templates of one model."""

    def __init__(self, signature: ModelSignature, padding: Padding | None = None) -> None:
        self._signature = signature
        self._padding = padding
        self._templates: dict[tuple[bytes, int], RequestTemplate] = {}

    def find(self, header: bytes, body_bytes: int) -> Repeated[RequestTemplate] | None:
        """What is known of a header that came before with tensors of the same size."""
        size = body_bytes - len(header)
        common, request_id = split_id(header) if _ID_KEY in header else (header, b"")
        template = self._templates.get((common, size))
        if template is None and request_id:
            template = self._templates.get((header, size))
        if template is None:
            return None
        return template, request_id if template.fixed_id is None else template.fixed_id, len(header)

    def keep(self, header: bytes, request: InferRequest, body_bytes: int) -> Repeated[RequestTemplate] | None:
        """Keep a decoded request's template; None if it must be decoded each time. Raises `ContractError`."""
        sizes = [item.data.nbytes for item in request.inputs if item.window is None]
        *starts, end = accumulate(sizes, initial=0)
        if end != body_bytes - len(header) or len(header) > KEPT_BYTES:  # some tensor's values are in the JSON
            return None
        template = RequestTemplate.of(request, starts, self._signature, self._padding)
        if template is None:
            return None
        common, request_id = split_id(header)
        if request_id.decode() != request.id:  # it is the value of something else, or JSON may write it differently
            common, request_id = header, orjson.dumps(request.id)[1:-1]
            template.fixed_id = request_id
        if len(self._templates) >= KEPT_TEMPLATES:  # headers that differ each time must not accumulate
            self._templates.clear()
        self._templates[common, end] = template
        return template, request_id, len(header)
