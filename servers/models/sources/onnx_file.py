"""A user's ONNX file, FILE.onnx: signature and dynamic axes as in the file, which engines execute unchanged.

The first dimension of every input and output is the batch and must be symbolic. Other symbolic dimensions become axes
without padding, since a file does not say with which values it may be padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.models.files import known_sha256, named_path, onnx_parts
from servers.models.items import text_ids
from servers.models.specification import ModelSpecification, UnknownModelError, served_name
from servers.models.weights import WeightsError, WeightsSource
from servers.protocol.tensors import Axis, TensorSpec

if TYPE_CHECKING:
    import torch

_DATATYPES = {
    "BOOL": "BOOL", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64", "INT8": "INT8",
    "INT16": "INT16", "INT32": "INT32", "INT64": "INT64", "FLOAT16": "FP16", "FLOAT": "FP32", "DOUBLE": "FP64",
    "STRING": "BYTES",
}  # fmt: skip
"""ONNX's name of an element's type → the protocol's."""

DEFAULT_SIZE, LARGEST_SIZE = 128, 512
"""Sizes of a symbolic dimension, since a file names none for it."""


def takes(reference: str) -> bool:
    """Whether the reference is FILE.onnx."""
    return reference.endswith(".onnx")


def specify(reference: str) -> ModelSpecification | None:
    """The specification of a file. Raises `UnknownModelError` for one that cannot be read or takes no batches."""
    if not takes(reference):
        return None
    path = named_path(reference)
    model = _model(path)
    graph = model.graph
    weights = {value.name for value in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    places: dict[str, dict[str, int]] = {}
    tensors = [_tensor(path.name, value, places) for value in [*inputs, *graph.output]]
    taken = {value.name for value in inputs}
    integers = [tensor.name for tensor in tensors[: len(inputs)] if tensor.dtype.kind in "iub"]
    counts = {name: count for name in integers if (count := _table_rows(graph, name)) is not None}
    return ModelSpecification(
        name=served_name(path.stem),
        reference=str(path),
        title=path.name,
        version="1",
        inputs=tuple(tensors[: len(inputs)]),
        outputs=tuple(tensors[len(inputs) :]),
        axes=tuple(
            # A dimension that only outputs have is not an axis: no input gives its size.
            Axis(name, DEFAULT_SIZE, LARGEST_SIZE, by_tensor)
            for name, by_tensor in places.items()
            if taken & by_tensor.keys()
        ),
        max_batch_size=32,
        values=_text_values(integers, counts),
        load_module=partial(refuse_module, path),
        file=path,
        definition_sha256=_sha256(path, model),
        default_weights=str(path),
    )


_ONES, _ZEROS, _COUNTED = ("mask",), ("type_ids", "segment_ids"), ("position_ids",)
"""Endings of the names that exporters of text models give their inputs, by what a text without padding has there."""


def _text_values(names: Iterable[str], counts: Mapping[str, int]) -> dict[str, tuple[int, int] | None]:
    """What a text has in the inputs that are called as in models of text; ids only if the file tells how many."""
    values: dict[str, tuple[int, int] | None] = {}
    for name in names:
        lower = name.lower()
        if lower.endswith(_COUNTED):
            values[name] = None
        elif lower.endswith(_ONES):
            values[name] = (1, 2)
        elif lower.endswith(_ZEROS):
            values[name] = (0, 1)
        elif name in counts:
            values[name] = text_ids(counts[name])
    return values


def _table_rows(graph: Any, name: str) -> int | None:
    """The rows of the smallest table of weights in which an input's values, perhaps cast, are places; None without
    one."""
    dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    same, rows = {name}, []
    for node in graph.node:  # sorted, so that what is cast comes first
        if node.op_type in ("Cast", "Identity") and node.input[0] in same:
            same.add(node.output[0])
        along = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if node.op_type == "Gather" and not along and node.input[1] in same and len(dims.get(node.input[0], ())) > 1:
            rows.append(dims[node.input[0]][0])
    return min(rows, default=None)


def refuse_module(path: Path, _: WeightsSource) -> torch.nn.Module:
    """Raises `WeightsError`: there is nothing for torch in an ONNX file."""
    raise WeightsError(
        f"{path.name} is an ONNX file, which torch does not execute; use --engine onnxruntime or tensorrt"
    )


def _sha256(path: Path, model: Any) -> str:
    """The hash of the file with its external data. Raises `UnknownModelError` for data that are missing."""
    try:
        return known_sha256(*onnx_parts(path, model))
    except OSError as exc:
        name = Path(exc.filename or path).name
        raise UnknownModelError(
            f"{path.name}: its weights are in the file {name}, which cannot be read ({exc.strerror or exc}); put it "
            "where the file names it"
        ) from exc


def _model(path: Path) -> Any:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(path, load_external_data=False)
    except FileNotFoundError as exc:
        raise UnknownModelError(f"{path.name}: no such file in {path.parent}") from exc
    except (OSError, DecodeError, ValueError) as exc:
        raise UnknownModelError(f"{path.name} is not an ONNX file that can be read") from exc


def _in_words(kind: Any) -> str:
    """A type of ONNX for people: a sequence of maps, an optional tensor of FLOAT, a tensor of BFLOAT16."""
    import onnx

    which = kind.WhichOneof("value")
    if which == "sequence_type":
        inner = kind.sequence_type.elem_type.WhichOneof("value")
        kinds = {"map_type": "maps", "sequence_type": "sequences", "optional_type": "optional values"}
        return f"a sequence of {kinds.get(inner, 'tensors')}"
    if which == "optional_type":
        return f"an optional {_in_words(kind.optional_type.elem_type).removeprefix('a ').removeprefix('an ')}"
    if which in ("tensor_type", "sparse_tensor_type"):
        name = onnx.TensorProto.DataType.Name(getattr(kind, which).elem_type)
        sparse = "sparse " if which == "sparse_tensor_type" else ""
        return f"a {sparse}tensor of {'no known datatype' if name == 'UNDEFINED' else name}"
    return {"map_type": "a map", "opaque_type": "an opaque value"}.get(which, "of no known type")


def _remedy(kind: Any) -> str:
    """What to do about a type that the protocol does not have."""
    which = kind.WhichOneof("value")
    if which == "map_type" or (which == "sequence_type" and kind.sequence_type.elem_type.HasField("map_type")):
        return "export the model with zipmap=False, as in skl2onnx.to_onnx(…, options={'zipmap': False})"
    if which == "sequence_type":
        return "concatenate the sequence into one tensor before the export (ConcatFromSequence)"
    if which == "optional_type":
        return "export the model with that tensor always present or without it"
    if which == "tensor_type":
        return f"add a Cast to one of {', '.join(_DATATYPES)} in the graph"
    if which == "sparse_tensor_type":
        return "export it as a dense tensor"
    return "export the model with tensors as inputs and outputs"


def _tensor(file: str, value: Any, places: dict[str, dict[str, int]]) -> TensorSpec:
    """One input or output; adds its symbolic dimensions to `places`."""
    import onnx

    kind = value.type.tensor_type
    element = onnx.TensorProto.DataType.Name(kind.elem_type)
    if not value.type.HasField("tensor_type") or element not in _DATATYPES:
        raise UnknownModelError(
            f"{file}: {value.name} is {_in_words(value.type)}, which the protocol does not have; {_remedy(value.type)}"
        )
    if kind.HasField("shape") and not kind.shape.dim:
        raise UnknownModelError(
            f"{file}: {value.name} is a single value without a batch dimension; give each item its own, as with "
            "keepdims=1 in a reduction"
        )
    if not kind.HasField("shape"):
        raise UnknownModelError(f"{file}: {value.name} has no shape; add it with onnx.shape_inference.infer_shapes")
    batch, *dimensions = kind.shape.dim
    if batch.HasField("dim_value"):
        raise UnknownModelError(
            f"{file}: {value.name} has a fixed batch dimension of {batch.dim_value}; export it with a dynamic "
            'one, such as dynamic_shapes={0: "batch"}'
        )
    for place, dimension in enumerate(dimensions, 1):
        if not dimension.HasField("dim_value"):
            places.setdefault(dimension.dim_param or f"{value.name}_{place}", {})[value.name] = place
    shape = (dimension.dim_value if dimension.HasField("dim_value") else -1 for dimension in dimensions)
    return TensorSpec(value.name, _DATATYPES[element], (-1, *shape))
