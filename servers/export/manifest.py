"""What an exported file is: its form, and the manifest beside it (`manifest.json`, schema abserve.artefact/1)."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from servers.engines.settings import engine_kind
from servers.options.libraries import installed_versions


class ExportError(Exception):
    """The artefact cannot be made; the message names the remedy where there is one."""


PRECISIONS = ("fp32", "fp16", "int8")
"""Of an ONNX file."""
STANDARD, FUSED, JAX = "standard", "fused", "jax"
"""ONNX's standard operators, which every runtime has, ONNX Runtime's fused ones (see `tower_graph`), or standard ones
that jax2onnx makes from the model's JAX function (see `jax_graph`)."""
OPSETS = {STANDARD: 18, FUSED: 19, JAX: 18}
"""Versions of ONNX's standard operators. 23 would emit Attention operators, which some runtimes may not support; 19 is
the first one whose DequantizeLinear gives FP16."""
PACKAGE = "package"
"""In place of operators: machine code that torch's AOTInductor made for one kind of CPU."""


@dataclass(frozen=True, slots=True)
class FileForm:
    """The requested form of a file; `operators` is one of `OPSETS`, or `PACKAGE`."""

    precision: str = "fp32"
    operators: str = STANDARD
    target: str | None = None
    """The CPU of a package, see `servers.export.torch_export.package_target`."""

    @property
    def suffix(self) -> str:
        """The end of the folder's name."""
        parts = (self.precision, self.operators, self.target)
        return "".join(f"-{part}" for part in parts if part not in ("fp32", "standard", None))


PLAIN = FileForm()


def executed_form(engine: str, precision: str, target: str | None = None) -> FileForm:
    """The file that an engine executes for a precision: FP16 and INT8 have their own, TF32 is how a GPU multiplies
    FP32, and BF16 how a CPU does.

    ONNX Runtime gets fused operators: with torch's export it leaves shape arithmetic on the CPU of a GPU session. An
    INT8 file has standard operators for every engine. A package is for the CPU `target`.
    """
    operators = engine_kind(engine).executes or STANDARD
    if operators == PACKAGE:
        return FileForm(precision, PACKAGE, target)
    if precision == "int8":
        return FileForm("int8")
    return FileForm("fp16" if precision == "fp16" else "fp32", operators)


FILE_NAME = "manifest.json"
_PACKAGES = (
    *("torch", "jax", "torchax", "jax2onnx", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy"),
    *("open_clip_torch", "torchvision", "timm", "transformers"),
)


class ParityMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """The file's answers to one batch compared with the model's own, see `servers.engines.agreement`; the worst row.
    `sizes` are those of the axes; in a `padded` batch the items have different lengths. None: not a number of this kind
    of output. `fault` is the reason why they differ; None in every file that was kept."""

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
    return {"python": platform.python_version(), **installed_versions(_PACKAGES)}
