"""A user's own model: a module in a file, an ONNX file, a folder of Triton; and how each is refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from servers.models.modules import measure_size
from servers.models.registry import UnknownModelError, get_base, get_specification
from servers.models.samples import write_samples
from servers.models.weights import CheckpointWeights, RandomWeights, WeightsError, parse_weights, pin

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/models.md"


def example() -> str:
    """The complete file with a description that the docs show."""
    return DOCUMENT.read_text().split("```python\n")[2].partition("```")[0]


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a user's file, my_model.py: the imports of the docs' example, then the text. Returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "my_model.py"
        path.write_text(f"import torch\nfrom servers.models import Input, Output, Preprocessing, UserModel\n{text}\n")
        return str(path)

    return write


def test_the_example_of_the_docs_is_one_short_file_that_works(tmp_path: Path) -> None:
    path = tmp_path / "my_model.py"
    path.write_text(example())
    assert len(example().strip().splitlines()) <= 20
    specification = get_base(f"{path}:scorer")
    assert (specification.name, specification.label) == ("my_model_scorer", "my_model.py:scorer")
    assert specification.kinds == {"scores": "logits"}
    assert specification.id_counts == {"ids": 1000}
    assert specification.make_items is not None
    weights = pin(parse_weights(specification.default_weights), specification.find_pretrained)
    assert re.fullmatch("module file my_model.py, SHA-256 [0-9a-f]{64}", weights.label)
    items = specification.make_items(0, [3, 5])
    np.testing.assert_array_equal(items["mask"], [[1, 1, 1, 0, 0], [1] * 5])
    module = specification.load_module(weights)
    with torch.inference_mode():
        assert module(*(torch.from_numpy(array) for array in items.values())).shape == (2, 2)
    assert measure_size(specification) == (1000 * 32 + 32 * 2 + 2, 2 * 32 * 2)
    assert write_samples(specification, tmp_path / "samples", "16")
    path.write_text(example().replace("1000, 32", "1001, 32"))
    with pytest.raises(WeightsError, match="but the pin requires"):
        specification.load_module(weights)


def test_a_module_whose_path_depends_on_its_data_is_run_for_its_size(file: Callable[[str], str]) -> None:
    path = file(
        "class Halving(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x if x.sum().item() > 0 else x / 2)\n"
        "def halving():\n"
        "    return UserModel(Halving(4, 3, bias=False), [Input('x', 'FP32', ('batch', 4))], "
        "[Output('y', 'FP32', ('batch', 3))])\n"
    )
    assert measure_size(get_base(f"{path}:halving")) == (12, 24)


def test_the_file_is_executed_once_and_seeds_and_checkpoints_are_those_asked_for(
    file: Callable[[str], str], tmp_path: Path
) -> None:
    path = file(
        "with open(__file__ + '.log', 'a') as log:\n    log.write('executed ')\n"
        "def linear():\n"
        "    x, y = Input('x', 'FP32', ('batch', 3)), Output('y', 'FP32', ('batch', 2))\n"
        "    return UserModel(torch.nn.Linear(3, 2), [x], [y])\n"
        "def other():\n    return linear()"
    )
    specification = get_base(f"{path}:linear")
    states = [specification.load_module(RandomWeights(seed)).state_dict()["weight"] for seed in (1, 1, 2)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    get_base(f"{path}:other").load_module(RandomWeights(0))
    assert Path(f"{path}.log").read_text() == "executed "
    checkpoint = tmp_path / "w.pt"
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, checkpoint)
    assert specification.load_module(CheckpointWeights(checkpoint)).state_dict()["weight"].sum() == 6
    torch.save({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, checkpoint)
    with pytest.raises(
        WeightsError, match=r"not the weights of my_model.py:linear: it has another shape for 1 tensors"
    ):
        specification.load_module(CheckpointWeights(checkpoint))


def test_values_are_limits_only_where_they_end_with_an_embedding(file: Callable[[str], str]) -> None:
    path = file(
        "def f():\n    x = [Input(str(count), kind, ('batch', 1), values=(0, count), padding=None) for count, kind in"
        " ((5, 'INT64'), (6, 'INT64'), (7, 'FP32'))]\n"
        "    both = torch.nn.ModuleList([torch.nn.Embedding(5, 2), torch.nn.Embedding(7, 2)])\n"
        "    both.forward = lambda *x: torch.zeros(len(x[0]), 4)\n"
        "    return UserModel(both, x, [Output('y', 'FP32', ('batch', 4))])"
    )
    assert get_base(f"{path}:f").id_counts == {"5": 5}


def test_samples_that_the_user_supplies_are_sent_as_they_are(file: Callable[[str], str], tmp_path: Path) -> None:
    path = file(
        "def f():\n    return UserModel(torch.nn.Flatten(), [Input('x', 'FP32', ('batch', 2, 2))],\n"
        "        [Output('y', 'FP32', ('batch', 4))], samples={'x': torch.arange(12.).reshape(3, 2, 2)})"
    )
    specification = get_base(f"{path}:f")
    assert write_samples(specification, tmp_path / "samples")
    assert specification.make_items is not None
    assert specification.make_items(0, [1] * 4)["x"][3, 0, 0] == 0, "the first follows the last"
    np.testing.assert_array_equal(
        np.load(tmp_path / "samples/x.tensors.npy"), np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    )
    assert '"kind": "given"' in (tmp_path / "samples/samples.json").read_text()


def test_several_inputs_outputs_and_free_sizes(file: Callable[[str], str]) -> None:
    path = file(
        "class Two(torch.nn.Module):\n    def forward(self, a, b):\n        return a + 1, b.sum(1).sum(1) > 0\n"
        "def two():\n    a = Input('a', 'UINT8', ('batch', 'width'))\n"
        "    b = Input('b', 'INT32', ('batch', 'height', 'width'))\n"
        "    outputs = [Output('c', 'UINT8', ('batch', 'width')), Output('d', 'BOOL', ('batch',), 'labels')]\n"
        "    return UserModel(Two(), [a, b], outputs, {'width': (4, 9), 'height': (3, 3)})"
    )
    specification = get_base(f"{path}:two")
    assert [tensor.shape for tensor in specification.inputs] == [(-1, -1), (-1, -1, -1)]
    assert [(axis.name, dict(axis.places)) for axis in specification.axes] == [
        ("width", {"a": 1, "b": 2, "c": 1}),
        ("height", {"b": 1}),
    ]
    assert specification.padded_axis is None
    assert specification.kind_of("d") == "labels"
    specification.load_module(RandomWeights(0))


def test_a_users_model_of_images_takes_every_payload(file: Callable[[str], str], tmp_path: Path) -> None:
    path = file(
        "def f():\n    shape = ('batch', 3, 8, 8)\n"
        "    return UserModel(torch.nn.Flatten(), [Input('x', 'FP32', shape)], [Output('y', 'FP32', ('batch', 192))],\n"
        "        item='image', image=Preprocessing(8, (0.5,) * 3, (0.5,) * 3))"
    )
    assert write_samples(get_base(f"{path}:f"), tmp_path / "samples")
    assert np.load(tmp_path / "samples/x.uint8.npy").shape[1:] == (8, 8, 3)
    assert (tmp_path / "samples/jpeg/00.jpg").is_file()


X, Y = "Input('x', 'FP32', ('batch', 3))", "Output('y', 'FP32', ('batch', 3))"
VARIABLE = "Input('x', 'FP32', ('batch', 'n'){})"


def returning(expression: str) -> str:
    return f"def f():\n    return {expression}"


def model(module: str = "None", inputs: str = X, outputs: str = Y, more: str = "") -> str:
    """A file whose function returns this model."""
    return returning(f"UserModel({module}, [{inputs}], [{outputs}], {more})")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def g(): pass", r"my_model\.py: there is no function f; use one of: g"),
        ("f = 3", r"there is no function f"),
        ("import nothing_of_the_name", r"my_model\.py cannot be imported: ModuleNotFoundError: .* \(line 3\)"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("def f():\n    raise KeyError('a')", r"my_model\.py:f failed: KeyError: 'a' \(line 4\)"),
        ("def f(x): pass", "f needs the arguments x"),
        (returning("torch.nn.Identity()"), "no sample input from which to learn the inputs of Identity"),
        (model(inputs=""), "inputs must be a list of at least one Input"),
        (model(outputs=X), "outputs must be a list of at least one Output"),
        (model(inputs=f"{X}, {X}"), "two tensors have the same name"),
        (model(inputs=X.replace("FP32", "float32")), "x has the unknown datatype 'float32'"),
        (model(inputs=X.replace("batch", "n")), 'of x must begin with "batch"'),
        (model(inputs=X.replace("3)", "-1)")), "sizes from 0 up"),
        (model(outputs=f"{Y[:-1]}, 'scores')"), "unknown kind 'scores' of y; use one of: embedding"),
        (model(inputs=VARIABLE.format("")), "sizes must give the default and the largest size of n"),
        (model(outputs=Y.replace("3)", "'n')")), "no input has the dimension n of y"),
        (model(inputs=f"{X[:-1]}, padding=0)"), "padding needs one dimension of variable size"),
        (model(more="samples={}"), "samples have no x"),
        (model(more="samples={'x': [[1, 2]]}"), r"the samples of x are int64 \[1, 2\], not FP32"),
        ("import sys\nsys.exit('bye')", r"my_model\.py cannot be imported: SystemExit: bye \(line 4\)"),
        ("def f():\n    raise SystemExit(3)", "f failed: SystemExit: 3"),
        ("x = 3", "there is no function f; the file defines none"),
        (model(inputs=X.replace("('batch', 3)", "3")), "a field of its UserModel has the wrong type: 'int' object is"),
        (model(inputs=VARIABLE.format(""), more="{'n': 5}"), "wrong type: cannot unpack"),
        (model(more="samples=[1]"), "a field of its UserModel has the wrong type"),
        (model(inputs=X.replace("'x'", "''")), "a tensor has an empty name"),
        (model(more="max_batch_size=0"), "max_batch_size is 0; it must be at least 1"),
        (model(inputs=f"{X[:-1]}, values=(5, 5))"), "the second must be above the first"),
        (model(inputs=f"{X[:-1]}, values=(0, 300))".replace("FP32", "UINT8")), "UINT8, which cannot hold its values"),
        (model(inputs=VARIABLE.format(", padding=0.5").replace("FP32", "INT64"), more="{'n': (4, 8)}"), "its padding"),
        (model(more="image=Preprocessing(3, (0,) * 3, (1,) * 3)"), "takes one FP32 input of 3 × 3"),
    ],
)
def test_a_file_that_describes_no_model_is_refused(text: str, message: str, file: Callable[[str], str]) -> None:
    with pytest.raises(UnknownModelError, match=message) as caught:
        get_base(f"{file(text)}:f")
    assert "\n" not in str(caught.value)


def test_a_neighbour_with_the_name_of_an_installed_package_hides_nothing_and_is_named(
    file: Callable[[str], str], tmp_path: Path
) -> None:
    for name in ("numpy", "msgspec"):
        (tmp_path / f"{name}.py").write_text("THEIRS = 1")
    (tmp_path / "neighbour_of_mine.py").write_text("import numpy\nWIDTH = numpy.int64(3)")
    assert get_base(f"{file(f'from neighbour_of_mine import WIDTH{chr(10)}{model()}')}:f").inputs[0].shape == (-1, 3)
    path = tmp_path / "another.py"
    path.write_text("from neighbour_of_mine import WIDTH\nimport numpy as np, msgspec\nprint(np.THEIRS)\n")
    with pytest.raises(UnknownModelError) as caught:
        get_base(f"{path}:f")
    assert str(caught.value).endswith(
        f"(line 3); msgspec, numpy in {tmp_path} has the name of an installed package, which is imported: rename it"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (model("torch.nn.Linear(3, 2)"), r"y is float32 \[2, 2\]; .* float32 \[2, 3\]"),
        (model("torch.nn.Linear(4, 2)"), "fails on inputs of its description: RuntimeError"),
        (model("torch.nn.Identity()", outputs=f"{Y}, {Y.replace('y', 'z')}"), "1 tensors; described outputs: 2"),
        (model("torch.nn.Identity()", outputs=Y.replace("FP32", "FP64")), "is float32 .* it is float64"),
        (
            "class Mean(torch.nn.Module):\n    def forward(self, x):\n        return x.mean(1, True).expand(-1, 3)\n"
            + model("Mean()", VARIABLE.format(", padding=0"), more="{'n': (8, 8)}"),
            "padding changes the answer y",
        ),
    ],
)
def test_a_module_that_is_not_as_described_is_refused(text: str, message: str, file: Callable[[str], str]) -> None:
    with pytest.raises(UnknownModelError, match=message) as caught:
        get_base(f"{file(text)}:f")
    assert "\n" not in str(caught.value)


def test_a_description_without_a_module_is_refused_when_it_is_loaded(file: Callable[[str], str]) -> None:
    with pytest.raises(WeightsError, match="the module is a NoneType"):
        get_base(f"{file(model())}:f").load_module(RandomWeights(0))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such.py:f", r"no_such\.py: no such file in "),
        ("no_such.onnx", r"no_such\.onnx: no such file in "),
        ("x" * 300, "^x{200}: File name too long"),
        ("./no/such", "give FILE.py:FUNCTION, FILE.onnx, or a folder"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(reference: str, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        get_specification(reference)


def write_onnx(path: Path, shape: list[Any], element: int = TensorProto.FLOAT) -> None:
    """y = x · w for the last dimension, which is 3."""
    out = [*shape[:-1], 2] if shape else []
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, out)],
        [helper.make_tensor("w", TensorProto.FLOAT, [3, 2], [1.0] * 6)],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph), path)


def test_an_onnx_file_has_the_signature_and_the_axes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "My Product.onnx"
    write_onnx(path, ["n", "rows", 3])
    specification = get_base(str(path))
    assert (specification.name, specification.label, specification.file) == ("my_product", "My Product.onnx", path)
    assert (specification.inputs[0].shape, specification.outputs[0].shape) == ((-1, -1, 3), (-1, -1, 2))
    (axis,) = specification.axes
    assert (axis.name, dict(axis.places), axis.padded) == ("rows", {"x": 1, "y": 1}, False)
    weights = pin(parse_weights(specification.default_weights), specification.find_pretrained)
    assert weights.label.startswith("ONNX file My Product.onnx, SHA-256 ")
    assert measure_size(specification)[0] == 6
    with pytest.raises(WeightsError, match="torch does not execute; use --engine onnxruntime or tensorrt"):
        specification.load_module(weights)


@pytest.mark.parametrize(
    ("shape", "element", "message"),
    [
        ([1, 3], TensorProto.FLOAT, "x has a fixed batch dimension of 1"),
        ([], TensorProto.FLOAT, "x is a single value without a batch dimension"),
        (
            ["n", 3],
            TensorProto.BFLOAT16,
            "x is a tensor of BFLOAT16, which the protocol does not have; add a Cast",
        ),
    ],
)
def test_an_onnx_file_that_takes_no_batches_is_refused(
    shape: list[Any], element: int, message: str, tmp_path: Path
) -> None:
    write_onnx(tmp_path / "a.onnx", shape, element)
    with pytest.raises(UnknownModelError, match=message):
        get_base(str(tmp_path / "a.onnx"))
    (tmp_path / "b.onnx").write_text("no graph")
    with pytest.raises(UnknownModelError, match="is not an ONNX file that can be read"):
        get_base(str(tmp_path / "b.onnx"))


def tensors(side: str, name: str, datatype: str, dims: str) -> str:
    return f'{side} [{{ name: "{name}" data_type: TYPE_{datatype} dims: {dims} }}]\n'


CONFIG = "max_batch_size: 8\n" + tensors("input", "x", "FP32", "[4, 3]") + tensors("output", "y", "FP32", "[-1, 2]")


def test_a_triton_folder_has_the_names_and_sizes_of_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "Product"
    write_onnx(folder / "1/model.onnx", ["n", "rows", 3])
    write_onnx(folder / "12/model.onnx", ["n", "rows", 3])
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{CONFIG}')
    specification = get_base(str(folder))
    assert (specification.name, specification.label, specification.max_batch_size) == ("Product", "Product", 8)
    assert specification.file == folder / "12/model.onnx"
    assert (specification.inputs[0].shape, specification.outputs[0].shape) == ((-1, 4, 3), (-1, -1, 2))
    assert specification.axes == (), "no input has a free size"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("what?", "config.pbtxt cannot be read"),
        (CONFIG.replace("8", "0"), "allows no batches; set max_batch_size"),
        (
            CONFIG.replace("FP32 dims: [4", "INT32 dims: [4"),
            r"has x as INT32 \[4, 3\]; the ONNX file has FP32 \[-1, 3\]",
        ),
        (CONFIG.replace('"x"', '"z"'), "the ONNX file has no such tensor"),
        (CONFIG.replace("[4, 3]", "[4, 5]"), "the ONNX file has FP32"),
        (CONFIG.replace("[4, 3]", "[12] reshape { shape: [4, 3] }"), "reshapes x, which only Triton does"),
        (CONFIG + 'default_model_filename: "model.plan"', "only a model with VERSION/model.onnx can be served"),
    ],
)
def test_a_triton_folder_that_cannot_be_served_is_refused(config: str, message: str, tmp_path: Path) -> None:
    write_onnx(tmp_path / "m/1/model.onnx", ["n", "rows", 3])
    (tmp_path / "m/config.pbtxt").write_text(config)
    with pytest.raises(UnknownModelError, match=message):
        get_base(str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("datatype", "fields", "samples"),
    [
        ("FP16", "", "np.full((2, 3), 1e5)"),
        ("FP32", "", "np.full((2, 3), 1e39)"),
        ("INT8", "", "np.full((2, 3), 200)"),
        ("INT32", "", "np.full((2, 3), 2**31)"),
        ("UINT8", "", "np.full((2, 3), 256, np.uint16)"),
        ("FP16", ", values=(0, 100000)", "None"),
        ("INT8", ", values=(0, 300)", "None"),
    ],
)
def test_values_of_a_users_module_that_its_datatype_cannot_hold(
    tmp_path: Path, datatype: str, fields: str, samples: str
) -> None:
    (tmp_path / "m.py").write_text(
        "import numpy as np, torch\nfrom servers.models import Input, Output, UserModel\n"
        f"def m():\n    samples = {samples}\n"
        f"    return UserModel(torch.nn.Identity(), [Input('x', '{datatype}', ('batch', 3){fields})], "
        f"[Output('y', '{datatype}', ('batch', 3))], samples=None if samples is None else {{'x': samples}})\n"
    )
    with pytest.raises(UnknownModelError, match=f"cannot hold|that {datatype} cannot hold"):
        get_base(f"{tmp_path / 'm.py'}:m")


@pytest.mark.parametrize("beside", ["link", "file"])
def test_a_file_behind_a_link_imports_what_lies_beside_either(tmp_path: Path, beside: str) -> None:
    folders = {name: tmp_path / name for name in ("link", "file")}
    for folder in folders.values():
        folder.mkdir()
    (folders["file"] / "blob").write_text(
        "import torch\nfrom neighbour_BESIDE import WIDTH\n".replace("BESIDE", beside)
        + "def build(): return torch.nn.Linear(WIDTH, 2)\nsample = torch.ones(1, WIDTH)\n"
    )
    (folders["link"] / "mine.py").symlink_to("../file/blob")
    (folders[beside] / f"neighbour_{beside}.py").write_text("WIDTH = 5\n")
    specification = get_specification(f"{folders['link']}/mine.py:build")
    assert (specification.inputs[0].item_shape, specification.name) == ((5,), "mine_build")
    assert specification.load_module(parse_weights(specification.default_weights)) is not None
