"""FILE.py:FUNCTION that returns a plain `torch.nn.Module`: the description follows from a sample; errors say what to
write."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.models.items import valid_items
from servers.models.modules import measure_size
from servers.models.registry import UnknownModelError, get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights

HEAD = "import torch\nfrom torch import nn\n"
CNN = """
def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5))

sample = torch.randn(1, 3, 16, 16)
"""
TEXT = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 8), nn.Embedding(40, 8)

    def forward(self, ids, attention_mask):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        weights = attention_mask.unsqueeze(2).to(x.dtype)
        return {"tokens": x * weights, "mean": (x * weights).sum(1) / weights.sum(1)}

def build():
    return Encoder()

def sample():
    return {"attention_mask": torch.ones(2, 12, dtype=torch.long), "ids": torch.randint(1, 50, (2, 12))}
"""
TWO = """
from typing import NamedTuple

class Answer(NamedTuple):
    picture: torch.Tensor
    score: torch.Tensor
    label: torch.Tensor
    loss: torch.Tensor | None = None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up, self.kind = nn.Conv2d(1, 4, 2, 2), nn.ConvTranspose2d(4, 1, 2, 2), nn.Embedding(7, 4)

    def forward(self, picture, kind):
        hidden = self.down(picture) + self.kind(kind)[:, :, None, None]
        score = hidden.mean((2, 3))
        return Answer(self.up(hidden), score, score.argmax(1))

def build():
    return Net()

def sample():
    return torch.rand(3, 1, 8, 8), torch.tensor([0, 3, 6])
"""


def specification(folder: Path, source: str, reference: str = "m.py:build") -> ModelSpecification:
    (folder / "m.py").write_text(HEAD + textwrap.dedent(source))
    return get_specification(f"{folder}/{reference}")


def tensors(spec: ModelSpecification) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.datatype, tensor.shape) for tensor in (*spec.inputs, *spec.outputs)]


def answers(spec: ModelSpecification, lengths: list[int]) -> list[np.ndarray]:
    items = valid_items(spec, 0, lengths)
    with torch.inference_mode():
        found = spec.load_module(RandomWeights(0))(*(torch.from_numpy(items[tensor.name]) for tensor in spec.inputs))
    return [answer.numpy() for answer in found]


def test_a_module_in_training_mode_is_served_in_eval_mode(tmp_path: Path) -> None:
    spec = specification(tmp_path, CNN)
    assert tensors(spec) == [("input", "FP32", (-1, 3, 16, 16)), ("output", "FP32", (-1, 4))]
    assert spec.item == "image"
    assert answers(spec, [1, 1])[0].shape == (2, 4)


def test_the_first_example_of_the_docs_works(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    (tmp_path / "net.py").write_text(text.split("```python\n")[1].partition("```")[0])
    spec = get_specification(f"{tmp_path}/net.py:build")
    assert tensors(spec) == [("input", "FP32", (-1, 3, 224, 224)), ("output", "FP32", (-1, 8))]


def test_a_table_of_doubles_is_sent_as_fp32_and_a_scalar_per_row_is_an_output(tmp_path: Path) -> None:
    source = """
    import numpy
    sample = numpy.random.rand(5, 6)
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        def forward(self, features):
            return self.layers(features).squeeze(-1)
    """
    spec = specification(tmp_path, source, "m.py:MLP")
    assert tensors(spec) == [("features", "FP32", (-1, 6)), ("output", "FP32", (-1,))]
    assert spec.axes == ()


def test_a_text_encoder_has_an_axis_padding_and_ids_within_its_embedding(tmp_path: Path) -> None:
    spec = specification(tmp_path, TEXT)
    assert [tensor.name for tensor in spec.inputs] == ["ids", "attention_mask"]
    (axis,) = spec.axes
    assert (axis.default, axis.largest) == (12, 40)
    assert dict(axis.padding) == {"ids": 0, "attention_mask": 0}
    assert dict(axis.places) == {"ids": 1, "attention_mask": 1, "tokens": 1}
    assert dict(spec.id_counts) == {"ids": 50}
    assert [answer.shape for answer in answers(spec, [5, 9])] == [(2, 9, 8), (2, 8)]


def test_an_encoder_without_a_mask_is_not_padded(tmp_path: Path) -> None:
    spec = specification(tmp_path, TEXT.replace("attention_mask.unsqueeze(2)", "(attention_mask * 0 + 1).unsqueeze(2)"))
    assert not spec.axes[0].padded


def test_two_inputs_and_three_outputs_of_a_named_tuple(tmp_path: Path) -> None:
    spec = specification(tmp_path, TWO)
    assert tensors(spec) == [
        ("picture", "FP32", (-1, 1, 8, 8)), ("kind", "INT64", (-1,)),
        ("picture_out", "FP32", (-1, 1, 8, 8)), ("score", "FP32", (-1, 4)), ("label", "INT64", (-1,)),
    ]  # fmt: skip
    assert spec.kind_of("label") == "labels"
    assert [answer.shape for answer in answers(spec, [1, 1])] == [(2, 1, 8, 8), (2, 4), (2,)]


def test_a_file_of_arrays_is_the_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", input=np.zeros((2, 3, 20, 20), np.float32))
    spec = specification(tmp_path, CNN, f"m.py:build:{tmp_path}/rows.npz")
    assert spec.inputs[0].shape == (-1, 3, 20, 20)
    assert spec.label == "m.py:build:rows.npz"
    assert get_specification(spec.reference).definition_sha256 == spec.definition_sha256  # as in another process


def test_torch_can_export_it(tmp_path: Path) -> None:
    """It binds every input to a parameter, though the module is called by names."""
    spec = specification(tmp_path, TWO)
    module, batch = spec.load_module(RandomWeights(0)), torch.export.Dim("batch", min=1, max=8)
    items = valid_items(spec, 0, [1, 1])
    inputs = tuple(torch.from_numpy(items[tensor.name]) for tensor in spec.inputs)
    exported = torch.export.export(module, inputs, dynamic_shapes=({0: batch}, {0: batch}))
    assert len(exported.module()(*inputs)) == 3


def test_other_parameters_are_another_definition(tmp_path: Path) -> None:
    """A function may load a file that changes while the Python file does not."""
    source = CNN.replace("return nn", "torch.manual_seed(len(__import__('os').listdir('/SEED'))); return nn")
    hashes = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (tmp_path / f"weights {seed}").touch()
        hashes.append(specification(folder, source.replace("/SEED", str(tmp_path))).definition_sha256)
    assert hashes[0] != hashes[1]


FORWARD = """
class Net(nn.Module):
    def forward(self, x, scale=None):
        return {returned}

def build():
    return Net()

sample = {sample}
"""


@pytest.mark.parametrize(
    ("returned", "sample", "words"),
    [
        ("x.mean()", "torch.randn(2, 4)", "does not follow the batch"),
        ("x - x.mean(0)", "torch.randn(2, 4)", "changes with the other items"),
        ("nn.functional.dropout(x)", "torch.randn(2, 4)", "training=self.training"),
        ("x.view(1, 4)", "torch.randn(1, 4)", "fails on 2"),
        ("len(x)", "torch.randn(2, 4)", "of type int"),
        ("x", "'text'", "of type str"),
        ("x", "{'y': torch.randn(2, 4)}", "forward does not take; it takes x, scale"),
        ("x", "[[1.0, 2.0]]", "of type list"),
        ("x", "(torch.randn(2, 4),) * 3", "forward takes 2: x, scale"),
        ("x + scale", "(torch.randn(2, 4), torch.randn(3, 4))", "different numbers of items"),
        ("x @ x", "torch.randn(2, 4)", "fails on its sample"),
        ("x.to('cuda')", "torch.randn(2, 4)", "use the device of its inputs"),
    ],
)
def test_a_module_that_cannot_be_served_says_why(tmp_path: Path, returned: str, sample: str, words: str) -> None:
    if "cuda" in returned and torch.cuda.is_available():
        pytest.skip("the module runs here")
    with pytest.raises(UnknownModelError) as caught:
        specification(tmp_path, FORWARD.format(returned=returned, sample=sample))
    assert words in str(caught.value)


EMPTY = """
class Boxes(nn.Module):
    def forward(self, x, history):
        return {"boxes": x.new_zeros(len(x), 0, 4), "scores": x + history.sum()}

def build():
    return Boxes()

def sample():
    return {"x": torch.rand(2, 1), "history": torch.zeros(2, 1, 0, dtype=torch.HISTORY)}
"""


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32", "bool"])
def test_inputs_and_outputs_may_be_empty(tmp_path: Path, dtype: str) -> None:
    spec = specification(tmp_path, EMPTY.replace("HISTORY", dtype))
    assert {tensor.name: tensor.shape for tensor in (*spec.inputs, *spec.outputs)} == {
        "x": (-1, 1), "history": (-1, 1, 0), "boxes": (-1, 0, 4), "scores": (-1, 1),
    }  # fmt: skip
    assert valid_items(spec, 0, [1, 1])["history"].shape == (2, 1, 0)
    engine = build_engine(spec, RandomWeights(0), EngineSettings("torch", device="cpu", threads=1))
    engine.load()
    assert engine.infer(valid_items(spec, 0, [1] * 3))["boxes"].shape == (3, 0, 4)
    engine.close()


def test_without_a_sample_the_line_to_add_is_given_and_works(tmp_path: Path) -> None:
    source = TEXT[: TEXT.index("def sample")]
    with pytest.raises(UnknownModelError, match="no sample input") as caught:
        specification(tmp_path, source)
    line = str(caught.value).rpartition("first: ")[2]
    folder = tmp_path / "again"
    folder.mkdir()
    spec = specification(folder, f"{source}\n{line.replace('1000', '50')}\n")
    assert [tensor.name for tensor in spec.inputs] == ["ids", "attention_mask"]


@pytest.mark.parametrize(
    ("reference", "words"),
    [("m.py:make", "needs the arguments width"), ("m.py:bild", "did you mean build"), ("n.py:build", "no such file")],
)
def test_a_wrong_reference_says_what_to_write(tmp_path: Path, reference: str, words: str) -> None:
    with pytest.raises(UnknownModelError, match=words):
        specification(tmp_path, CNN + "\ndef make(width):\n    return nn.Linear(width, 1)\n", reference)


LOADED = """
def linear():
    return nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)).eval()

def exported():
    batch = ({0: torch.export.Dim("batch")},)
    return torch.export.export(linear(), (torch.ones(2, 4),), dynamic_shapes=batch).module()

def scripted():
    return torch.jit.script(linear())

def traced():
    return torch.jit.trace(linear(), torch.ones(2, 4))

def frozen():
    return torch.jit.freeze(scripted())

def inside():
    return nn.Sequential(exported())

sample = torch.rand(2, 4)
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", ["exported", "scripted", "traced", "frozen", "inside"])
def test_what_a_loader_returns_is_served(tmp_path: Path, function: str) -> None:
    """An exported program has no eval(), TorchScript no requires_grad_()."""
    spec = specification(tmp_path, LOADED, f"m.py:{function}")
    engine = build_engine(spec, RandomWeights(0), EngineSettings("torch", device="cpu", threads=1))
    engine.load()
    (answer,) = engine.infer(valid_items(spec, 0, [1] * 3)).values()
    assert answer.shape == (3, 2)
    engine.close()
    assert measure_size(spec)[0] == (0 if function == "frozen" else 10)


def test_a_cast_inside_a_module_is_named(tmp_path: Path) -> None:
    source = FORWARD.format(returned="x.to(torch.bfloat16) @ torch.ones(4, 4)", sample="torch.randn(2, 4)")
    with pytest.raises(UnknownModelError, match="remove casts to a fixed type from forward"):
        specification(tmp_path, source)
