"""What a model accepts and returns, and the check of a request against it that both doors share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from servers.contract.errors import InvalidRequestError
from servers.contract.records import InferRequest, RequestedOutput
from servers.contract.tensors import Array, TensorSpec


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as the protocol's JSON writes it: [1,3,224,224]."""
    return "[" + ",".join(map(str, shape)) + "]"


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The part of a model that a request is checked against."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int

    def validate(self, request: InferRequest) -> tuple[int, Mapping[str, Array]]:
        """The number of items and the inputs by name. Raises `InvalidRequestError` at the first contradiction."""
        arrays: dict[str, Array] = {}
        rows: int | None = None
        for tensor in request.inputs:
            spec = next((spec for spec in self.inputs if spec.name == tensor.name), None)
            if spec is None:
                known = ", ".join(repr(spec.name) for spec in self.inputs)
                raise InvalidRequestError(
                    f"unexpected inference input {_quoted(tensor.name)} for model '{self.name}', expected {known}"
                )
            if tensor.name in arrays:
                raise InvalidRequestError(f"input '{tensor.name}' is given more than once")
            if tensor.datatype != spec.datatype:
                raise InvalidRequestError(
                    f"inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                    f"but model '{self.name}' expects '{spec.datatype}'"
                )
            rows = self._checked_rows(spec, tensor.shape, rows)
            arrays[tensor.name] = tensor.data
        missing = [spec.name for spec in self.inputs if spec.name not in arrays]
        if missing or rows is None:
            raise InvalidRequestError(
                f"expected {len(self.inputs)} inputs but got {len(arrays)} inputs for model '{self.name}', "
                f"missing {', '.join(map(repr, missing))}"
            )
        self._check_outputs(request.outputs)
        return rows, arrays

    def _checked_rows(self, spec: TensorSpec, shape: tuple[int, ...], rows: int | None) -> int:
        if len(shape) != len(spec.shape) or any(
            wanted not in (-1, got) for wanted, got in zip(spec.shape[1:], shape[1:], strict=True)
        ):
            raise InvalidRequestError(
                f"unexpected shape for input '{spec.name}' for model '{self.name}', "
                f"expected {shape_text(spec.shape)}, got {shape_text(shape)}"
            )
        if not 1 <= shape[0] <= self.max_batch_size:
            raise InvalidRequestError(
                f"inference request batch-size must be between 1 and {self.max_batch_size} for '{self.name}', "
                f"got {shape[0]}"
            )
        if rows is not None and rows != shape[0]:
            raise InvalidRequestError(
                f"input '{spec.name}' has batch size {shape[0]}, but another input has batch size {rows}"
            )
        return shape[0]

    def _check_outputs(self, outputs: tuple[RequestedOutput, ...] | None) -> None:
        if outputs is None:
            return
        seen: set[str] = set()
        known = {spec.name for spec in self.outputs}
        for output in outputs:
            if output.name not in known:
                raise InvalidRequestError(
                    f"unexpected inference output {_quoted(output.name)} for model '{self.name}', "
                    f"expected {', '.join(map(repr, sorted(known)))}"
                )
            if output.name in seen:
                raise InvalidRequestError(f"output '{output.name}' is requested more than once")
            seen.add(output.name)


def _quoted(name: str) -> str:
    """A client's name in a message: escaped, and never longer than a line."""
    return repr(name if len(name) <= 64 else name[:61] + "...")
