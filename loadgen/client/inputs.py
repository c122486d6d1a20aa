"""The inputs that requests carry: from `abserve samples`, from the user's files, or random values.

A folder of samples holds `samples.json` and per input the array INPUT.PAYLOAD.npy with the items in its first dimension
(for BYTES a JSON list of base64 strings). Items of different sizes are padded to the largest there; a request is cut at
the largest of its own.

The user's own inputs are checked against the model's metadata and written as such a folder:

    FILE.npz     one array per input, the items in its first dimension
    FILE.json    perf_analyzer's --input-data: {"data": [{"INPUT": VALUES, …}, …]}; the steps of streams are items too
    FILE.jsonl   one item per line in the same form
    DIR          JPEG files; or, as perf_analyzer's --input-data DIR, one file per input with the values of one item
                 (for BYTES a text of one element per line); other files there are passed over

VALUES are a list of one item's values, {"content": [...], "shape": [...]} or {"b64": "..."} of the raw bytes; those of
BYTES are each element after its length of four bytes in little-endian order. Items may differ in shape; nothing pads
them, so those of different shapes never share a request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.base.child_process import ABSERVE
from loadgen.base.documents import last_line, one_line, open_named, read_inside, read_limited, read_named
from loadgen.client.endpoint import MOST_VALUES, Signature, TensorSignature, fits
from loadgen.records.payloads import GUESSED, OWN_TENSORS

Array = npt.NDArray[np.generic]
Shape = tuple[int, ...]

SYNTHETIC_ITEMS = 16
_VARIABLE_SIZE, _PICTURE_SIDE = 16, 224
"""The size of a generated item where the metadata have a variable one."""
MANIFEST, SCHEMA = "samples.json", "abserve.samples/2"
PHOTOGRAPHS, RANDOM, GIVEN = "photographs", "random values", "given"
BYTES_PREFIX = 4
"""Size of the length before each element of the datatype BYTES."""

NUMPY_TYPES: Mapping[str, str] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""The protocol's datatypes except BYTES and BF16, which NumPy does not have."""
SAMPLE_TYPES: Mapping[str, str] = {**NUMPY_TYPES, "BYTES": "O"}
"""The datatypes of samples: every one but BF16."""

MOST_INPUT_BYTES = 2**32
"""Limit of a file of inputs, and of what a compressed one unpacks to."""

Kind = Literal["npz", "json", "jsonl", "images", "raw files"]
RANDOM_INPUTS = "random"
"""In place of a path: random values of the shapes in the server's metadata."""
_JPEG = (".jpg", ".jpeg")
_NOT_INPUTS = re.compile(r"\..*|Thumbs\.db|desktop\.ini|(README|LICEN[CS]E)(\..*)?", re.IGNORECASE)
"""What other programs and people leave in a folder beside the inputs."""
Items = list[dict[str, Array]]
"""The inputs of each item by name."""


class InputError(Exception):
    """There is nothing to send; the message says what to do."""


def exact_array(values: Sequence[Any], datatype: str) -> Array | None:
    """Python's numbers as a flat array of a datatype, changed only by rounding. None if the datatype cannot hold one of
    them, also for a number of another kind: a fraction in a datatype of integers, true in one of numbers.

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
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode != 0:
        raise InputError(f"no sample inputs for {model}: {last_line(done.stderr or done.stdout)}")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The content of `samples.json`; empty if it is missing or damaged, because the arrays alone can be sent."""
    with suppress(OSError, ValueError):
        manifest = json.loads(read_named(directory / MANIFEST))
        return manifest if isinstance(manifest, dict) else {}
    return {}


def _variant(directory: Path, payload: str) -> Mapping[str, Any]:
    """What the samples say about their model with a payload; empty if they say nothing."""
    variants = read_manifest(directory).get("variants")
    named = [variants.get(name) for name in _names_of(payload)] if isinstance(variants, dict) else []
    return next((variant for variant in named if isinstance(variant, dict)), {})


def served_model(directory: Path, payload: str) -> str | None:
    """The name under which our servers serve the samples' model for a payload, if the samples say so."""
    model = _variant(directory, payload).get("model")
    return None if model is None else str(model)


def signature_of(directory: Path, payload: str) -> Signature | None:
    """The inputs of the samples' model for a payload, if the samples say so."""
    variant = _variant(directory, payload)
    try:
        inputs = [{**tensor, "shape": [-1, *tensor["item_shape"]]} for tensor in variant["inputs"]]
        return Signature(str(variant["model"]), msgspec.convert(tuple(inputs), tuple[TensorSignature, ...]), ())
    except (TypeError, KeyError, msgspec.ValidationError):
        return None


def as_model_inputs(inputs: SampleInputs, samples: SampleInputs, directory: Path) -> SampleInputs:
    """The user's own inputs, described as the samples of the model in a folder are: what an item is, the kinds of the
    outputs, and each item's length. Raises `InputError` for an item that has several lengths, or that is longer than
    the model takes."""
    inputs = replace(inputs, item=samples.item, kinds=samples.kinds, axis=samples.axis)
    axis, largest = read_manifest(directory).get("axis") or {}, largest_length(directory)
    places = {name: int(at) - 1 for name, at in axis.get("places", {}).items() if name in inputs.arrays}
    lengths = []
    for item in range(inputs.count) if places else ():
        sizes = {name: inputs.own_shape(name, item)[at] for name, at in places.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise InputError(f"item {item + 1} has several lengths along the {axis['name']} axis: {listed}")
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
    arrays = {name: array if array.size else array.reshape(count, *shapes.get(name, [array.shape[1:]])[0])
              for name, array in arrays.items()}  # fmt: skip
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


def leaves_of(content: object, shape: Sequence[int]) -> list[Any]:
    """The elements of nested lists of this shape, in order. Raises `ValueError` for lists of different lengths at the
    same depth."""
    leaves: list[Any] = [content]
    for size in shape:
        if any(not isinstance(leaf, list) or len(leaf) != size for leaf in leaves):
            raise ValueError("its lists have different lengths")
        leaves = [inner for leaf in leaves for inner in leaf]
    return leaves


def byte_array(content: object, decode: Any = bytes) -> Array:
    """Nested lists as an object array. Raises `ValueError` for lists of different lengths at the same depth."""
    shape = shape_of(content)
    array = np.empty(math.prod(shape), dtype=object)
    array[:] = [decode(leaf) for leaf in leaves_of(content, shape)]
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

    Floats are standard normal, integers and booleans 0 or 1, but what a text without padding has in inputs that are
    called mask, token_type_ids or position_ids. A variable dimension other than the batch is 16, both of a
    picture with three channels 224. Raises `InputError` for BYTES inputs, and for values that take too much room.
    """
    random, arrays, guessed = np.random.default_rng(seed), {}, list[str]()
    try:
        for tensor in signature.inputs:
            if tensor.datatype not in NUMPY_TYPES:
                _check_datatype(tensor)  # BF16 cannot be given either
                meaning = ": the metadata do not say what its bytes mean" if tensor.datatype == "BYTES" else ""
                raise InputError(
                    f"input {tensor.name} is {tensor.datatype}, for which no values can be generated{meaning}; give "
                    "your own with --inputs: DIR of JPEG files, FILE.npz, FILE.json or FILE.jsonl"
                )
            shape = (SYNTHETIC_ITEMS, *generated_shape(tensor.shape[1:]))
            if math.prod(shape) > MOST_VALUES:
                raise InputError(f"input {tensor.name} has the shape {list(tensor.shape)}, too large to generate")
            dtype = np.dtype(NUMPY_TYPES[tensor.datatype])
            values: Array = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
            known = _of_text(tensor.name, shape) if dtype.kind != "f" else None
            guessed += [tensor.name] if dtype.kind != "f" and known is None else []
            arrays[tensor.name] = (values if known is None else known).astype(dtype)
        kind = RANDOM + (f"{GUESSED}{', '.join(guessed)}" if guessed else "")
        write_folder(directory, payload, arrays, {"kind": kind, "seed": seed})
    except (OSError, MemoryError) as exc:
        raise InputError(f"no values can be generated for {signature.model}: {exc}") from exc


def _of_text(name: str, shape: Shape) -> Array | None:
    """What a text without padding has in an input of this name; None for other names."""
    name = name.lower()
    if name.endswith("mask"):
        return np.ones(shape)
    if name.endswith(("type_ids", "segment_ids")):
        return np.zeros(shape)
    return np.broadcast_to(np.arange(shape[-1]), shape) if name.endswith("position_ids") else None


def generated_shape(shape: Sequence[int]) -> Shape:
    """The shape of a generated item where the metadata have these sizes, -1 for a variable one."""
    picture = tuple(shape) in ((3, -1, -1), (-1, -1, 3))
    return tuple((_PICTURE_SIDE if picture else _VARIABLE_SIZE) if size < 0 else size for size in shape)


def kind_of(path: Path) -> Kind:
    """What a path holds, by its name. Raises `InputError`."""
    if path.is_dir():
        names = [entry for entry in path.iterdir() if entry.is_file() and not _NOT_INPUTS.fullmatch(entry.name)]
        if not names:
            raise InputError(f"--inputs {path} holds no files; give JPEG files, or one file per input")
        return "images" if 2 * sum(entry.suffix.lower() in _JPEG for entry in names) >= len(names) else "raw files"
    if not path.exists():
        raise InputError(f"--inputs {path} does not exist; give a folder, a file, or random")
    for kind in ("npz", "json", "jsonl"):
        if path.suffix.lower() == f".{kind}":
            return kind
    raise InputError(f"--inputs {path} has an unknown ending; give a folder, or a file with .npz, .json or .jsonl")


def image_folder(inputs: str | None) -> Path | None:
    """The user's folder of JPEG files, if `--inputs` is one. Raises `InputError`, `OSError`."""
    if inputs is None or inputs == RANDOM_INPUTS:
        return None
    return Path(inputs).absolute() if kind_of(Path(inputs)) == "images" else None


def read_given(inputs: str | None, signature: Signature, directory: Path, payload: str, seed: int) -> SampleInputs:
    """The user's inputs or random values, checked against the model's metadata; they are written as a folder of samples
    and read back. Raises `InputError`."""
    if inputs is None or inputs == RANDOM_INPUTS:
        write_synthetic(signature, directory, payload, seed)
    else:
        write_given(Path(inputs), signature, directory, payload)
    return read_inputs(directory, payload)


def write_given(path: Path, signature: Signature, directory: Path, payload: str) -> None:
    """Write the user's inputs as a folder of samples. Raises `InputError` with the item and the input at fault."""
    source = path.name
    try:
        match kind_of(path):
            case "npz":
                items = _read_npz(path, signature)
            case "raw files":
                item, left = _read_raw(path, signature)
                items, source = [item], source + (f" ({left} passed over)" if left else "")
            case "jsonl":
                items = _read_lines(path, signature)
            case _:
                items, ignored = _read_json(path, signature)
                source += f" ({ignored} ignored)" if ignored else ""
        stacked = {name: _stack([item[name] for item in items]) for name in _input_names(items, signature)}
        arrays = {name: array for name, (array, _) in stacked.items()}
        # JSON loses the sizes after a 0, so empty inputs have theirs here as well
        shapes = {name: of_items for name, (array, of_items) in stacked.items()
                  if len(set(of_items)) > 1 or not array.size}  # fmt: skip
        write_folder(directory, payload, arrays, {"kind": GIVEN, "source": source, "shapes": shapes})
    except (InputError, OSError, ValueError, MemoryError, zipfile.BadZipFile, EOFError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise InputError(f"--inputs {path}: {one_line(reason, 400)}") from exc


def _input_names(items: Items, signature: Signature) -> list[str]:
    """The names of the inputs that the items have: all of the model's, except optional ones that no item has. Raises
    `InputError`."""
    names = []
    for tensor in signature.inputs:
        missing = [number for number, item in enumerate(items, start=1) if tensor.name not in item]
        if 0 < len(missing) < len(items):
            raise InputError(
                f"item {missing[0]} has no input {tensor.name}, and others have it; give the optional input in every "
                "item or in none, because the items of a request have the same inputs"
            )
        if not missing:
            names.append(tensor.name)
    if items and not names:
        raise InputError("its items have no inputs at all; give at least one of the model's optional inputs")
    return names


def _stack(items: Sequence[Array]) -> tuple[Array, list[Shape]]:
    """All items of an input in one array, padded with zeros to the largest, and the shape of each. Raises `InputError`
    without any."""
    if not items:
        raise InputError("it holds no items")
    shapes = [item.shape for item in items]
    whole = np.zeros((len(items), *map(max, *shapes, shapes[0])), items[0].dtype)
    if whole.dtype.hasobject:
        whole.fill(b"")
    for row, item in enumerate(items):
        place: tuple[Any, ...] = (row, *map(slice, item.shape))
        whole[place] = item
    return whole, shapes


def _read_npz(path: Path, signature: Signature) -> Items:
    with open_named(path) as file, np.load(file, allow_pickle=False) as content:
        if (unpacked := sum(entry.file_size for entry in content.zip.infolist())) > MOST_INPUT_BYTES:
            raise InputError(f"its arrays have {unpacked:,} bytes, more than the limit of {MOST_INPUT_BYTES:,}")
        _check_names(content.files, signature, "the file")
        tensors = [tensor for tensor in signature.inputs if tensor.name in content.files]
        arrays = {tensor.name: _of_npz(content[tensor.name], tensor) for tensor in tensors}
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"its arrays have different numbers of items: {counts}")
    return [{name: array[item] for name, array in arrays.items()} for item in range(next(iter(counts.values())))]


def _of_npz(array: Array, tensor: TensorSignature) -> Array:
    if tensor.datatype == "BYTES" and array.dtype.kind in "SU":
        array = (np.char.encode(array.astype(str), "utf-8") if array.dtype.kind == "U" else array).astype(object)
    _check_datatype(tensor)
    dtype = SAMPLE_TYPES[tensor.datatype]
    if array.ndim == 0:
        raise InputError(f"the array {tensor.name} is a single value; its first dimension must be the items")
    if array.dtype != dtype:
        raise InputError(
            f"the model's input {tensor.name} is {tensor.datatype}, and the array is {array.dtype}; convert it with "
            f"astype({np.dtype('S' if dtype == 'O' else dtype).name!r})"
        )
    if tensor.datatype == "BOOL" and array.view("u1").max(initial=0) > 1:
        raise InputError(f"input {tensor.name} has values that BOOL cannot hold; its bytes are 0 or 1")
    _check_shape(array.shape[1:], tensor, "")
    return array


def _read_raw(folder: Path, signature: Signature) -> tuple[dict[str, Array], str]:
    """The item, and the names of what else is there: expected outputs lie beside perf_analyzer's inputs."""
    taken = {tensor.name for tensor in signature.inputs if (folder / tensor.name).is_file()}
    _check_names(taken, signature, "the folder")
    item, left = {}, sorted(entry.name for entry in folder.iterdir() if entry.name not in taken)
    for tensor in signature.inputs:
        if tensor.name not in taken:
            continue  # an optional one, by `_check_names`
        content = read_inside(folder, tensor.name, MOST_INPUT_BYTES)
        values = _bytes_of(content.splitlines()) if tensor.datatype == "BYTES" else _from_buffer(content, tensor, "")
        item[tensor.name] = _shaped(values, None, tensor, "")
    return item, one_line(", ".join(left), 200)


def _read_json(path: Path, signature: Signature) -> tuple[Items, str]:
    """The items of perf_analyzer's file, and what in it is not used."""
    try:
        document = _parse(read_named(path, MOST_INPUT_BYTES))
    except ValueError as exc:
        raise InputError(f"it is not JSON: {exc}") from exc
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        raise InputError('it has no list "data", as in {"data": [{"INPUT": [1, 2]}]}')
    ignored = ", ".join(sorted(set(document) - {"data"}))
    return [_item(step, signature, f"item {number}") for number, step in enumerate(_steps(data), start=1)], ignored


def _parse(text: str | bytes) -> Any:
    """Parse JSON; a number too large for a 64-bit float becomes a `Decimal`, which no datatype holds, instead of
    infinity. Raises `ValueError`."""

    def number(text: str) -> float | Decimal:
        value = float(text)
        return value if math.isfinite(value) else Decimal(text)

    try:
        return json.loads(text, parse_float=number)
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None


def _steps(data: Sequence[object]) -> Iterator[object]:
    """The items of perf_analyzer's data, also those inside streams."""
    for entry in data:
        yield from entry if isinstance(entry, list) else (entry,)


def _read_lines(path: Path, signature: Signature) -> Items:
    items = []
    for number, line in enumerate(read_named(path, MOST_INPUT_BYTES).decode("utf-8-sig").splitlines(), start=1):
        if line.strip():
            try:
                content = _parse(line)
            except ValueError as exc:
                raise InputError(f"line {number} is not JSON: {exc}") from exc
            items += [_item(step, signature, f"line {number}") for step in _steps([content])]
    return items


def one_item(content: object, signature: Signature) -> SampleInputs:
    """The inputs of one entry of perf_analyzer's data. Raises `InputError`."""
    arrays = {name: array[np.newaxis] for name, array in _item(content, signature, "the entry").items()}
    return SampleInputs(arrays, "given")


def _item(content: object, signature: Signature, place: str) -> dict[str, Array]:
    if not isinstance(content, dict):
        raise InputError(f"{place} is not an object of inputs")
    _check_names(content, signature, place)
    tensors = [tensor for tensor in signature.inputs if tensor.name in content]
    return {tensor.name: _values(content[tensor.name], tensor, f"{place}, ") for tensor in tensors}


def _check_names(names: Collection[str], signature: Signature, place: str) -> None:
    expected = [tensor.name for tensor in signature.inputs]
    if missing := [name for name in expected if name not in names and name not in signature.optional]:
        raise InputError(f"{place} has no input {missing[0]}; the model takes {', '.join(expected)}")
    if odd := sorted(set(names) - set(expected)):
        raise InputError(f"{place} has {odd[0]}, which the model does not take; its inputs are {', '.join(expected)}")


def _values(entry: object, tensor: TensorSignature, place: str) -> Array:
    """One item's values of one input."""
    content, shape = entry, None
    if isinstance(entry, dict):
        content = entry.get("content", entry)
        shape = entry.get("shape")
        if shape is not None and not (isinstance(shape, list) and all(type(size) is int for size in shape)):
            raise InputError(f"{place}input {tensor.name}: the shape {shape} is not a list of whole numbers")
    if isinstance(content, dict):
        if not isinstance(content.get("b64"), str):
            raise InputError(f'{place}input {tensor.name} has neither "content" nor "b64"')
        try:
            decoded = base64.b64decode(content["b64"], validate=True)
        except ValueError as exc:
            raise InputError(f"{place}input {tensor.name} is not base64: {exc}") from exc
        return _shaped(_from_buffer(decoded, tensor, place), shape, tensor, place)
    listed = content if isinstance(content, list) else [content]
    nested = shape_of(listed)
    try:
        flat = leaves_of(listed, nested)
    except ValueError as exc:
        raise InputError(f"{place}input {tensor.name}: {exc}") from None
    values = _bytes_of(flat, tensor, place) if tensor.datatype == "BYTES" else _numbers(flat, tensor, place)
    return _shaped(values, shape if shape is not None else nested if len(nested) > 1 else None, tensor, place)


def _bytes_of(values: Sequence[object], tensor: TensorSignature | None = None, place: str = "") -> Array:
    def encoded(value: object) -> bytes:
        if isinstance(value, str | bytes):
            try:
                return value.encode() if isinstance(value, str) else value
            except UnicodeEncodeError as exc:
                raise InputError(f"{place}an input has half a surrogate pair, which is no text: {exc.reason}") from exc
        name = "" if tensor is None else tensor.name
        raise InputError(f"{place}input {name} takes texts, and {one_line(repr(value), 40)} is not one")

    return byte_array(list(values), encoded)


def _numbers(values: list[Any], tensor: TensorSignature, place: str) -> Array:
    """The values in the input's datatype, none of them changed by it except for rounding."""
    _check_datatype(tensor, place)
    array = exact_array(values, tensor.datatype)
    if array is None:
        raise InputError(f"{place}input {tensor.name} has values that {tensor.datatype} cannot hold")
    return array


def _check_datatype(tensor: TensorSignature, place: str = "") -> None:
    if tensor.datatype not in SAMPLE_TYPES:
        raise InputError(
            f"{place}input {tensor.name} is {tensor.datatype}, which abserve cannot send; it sends inputs of "
            f"{', '.join(SAMPLE_TYPES)}: cast one of these in the model"
        )


def _from_buffer(content: bytes, tensor: TensorSignature, place: str) -> Array:
    """The values in raw bytes as the protocol sends them."""
    _check_datatype(tensor, place)
    if tensor.datatype == "BYTES":
        elements = read_elements(content)
        if elements is None:
            raise InputError(
                f"{place}input {tensor.name}: the base64 of BYTES must hold each element after its length of four "
                f"bytes in little-endian order, as for perf_analyzer; these {len(content):,} bytes do not"
            )
        return byte_array(elements)
    dtype = np.dtype(SAMPLE_TYPES[tensor.datatype])
    if len(content) % dtype.itemsize:
        raise InputError(
            f"{place}input {tensor.name} has {len(content):,} bytes, which is not a multiple of {dtype.itemsize} "
            f"({tensor.datatype})"
        )
    if tensor.datatype == "BOOL" and content.strip(b"\0\1"):
        raise InputError(f"{place}input {tensor.name} has values that BOOL cannot hold; its bytes are 0 or 1")
    return np.frombuffer(content, dtype)


def _shaped(values: Array, shape: Sequence[int] | None, tensor: TensorSignature, place: str) -> Array:
    """The values in the given shape, else in that of the metadata, where one size may follow from their number."""
    expected = tensor.shape[1:]
    if shape is None:
        fixed = math.prod(size for size in expected if size >= 0)
        free = sum(size < 0 for size in expected)
        if free > 1 or (free == 1 and (fixed == 0 or len(values) % fixed)):
            raise InputError(
                f"{place}input {tensor.name} has {len(values):,} values, and the model takes the shape "
                f"{list(expected)}; write the shape of the item beside its content"
            )
        shape = [len(values) // fixed if size < 0 else size for size in expected]
    if math.prod(shape) != len(values):
        raise InputError(
            f"{place}input {tensor.name} has {len(values):,} values, and the shape {list(shape)} needs "
            f"{math.prod(shape):,}"
        )
    _check_shape(tuple(shape), tensor, place)
    return values.reshape(tuple(shape))


def _check_shape(shape: Shape, tensor: TensorSignature, place: str) -> None:
    expected = tensor.shape[1:]
    if not fits(shape, expected):
        raise InputError(
            f"{place}input {tensor.name} has items of shape {list(shape)}, and the model takes {list(expected)}"
        )


def elements_end(data: memoryview, count: int) -> int | None:
    """Where the last of `count` elements of BYTES ends; None if they do not fit."""
    end = 0
    for _ in range(count):
        if end + BYTES_PREFIX > len(data):
            return None
        end += BYTES_PREFIX + int.from_bytes(data[end : end + BYTES_PREFIX], "little")
    return end if end <= len(data) else None


def read_elements(data: bytes | memoryview) -> list[bytes] | None:
    """The elements of BYTES in the protocol's binary form: each follows its length, four bytes in little-endian order.
    None if the data end in the middle of one."""
    elements, place = [], 0
    while place < len(data):
        start = place + BYTES_PREFIX
        place = start + int.from_bytes(data[place:start], "little")
        if start > len(data) or place > len(data):
            return None
        elements.append(bytes(data[start:place]))
    return elements
