"""The model under test as its metadata describes it, inference requests for it, and JPEG and PNG files."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.client.connection import model_path
from loadgen.client.endpoint import TensorSignature
from loadgen.client.inputs import NUMPY_TYPES
from loadgen.conformance.records import NotApplicableError
from loadgen.records.targets import Kind

Array = npt.NDArray[Any]

HEADER = "Inference-Header-Content-Length"
VARIABLE_DIMENSION = 4
LARGEST_BODY_BYTES = 20_000_000
GOLDEN_PROMPT = (5, 17, 3, 900, 44)
"""Ids that every vocabulary has."""


@dataclass(frozen=True, slots=True)
class Body:
    """The headers and the content of one inference request."""

    headers: Mapping[str, str]
    content: bytes


@dataclass
class InferenceRequest:
    """A valid request, which a case changes before it is encoded for HTTP or gRPC. `entries` are the inputs of the
    JSON, `blobs` their bytes; `document` holds the JSON's other members."""

    model: ServedModel
    name: str
    entries: list[dict[str, Any]]
    blobs: list[bytes]
    document: dict[str, Any] = field(default_factory=lambda: {"parameters": {"binary_data_output": True}})
    version: str = ""
    sizes: dict[int, Any] = field(default_factory=dict)
    """Input → `binary_data_size`, where it is not the size of the blob."""

    @property
    def path(self) -> str:
        """The route of the HTTP request."""
        return f"{model_path(self.name, self.version or None)}/infer"

    def body(self) -> Body:
        """The HTTP body: the JSON, then the binary tensors; JSON alone if there are no blobs."""
        if not self.blobs:
            return json_body({"inputs": self.entries, **self.document})
        entries = [
            {**entry, "parameters": {"binary_data_size": self.sizes.get(index, len(blob))}}
            for index, (entry, blob) in enumerate(zip(self.entries, self.blobs, strict=True))
        ]
        text = json.dumps({"inputs": entries, **self.document}).encode()
        headers = {"Content-Type": "application/octet-stream", HEADER: str(len(text))}
        return Body(headers, text + b"".join(self.blobs))


_ROUTES = {Kind.TENSORS: "infer", Kind.TOKENS: "generate_stream"}


@dataclass(frozen=True)
class ServedModel:
    """The model that requests are made for. `max_batch_size` is None if the server does not report it, 0 without
    batching."""

    name: str
    inputs: tuple[TensorSignature, ...] = ()
    outputs: tuple[TensorSignature, ...] = ()
    max_batch_size: int | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Settings in effect, as its configuration has them."""

    @property
    def path(self) -> str:
        """The route of inference."""
        return f"{model_path(self.name)}/{_ROUTES[self.kind]}"

    @property
    def kind(self) -> Kind:
        """What it gives; of a language model token ids go in, and token ids come out."""
        return Kind.TOKENS if any(tensor.name == "token_ids" for tensor in self.outputs) else Kind.TENSORS

    @property
    def batches(self) -> bool:
        """Whether the first dimension is the batch."""
        return self.max_batch_size != 0 and all(tensor.shape[:1] == (-1,) for tensor in self.inputs)

    @property
    def takes_an_image(self) -> bool:
        """Whether it takes one encoded image: a single BYTES input with one element per item."""
        return [tensor.datatype for tensor in self.inputs] == ["BYTES"] and np.prod(self.shape(self.inputs[0], 1)) == 1

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one item of all inputs."""
        return sum(len(tensor_bytes(array)) for array in self.arrays(1))

    def rows(self, most: int) -> int:
        """The number of rows a request may have, up to `most` and 20 MB."""
        if not self.batches:
            return 1
        limit = min(most, self.max_batch_size or most)
        return max(1, min(limit, LARGEST_BODY_BYTES // max(1, self.item_bytes)))

    def shape(self, tensor: TensorSignature, rows: int) -> list[int]:
        """Concrete dimensions for this number of rows."""
        shape = [VARIABLE_DIMENSION if size < 0 else size for size in tensor.shape]
        return [rows, *shape[1:]] if self.batches else shape

    def arrays(self, rows: int, seed: int = 0) -> list[Array]:
        """Seeded values for every input; a JPEG file for an input of BYTES."""
        random = np.random.default_rng((seed, rows))
        arrays = []
        for tensor in self.inputs:
            shape = self.shape(tensor, rows)
            if tensor.datatype == "BYTES":
                array: Array = np.empty(shape, object)
                array.fill(flat_jpeg(224, 224))
            elif tensor.datatype.startswith("FP"):
                array = random.uniform(-1, 1, shape).astype(NUMPY_TYPES[tensor.datatype])
            elif tensor.datatype in NUMPY_TYPES:
                array = random.integers(0, 2, shape).astype(NUMPY_TYPES[tensor.datatype])
            else:
                raise NotApplicableError(f"the cases support no {tensor.datatype} tensors")
            arrays.append(array)
        return arrays

    def request(self, rows: int = 1, seed: int = 0, arrays: Iterable[Array] | None = None) -> InferenceRequest:
        """A valid request for binary inputs and outputs, with seeded values unless `arrays` are given."""
        entries = [
            {"name": tensor.name, "shape": self.shape(tensor, rows), "datatype": tensor.datatype}
            for tensor in self.inputs
        ]
        blobs = [tensor_bytes(array) for array in (self.arrays(rows, seed) if arrays is None else arrays)]
        return InferenceRequest(self, self.name, entries, blobs)

    def binary(self, rows: int = 1, seed: int = 0) -> Body:
        """The body of a valid request."""
        if self.kind is Kind.TOKENS:
            return json_body({"input_ids": GOLDEN_PROMPT, "max_tokens": 8, "ignore_eos": True})
        return self.request(rows, seed).body()


def tensor_bytes(array: Array) -> bytes:
    """Little-endian elements in row order; BYTES elements with their 4-byte length before them."""
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(item)) + item for item in array.ravel())
    return np.ascontiguousarray(array).tobytes()


def events_of(body: bytes) -> list[Any]:
    """The documents of a stream's events, "[DONE]" as text. Raises `ValueError`."""
    lines = [line.removeprefix(b"data:").strip() for line in body.splitlines() if line.startswith(b"data:")]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


def stream_problem(body: bytes) -> str | None:
    """The error that a stream holds, None if it holds none."""
    try:
        events = events_of(body)
    except (ValueError, RecursionError):
        return "an event of the stream is not JSON"
    errors = [event["error"] for event in events if isinstance(event, dict) and "error" in event]
    if not errors:
        return None if events else "the stream has no event"
    error = errors[0]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def json_body(document: object) -> Body:
    """JSON alone; text and bytes are sent unchanged."""
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    return Body({"Content-Type": "application/json"}, text.encode() if isinstance(text, str) else text)


# Images without an image library: one code in each Huffman table, category 0 (no difference) and end-of-block, one bit
# each, so that a flat block takes two bits.
_DC_TABLE = bytes([0x00, 1, *[0] * 15, 0x00])
_AC_TABLE = bytes([0x10, 1, *[0] * 15, 0x00])
_BLOCK = 8


def flat_jpeg(width: int, height: int, components: int = 3) -> bytes:
    """A valid baseline JPEG of mid-grey: 1 component is greyscale, 3 YCbCr, 4 CMYK. About 2 bits per 64 pixels."""
    bits = 2 * -(-width // _BLOCK) * -(-height // _BLOCK) * components
    data = b"\x00" * (bits // 8)
    if bits % 8:
        data += bytes([0xFF >> (bits % 8)])  # the rest of the last byte is filled with ones
    return _jpeg_header(width, height, components) + data + b"\xff\xd9"


def claiming_jpeg(width: int, height: int, total_bytes: int) -> bytes:
    """A JPEG whose header claims that size and whose data ends after `total_bytes`."""
    header = _jpeg_header(width, height, 3)
    return header + b"\x00" * (total_bytes - len(header) - 2) + b"\xff\xd9"


def flat_png(width: int, height: int) -> bytes:
    """A valid 8-bit RGB PNG, all black."""
    row = b"\x00" + b"\x00\x00\x00" * width
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * height)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _jpeg_header(width: int, height: int, components: int) -> bytes:
    """Everything before the coded blocks (ISO/IEC 10918-1, annex B)."""
    adobe = (0xEE, b"Adobe" + struct.pack(">HHHB", 100, 0, 0, 0))
    jfif = (0xE0, b"JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00")
    frame = b"".join(bytes([index + 1, 0x11, 0]) for index in range(components))
    scan = b"".join(bytes([index + 1, 0x00]) for index in range(components))
    segments = (
        adobe if components == 4 else jfif,
        (0xDB, b"\x00" + b"\x10" * 64),
        (0xC0, struct.pack(">BHHB", 8, height, width, components) + frame),
        (0xC4, _DC_TABLE),
        (0xC4, _AC_TABLE),
        (0xDA, bytes([components]) + scan + b"\x00\x3f\x00"),
    )
    return b"\xff\xd8" + b"".join(
        struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content for marker, content in segments
    )
