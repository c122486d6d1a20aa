"""Writes a model's sample inputs to a folder, so that a load generator can send them without this package.

    INPUT.PAYLOAD.npy   items of one input [items, …], its name quoted as in a URL; elements that are bytes are in
                        INPUT.PAYLOAD.json, as lists of base64 strings; for images:
        pixel_values.fp32.npy    float32 (N, 3, s, s)    normalised: the model's input
        pixel_values.uint8.npy   uint8   (N, s, s, 3)    RGB, resized and cropped
        jpeg/NN.jpg                                      as photographed, any size
    samples.json        schema abserve.samples/2: kind, model, item, axis with each item's length, variants, files

The kind is `photographs` (our corpus), `given` (the user's pictures, or the samples of a user's module), `token ids` or
`random values`. An item index means the same item in all payloads: `normalise` of the UINT8 item is the FP32 item, and
a server decodes the JPEG file to the UINT8 item, bit for bit. Items of different lengths are padded to the longest with
the model's padding, so a batch is a slice cut at its own longest item. Imports no torch.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from servers.models.files import FolderError, atomic_folder, file_sha256
from servers.models.images import ImageError, UInt8Array, decode_jpeg, normalise, resize_and_crop
from servers.models.items import credits_text, item_bytes, jpeg_paths, text_lengths, valid_items
from servers.models.registry import payload_variants
from servers.models.specification import ModelSpecification, Preprocessing
from servers.options.defaults import OptionError
from servers.protocol.tensors import Array, Axis

SCHEMA = "abserve.samples/2"
MANIFEST = "samples.json"
TEXT = "text"
GENERATED_ITEMS = 64
_MOST_BYTES = 2**28
"""Limit for all generated items together; at least 8 items are made even if they exceed it."""
MOST_JPEG_BYTES = 2**26


def write_samples(
    specification: ModelSpecification,
    folder: Path,
    sequence_length: str = TEXT,
    seed: int = 0,
    images: Path | None = None,
) -> bool:
    """Write the samples unless `folder` already holds the same ones with untouched files; True when it wrote.

    `specification` is the model itself, not a variant. `sequence_length` is `text`, for lengths as real text has them,
    or one or several whole numbers. `images` is a folder of JPEG files. Raises `OptionError`, and `FolderError` when
    the place cannot be written or holds something else.
    """
    if images is not None:
        if specification.payload != "fp32":
            raise OptionError(f"{specification.label} takes no images; give it inputs of another kind")
        specification = replace(specification, samples=None)  # the user's come before its author's
    if specification.payload == "fp32" and specification.samples is None:
        return _write_images(specification, folder, images)
    return _write_items(specification, folder, sequence_length, seed)


def _write_images(specification: ModelSpecification, folder: Path, images: Path | None) -> bool:
    preprocessing = specification.preprocessing
    paths = jpeg_paths() if images is None else _jpegs(images)
    document = _document(specification, "photographs" if images is None else "given", len(paths))
    if images is None:
        document["credits"] = credits_text()
    else:
        left = sorted({entry.name for entry in images.iterdir()} - {path.name for path in paths})
        document["source"] = images.absolute().name + (f" ({', '.join(left)[:200]} passed over)" if left else "")
    digest = hashlib.sha256(repr((document, preprocessing)).encode())
    for path in paths:
        digest.update(path.name.encode() + bytes.fromhex(file_sha256(path)))
    document["source_sha256"] = digest.hexdigest()
    if _up_to_date(folder, document):
        return False
    pixels = np.stack([_decode(path, preprocessing) for path in paths])
    name = specification.inputs[0].name
    with atomic_folder(folder) as fresh:
        document["files"] = {
            "fp32": [_save(fresh, name, "fp32", normalise(pixels, preprocessing))],
            "uint8": [_save(fresh, name, "uint8", pixels)],
            "jpeg": [],
        }
        (fresh / "jpeg").mkdir()
        for index, path in enumerate(paths):
            copied = fresh / "jpeg" / f"{index:0{max(2, len(str(len(paths) - 1)))}d}.jpg"
            copied.write_bytes(path.read_bytes())
            document["files"]["jpeg"].append({**_entry(fresh, copied), "original": path.name})
        _write_manifest(fresh, document)
    return True


def _jpegs(folder: Path) -> Sequence[Path]:
    if not folder.is_dir():
        raise OptionError(f"--images {folder}: no such folder")
    # Hidden ones are what other systems keep beside a picture: macOS writes ._NAME.jpg.
    paths = sorted(path for path in folder.glob("[!.]*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise OptionError(f"--images {folder}: no .jpg or .jpeg files in it")
    inside = folder.resolve()
    for path in paths:  # a folder may come from somebody else: no pipe is waited for, no other file is sent
        if not path.is_file() or not path.resolve().is_relative_to(inside):
            raise OptionError(f"--images {folder}: {path.name} is not a regular file inside the folder")
        if path.stat().st_size > MOST_JPEG_BYTES:
            raise OptionError(f"--images {folder}: {path.name} has more than {MOST_JPEG_BYTES:,} bytes")
    return paths


def _decode(path: Path, preprocessing: Preprocessing) -> Any:
    try:
        return resize_and_crop(decode_jpeg(path.read_bytes()), preprocessing)
    except (ImageError, OSError) as exc:
        raise OptionError(f"{path.name}: {exc}") from exc


def _write_items(specification: ModelSpecification, folder: Path, sequence_length: str, seed: int) -> bool:
    axis = specification.main_axis
    if specification.samples is not None:
        arrays, kind = specification.samples, "given"
        lengths = [1 if axis is None else axis.size_of(arrays)] * len(next(iter(arrays.values())))
    else:
        lengths = _lengths(specification, axis, sequence_length, seed)
        integers = all(tensor.dtype.kind in "iu" for tensor in specification.inputs)
        kind = "token ids" if axis is not None and axis.padded and integers else "random values"
        guessed = [
            tensor.name
            for tensor in specification.inputs
            if specification.file is not None and tensor.dtype.kind in "iub" and tensor.datatype != "UINT8"
            if tensor.name not in specification.values
        ]
        kind += f", 0 or 1 for {', '.join(guessed)}" if guessed else ""
        arrays = valid_items(specification, seed, lengths)
    document = _document(specification, kind, len(lengths))
    if axis is not None:
        taken = {tensor.name for tensor in specification.inputs}
        places = {name: place for name, place in axis.places.items() if name in taken}
        document["axis"] = {"name": axis.name, "places": places, "default": axis.default, "largest": axis.largest}
        document["lengths"] = lengths
    digest = hashlib.sha256(repr(document).encode())
    for array in arrays.values():
        digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes())
    document["source_sha256"] = digest.hexdigest()
    if _up_to_date(folder, document):
        return False
    with atomic_folder(folder) as fresh:
        payload = specification.payload
        document["files"] = {payload: [_save(fresh, name, payload, array) for name, array in arrays.items()]}
        _write_manifest(fresh, document)
    return True


def _lengths(specification: ModelSpecification, axis: Axis | None, text: str, seed: int) -> list[int]:
    """One length per item. Raises `OptionError` for lengths that the model does not take."""
    if axis is None:
        if text != TEXT:
            raise OptionError(f"{specification.label} takes no sequences; leave out --sequence-length")
        return [1] * _count(specification, None)
    if text == TEXT:
        count = _count(specification, axis.largest if axis.padded else axis.default)
        return text_lengths(count, seed, axis.largest) if axis.padded else [axis.default] * count
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= axis.largest for part in parts):
        raise OptionError(
            f"--sequence-length {text}: give {TEXT}, or whole numbers from 1 to {axis.largest}, as in 32,128"
        )
    sizes = list(dict.fromkeys(map(int, parts)))
    if len(sizes) > 1 and not axis.padded:
        raise OptionError(f"--sequence-length {text}: {specification.label} has no padding; give one length")
    return [size for size in sizes for _ in range(_count(specification, max(sizes)))]


def _count(specification: ModelSpecification, length: int | None) -> int:
    return max(8, min(GENERATED_ITEMS, _MOST_BYTES // max(1, item_bytes(specification, length))))


def _document(specification: ModelSpecification, kind: str, count: int) -> dict[str, Any]:
    # An author's items are tensors, also those of images.
    variants = payload_variants(specification) if specification.samples is None else [specification]
    return {
        "schema": SCHEMA,
        "kind": kind,
        "reference": specification.label,
        "model": specification.name,
        "title": specification.title,
        "item": specification.item,
        "kinds": {output.name: specification.kind_of(output.name) for output in specification.outputs},
        "count": count,
        "axis": None,
        "lengths": None,
        "variants": {
            variant.payload: {
                "model": variant.name,
                "inputs": [
                    {"name": tensor.name, "datatype": tensor.datatype, "item_shape": list(tensor.item_shape)}
                    for tensor in variant.inputs
                ],
            }
            for variant in variants
        },
    }


def _save(folder: Path, name: str, payload: str, array: Array) -> dict[str, object]:
    stem = f"{quote(name, safe='')}.{payload}"
    if array.dtype.hasobject:
        path = folder / f"{stem}.json"
        path.write_text(json.dumps(_base64(array.tolist())) + "\n", encoding="utf-8")
    else:
        path = folder / f"{stem}.npy"
        np.save(path, array)
    return {"input": name, **_entry(folder, path)}


def _base64(value: Any) -> Any:
    return [_base64(element) for element in value] if isinstance(value, list) else base64.b64encode(value).decode()


def _entry(folder: Path, path: Path) -> dict[str, object]:
    return {"path": str(path.relative_to(folder)), "sha256": file_sha256(path), "bytes": path.stat().st_size}


def _write_manifest(folder: Path, document: Mapping[str, Any]) -> None:
    (folder / MANIFEST).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _up_to_date(folder: Path, document: Mapping[str, Any]) -> bool:
    """Whether the folder holds these samples, untouched. Raises `FolderError` if it holds something else."""
    existing = _read(folder)
    if existing.get("source_sha256") == document["source_sha256"] and _untouched(folder, existing):
        return True
    holds_samples = str(existing.get("schema")).startswith("abserve.samples/")
    if not holds_samples and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FolderError(f"{folder} exists and holds something other than samples; choose another folder")
    return False


def _read(folder: Path) -> dict[str, Any]:
    """The manifest in `folder`; empty when it is missing or unreadable."""
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _untouched(folder: Path, document: dict[str, Any]) -> bool:
    try:
        entries = [entry for files in document["files"].values() for entry in files]
        return all(file_sha256(folder / entry["path"]) == entry["sha256"] for entry in entries)
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def corpus_pixels(specification: ModelSpecification, count: int) -> UInt8Array:
    """`count` photographs of the corpus in order, resized and cropped; repeated when there are too few."""
    paths = jpeg_paths()
    needed = [decode_jpeg(paths[index % len(paths)].read_bytes()) for index in range(count)]
    return np.stack([resize_and_crop(pixels, specification.preprocessing) for pixels in needed])


def photographs(specification: ModelSpecification, count: int) -> dict[str, Array]:
    """`count` photographs of the corpus as an engine gets them, by the input's name."""
    pixels, name = corpus_pixels(specification, count), specification.inputs[0].name
    return {name: pixels if specification.payload == "uint8" else normalise(pixels, specification.preprocessing)}
