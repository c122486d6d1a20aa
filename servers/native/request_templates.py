"""Templates of repeated requests: a decoded and checked JSON header, kept by its bytes.

Load clients send the same header with every tensor, and the meaning of a header with plain binary tensors depends only
on its bytes and on the model. So the template keeps the result of the first decoding. A header with values, a timeout,
BYTES or shared memory (whose regions come and go) is never kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from servers.contract.codec import HEADER_LENGTH, encode_response
from servers.contract.records import InferRequest, InferResponse, ModelSignature, OutputTensor
from servers.contract.tensors import Array
from servers.engines.padding import BatchKey, Padding, batch_key

_KEPT_TEMPLATES = 256
KEPT_HEADER_BYTES = 4096
"""Longer JSON headers are decoded each time."""

_OK_LINE = b"HTTP/1.1 200 OK\r\n"


class _Input(NamedTuple):
    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int


@dataclass(eq=False, slots=True)
class RequestTemplate:
    """The request that one JSON header makes, with a body of `body_bytes`."""

    rows: int
    body_bytes: int
    key: BatchKey
    _inputs: tuple[_Input, ...]
    _names: tuple[str, ...]
    _request_id: str
    _answers: dict[tuple[tuple[int, ...], ...], bytes] = field(default_factory=dict)

    def arrays(self, body: memoryview) -> Mapping[str, Array]:
        """Views over a body of `body_bytes`; nothing is copied."""
        return {name: np.ndarray(shape, dtype, body, offset) for name, dtype, shape, offset in self._inputs}

    def answer(self, outputs: Mapping[str, Array], signature: ModelSignature, common: bytes) -> bytes:
        """The bytes of the response, with the header lines `common`.

        Everything between these and the outputs' bytes is the same for the same shapes, so it is kept.
        """
        arrays = [outputs[name] for name in self._names]
        data = [array.tobytes() for array in arrays]
        shapes = tuple([array.shape for array in arrays])
        prefix = self._answers.get(shapes)
        if prefix is None:
            prefix = self._prefix(signature, arrays)
            if len(self._answers) < 8:
                self._answers[shapes] = prefix
        return b"".join([_OK_LINE, common, prefix, *data])

    def _prefix(self, signature: ModelSignature, arrays: list[Array]) -> bytes:
        datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        tensors = [
            OutputTensor(name, datatypes[name], array, True) for name, array in zip(self._names, arrays, strict=True)
        ]
        response = InferResponse(signature.name, signature.version, self._request_id, tuple(tensors))
        content, json_bytes = encode_response(response)
        head = (
            f"content-type: application/octet-stream\r\n{HEADER_LENGTH.lower()}: {json_bytes}\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content[:json_bytes]


class TemplateCache:
    """The latest templates of one model."""

    def __init__(self, signature: ModelSignature, padding: Padding | None = None) -> None:
        self._signature = signature
        self._padding = padding
        self._templates: dict[bytes, RequestTemplate] = {}

    def find(self, header: bytes, body_bytes: int) -> RequestTemplate | None:
        """The template of a header that came before with a body of the same size."""
        template = self._templates.get(header)
        return template if template is not None and template.body_bytes == body_bytes else None

    def keep(self, header: bytes, request: InferRequest, body_bytes: int) -> RequestTemplate | None:
        """Keep a decoded request's template; None if it must be decoded each time. Raises `ContractError`."""
        known = self._signature.outputs
        wanted = request.outputs
        if wanted is None:
            names, binary = tuple(spec.name for spec in known), request.binary_output
        else:
            names = tuple(output.name for output in wanted)
            binary = all(output.binary and output.window is None for output in wanted)
        plain = binary and "timeout" not in request.parameters and all(spec.datatype != "BYTES" for spec in known)
        if not plain or len(header) > KEPT_HEADER_BYTES:
            return None
        items: list[_Input] = []
        offset = len(header)
        for tensor in request.inputs:
            if tensor.window is not None or tensor.datatype == "BYTES" or tensor.data.size == 0:
                return None
            items.append(_Input(tensor.name, tensor.data.dtype, tensor.shape, offset))
            offset += tensor.data.nbytes
        if offset != body_bytes:  # some tensor's values are in the JSON
            return None
        rows, _ = self._signature.validate(request)
        key = batch_key(((item.name, item.shape) for item in items), self._padding)
        template = RequestTemplate(rows, body_bytes, key, tuple(items), names, request.id)
        if len(self._templates) >= _KEPT_TEMPLATES:  # headers that differ each time must not accumulate
            self._templates.clear()
        self._templates[header] = template
        return template
