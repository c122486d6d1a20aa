"""The images that requests carry: photographs that `abserve samples` decoded, or seeded values for an unknown model."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from loadgen.invocation import ABSERVE
from loadgen.transport.endpoint import Signature

Array = npt.NDArray[np.generic]

SYNTHETIC_ITEMS = 16
_MOST_VALUES = 2**28
"""Of all items of an input together."""

NUMPY_TYPES: Mapping[str, str] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""Datatypes of the protocol but for BYTES and BF16, which NumPy does not have."""


class InputError(Exception):
    """There is nothing to send; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """One array an input, first dimension = item; all arrays hold the same number of items."""

    arrays: Mapping[str, Array]
    kind: Literal["photographs", "synthetic"]

    @property
    def count(self) -> int:
        """Number of different items."""
        return min(len(array) for array in self.arrays.values())

    def take(self, name: str, items: Sequence[int]) -> Array:
        """These items of one input, contiguous. Raises `InputError` where there is no such input."""
        array = self.arrays.get(name)
        if array is None:
            have = ", ".join(sorted(self.arrays))
            raise InputError(f"the model wants an input {name}; the samples hold {have}")
        return np.ascontiguousarray(array[list(items)])

    def describe(self) -> dict[str, str | int]:
        """For the stored record: what was sent, and a digest that tells two runs' inputs apart."""
        digest = hashlib.sha256()
        for name in sorted(self.arrays):
            digest.update(name.encode())
            array = self.arrays[name]
            for part in array.ravel() if array.dtype.hasobject else (np.ascontiguousarray(array).data,):
                digest.update(part)
        return {"kind": self.kind, "count": self.count, "sha256": digest.hexdigest()}


def write_samples(model: str, directory: Path, abserve: Sequence[str] = ABSERVE) -> None:
    """Run `abserve samples`, which knows the registered models. Raises `InputError` with its last line of output."""
    argv = [*abserve, "samples", "--model", model, "--out", str(directory)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = lines[-1].removeprefix("error: ") if lines else f"exit status {done.returncode}"
        raise InputError(f"no sample images for {model}: {said}")


def read_inputs(directory: Path, payload: str) -> SampleInputs:
    """Read `INPUT.PAYLOAD.npy` for every input, its name quoted as in a URL, or the files in `jpeg/` as an object array
    [items, 1] of `bytes`. Raises `InputError` when there is none."""
    if payload == "jpeg":
        return _read_jpeg(directory)
    suffix = f".{payload}.npy"
    arrays = {unquote(path.name.removesuffix(suffix)): np.load(path) for path in sorted(directory.glob(f"*{suffix}"))}
    if not arrays:
        raise InputError(f"{directory} holds no *{suffix}; write it with: abserve samples --out {directory}")
    return SampleInputs(arrays, _kind(directory))


def _read_jpeg(directory: Path) -> SampleInputs:
    paths = sorted((directory / "jpeg").glob("*.jpg"))
    if not paths:
        raise InputError(f"{directory} holds no jpeg/*.jpg; write them with: abserve samples --out {directory}")
    files = np.empty((len(paths), 1), dtype=object)
    files[:, 0] = [path.read_bytes() for path in paths]
    try:
        name = str(json.loads((directory / "samples.json").read_bytes())["variants"]["jpeg"]["tensor"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{directory / 'samples.json'} does not say which input takes a JPEG file") from None
    return SampleInputs({name: files}, _kind(directory))


def _kind(directory: Path) -> Literal["photographs", "synthetic"]:
    try:
        manifest = json.loads((directory / "samples.json").read_bytes())
    except (OSError, ValueError):
        return "photographs"
    return "synthetic" if isinstance(manifest, dict) and manifest.get("kind") == "synthetic" else "photographs"


def write_synthetic(signature: Signature, directory: Path, payload: str, seed: int) -> None:
    """Seeded values in the shape that a server's own metadata gives, for a model that we do not know.

    Floats are standard normal, integers and booleans 0 or 1, a free dimension other than the batch is 16. Raises
    `InputError` for BYTES inputs, and where there is no room for the values.
    """
    try:
        _write_synthetic(signature, directory, payload, seed)
    except (OSError, MemoryError) as exc:
        raise InputError(f"no values can be made up for {signature.model}: {exc}") from exc


def _write_synthetic(signature: Signature, directory: Path, payload: str, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for tensor in signature.inputs:
        if tensor.datatype not in NUMPY_TYPES:
            raise InputError(f"input {tensor.name} is {tensor.datatype}: no values can be made up for it")
        shape = (SYNTHETIC_ITEMS, *(16 if size < 0 else size for size in tensor.shape[1:]))
        if math.prod(shape) > _MOST_VALUES:
            raise InputError(f"input {tensor.name} has the shape {list(tensor.shape)}: too large for values made up")
        dtype = np.dtype(NUMPY_TYPES[tensor.datatype])
        values: Array = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
        name = quote(tensor.name, safe="")  # it is the server's word, which may hold a slash
        np.save(directory / f"{name}.{payload}.npy", values.astype(dtype))
    (directory / "samples.json").write_text(json.dumps({"kind": "synthetic", "seed": seed}))
