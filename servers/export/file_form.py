"""The forms of a model's ONNX file, and which one an engine executes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from servers.engines.settings import engine_kind

PRECISIONS = ("fp32", "fp16")


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
    """The requested form of a file; `operators` is a value of `Operators`."""

    precision: str = "fp32"
    operators: str = Operators.STANDARD

    @property
    def suffix(self) -> str:
        """The end of the folder's name."""
        return "".join(f"-{part}" for part in (self.precision, self.operators) if part not in ("fp32", "standard"))


PLAIN = FileForm()


def executed_form(engine: str, precision: str) -> FileForm:
    """The file that an engine executes for a precision: FP16 has its own, TF32 is how a GPU multiplies FP32.

    ONNX Runtime gets fused operators: with torch's export it leaves shape arithmetic on the CPU of a GPU session.
    """
    stored = "fp16" if precision == "fp16" else "fp32"
    return FileForm(stored, engine_kind(engine).executes or Operators.STANDARD)
