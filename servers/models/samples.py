"""Writes a model's sample inputs to a folder, so that a load generator can send them without this package.

They are the same for all payload variants of a model:

    pixel_values.fp32.npy    float32 (N, 3, 224, 224)    normalised: the model's input
    pixel_values.uint8.npy   uint8   (N, 224, 224, 3)    RGB, resized and cropped
    jpeg/NN.jpg                                          as photographed, any size
    samples.json             schema abserve.samples/1: model, tensor, variants, files with SHA-256, credits

An item index means the same picture in all three: `normalise` of the UINT8 item is the FP32 item, and a server
decodes the JPEG file to the UINT8 item, bit for bit. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from servers.contract.tensors import TensorSpec
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
    source, existing = _source_digest(specification), _read(folder)
    if existing.get("source_sha256") == source and _untouched(folder, existing):
        return False
    if existing.get("schema") != SCHEMA and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
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
        document = {
            "schema": SCHEMA,
            "kind": "photographs",
            "model": specification.name,
            **_signature(tensor),
            "count": len(paths),
            "variants": {
                variant.payload: {"model": variant.name, **_signature(variant.inputs[0])}
                for variant in payload_variants(specification)
            },
            "files": {
                "fp32": _entry(fresh, f"{tensor.name}.fp32.npy", datatype="FP32", item_shape=tensor.item_shape),
                "uint8": _entry(fresh, f"{tensor.name}.uint8.npy", datatype="UINT8", item_shape=pixels.shape[1:]),
                "jpeg": [_entry(fresh, f"jpeg/{i:02d}.jpg", original=path.name) for i, path in enumerate(paths)],
            },
            "source_sha256": source,
            "credits": credits_text(),
        }
        (fresh / MANIFEST).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _signature(tensor: TensorSpec) -> dict[str, object]:
    return {"tensor": tensor.name, "datatype": tensor.datatype, "item_shape": tensor.item_shape}


def _entry(folder: Path, name: str, **more: object) -> dict[str, object]:
    path = folder / name
    return {"path": name, "sha256": file_sha256(path), "bytes": path.stat().st_size, **more}


def _source_digest(specification: ModelSpecification) -> str:
    """A hash of everything that the samples are made from: pictures, preprocessing, the input's signature."""
    source = (SCHEMA, specification.name, specification.inputs, specification.preprocessing)
    digest = hashlib.sha256(repr(source).encode())
    for path in jpeg_paths():
        digest.update(path.name.encode() + bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, Any]:
    """The manifest in `folder`; empty when it is missing or unreadable."""
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _untouched(folder: Path, document: dict[str, Any]) -> bool:
    try:
        entries = [document["files"]["fp32"], document["files"]["uint8"], *document["files"]["jpeg"]]
        return all(file_sha256(folder / entry["path"]) == entry["sha256"] for entry in entries)
    except (OSError, KeyError, TypeError):
        return False
