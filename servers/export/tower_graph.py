"""An open_clip vision tower as an ONNX graph of ONNX Runtime's fused operators.

torch's export has an attention of twenty operators per block, with shape arithmetic between them, and ONNX Runtime
does not fuse it. Here a block is seven nodes, no node computes a shape, and so no node is left on the CPU when the rest
is on a GPU. The operators of the domain com.microsoft are in every build of ONNX Runtime, Triton's backend included;
TensorRT and others do not have them.

The weights are rearranged only where that is exact in FP32: see
`servers.engines.torch.vit_tower` for the algebra of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from servers.engines.torch.vit_tower import BYTE_CENTRE, BYTE_SCALE, TowerShape, fold_bytes, read_shape
from servers.export.manifest import FUSED, OPSETS
from servers.models.specification import ModelSpecification

if TYPE_CHECKING:
    import onnx
    import torch

CONTRIB_DOMAIN = "com.microsoft"
_CONTRIB_VERSION = 1
_IR_VERSION = 9


def tower_graph(specification: ModelSpecification, visual: torch.nn.Module, precision: str) -> onnx.ModelProto:
    """`visual` (FP32, on the CPU, taking normalised pixels) with weights in `precision`, fp32 or fp16. Input and output
    are the specification's: FP32 [n, 3, s, s] or UINT8 [n, s, s, 3] in, FP32 [n, width] out. Raises
    `UnsupportedTowerError` for a tower that computes something else, see `read_shape`."""
    shape = read_shape(visual)
    state = {name: tensor.detach().float().cpu() for name, tensor in visual.state_dict().items()}
    graph = _TowerGraph(shape, state, np.float16 if precision == "fp16" else np.float32)
    class_token = graph.blocks(graph.tokens(specification))
    return graph.model(specification, graph.product(class_token, "proj", state["proj"], "projected"))


class _TowerGraph:
    """Nodes and weights in the order in which they are added; a tensor has the name of the node that makes it."""

    def __init__(self, shape: TowerShape, state: dict[str, torch.Tensor], dtype: type[np.floating[Any]]) -> None:
        self._shape, self._state, self._dtype = shape, state, dtype
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._known: set[str] = set()

    def weight(
        self, name: str, values: torch.Tensor | npt.ArrayLike | None = None, dtype: npt.DTypeLike | None = None
    ) -> str:
        """Add a constant once; `values` default to the tower's parameter `name`, `dtype` to the graph's precision."""
        from onnx import numpy_helper

        if name not in self._known:
            self._known.add(name)
            array = np.asarray(self._state[name] if values is None else values).astype(dtype or self._dtype)
            self._initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def integers(self, name: str, values: Sequence[int]) -> str:
        """Shapes, axes and pads."""
        return self.weight(name, np.array(values, np.int64), np.int64)

    def add(
        self, operator: str, inputs: Sequence[str], output: str, *more: str, domain: str = "", **attributes: Any
    ) -> str:
        """Append a node, of ONNX's standard operators unless `domain` is given; returns `output`, its first output."""
        from onnx import helper

        name = f"{output}/{operator}"
        self._nodes.append(helper.make_node(operator, inputs, [output, *more], name=name, domain=domain, **attributes))
        return output

    def fused(self, operator: str, inputs: Sequence[str], output: str, *more: str, **attributes: Any) -> str:
        """Append a node of ONNX Runtime's operators."""
        return self.add(operator, inputs, output, *more, domain=CONTRIB_DOMAIN, **attributes)

    def product(self, tensor: str, name: str, values: torch.Tensor, output: str) -> str:
        """`tensor` times a weight [in, out], without a bias."""
        return self.add("MatMul", [tensor, self.weight(name, values)], output)

    def norm(self, name: str) -> list[str]:
        """Gain and bias of a LayerNorm."""
        return [self.weight(f"{name}.weight"), self.weight(f"{name}.bias")]

    def tokens(self, specification: ModelSpecification) -> str:
        """Pixels → tokens [n, tokens, width] after the first LayerNorm, the class token first."""
        from onnx import TensorProto

        shape, state = self._shape, self._state
        source, convolution = specification.inputs[0].name, state["conv1.weight"]
        grid, side, patch = shape.grid, shape.patch_size, [-1, shape.grid**2, shape.patch_elements]
        positions = state["positional_embedding"].clone()
        positions[0] += state["class_embedding"]
        if specification.payload == "uint8":
            mean, std = specification.preprocessing.mean, specification.preprocessing.std
            convolution, bias = fold_bytes(convolution, mean, std)
            positions[1:] += bias
            # A row of a patch is one run of 3·side bytes: whole runs change places, and only bytes move.
            rows = self.add("Reshape", [source, self.integers("rows_of_patches", [-1, side, grid, 3 * side])], "rows")
            cut = self.add("Transpose", [rows], "cut", perm=[0, 2, 1, 3])
            raw = self.add("Reshape", [cut, self.integers("patch_shape", patch)], "byte_patches")
            scale, centre = self.weight("byte_scale", 1 / BYTE_SCALE), self.weight("byte_centre", BYTE_CENTRE, np.uint8)
            patches = self.add("DequantizeLinear", [raw, scale, centre], "patches")  # (u - centre)·scale
            order = (2, 3, 1, 0)
        else:
            if self._dtype == np.float16:
                source = self.add("Cast", [source], "pixels_fp16", to=TensorProto.FLOAT16)
            rows_shape = self.integers("rows_of_patches", [-1, 3, grid, side, grid, side])
            rows = self.add("Reshape", [source, rows_shape], "rows")
            cut = self.add("Transpose", [rows], "cut", perm=[0, 2, 4, 1, 3, 5])
            patches = self.add("Reshape", [cut, self.integers("patch_shape", patch)], "patches")
            order = (1, 2, 3, 0)
        weight = convolution.permute(*order).reshape(-1, shape.width)
        embedded = self.product(patches, "patch_weight", weight, "embedded")
        # The class token enters as a row of zeros, to which its position is added.
        with_class = self.add("Pad", [embedded, self.integers("row_before", [0, 1, 0, 0, 0, 0])], "with_class")
        placed = self.add("Add", [with_class, self.weight("positions", positions)], "placed")
        return self.add("LayerNormalization", [placed, *self.norm("ln_pre")], "tokens_0", epsilon=shape.epsilon)

    def blocks(self, tokens: str) -> str:
        """The residual blocks → the class token after the last LayerNorm, [n, 1, width]."""
        shape, state = self._shape, self._state
        name = "transformer.resblocks.{}.{}".format
        normal = self.add(
            "LayerNormalization", [tokens, *self.norm(name(0, "ln_1"))], "normal_0", epsilon=shape.epsilon
        )

        def linear(tensor: str, parameter: str, output: str) -> str:
            return self.product(tensor, parameter, state[parameter].t(), output)  # the next node adds the bias

        for index in range(shape.layers):
            attention, mlp = name(index, "attn."), name(index, "mlp.")
            qkv = self.weight(f"{attention}in_proj_weight", state[f"{attention}in_proj_weight"].t())
            inputs = [normal, qkv, self.weight(f"{attention}in_proj_bias")]
            mixed = self.fused("Attention", inputs, f"mixed_{index}", num_heads=shape.heads)
            last = index == shape.layers - 1
            if last:  # no later node reads the other tokens
                mixed, tokens = self.class_token(mixed), self.class_token(tokens)
            out = linear(mixed, f"{attention}out_proj.weight", f"attended_{index}")
            bias, label = f"{attention}out_proj.bias", f"{index}_attention"
            normal, tokens = self.add_and_normalise(out, tokens, bias, name(index, "ln_2"), label)
            hidden = linear(normal, f"{mlp}c_fc.weight", f"hidden_{index}")
            active = self.activation(hidden, self.weight(f"{mlp}c_fc.bias"), index)
            out = linear(active, f"{mlp}c_proj.weight", f"projected_{index}")
            following = "ln_post" if last else name(index + 1, "ln_1")
            normal, tokens = self.add_and_normalise(out, tokens, f"{mlp}c_proj.bias", following, f"{index}_mlp")
        return normal

    def class_token(self, tensor: str) -> str:
        """The first token of each image."""
        bounds = [
            self.integers(f"class_token_{word}", [value]) for word, value in (("from", 0), ("to", 1), ("axis", 1))
        ]
        return self.add("Slice", [tensor, *bounds], f"{tensor}_class")

    def activation(self, tensor: str, bias: str, index: int) -> str:
        """GELU or QuickGELU of tensor + bias."""
        if not self._shape.quick_gelu:
            return self.fused("BiasGelu", [tensor, bias], f"active_{index}")
        biased = self.add("Add", [tensor, bias], f"biased_{index}")
        return self.fused("QuickGelu", [biased], f"active_{index}", alpha=1.702)

    def add_and_normalise(self, tensor: str, tokens: str, bias: str, norm: str, label: str) -> tuple[str, str]:
        """LayerNorm of tokens + tensor + bias, and that sum itself, in one node."""
        total = f"tokens_{label}"
        inputs = [tensor, tokens, *self.norm(norm), self.weight(bias)]
        normal = self.fused(
            "SkipLayerNormalization", inputs, f"normal_{label}", "", "", total, epsilon=self._shape.epsilon
        )
        return normal, total

    def model(self, specification: ModelSpecification, embedding: str) -> onnx.ModelProto:
        """The whole graph, ending in `embedding`, in the types of the specification."""
        import onnx
        from onnx import TensorProto, helper

        (source,), (target,) = specification.inputs, specification.outputs
        if self._dtype == np.float16:
            embedding = self.add("Cast", [embedding], "embedding_fp32", to=TensorProto.FLOAT)
        self.add("Reshape", [embedding, self.integers("flat", [-1, *target.item_shape])], target.name)
        datatype = TensorProto.UINT8 if source.datatype == "UINT8" else TensorProto.FLOAT
        graph = helper.make_graph(
            self._nodes,
            specification.name,
            [helper.make_tensor_value_info(source.name, datatype, ["batch", *source.item_shape])],
            [helper.make_tensor_value_info(target.name, TensorProto.FLOAT, ["batch", *target.item_shape])],
            self._initializers,
        )
        imports = [helper.make_opsetid("", OPSETS[FUSED]), helper.make_opsetid(CONTRIB_DOMAIN, _CONTRIB_VERSION)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=_IR_VERSION, producer_name="abserve")
        onnx.checker.check_model(model)
        return model
