"""The description of an artefact: `manifest.json` beside the file, schema abserve.artefact/1."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

FILE_NAME = "manifest.json"
_PACKAGES = (
    *("torch", "jax", "torchax", "jax2onnx", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy"),
    *("open_clip_torch", "torchvision", "timm", "transformers"),
)


class ParityMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """The file's answers to one batch compared with the model's own, see `servers.engines.agreement`; the worst row.

    `sizes` are those of the axes; in a `padded` batch the items have different lengths. None: not a number of this kind
    of output. `fault` is the reason why they differ; None in every file that was kept.
    """

    batch: int
    sizes: dict[str, int] = {}
    padded: bool = False
    cosine_min: float | None
    relative_error: float | None = None
    max_abs: float | None
    top1: float | None = None
    fault: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One artefact. `weights` is the label for people; `weights_sha256` is that of the file, None for random weights;
    `weights_revision` is the commit of the hub's repository that the file came from.

    `operators` are those in the file: `standard` also where fused ones were requested and do not cover the model.
    A package has no `opset`; `target` is the kind of CPU that it was compiled for.
    `quantisation` says how an INT8 file was made; its parity shows what that lost.
    `model_sha256` is the specification's `definition_sha256`. A user's ONNX file that is executed unchanged has no
    `parity`, which compares a file with the model that it was made from.
    """

    schema: Literal["abserve.artefact/1"] = "abserve.artefact/1"
    kind: Literal["onnx", "aotinductor"] = "onnx"
    model: str
    model_version: str
    model_sha256: str | None = None
    weights: str
    weights_sha256: str | None
    weights_revision: str | None = None
    payload: str = "fp32"
    precision: str
    operators: str = "standard"
    quantisation: str | None = None
    versions: dict[str, str]
    target: str | None = None
    opset: int | None = None
    seconds: float
    file: str
    bytes: int
    sha256: str
    parity_tolerance: float | None = None
    parity: tuple[ParityMeasurement, ...]
    created_at: str

    def write(self, folder: Path) -> None:
        """Write it into the artefact's folder."""
        (folder / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def to_dict(self) -> dict[str, object]:
        """Plain data, as other records embed it."""
        document: dict[str, object] = msgspec.to_builtins(self)
        return document


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in an artefact's folder; None when it is missing or has another schema."""
    try:
        return msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def package_versions() -> dict[str, str]:
    """The installed packages that determine the content of an export."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
