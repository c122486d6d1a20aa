"""The forms of a model's exported file, ONNX or torch's package, and which one an engine executes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from servers.engines.settings import engine_kind

PRECISIONS = ("fp32", "fp16", "int8")
"""Of an ONNX file."""
PACKAGE = "package"
"""In place of operators: machine code that torch's AOTInductor made for one kind of CPU."""


class Operators(StrEnum):
    """ONNX's standard operators, which every runtime has, ONNX Runtime's fused ones (see `tower_graph`), or standard
    ones that jax2onnx makes from the model's JAX function (see `jax_graph`)."""

    STANDARD = "standard"
    FUSED = "fused"
    JAX = "jax"


OPSETS = {Operators.STANDARD: 18, Operators.FUSED: 19, Operators.JAX: 18}
"""Versions of ONNX's standard operators. 23 would emit Attention operators, which some runtimes may not support; 19 is
the first one whose DequantizeLinear gives FP16."""


@dataclass(frozen=True, slots=True)
class FileForm:
    """The requested form of a file; `operators` is a value of `Operators`, or `PACKAGE`."""

    precision: str = "fp32"
    operators: str = Operators.STANDARD
    target: str | None = None
    """The CPU of a package, see `servers.export.package.target`."""

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
    operators = engine_kind(engine).executes or Operators.STANDARD
    if operators == PACKAGE:
        return FileForm(precision, PACKAGE, target)
    if precision == "int8":
        return FileForm("int8")
    return FileForm("fp16" if precision == "fp16" else "fp32", operators)
