"""Writes a model's sample inputs to a folder, so that a load generator can send them without importing any of this.

They are the same for all payload variants of a model:

    pixel_values.fp32.npy    float32 (N, 3, 224, 224)    normalised: the model's input
    pixel_values.uint8.npy   uint8   (N, 224, 224, 3)    RGB, resized and cropped
    jpeg/NN.jpg                                          as photographed, any size
    samples.json             schema abserve.samples/1: model, tensor, variants, files with SHA-256, credits

The same item index is the same picture in all three: `normalise` of the UINT8 item is the FP32 item, and what a server
makes of the JPEG file is the UINT8 item, bit for bit. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from servers.models.atomic_folder import FolderError, atomic_folder, file_sha256
from servers.models.corpus import credits_text, jpeg_paths
from servers.models.preprocessing import decode_jpeg, normalise, resize_and_crop
from servers.models.registry import payload_variants
from servers.models.specification import ModelSpecification

SCHEMA = "abserve.samples/1"
MANIFEST = "samples.json"


def write_samples(specification: ModelSpecification, folder: Path) -> bool:
    """Write the samples unless `folder` already holds the same ones with untouched files; True when it wrote.

    `specification` is the FP32 variant. Raises `FolderError` when the place cannot be written or holds something else.
    """
    source = _source_digest(specification)
    if _up_to_date(folder, source):
        return False
    if folder.exists() and not _ours(folder):
        raise FolderError(f"{folder} exists and holds something other than samples; choose another folder")
    tensor, preprocessing = specification.inputs[0], specification.preprocessing
    paths = jpeg_paths()
    with atomic_folder(folder) as fresh:
        pixels = np.stack([resize_and_crop(decode_jpeg(path.read_bytes()), preprocessing) for path in paths])
        np.save(fresh / f"{tensor.name}.fp32.npy", normalise(pixels, preprocessing))
        np.save(fresh / f"{tensor.name}.uint8.npy", pixels)
        (fresh / "jpeg").mkdir()
        for index, path in enumerate(paths):
            (fresh / "jpeg" / f"{index:02d}.jpg").write_bytes(path.read_bytes())
        files = {
            "fp32": _entry(fresh, f"{tensor.name}.fp32.npy") | {"datatype": "FP32", "item_shape": tensor.item_shape},
            "uint8": _entry(fresh, f"{tensor.name}.uint8.npy") | {"datatype": "UINT8", "item_shape": pixels.shape[1:]},
            "jpeg": [
                _entry(fresh, f"jpeg/{index:02d}.jpg") | {"original": path.name} for index, path in enumerate(paths)
            ],
        }
        document = {
            "schema": SCHEMA,
            "kind": "photographs",
            "model": specification.name,
            "tensor": tensor.name,
            "datatype": tensor.datatype,
            "item_shape": tensor.item_shape,
            "count": len(paths),
            "variants": {
                variant.payload: {
                    "model": variant.name,
                    "tensor": variant.inputs[0].name,
                    "datatype": variant.inputs[0].datatype,
                    "item_shape": variant.inputs[0].item_shape,
                }
                for variant in payload_variants(specification)
            },
            "files": files,
            "source_sha256": source,
            "credits": credits_text(),
        }
        (fresh / MANIFEST).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _entry(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return {"path": name, "sha256": file_sha256(path), "bytes": path.stat().st_size}


def _source_digest(specification: ModelSpecification) -> str:
    """Of everything that the samples are made from: pictures, preprocessing, the input's signature."""
    source = (SCHEMA, specification.name, specification.inputs, specification.preprocessing)
    digest = hashlib.sha256(repr(source).encode())
    for path in jpeg_paths():
        digest.update(path.name.encode() + bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def _up_to_date(folder: Path, source: str) -> bool:
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        if document["source_sha256"] != source:
            return False
        entries = [document["files"]["fp32"], document["files"]["uint8"], *document["files"]["jpeg"]]
        return all(file_sha256(folder / entry["path"]) == entry["sha256"] for entry in entries)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _ours(folder: Path) -> bool:
    """Whether the folder may be replaced: empty, or written by this module."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        return bool(json.loads((folder / MANIFEST).read_bytes())["schema"] == SCHEMA)
    except (OSError, ValueError, KeyError, TypeError):
        return False
