"""An open_clip vision tower as an ONNX graph of ONNX Runtime's own fused operators.

What torch exports has an attention of twenty operators a block, with shape arithmetic between them, and ONNX Runtime
fuses none of it. Here a block is seven nodes, no node computes a shape, and so no node is left on the CPU when the rest
is on a GPU. The operators of the domain com.microsoft are in every build of ONNX Runtime, Triton's backend included;
TensorRT and others do not know them.

The weights are rearranged only where that is exact in FP32: `servers.engines.vit.tower` has the algebra of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from servers.engines.vit.tower import BYTE_CENTRE, BYTE_SCALE, TowerShape, fold_bytes, read_shape
from servers.export.file_form import FUSED, OPSETS
from servers.models.specification import ModelSpecification

if TYPE_CHECKING:
    import onnx
    import torch

CONTRIB_DOMAIN = "com.microsoft"
_CONTRIB_VERSION = 1
_IR_VERSION = 9


def tower_graph(specification: ModelSpecification, visual: torch.nn.Module, precision: str) -> onnx.ModelProto:
    """`visual` (FP32, on the CPU, taking normalised pixels) with weights in `precision`, fp32 or fp16.

    Input and output are the specification's: FP32 [n, 3, s, s] or UINT8 [n, s, s, 3] in, FP32 [n, width] out.
    Raises `UnsupportedTowerError` for a tower that computes something else, see `read_shape`.
    """
    shape = read_shape(visual)
    state = {name: tensor.detach().float().cpu() for name, tensor in visual.state_dict().items()}
    graph = _Graph(np.float16 if precision == "fp16" else np.float32)
    tokens = _embedded(graph, specification, shape, state)
    class_token = _blocks(graph, shape, state, tokens)
    embedding = graph.add("MatMul", [class_token, graph.weight("proj", state["proj"])], "projected")
    return graph.model(specification, embedding)


class _Graph:
    """Nodes and weights in the order in which they are added; tensors are called by the names of what makes them."""

    def __init__(self, dtype: type[np.floating[Any]]) -> None:
        self.dtype = dtype
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._known: set[str] = set()

    def weight(self, name: str, values: torch.Tensor | npt.ArrayLike, dtype: npt.DTypeLike = None) -> str:
        """Constants by a name, once; in the graph's own precision unless `dtype` says otherwise."""
        from onnx import numpy_helper

        if name not in self._known:
            self._known.add(name)
            array = np.ascontiguousarray(np.asarray(values).astype(dtype or self.dtype))
            self._initializers.append(numpy_helper.from_array(array, name))
        return name

    def integers(self, name: str, values: Sequence[int]) -> str:
        """Shapes, axes and pads."""
        return self.weight(name, np.array(values, np.int64), np.int64)

    def add(self, operator: str, inputs: Sequence[str], output: str, *more: str, **attributes: Any) -> str:
        """Append a node of ONNX's own operators; returns `output`, the first of its outputs."""
        return self._append("", operator, inputs, [output, *more], attributes)

    def fused(self, operator: str, inputs: Sequence[str], output: str, *more: str, **attributes: Any) -> str:
        """Append a node of ONNX Runtime's."""
        return self._append(CONTRIB_DOMAIN, operator, inputs, [output, *more], attributes)

    def _append(
        self, domain: str, operator: str, inputs: Sequence[str], outputs: list[str], attributes: dict[str, Any]
    ) -> str:
        from onnx import helper

        self._nodes.append(
            helper.make_node(operator, inputs, outputs, name=f"{outputs[0]}/{operator}", domain=domain, **attributes)
        )
        return outputs[0]

    def model(self, specification: ModelSpecification, embedding: str) -> onnx.ModelProto:
        """All of it, ending in `embedding`, in the types of the specification."""
        import onnx
        from onnx import TensorProto, helper

        (source,), (target,) = specification.inputs, specification.outputs
        if self.dtype == np.float16:
            embedding = self.add("Cast", [embedding], "embedding_fp32", to=TensorProto.FLOAT)
        self.add("Reshape", [embedding, self.integers("flat", [-1, *target.item_shape])], target.name)
        given = TensorProto.UINT8 if source.datatype == "UINT8" else TensorProto.FLOAT
        graph = helper.make_graph(
            self._nodes,
            specification.name,
            [helper.make_tensor_value_info(source.name, given, ["batch", *source.item_shape])],
            [helper.make_tensor_value_info(target.name, TensorProto.FLOAT, ["batch", *target.item_shape])],
            self._initializers,
        )
        imports = [helper.make_opsetid("", OPSETS[FUSED]), helper.make_opsetid(CONTRIB_DOMAIN, _CONTRIB_VERSION)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=_IR_VERSION, producer_name="abserve")
        onnx.checker.check_model(model)
        return model


def _embedded(
    graph: _Graph, specification: ModelSpecification, shape: TowerShape, state: dict[str, torch.Tensor]
) -> str:
    """Pixels → tokens [n, tokens, width] after the first LayerNorm, the class token first."""
    from onnx import TensorProto

    source, convolution = specification.inputs[0].name, state["conv1.weight"]
    grid, side, patch = shape.grid, shape.patch_size, [-1, shape.grid**2, shape.patch_elements]
    positions = state["positional_embedding"].clone()
    positions[0] += state["class_embedding"]
    if specification.payload == "uint8":
        convolution, bias = fold_bytes(convolution, specification.preprocessing.mean, specification.preprocessing.std)
        positions[1:] += bias
        # A row of a patch is one run of 3·side bytes: whole runs change places, and only bytes move.
        rows = graph.add("Reshape", [source, graph.integers("rows_of_patches", [-1, side, grid, 3 * side])], "rows")
        cut = graph.add("Transpose", [rows], "cut", perm=[0, 2, 1, 3])
        raw = graph.add("Reshape", [cut, graph.integers("patch_shape", patch)], "byte_patches")
        scale, centre = graph.weight("byte_scale", 1 / BYTE_SCALE), graph.weight("byte_centre", BYTE_CENTRE, np.uint8)
        patches = graph.add("DequantizeLinear", [raw, scale, centre], "patches")  # (u - centre)·scale
        order = (2, 3, 1, 0)
    else:
        pixels = source
        if graph.dtype == np.float16:
            pixels = graph.add("Cast", [source], "pixels_fp16", to=TensorProto.FLOAT16)
        rows = graph.add(
            "Reshape", [pixels, graph.integers("rows_of_patches", [-1, 3, grid, side, grid, side])], "rows"
        )
        cut = graph.add("Transpose", [rows], "cut", perm=[0, 2, 4, 1, 3, 5])
        patches = graph.add("Reshape", [cut, graph.integers("patch_shape", patch)], "patches")
        order = (1, 2, 3, 0)
    weight = convolution.permute(*order).reshape(-1, shape.width)
    embedded = graph.add("MatMul", [patches, graph.weight("patch_weight", weight)], "embedded")
    # The class token enters as a row of zeros that its position makes what it is.
    with_class = graph.add("Pad", [embedded, graph.integers("row_before", [0, 1, 0, 0, 0, 0])], "with_class")
    placed = graph.add("Add", [with_class, graph.weight("positions", positions)], "placed")
    return graph.add("LayerNormalization", [placed, *_norm(graph, state, "ln_pre")], "tokens_0", epsilon=shape.epsilon)


def _blocks(graph: _Graph, shape: TowerShape, state: dict[str, torch.Tensor], tokens: str) -> str:
    """The residual blocks → the class token after the last LayerNorm, [n, 1, width]."""
    name = "transformer.resblocks.{}.{}".format
    normal = graph.add(
        "LayerNormalization", [tokens, *_norm(graph, state, name(0, "ln_1"))], "normal_0", epsilon=shape.epsilon
    )
    for index in range(shape.layers):
        attention, mlp = name(index, "attn."), name(index, "mlp.")
        qkv = graph.weight(f"{attention}in_proj_weight", state[f"{attention}in_proj_weight"].t())
        qkv_bias = graph.weight(f"{attention}in_proj_bias", state[f"{attention}in_proj_bias"])
        mixed = graph.fused("Attention", [normal, qkv, qkv_bias], f"mixed_{index}", num_heads=shape.heads)
        last = index == shape.layers - 1
        if last:  # nobody reads the other tokens any more
            mixed, tokens = (_class_token(graph, tensor) for tensor in (mixed, tokens))
        out = _product(graph, state, f"{attention}out_proj.weight", mixed, f"attended_{index}")
        normal, tokens = _add_and_normalise(
            graph, shape, state, f"{attention}out_proj.bias", name(index, "ln_2"), out, tokens, f"{index}_attention"
        )
        hidden = _product(graph, state, f"{mlp}c_fc.weight", normal, f"hidden_{index}")
        active = _activation(graph, shape, hidden, graph.weight(f"{mlp}c_fc.bias", state[f"{mlp}c_fc.bias"]), index)
        out = _product(graph, state, f"{mlp}c_proj.weight", active, f"projected_{index}")
        following = "ln_post" if last else name(index + 1, "ln_1")
        normal, tokens = _add_and_normalise(
            graph, shape, state, f"{mlp}c_proj.bias", following, out, tokens, f"{index}_mlp"
        )
    return normal


def _class_token(graph: _Graph, tensor: str) -> str:
    bounds = [graph.integers(f"class_token_{word}", [value]) for word, value in (("from", 0), ("to", 1), ("axis", 1))]
    return graph.add("Slice", [tensor, *bounds], f"{tensor}_class")


def _product(graph: _Graph, state: dict[str, torch.Tensor], name: str, tensor: str, output: str) -> str:
    """Without its bias, which the next node adds."""
    return graph.add("MatMul", [tensor, graph.weight(name, state[name].t())], output)


def _activation(graph: _Graph, shape: TowerShape, tensor: str, bias: str, index: int) -> str:
    if not shape.quick_gelu:
        return graph.fused("BiasGelu", [tensor, bias], f"active_{index}")
    biased = graph.add("Add", [tensor, bias], f"biased_{index}")
    return graph.fused("QuickGelu", [biased], f"active_{index}", alpha=1.702)


def _add_and_normalise(
    graph: _Graph,
    shape: TowerShape,
    state: dict[str, torch.Tensor],
    bias: str,
    norm: str,
    tensor: str,
    tokens: str,
    label: str,
) -> tuple[str, str]:
    """LayerNorm of tokens + tensor + bias, and that sum itself, in one node."""
    total = f"tokens_{label}"
    inputs = [tensor, tokens, *_norm(graph, state, norm), graph.weight(bias, state[bias])]
    normal = graph.fused("SkipLayerNormalization", inputs, f"normal_{label}", "", "", total, epsilon=shape.epsilon)
    return normal, total


def _norm(graph: _Graph, state: dict[str, torch.Tensor], name: str) -> list[str]:
    return [graph.weight(f"{name}.{part}", state[f"{name}.{part}"]) for part in ("weight", "bias")]
