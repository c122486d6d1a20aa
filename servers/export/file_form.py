"""In which forms a model's ONNX file exists, and which one an engine executes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PRECISIONS = ("fp32", "fp16")


class Operators(StrEnum):
    """ONNX's own, which every runtime knows; or ONNX Runtime's fused ones for a model that `tower_graph` covers."""

    STANDARD = "standard"
    FUSED = "fused"


STANDARD, FUSED = Operators.STANDARD.value, Operators.FUSED.value

OPSETS = {STANDARD: 18, FUSED: 19}
"""Of ONNX's own operators. 23 would emit Attention operators, which not every runtime here is known to support; 19 is
the first one whose DequantizeLinear gives FP16."""


@dataclass(frozen=True, slots=True)
class FileForm:
    """What is asked of a file: one of `PRECISIONS` and of `Operators`."""

    precision: str = "fp32"
    operators: str = STANDARD

    @property
    def suffix(self) -> str:
        """Of the folder's name."""
        return "".join(f"-{part}" for part in (self.precision, self.operators) if part not in ("fp32", STANDARD))


PLAIN = FileForm()


def executed_form(engine: str, precision: str) -> FileForm:
    """Which file an engine executes for a precision: FP16 has its own, TF32 is how a GPU multiplies FP32.

    ONNX Runtime gets its fused operators where they cover the model: what torch exports leaves shape arithmetic on the
    CPU of a GPU session.
    """
    stored = "fp16" if precision == "fp16" else "fp32"
    return FileForm(stored, FUSED if engine == "onnxruntime" else STANDARD)
