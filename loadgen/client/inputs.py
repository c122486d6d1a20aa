"""The samples that requests carry: from `abserve samples`, from the user's files, or random values.

A folder of samples holds `samples.json` and per input the array INPUT.PAYLOAD.npy with the items in its first dimension
(for BYTES a JSON list of base64 strings). Items of different sizes are padded to the largest there; a request is cut at
the largest of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.documents import open_named, read_limited, read_named
from loadgen.invocation import ABSERVE
from loadgen.records.payloads import OWN_TENSORS

Array = npt.NDArray[np.generic]
Shape = tuple[int, ...]

SYNTHETIC_ITEMS = 16
MANIFEST, SCHEMA = "samples.json", "abserve.samples/2"
PHOTOGRAPHS, RANDOM, GIVEN = "photographs", "random values", "given"
_MOST_VALUES = 2**28
"""Limit for all items of an input together."""

NUMPY_TYPES: Mapping[str, str] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""The protocol's datatypes except BYTES and BF16, which NumPy does not have."""
SAMPLE_TYPES: Mapping[str, str] = {**NUMPY_TYPES, "BYTES": "O"}
"""The datatypes of samples: every one but BF16."""

MOST_INPUT_BYTES = 2**32
"""Limit of a file of inputs, and of what a compressed one unpacks to."""


class InputError(Exception):
    """There is nothing to send; the message says what to do."""


def exact_array(values: Sequence[Any], datatype: str) -> Array | None:
    """Python's numbers as a flat array of a datatype, changed by it only through rounding; None if it cannot hold one
    of them, also for a number of another kind: a fraction in a datatype of integers, true in one of numbers.

    NumPy alone would make floats of large integers in a list, infinity of floats that are too large, and wrap others.
    """
    dtype, kinds = np.dtype(NUMPY_TYPES[datatype]), set(map(type, values))
    if dtype.kind == "f":
        if not kinds <= {int, float}:
            return None
        try:
            wide = np.array(values, np.float64)
        except OverflowError:
            return None
        with np.errstate(over="ignore"):
            rounded = wide.astype(dtype)
        return rounded if np.array_equal(np.isinf(rounded), np.isinf(wide)) else None
    if not kinds <= ({int, bool} if dtype.kind == "b" else {int}):
        return None
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return np.array(values, dtype) if not values or (min(values) >= least and max(values) <= most) else None


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """One array per input, first dimension = item; all arrays hold the same number of items."""

    arrays: Mapping[str, Array]
    kind: str
    """photographs, token ids, random values, or given."""
    item: str = "item"
    """What an item is, for readers: image, sequence, item."""
    lengths: tuple[int, ...] = ()
    """The size of each item along the model's padded axis; empty without one."""
    shapes: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    """The shape of each item, for inputs whose items differ; their arrays are padded to the largest."""
    mixed: bool = True
    """Whether items of different shapes may share a request: only if they are padded as the model wants it."""
    axis: str | None = None
    """The name of the model's padded axis."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind of each output, as far as the samples know the model: embedding, logits, labels, tensor."""
    about: Mapping[str, str | int] = field(default_factory=dict)
    """More for the stored record: the seed, or the file that the user gave."""

    @property
    def count(self) -> int:
        """Number of different items."""
        return min(len(array) for array in self.arrays.values())

    def take(self, name: str, items: Sequence[int]) -> Array:
        """These items of one input, contiguous, cut at the largest of them. Raises `InputError` if the samples do not
        have the input, or if the items cannot share a request."""
        array = self.arrays.get(name)
        if array is None:
            raise InputError(f"the model has an input {name}; the samples have {', '.join(sorted(self.arrays))}")
        chosen = array[list(items)]
        if name in self.shapes:
            shapes = {self.shapes[name][item] for item in items}
            if len(shapes) > 1 and not self.mixed:
                raise InputError(f"items of input {name} with the shapes {sorted(shapes)} cannot share a request")
            chosen = chosen[(slice(None), *(slice(max(sizes)) for sizes in zip(*shapes, strict=True)))]
        return np.ascontiguousarray(chosen)

    def own_shape(self, name: str, item: int) -> Shape:
        """The shape of one item of an input without padding."""
        return self.shapes[name][item] if name in self.shapes else self.arrays[name].shape[1:]

    def groups(self, length: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Groups of items that may share a request, of all items or those of one length. Raises `InputError` if no item
        has that length."""
        items = [item for item in range(self.count) if length is None or self.lengths[item : item + 1] == (length,)]
        if not items:
            raise InputError(f"no {self.item} has the length {length}")
        if self.mixed:
            return (tuple(items),)
        alike: dict[tuple[Shape, ...], list[int]] = {}
        for item in items:
            alike.setdefault(tuple(shapes[item] for shapes in self.shapes.values()), []).append(item)
        return tuple(map(tuple, alike.values()))

    def describe(self) -> dict[str, str | int]:
        """A description for the stored record: what the inputs are, and a digest that distinguishes those of two
        runs."""
        digest = hashlib.sha256()
        for name in sorted(self.arrays):
            digest.update(name.encode())
            array = self.arrays[name]
            for part in array.ravel().tolist() if array.dtype.hasobject else (np.ascontiguousarray(array).data,):
                digest.update(part)
        lengths: dict[str, str | int] = {}
        if self.lengths:
            ordered = sorted(self.lengths)
            lengths = {"length_min": ordered[0], "length_median": ordered[(len(ordered) - 1) // 2]}
            lengths |= {"length_max": ordered[-1], "length_sum": sum(ordered)}
        return {
            "kind": self.kind, "item": self.item, "count": self.count, **lengths, **self.about,
            "sha256": digest.hexdigest(),
        }  # fmt: skip


def write_samples(
    model: str,
    directory: Path,
    abserve: Sequence[str] = ABSERVE,
    *,
    sequence_length: str | None = None,
    seed: int = 0,
    images: Path | None = None,
) -> None:
    """Run `abserve samples`, which knows the models. Raises `InputError` with its last line of output."""
    options = {
        "sequence-length": sequence_length,
        "seed": str(seed) if seed else None,
        "images": None if images is None else str(images),
    }
    argv = [*abserve, "samples", "--model", model, "--out", str(directory)]
    argv += [part for name, value in options.items() if value is not None for part in (f"--{name}", value)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = lines[-1].removeprefix("error: ") if lines else f"exit status {done.returncode}"
        raise InputError(f"no sample inputs for {model}: {reason}")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The content of `samples.json`; empty if it is missing or damaged, because the arrays alone can be sent."""
    with suppress(OSError, ValueError):
        manifest = json.loads(read_named(directory / MANIFEST))
        return manifest if isinstance(manifest, dict) else {}
    return {}


def _variant(directory: Path, payload: str) -> Mapping[str, Any]:
    """What the samples say of their model with a payload; empty if that is nothing."""
    variants = read_manifest(directory).get("variants")
    known = [variants.get(name) for name in _names_of(payload)] if isinstance(variants, dict) else []
    return next((one for one in known if isinstance(one, dict)), {})


def served_model(directory: Path, payload: str) -> str | None:
    """The name under which our servers serve the samples' model for a payload, if the samples say so."""
    found = _variant(directory, payload).get("model")
    return None if found is None else str(found)


def signature_of(directory: Path, payload: str) -> Signature | None:
    """The inputs of the samples' model for a payload, if the samples say so."""
    found = _variant(directory, payload)
    try:
        inputs = [{**one, "shape": [-1, *one["item_shape"]]} for one in found["inputs"]]
        return Signature(str(found["model"]), msgspec.convert(tuple(inputs), tuple[TensorSignature, ...]), ())
    except (TypeError, KeyError, msgspec.ValidationError):
        return None


def as_model_inputs(inputs: SampleInputs, known: SampleInputs, directory: Path) -> SampleInputs:
    """The user's own inputs with what is known from the samples of the model in a folder: what an item is, the kinds of
    the outputs, and each item's length. Raises `InputError` for an item that has several lengths, or that is longer
    than the model takes."""
    inputs = replace(inputs, item=known.item, kinds=known.kinds, axis=known.axis)
    axis, largest = read_manifest(directory).get("axis") or {}, largest_length(directory)
    places = {name: int(at) - 1 for name, at in axis.get("places", {}).items() if name in inputs.arrays}
    lengths = []
    for item in range(inputs.count) if places else ():
        sizes = {name: inputs.own_shape(name, item)[at] for name, at in places.items()}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise InputError(f"item {item + 1} has several lengths along the {axis['name']} axis: {told}")
        lengths.append(max(sizes.values()))
        if lengths[-1] > largest:
            raise InputError(f"item {item + 1} has the length {lengths[-1]}, and the model takes at most {largest}")
    return replace(inputs, lengths=tuple(lengths))


def largest_length(directory: Path) -> int:
    """The largest size of the axis that the model takes, by the samples' description; 0 if that has none."""
    axis = read_manifest(directory).get("axis")
    largest = axis.get("largest") if isinstance(axis, dict) else None
    return largest if isinstance(largest, int) else 0


def read_inputs(directory: Path, payload: str) -> SampleInputs:
    """Read every input of a payload, JPEG files as an object array [items, 1] of `bytes`. Raises `InputError` if the
    folder has none, or if its files or `samples.json` cannot be used."""
    manifest = read_manifest(directory)
    arrays = _read_jpegs(directory, manifest) if payload == "jpeg" else _read_arrays(directory, payload)
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"the samples in {directory} have different numbers of items: {counts}")
    try:
        axis, lengths = manifest.get("axis") or {}, tuple(int(length) for length in manifest.get("lengths") or ())
        about = {name: manifest[name] for name in ("seed", "source") if manifest.get(name) is not None}
        shapes = {
            str(name): tuple(tuple(map(int, shape)) for shape in of_items)
            for name, of_items in (manifest.get("shapes") or {}).items()
        } or {name: _along(arrays[name], int(place), lengths) for name, place in (axis.get("places") or {}).items()
              if lengths and name in arrays}  # fmt: skip
        kind, name = str(manifest.get("kind", PHOTOGRAPHS)), axis.get("name")
        item = str(manifest.get("item", "image" if kind == PHOTOGRAPHS else "item"))
        kinds = {str(output): str(kind) for output, kind in (manifest.get("kinds") or {}).items()}
    except (TypeError, ValueError, AttributeError, IndexError) as exc:
        raise InputError(f"{directory / MANIFEST} cannot be used: {exc}") from exc
    count = next(iter(counts.values()))
    if any(len(of_items) != count for of_items in (*shapes.values(), *([lengths] if lengths else []))):
        raise InputError(f"{directory / MANIFEST} does not describe the {count} items that the folder holds")
    return SampleInputs(arrays, kind, item, lengths, shapes, not manifest.get("shapes"), name, kinds, about)


def _along(array: Array, place: int, lengths: Sequence[int]) -> tuple[Shape, ...]:
    """The shapes of items whose dimension `place` has these sizes."""
    return tuple((*array.shape[1:place], length, *array.shape[place + 1 :]) for length in lengths)


def _names_of(payload: str) -> Sequence[str]:
    """The names that a folder may have for a payload; a model's own tensors have either of two."""
    return (payload, *OWN_TENSORS) if payload in OWN_TENSORS else (payload,)


def _read_jpegs(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Array]:
    paths = sorted(directory.glob("jpeg/*.jpg"))
    if not paths:
        raise InputError(_nothing(directory, "jpeg/*.jpg"))
    try:
        variant = manifest["variants"]["jpeg"]
        name = str(variant["tensor"] if "tensor" in variant else variant["inputs"][0]["name"])
    except (KeyError, TypeError, IndexError):
        raise InputError(f"{directory / MANIFEST} does not say which input takes a JPEG file") from None
    return {name: byte_array([[read_named(path, MOST_INPUT_BYTES)] for path in paths])}


def _read_arrays(directory: Path, payload: str) -> dict[str, Array]:
    for name in _names_of(payload):
        paths = sorted([*directory.glob(f"*.{name}.npy"), *directory.glob(f"*.{name}.json")])
        if paths:
            return {unquote(path.stem.removesuffix(f".{name}")): _load(path) for path in paths}
    raise InputError(_nothing(directory, f"*.{payload}.npy"))


def _nothing(directory: Path, pattern: str) -> str:
    return f"{directory} has no {pattern}; write the samples with: abserve samples --out {directory}"


def _load(path: Path) -> Array:
    """The items of one input. Raises `InputError` for anything but a file of at least one item."""
    try:
        as_json = path.suffix == ".json"  # nested lists of base64 strings
        with open_named(path) as file:
            content = read_limited(file, MOST_INPUT_BYTES) if as_json else None
            items = np.load(file) if content is None else byte_array(json.loads(content), base64.b64decode)
        if isinstance(items, np.ndarray) and items.ndim and len(items):
            return items
        reason = "it holds no items"
    except (OSError, ValueError, EOFError, TypeError) as exc:
        reason = str(exc)
    raise InputError(f"{path} cannot be used: {reason}; write the samples with: abserve samples --out {path.parent}")


def shape_of(content: object) -> list[int]:
    """The shape of nested lists, by the first list of each depth."""
    shape: list[int] = []
    while isinstance(content, list):
        shape.append(len(content))
        content = content[0] if content else None
    return shape


def byte_array(content: object, decode: Any = bytes) -> Array:
    """Nested lists as an object array. Raises `ValueError` for lists of different lengths at the same depth."""
    leaves, shape = [content], shape_of(content)
    for size in shape:
        if any(not isinstance(leaf, list) or len(leaf) != size for leaf in leaves):
            raise ValueError("its lists have different lengths")
        leaves = [inner for leaf in leaves for inner in leaf]  # type: ignore[attr-defined]  # a list, by the line above
    array = np.empty(math.prod(shape), dtype=object)
    array[:] = [decode(leaf) for leaf in leaves]
    return array.reshape(shape)


def write_folder(directory: Path, payload: str, arrays: Mapping[str, Array], manifest: Mapping[str, object]) -> None:
    """Write a folder of samples that `read_inputs` reads. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        path = directory / f"{quote(name, safe='')}.{payload}"  # the server's name may hold a slash
        if array.dtype.hasobject:
            encoded = np.vectorize(lambda element: base64.b64encode(element).decode(), otypes=[object])(array)
            path.with_name(f"{path.name}.json").write_text(json.dumps(encoded.tolist()))
        else:
            np.save(path.with_name(f"{path.name}.npy"), array)
    (directory / MANIFEST).write_text(json.dumps({"schema": SCHEMA, **manifest}))


def write_synthetic(signature: Signature, directory: Path, payload: str, seed: int) -> None:
    """Write random values in the shape of the server's metadata.

    Floats are standard normal, integers and booleans 0 or 1, a variable dimension other than the batch is 16. Raises
    `InputError` for BYTES inputs, and when there is no room for the values.
    """
    random, arrays = np.random.default_rng(seed), {}
    try:
        for tensor in signature.inputs:
            if tensor.datatype not in NUMPY_TYPES:
                raise InputError(f"input {tensor.name} is {tensor.datatype}, for which no values can be generated")
            shape = (SYNTHETIC_ITEMS, *(16 if size < 0 else size for size in tensor.shape[1:]))
            if math.prod(shape) > _MOST_VALUES:
                raise InputError(f"input {tensor.name} has the shape {list(tensor.shape)}, too large to generate")
            dtype = np.dtype(NUMPY_TYPES[tensor.datatype])
            values: Array = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
            arrays[tensor.name] = values.astype(dtype)
        write_folder(directory, payload, arrays, {"kind": RANDOM, "seed": seed})
    except (OSError, MemoryError) as exc:
        raise InputError(f"no values can be generated for {signature.model}: {exc}") from exc
