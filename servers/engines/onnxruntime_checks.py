"""What is checked before ONNX Runtime executes anything: which package is installed, and that the file is the model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from servers.contract.tensors import TensorSpec
from servers.engines.interface import EngineError

PACKAGES = ("onnxruntime", "onnxruntime-gpu")
ELEMENT_TYPES = {"FP32": "tensor(float)", "FP16": "tensor(float16)", "UINT8": "tensor(uint8)", "INT64": "tensor(int64)"}


def installed_packages() -> tuple[str, ...]:
    """Which of ONNX Runtime's two PyPI packages are installed."""
    found = []
    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            continue
        found.append(package)
    return tuple(found)


def assert_one_package() -> None:
    """Raise `EngineError` unless exactly one package is installed: both write to one folder, and the last one wins."""
    found = installed_packages()
    if len(found) > 1:
        raise EngineError(
            "both onnxruntime and onnxruntime-gpu are installed and overwrite each other; "
            "run: pip uninstall -y onnxruntime onnxruntime-gpu, then install one of them again"
        )
    if not found:
        raise EngineError("ONNX Runtime is not installed; run: pip install onnxruntime-gpu")


def assert_signature(nodes: Sequence[Any], tensors: Sequence[TensorSpec], what: str) -> None:
    """Raise `EngineError` unless a session's inputs or outputs are those of the model, with a free batch dimension."""

    def show(name: str, element: str, dims: Sequence[object]) -> str:
        return f"{name} {element}[{','.join(str(d) for d in dims)}]"

    found = [show(node.name, node.type, ["*", *node.shape[1:]]) for node in nodes]
    wanted = [show(t.name, ELEMENT_TYPES.get(t.datatype, t.datatype), ["*", *t.item_shape]) for t in tensors]
    fixed = [node.name for node in nodes if isinstance(node.shape[0], int)]
    if found != wanted:
        raise EngineError(f"the ONNX file's {what} are {found}, the model's are {wanted}; export it again")
    if fixed:
        raise EngineError(f"the ONNX file fixes the batch size of {fixed[0]}; export it again with a dynamic batch")
