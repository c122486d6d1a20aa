"""The model that a server offers, as its metadata describes it, and valid requests for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.conformance.images import flat_jpeg
from loadgen.conformance.records import NotApplicableError

Array = npt.NDArray[Any]

DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
VARIABLE_DIMENSION = 4
LARGEST_BODY_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output; -1 in `shape` is variable, and the first -1 of a batching model is the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """The headers and the content of one inference request."""

    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True)
class Model:
    """What cases are made from. `max_batch_size` is None where the server does not say, 0 without batching."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch_size: int | None

    @property
    def path(self) -> str:
        """Where it is asked."""
        return f"/v2/models/{self.name}/infer"

    @property
    def batches(self) -> bool:
        """Whether the first dimension is a batch."""
        return self.max_batch_size != 0 and all(tensor.shape[:1] == (-1,) for tensor in self.inputs)

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one item of all inputs."""
        return sum(len(tensor_bytes(array)) for array in self.arrays(1).values())

    def rows(self, wanted: int) -> int:
        """As many rows as a request may have, up to `wanted` and 20 MB."""
        if not self.batches:
            return 1
        limit = min(wanted, self.max_batch_size or wanted)
        return max(1, min(limit, LARGEST_BODY_BYTES // max(1, self.item_bytes)))

    def shape(self, tensor: Tensor, rows: int) -> list[int]:
        """Concrete dimensions for so many rows."""
        shape = [VARIABLE_DIMENSION if size < 0 else size for size in tensor.shape]
        if self.batches:
            shape[0] = rows
        return shape

    def arrays(self, rows: int, seed: int = 0) -> dict[str, Array]:
        """Seeded values for every input; a picture for an input of bytes."""
        random = np.random.default_rng((seed, rows))
        arrays = {}
        for tensor in self.inputs:
            shape = self.shape(tensor, rows)
            if tensor.datatype == "BYTES":
                array = np.empty(shape, object)
                array[...] = flat_jpeg(224, 224)
            elif tensor.datatype.startswith("FP"):
                array = random.uniform(-1, 1, shape).astype(DTYPES[tensor.datatype])
            elif tensor.datatype in DTYPES:
                array = random.integers(0, 2, shape).astype(DTYPES[tensor.datatype])
            else:
                raise NotApplicableError(f"the corpus knows no {tensor.datatype} tensors")
            arrays[tensor.name] = array
        return arrays

    def entries(self, rows: int = 1) -> list[dict[str, Any]]:
        """`inputs` of the JSON document, without data."""
        return [
            {"name": tensor.name, "shape": self.shape(tensor, rows), "datatype": tensor.datatype}
            for tensor in self.inputs
        ]

    def binary(self, rows: int = 1, seed: int = 0, **document: Any) -> Body:
        """A valid request with binary tensors both ways; `document` adds to its JSON or replaces parts of it."""
        arrays = self.arrays(rows, seed)
        return self.binary_of(list(arrays.values()), rows, **document)

    def binary_of(self, arrays: list[Array], rows: int, **document: Any) -> Body:
        """The same with these values, one array an input."""
        blobs = [tensor_bytes(array) for array in arrays]
        entries = self.entries(rows)
        for entry, blob in zip(entries, blobs, strict=True):
            entry["parameters"] = {"binary_data_size": len(blob)}
        return binary_body({"inputs": entries, "parameters": {"binary_data_output": True}, **document}, blobs)

    def json(self, rows: int = 1, **document: Any) -> Body:
        """A valid request in JSON alone, all zeros."""
        entries = self.entries(rows)
        for entry, tensor in zip(entries, self.inputs, strict=True):
            if tensor.datatype == "BYTES":
                raise NotApplicableError("bytes of a picture cannot be written in JSON")
            entry["data"] = [False if tensor.datatype == "BOOL" else 0] * int(np.prod(entry["shape"]))
        return json_body({"inputs": entries, **document})


def tensor_bytes(array: Array) -> bytes:
    """Little-endian elements in row order; BYTES elements with their 4-byte length before them."""
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(item)) + item for item in array.ravel())
    return np.ascontiguousarray(array).tobytes()


def binary_body(document: Mapping[str, Any], blobs: Iterable[bytes]) -> Body:
    """JSON, then the tensors, with the header that says where the one ends."""
    text = json.dumps(document).encode()
    return Body(
        {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))},
        text + b"".join(blobs),
    )


def json_body(document: object) -> Body:
    """JSON alone; a str or bytes is sent as it is."""
    if isinstance(document, bytes):
        return Body({"Content-Type": "application/json"}, document)
    text = document if isinstance(document, str) else json.dumps(document)
    return Body({"Content-Type": "application/json"}, text.encode())
