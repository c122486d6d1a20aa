"""The number of files that a person touches: none for a library's model, one for their own, one for a new source."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loadgen.entry import PanelledCommand
from servers.commands import models as command
from servers.commands.models import models
from servers.models import descriptions, registry, sources
from servers.models.registry import DEFAULT_MODEL, known_references
from servers.models.specification import ModelSpecification, reason_of
from tests.tiny_bert import write_tiny_bert

ROOT = Path(__file__).resolve().parents[3]

SOURCE = '''
"""Models that add a number."""
import torch
from servers.protocol.tensors import TensorSpec
from servers.models.specification import ModelSpecification

class Add(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = torch.nn.Parameter(torch.tensor(float(number)))
    def forward(self, x):
        return x + self.number

def names():
    return ("one",)

def specify(name):
    if name not in names():
        return None
    tensors = [TensorSpec(name, "FP32", (-1, 4)) for name in ("x", "y")]
    return ModelSpecification(
        name="add_one", reference=f"add:{name}", title="adds 1", version="1", inputs=(tensors[0],),
        outputs=(tensors[1],), max_batch_size=4, load_module=lambda source: Add(1).eval().requires_grad_(False),
    )
'''

USE = """
import sys
import numpy as np
from servers.models import descriptions, sources
sources.__path__.append(sys.argv[1])
from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.models.registry import SOURCES, get_base, known_references
from servers.models.weights import RandomWeights
assert "add" in SOURCES and "add:one" in known_references()
engine = build_engine(get_base("add:one"), RandomWeights(0), EngineSettings("torch", device="cpu"), None)
engine.load()
(answer,) = engine.infer({"x": np.zeros((2, 4), np.float32)}).values()
assert (answer == 1).all(), answer
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which descriptions are kept; empty before every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "abserve" / "descriptions"


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command(cls=PanelledCommand)(models)
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.output.removeprefix("reading the libraries of models …\n")


def test_a_new_source_is_one_file_and_its_models_are_served(tmp_path: Path) -> None:
    (tmp_path / "add.py").write_text(SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (Path(sources.__path__[0]) / "add.py").exists()


def test_a_new_model_is_described_without_touching_a_file_of_ours(tmp_path: Path) -> None:
    text = (ROOT / "docs/models.md").read_text().split("```python\n")[2].partition("```")[0]
    (tmp_path / "mine.py").write_text(text)
    status, output = run(f"{tmp_path / 'mine.py'}:scorer", "--json")
    assert status == 0
    (described,) = json.loads(output)["models"]
    assert described["inputs"][0] == {"name": "ids", "datatype": "INT64", "shape": ["batch", "sequence"]}
    assert described["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": ["batch", 2], "kind": "logits"}]
    assert described["axes"] == [
        {"name": "sequence", "default": 128, "largest": 512, "padding": {"ids": 0, "mask": 0}},
    ]
    assert described["default_weights"] == "module file mine.py"
    assert described["definition_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert str(tmp_path) not in output
    assert "32,066 parameters, 128 FLOP per " in run(f"{tmp_path / 'mine.py'}:scorer")[1]


def test_the_list_has_every_source_with_parameters_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model of each library, since counting the operations of all of them takes a minute."""
    listed = ("open_clip:ViT-B-32", "torchvision:resnet50", "timm:resnet50", "transformers:bert-base-uncased")
    assert {*listed} < {*known_references()}
    monkeypatch.setattr(command, "known_references", lambda: listed)
    status, output = run()
    assert status == 0
    for line in (
        "open_clip:ViT-B-32: OpenCLIP ViT-B-32 image tower, 87.8 million parameters, 8.818 GFLOP per image",
        "torchvision:resnet50: torchvision resnet50, 25.6 million parameters, 8.178 GFLOP per image",
        "timm:resnet50: timm resnet50, 25.6 million parameters, 8.178 GFLOP per image",
        "transformers:bert-base-uncased: bert-base-uncased, 109.5 million parameters, 22.35 GFLOP per sequence",
    ):
        assert line in output.splitlines()


def test_one_model_and_the_names_of_a_source() -> None:
    status, output = run("torchvision:resnet18")
    assert status == 0
    assert "logits FP32 [batch, 1000], compared as logits" in output
    assert "fp32, uint8, jpeg" in output
    status, output = run("torchvision", "--json")
    assert "torchvision:alexnet" in json.loads(output)["names"]
    status, output = run("torchvision:resnet17")
    assert status == 2
    assert "did you mean torchvision:resnet1" in output


def test_the_default_model_is_described_without_its_library() -> None:
    code = (
        "import sys; from servers.models.registry import DEFAULT_MODEL, get_base; get_base(DEFAULT_MODEL);"
        "print({'open_clip', 'torch', 'transformers', 'timm', 'torchvision', 'onnx'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


LOAD = """
import sys
from servers.models.registry import describe
from servers.models.weights import RandomWeights
from servers.options.libraries import import_library

def load(reference, *needless):
    describe(reference).load_module(RandomWeights(0))
    assert {*needless}.isdisjoint(sys.modules), (reference, {*needless} & {*sys.modules})

"""
PROGRAM = f"""{LOAD}
import os, torch
if not (child := os.fork()):
    load("torchvision:resnet18", "torch._dynamo")
    load(sys.argv[1], "sklearn", "scipy", "pandas")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
load("open_clip:ViT-S-32-alt", "torch._dynamo", "transformers", "timm", "ftfy", "torchvision.models")
for name in ("open_clip", "torchvision"):
    import_library(name)
import servers.native.grpc.inference, open_clip, torchvision, torch
assert {{"torch._dynamo", "grpc", "rich"}}.isdisjoint(sys.modules)
import tritonclient.grpc, structlog, rich
tritonclient.grpc.InferenceServerClient
open_clip.create_model, open_clip.transformer, torchvision.ops.nms, torchvision.models.resnet18
print(torchvision.ops.roi_align.__name__, torch._dynamo.config.__name__, open_clip.__version__[0])
"""


def test_models_are_loaded_without_what_they_do_not_need(tmp_path: Path) -> None:
    """And a library that was imported in part is whole when more of it is used."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(write_tiny_bert(tmp_path))],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("roi_align torch._dynamo.config ")


class Library:
    """Counts how often known models are measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.versions = {"torch": "1"}
        monkeypatch.setattr(command, "known_references", lambda: (DEFAULT_MODEL,))
        monkeypatch.setattr(descriptions, "version", self.versions.get)
        monkeypatch.setattr(registry, "measure_size", self.count)
        monkeypatch.setattr(descriptions, "shipped", lambda _: None)

    def count(self, specification: ModelSpecification) -> tuple[int, None]:
        self.read.append(specification.reference)
        return 7, None


def test_what_the_libraries_said_is_kept_for_their_versions(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    library = Library(monkeypatch)
    first = run()
    assert f"{DEFAULT_MODEL}: OpenCLIP ViT-B-32 image tower, 7 parameters" in first[1]
    assert (run(), library.read) == (first, [DEFAULT_MODEL])
    library.versions["torch"] = "2"
    assert (run(), library.read) == (first, [DEFAULT_MODEL] * 2)
    (kept,) = cache.iterdir()
    kept.write_bytes(b"[1, 2")
    assert (run(), library.read) == (first, [DEFAULT_MODEL] * 3)


def test_without_a_place_for_the_cache_the_models_are_read_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = Library(monkeypatch)
    (tmp_path / "cache").write_text("a file")
    assert run() == run()
    assert library.read == [DEFAULT_MODEL] * 2


def test_a_users_model_is_measured_again_when_its_file_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = Library(monkeypatch)
    text = (ROOT / "docs/models.md").read_text().split("```python\n")[2].partition("```")[0]
    for change in ((text,), (), (f"{text}#",)):
        for content in change:
            (tmp_path / "mine.py").write_text(content)
        assert run(f"{tmp_path / 'mine.py'}:scorer")[0] == 0
    assert len(library.read) == 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("out of memory\nTried to allocate", "out of memory"),
        ("\n\n  the shapes differ  \nmore", "the shapes differ"),  # as TorchScript and torch.export begin
        (
            "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript:\n"
            "RuntimeError: size mismatch\n",
            "RuntimeError: size mismatch",
        ),
        ("", "AssertionError"),  # a bare assert
    ],
)
def test_the_cause_of_an_error_is_one_line_that_is_never_empty(message: str, reason: str) -> None:
    assert reason_of(AssertionError(message)) == reason
