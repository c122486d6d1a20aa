"""The model that a server offers, as its metadata describes it, and inference requests for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.conformance.images import flat_jpeg
from loadgen.conformance.records import NotApplicableError
from loadgen.transport.endpoint import TensorSignature
from loadgen.transport.inputs import NUMPY_TYPES

Array = npt.NDArray[Any]

HEADER = "Inference-Header-Content-Length"
VARIABLE_DIMENSION = 4
LARGEST_BODY_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class Body:
    """The headers and the content of one inference request."""

    headers: Mapping[str, str]
    content: bytes


@dataclass
class InferenceRequest:
    """A valid request, for a case to spoil before it is written for HTTP or gRPC. `entries` are the inputs as the JSON
    names them, `blobs` their bytes; `document` holds the JSON's other members."""

    model: Model
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
        version = f"/versions/{self.version}" if self.version else ""
        return f"/v2/models/{self.name}{version}/infer"

    def body(self) -> Body:
        """The HTTP body: binary tensors behind the JSON; JSON alone where there are no blobs."""
        if not self.blobs:
            return json_body({"inputs": self.entries, **self.document})
        entries = [
            {**entry, "parameters": {"binary_data_size": self.sizes.get(index, len(blob))}}
            for index, (entry, blob) in enumerate(zip(self.entries, self.blobs, strict=True))
        ]
        return binary_body({"inputs": entries, **self.document}, self.blobs)


@dataclass(frozen=True)
class Model:
    """What requests are made for. `max_batch_size` is None where the server does not report it, 0 without batching."""

    name: str
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    max_batch_size: int | None

    @property
    def path(self) -> str:
        """The route of inference."""
        return f"/v2/models/{self.name}/infer"

    @property
    def batches(self) -> bool:
        """Whether the first dimension is a batch."""
        return self.max_batch_size != 0 and all(tensor.shape[:1] == (-1,) for tensor in self.inputs)

    @property
    def takes_an_image(self) -> bool:
        """Whether it takes one encoded image: a single BYTES input with one element per item."""
        return [one.datatype for one in self.inputs] == ["BYTES"] and np.prod(self.shape(self.inputs[0], 1)) == 1

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one item of all inputs."""
        return sum(len(tensor_bytes(array)) for array in self.arrays(1))

    def rows(self, wanted: int) -> int:
        """As many rows as a request may have, up to `wanted` and 20 MB."""
        if not self.batches:
            return 1
        limit = min(wanted, self.max_batch_size or wanted)
        return max(1, min(limit, LARGEST_BODY_BYTES // max(1, self.item_bytes)))

    def shape(self, tensor: TensorSignature, rows: int) -> list[int]:
        """Concrete dimensions for so many rows."""
        shape = [VARIABLE_DIMENSION if size < 0 else size for size in tensor.shape]
        return [rows, *shape[1:]] if self.batches else shape

    def arrays(self, rows: int, seed: int = 0) -> list[Array]:
        """Seeded values for every input; a picture for an input of BYTES."""
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
                raise NotApplicableError(f"the corpus knows no {tensor.datatype} tensors")
            arrays.append(array)
        return arrays

    def request(self, rows: int = 1, seed: int = 0, arrays: Iterable[Array] | None = None) -> InferenceRequest:
        """A valid request with binary tensors both ways, of seeded values unless others are given."""
        entries = [
            {"name": tensor.name, "shape": self.shape(tensor, rows), "datatype": tensor.datatype}
            for tensor in self.inputs
        ]
        blobs = [tensor_bytes(array) for array in (self.arrays(rows, seed) if arrays is None else arrays)]
        return InferenceRequest(self, self.name, entries, blobs)

    def binary(self, rows: int = 1, seed: int = 0, **document: Any) -> Body:
        """The body of a valid request; `document` adds to its JSON or replaces parts of it."""
        request = self.request(rows, seed)
        request.document |= document
        return request.body()


def tensor_bytes(array: Array) -> bytes:
    """Little-endian elements in row order; BYTES elements with their 4-byte length before them."""
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(item)) + item for item in array.ravel())
    return np.ascontiguousarray(array).tobytes()


def binary_body(document: Mapping[str, Any], blobs: Iterable[bytes]) -> Body:
    """JSON, then the tensors, with the header that says where the JSON ends."""
    text = json.dumps(document).encode()
    return Body({"Content-Type": "application/octet-stream", HEADER: str(len(text))}, text + b"".join(blobs))


def json_body(document: object) -> Body:
    """JSON alone; text and bytes are sent unchanged."""
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    return Body({"Content-Type": "application/json"}, text.encode() if isinstance(text, str) else text)
