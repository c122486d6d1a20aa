"""The samples that requests carry: photographs decoded by `abserve samples`, or random values for an unknown model."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from loadgen.invocation import ABSERVE
from loadgen.transport.endpoint import Signature

Array = npt.NDArray[np.generic]

SYNTHETIC_ITEMS = 16
_MOST_VALUES = 2**28
"""Limit for all items of an input together."""

NUMPY_TYPES: Mapping[str, str] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""The protocol's datatypes except BYTES and BF16, which NumPy does not have."""


class InputError(Exception):
    """There is nothing to send; the message says what to do."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """One array per input, first dimension = item; all arrays hold the same number of items."""

    arrays: Mapping[str, Array]
    kind: Literal["photographs", "synthetic"]
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind of each output, as far as the samples know the model: embedding, logits, labels, tensor."""

    @property
    def count(self) -> int:
        """Number of different items."""
        return min(len(array) for array in self.arrays.values())

    def take(self, name: str, items: Sequence[int]) -> Array:
        """These items of one input, contiguous. Raises `InputError` if there is no such input."""
        array = self.arrays.get(name)
        if array is None:
            raise InputError(f"the model has an input {name}; the samples have {', '.join(sorted(self.arrays))}")
        return np.ascontiguousarray(array[list(items)])

    def describe(self) -> dict[str, str | int]:
        """A description for the stored record: the kind, and a digest that distinguishes the inputs of two runs."""
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
        reason = lines[-1].removeprefix("error: ") if lines else f"exit status {done.returncode}"
        raise InputError(f"no sample images for {model}: {reason}")


def read_inputs(directory: Path, payload: str) -> SampleInputs:
    """Read `INPUT.PAYLOAD.npy` for every input, its name quoted as in a URL, or the files in `jpeg/` as an object array
    [items, 1] of `bytes`. Raises `InputError` when there are none."""
    manifest: Any = {}
    with suppress(OSError, ValueError):
        manifest = json.loads((directory / "samples.json").read_bytes())
    synthetic = isinstance(manifest, dict) and manifest.get("kind") == "synthetic"
    pattern = "jpeg/*.jpg" if payload == "jpeg" else f"*.{payload}.npy"
    paths = sorted(directory.glob(pattern))
    if not paths:
        raise InputError(f"{directory} has no {pattern}; write the samples with: abserve samples --out {directory}")
    if payload == "jpeg":
        try:
            name = str(manifest["variants"]["jpeg"]["tensor"])
        except (KeyError, TypeError):
            raise InputError(f"{directory / 'samples.json'} does not say which input takes a JPEG file") from None
        files = np.empty((len(paths), 1), dtype=object)
        files[:, 0] = [path.read_bytes() for path in paths]
        arrays: dict[str, Array] = {name: files}
    else:
        arrays = {unquote(path.name.removesuffix(f".{payload}.npy")): _load(path) for path in paths}
    kinds = manifest.get("kinds") if isinstance(manifest, dict) else None
    return SampleInputs(arrays, "synthetic" if synthetic else "photographs", kinds if isinstance(kinds, dict) else {})


def _load(path: Path) -> Array:
    """The items of one input. Raises `InputError` for anything but a file of at least one item."""
    try:
        items = np.load(path)
        if isinstance(items, np.ndarray) and items.ndim and len(items):
            return items
        reason = "it holds no items"
    except (OSError, ValueError, EOFError) as exc:
        reason = str(exc)
    raise InputError(f"{path} cannot be used: {reason}; write the samples with: abserve samples --out {path.parent}")


def write_synthetic(signature: Signature, directory: Path, payload: str, seed: int) -> None:
    """Write random values in the shape of the server's metadata, for a model that is not registered.

    Floats are standard normal, integers and booleans 0 or 1, a variable dimension other than the batch is 16. Raises
    `InputError` for BYTES inputs, and when there is no room for the values.
    """
    random = np.random.default_rng(seed)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for tensor in signature.inputs:
            if tensor.datatype not in NUMPY_TYPES:
                raise InputError(f"input {tensor.name} is {tensor.datatype}, for which no values can be generated")
            shape = (SYNTHETIC_ITEMS, *(16 if size < 0 else size for size in tensor.shape[1:]))
            if math.prod(shape) > _MOST_VALUES:
                raise InputError(f"input {tensor.name} has the shape {list(tensor.shape)}, too large to generate")
            dtype = np.dtype(NUMPY_TYPES[tensor.datatype])
            values: Array = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
            name = quote(tensor.name, safe="")  # the server's name may hold a slash
            np.save(directory / f"{name}.{payload}.npy", values.astype(dtype))
        (directory / "samples.json").write_text(json.dumps({"kind": "synthetic", "seed": seed}))
    except (OSError, MemoryError) as exc:
        raise InputError(f"no values can be generated for {signature.model}: {exc}") from exc
