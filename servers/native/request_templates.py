"""Templates of requests over HTTP: a decoded and checked JSON header, kept by its bytes without the value of its id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate

import orjson

from servers.engines.padding import Padding
from servers.native.templates import KEPT_BYTES, KEPT_TEMPLATES, Repeated, Template
from servers.protocol.codec import HEADER_LENGTH, encode_response
from servers.protocol.records import InferRequest, ModelSignature, Window
from servers.protocol.tensors import Array

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
        targets: Mapping[str, Window],
        signature: ModelSignature,
        common: bytes,
        request_id: bytes,
    ) -> bytes:
        """The bytes of the response, with the header lines `common`. Raises `ContractError`."""
        data = self.data(outputs, targets)
        shapes = self.shapes(outputs)
        kept = self._answers.get(shapes)
        if kept is None:
            content, json_bytes = encode_response(self.response(outputs, signature))
            document = content[:json_bytes]
            kept = _head(json_bytes, len(content)) + document, document, json_bytes, len(content)
            self.keep_answer(shapes, kept)
        prefix, document, json_bytes, size = kept
        if request_id:
            member = b'"id":"%b",' % request_id
            if json_bytes is not None:
                json_bytes += len(member)
            prefix = b"".join([_head(json_bytes, size + len(member)), b"{", member, document[1:]])
        return b"".join([_OK_LINE, common, prefix, *data])


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
        self._templates: dict[tuple[bytes, int], tuple[RequestTemplate, bytes | None]] = {}
        """With the id of those whose key holds it."""

    def find(self, header: bytes, body_bytes: int) -> Repeated[RequestTemplate] | None:
        """What is known of a header that came before with tensors of the same size."""
        size = body_bytes - len(header)
        common, request_id = split_id(header) if _ID_KEY in header else (header, b"")
        known = self._templates.get((common, size))
        if known is None and request_id:
            known = self._templates.get((header, size))
        if known is None:
            return None
        template, fixed = known
        return template, request_id if fixed is None else fixed, len(header)

    def keep(self, header: bytes, request: InferRequest, body_bytes: int) -> Repeated[RequestTemplate] | None:
        """Keep a decoded request's template; None if it must be decoded each time. Raises `ContractError`."""
        sizes = [item.data.nbytes for item in request.inputs if item.window is None]
        *starts, end = accumulate(sizes, initial=0)
        if end != body_bytes - len(header) or len(header) > KEPT_BYTES:  # some tensor's values are in the JSON
            return None
        common, request_id = split_id(header)
        fixed = None
        if request_id.decode() != request.id:  # it is the value of something else, or JSON may write it differently
            common, request_id = header, orjson.dumps(request.id)[1:-1]
            fixed = request_id
        template = RequestTemplate.of(request, starts, self._signature, self._padding)
        if template is None:
            return None
        if len(self._templates) >= KEPT_TEMPLATES:  # headers that differ each time must not accumulate
            self._templates.clear()
        self._templates[common, end] = template, fixed
        return template, request_id, len(header)
