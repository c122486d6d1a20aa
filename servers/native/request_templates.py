"""Templates of requests over HTTP: a decoded and checked JSON header, kept by its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from servers.contract.codec import HEADER_LENGTH, encode_response
from servers.contract.records import InferRequest, ModelSignature, Window
from servers.contract.tensors import Array
from servers.engines.padding import Padding
from servers.native.templates import KEPT_BYTES, KEPT_TEMPLATES, Template

_OK_LINE = b"HTTP/1.1 200 OK\r\n"


class RequestTemplate(Template):
    """The request that one JSON header makes, with a body of one size."""

    __slots__ = ()

    def answer(
        self, outputs: Mapping[str, Array], targets: Mapping[str, Window], signature: ModelSignature, common: bytes
    ) -> bytes:
        """The bytes of the response, with the header lines `common`. Raises `ContractError`."""
        data = self.data(outputs, targets)
        shapes = self.shapes(outputs)
        prefix = self._answers.get(shapes)
        if prefix is None:
            prefix = self._prefix(outputs, signature)
            self.keep_answer(shapes, prefix)
        return b"".join([_OK_LINE, common, prefix, *data])

    def _prefix(self, outputs: Mapping[str, Array], signature: ModelSignature) -> bytes:
        content, json_bytes = encode_response(self.response(outputs, signature))
        kind = "application/json"
        if json_bytes is not None:
            kind = f"application/octet-stream\r\n{HEADER_LENGTH.lower()}: {json_bytes}"
        head = f"content-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
        return head.encode() + content[:json_bytes]


class TemplateCache:
    """The latest templates of one model."""

    def __init__(self, signature: ModelSignature, padding: Padding | None = None) -> None:
        self._signature = signature
        self._padding = padding
        self._templates: dict[tuple[bytes, int], RequestTemplate] = {}

    def find(self, header: bytes, body_bytes: int) -> RequestTemplate | None:
        """The template of a header that came before with a body of the same size."""
        return self._templates.get((header, body_bytes))

    def keep(self, header: bytes, request: InferRequest, body_bytes: int) -> RequestTemplate | None:
        """Keep a decoded request's template; None if it must be decoded each time. Raises `ContractError`."""
        sizes = [item.data.nbytes for item in request.inputs if item.window is None]
        *starts, end = accumulate(sizes, initial=len(header))
        if end != body_bytes or len(header) > KEPT_BYTES:  # some tensor's values are in the JSON
            return None
        template = RequestTemplate.of(request, starts, self._signature, self._padding)
        if template is not None:
            if len(self._templates) >= KEPT_TEMPLATES:  # headers that differ each time must not accumulate
                self._templates.clear()
            self._templates[header, body_bytes] = template
        return template
