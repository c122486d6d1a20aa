"""Reads the user's own inputs: arrays, raw files, or perf_analyzer's JSON, checked against the model's metadata.

    FILE.npz     one array per input, the items in its first dimension
    FILE.json    perf_analyzer's --input-data: {"data": [{"INPUT": VALUES, …}, …]}; the steps of streams are items too
    FILE.jsonl   one item per line in the same form
    DIR          JPEG files; or, as perf_analyzer's --input-data DIR, one file per input with the values of one item
                 (for BYTES a text of one element per line)

VALUES are a list of one item's values, {"content": [...], "shape": [...]} or {"b64": "..."} of the raw bytes; those of
BYTES are each element after its length of four bytes in little-endian order. Items may differ in shape; nothing pads
them, so those of different shapes never share a request.
"""

from __future__ import annotations

import base64
import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loadgen.client.endpoint import Signature, TensorSignature, fits
from loadgen.client.inputs import (
    GIVEN,
    MOST_INPUT_BYTES,
    SAMPLE_TYPES,
    Array,
    InputError,
    SampleInputs,
    Shape,
    byte_array,
    exact_array,
    read_inputs,
    shape_of,
    write_folder,
    write_synthetic,
)
from loadgen.client.outputs import read_elements
from loadgen.documents import one_line, open_named, read_inside, read_named

Kind = Literal["npz", "json", "jsonl", "images", "raw files"]
RANDOM_INPUTS = "random"
"""In place of a path: random values of the shapes in the server's metadata."""
_JPEG = (".jpg", ".jpeg")
Items = list[dict[str, Array]]
"""The inputs of each item by name."""


def kind_of(path: Path) -> Kind:
    """What a path holds, by its name. Raises `InputError`."""
    if path.is_dir():
        names = [entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith(".")]
        if not names:
            raise InputError(f"--inputs {path} holds no files; give JPEG files, or one file per input")
        return "images" if all(entry.suffix.lower() in _JPEG for entry in names) else "raw files"
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
    """The user's inputs or random values, as the model's metadata demand, by way of a folder of samples. Raises
    `InputError`."""
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
                items = [_read_raw(path, signature)]
            case "jsonl":
                items = _read_lines(path, signature)
            case _:
                items, ignored = _read_json(path, signature)
                source += f" ({ignored} ignored)" if ignored else ""
        stacked = {name: _stack([item[name] for item in items]) for name in _given(items, signature)}
        arrays = {name: array for name, (array, _) in stacked.items()}
        shapes = {name: own for name, (_, own) in stacked.items() if len(set(own)) > 1}
        write_folder(directory, payload, arrays, {"kind": GIVEN, "source": source, "shapes": shapes})
    except (InputError, OSError, ValueError, MemoryError, zipfile.BadZipFile, EOFError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise InputError(f"--inputs {path}: {one_line(reason, 400)}") from exc


def _given(items: Items, signature: Signature) -> list[str]:
    """The inputs that the items have: all of the model, except for optional ones that none has. Raises `InputError`."""
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
    """All items of an input in one array, with the shape of each; smaller ones have zeros behind. Raises `InputError`
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
        if (unpacked := sum(one.file_size for one in content.zip.infolist())) > MOST_INPUT_BYTES:
            raise InputError(f"its arrays have {unpacked:,} bytes, more than the limit of {MOST_INPUT_BYTES:,}")
        _check_names(content.files, signature, "the file")
        arrays = {one.name: _of_npz(content[one.name], one) for one in signature.inputs if one.name in content.files}
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"its arrays have different numbers of items: {counts}")
    return [{name: array[item] for name, array in arrays.items()} for item in range(next(iter(counts.values())))]


def _of_npz(array: Array, tensor: TensorSignature) -> Array:
    if tensor.datatype == "BYTES" and array.dtype.kind in "SU":
        array = (np.char.encode(array.astype(str), "utf-8") if array.dtype.kind == "U" else array).astype(object)
    _check_datatype(tensor)
    wanted = SAMPLE_TYPES[tensor.datatype]
    if array.ndim == 0:
        raise InputError(f"the array {tensor.name} is a single value; its first dimension must be the items")
    if array.dtype != wanted:
        raise InputError(
            f"the model's input {tensor.name} is {tensor.datatype}, and the array is {array.dtype}; convert it with "
            f"astype({np.dtype('S' if wanted == 'O' else wanted).name!r})"
        )
    if tensor.datatype == "BOOL" and array.view("u1").max(initial=0) > 1:
        raise InputError(f"input {tensor.name} has values that BOOL cannot hold; its bytes are 0 or 1")
    _check_shape(array.shape[1:], tensor, "")
    return array


def _read_raw(folder: Path, signature: Signature) -> dict[str, Array]:
    _check_names([path.name for path in folder.iterdir() if path.is_file()], signature, "the folder")
    item = {}
    for tensor in signature.inputs:
        if not (folder / tensor.name).is_file():
            continue  # an optional one, by `_check_names`
        content = read_inside(folder, tensor.name, MOST_INPUT_BYTES)
        values = _bytes_of(content.splitlines()) if tensor.datatype == "BYTES" else _from_buffer(content, tensor, "")
        item[tensor.name] = _shaped(values, None, tensor, "")
    return item


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
    """JSON in which a number beyond a float of 64 bits stays one that no datatype holds, instead of infinity. Raises
    `ValueError`."""

    def number(text: str) -> float | Decimal:
        value = float(text)
        return value if math.isfinite(value) else Decimal(text)

    try:
        return json.loads(text, parse_float=number)
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None


def _steps(data: Sequence[object]) -> Iterator[object]:
    """The items, also those inside streams."""
    for entry in data:
        yield from entry if isinstance(entry, list) else (entry,)


def _read_lines(path: Path, signature: Signature) -> Items:
    items = []
    for number, line in enumerate(read_named(path, MOST_INPUT_BYTES).decode().splitlines(), start=1):
        if line.strip():
            try:
                content = _parse(line)
            except ValueError as exc:
                raise InputError(f"line {number} is not JSON: {exc}") from exc
            items += [_item(step, signature, f"line {number}") for step in _steps([content])]
    return items


def _item(content: object, signature: Signature, place: str) -> dict[str, Array]:
    if not isinstance(content, dict):
        raise InputError(f"{place} is not an object of inputs")
    _check_names(content, signature, place)
    given = [tensor for tensor in signature.inputs if tensor.name in content]
    return {tensor.name: _values(content[tensor.name], tensor, f"{place}, ") for tensor in given}


def _check_names(found: Sequence[str] | Mapping[str, object], signature: Signature, place: str) -> None:
    wanted = [tensor.name for tensor in signature.inputs]
    if missing := [name for name in wanted if name not in found and name not in signature.optional]:
        raise InputError(f"{place} has no input {missing[0]}; the model takes {', '.join(wanted)}")
    if odd := sorted(set(found) - set(wanted)):
        raise InputError(f"{place} has {odd[0]}, which the model does not take; its inputs are {', '.join(wanted)}")


def _values(given: object, tensor: TensorSignature, place: str) -> Array:
    """One item's values of one input."""
    content, shape = given, None
    if isinstance(given, dict):
        content = given.get("content", given)
        shape = given.get("shape")
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
    flat = _flat(listed, len(nested))
    values = _bytes_of(flat, tensor, place) if tensor.datatype == "BYTES" else _numbers(flat, tensor, place)
    return _shaped(values, shape if shape is not None else nested if len(nested) > 1 else None, tensor, place)


def _flat(content: list[Any], depth: int) -> list[Any]:
    for _ in range(depth - 1):
        content = [value for inner in content for value in (inner if isinstance(inner, list) else [inner])]
    return content


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
        known = ", ".join(SAMPLE_TYPES)
        raise InputError(
            f"{place}input {tensor.name} is {tensor.datatype}, which abserve cannot send; it sends inputs of {known}"
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
