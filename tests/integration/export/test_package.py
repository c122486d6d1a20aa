"""AOTInductor's package: made once, proven, executed at any batch size and length by an engine without the module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from servers.engines.batches import random_inputs
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError
from servers.engines.settings import EngineSettings
from servers.engines.torch.forms import expected_answers
from servers.export import torch_export
from servers.export.artefacts import Artefact, ensure_artefact, executed_file
from servers.export.manifest import PACKAGE, ExportError, FileForm
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights, WeightsSource
from servers.protocol.tensors import Axis, TensorSpec

WEIGHTS = RandomWeights(0)


class Scores(torch.nn.Module):
    """Of sequences: scores per place, their mean, and the input itself, which an engine must not give away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = self.second(self.first(x).relu())
        return scores, scores.mean(1), x


def scores() -> ModelSpecification:
    def load(_: WeightsSource) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Scores().eval().requires_grad_(False)

    names = ("x", "scores", "same")
    return ModelSpecification(
        name="scores",
        reference="test:scores",
        title="scores",
        version="1",
        inputs=(TensorSpec("x", "FP32", (-1, -1, 8)),),
        outputs=(
            TensorSpec("scores", "FP32", (-1, -1, 4)),
            TensorSpec("mean", "FP32", (-1, 4)),
            TensorSpec("same", "FP32", (-1, -1, 8)),
        ),
        axes=(Axis("length", 6, 20, dict.fromkeys(names, 1)),),
        max_batch_size=8,
        load_module=load,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artefacts")


@pytest.fixture(scope="module")
def made(root: Path) -> Artefact:
    from torch._inductor import config as inductor

    quick = {
        "cpp.vec_isa_ok": True,  # else it compiles three programs to try what the processor says
        "aot_inductor.precompile_headers": False,  # which pays from the second package on
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    with inductor.patch(quick):
        path, manifest = executed_file("aotinductor", "fp32", scores(), WEIGHTS, root)
    assert manifest is not None
    return Artefact(path, manifest, made_now=True)


@pytest.fixture
def engine(made: Artefact) -> Iterator[Engine]:
    threads = torch.get_num_threads()
    settings = EngineSettings("aotinductor", "fp32", threads=1)
    unloadable = replace(scores(), load_module=lambda _: pytest.fail("the package needs no module"))
    loaded = build_engine(unloadable, WEIGHTS, settings, made.path)
    loaded.load()
    yield loaded
    loaded.close()
    torch.set_num_threads(threads)


def test_the_package_is_an_artefact_of_this_processor(made: Artefact, root: Path) -> None:
    manifest = made.manifest
    target = torch_export.package_target()
    assert (manifest.kind, manifest.operators, manifest.opset) == ("aotinductor", PACKAGE, None)
    assert (manifest.target, made.path.name) == (target, "model.pt2")
    assert made.path.parent.name.endswith(f"-package-{target}")
    assert [(measurement.batch, measurement.sizes["length"]) for measurement in manifest.parity] == [
        (1, 6),
        (2, 20),
        (7, 3),
    ]
    assert all(
        measurement.relative_error is not None and measurement.relative_error < 1e-5 for measurement in manifest.parity
    )
    again = ensure_artefact(scores(), WEIGHTS, root, form=FileForm("fp32", PACKAGE, target))
    assert (again.made_now, again.manifest) == (False, manifest)


def test_every_batch_and_length_is_answered_as_by_the_module(engine: Engine) -> None:
    model = scores()
    module = model.load_module(WEIGHTS)
    kept = []
    for rows, length in ((1, 6), (5, 1), (3, 20)):
        given = random_inputs(model, rows, rows, {"length": length})
        kept.append((expected_answers(model, module, given), engine.infer(given)))
        given["x"][:] = 7  # an answer does not share the caller's memory
    for wanted, answers in kept:
        assert list(answers) == ["scores", "mean", "same"]
        for name, array in answers.items():
            got, want = (np.asarray(answer, np.float64) for answer in (array, wanted[name]))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="length 21, more than the largest, 20"):
        engine.infer({"x": np.zeros((1, 21, 8), np.float32)})


def test_the_description_is_read_back_from_the_package(engine: Engine) -> None:
    described = engine.describe()
    assert (described.kind, described.precision, described.mode) == ("aotinductor", "fp32", "package")
    assert (described.device, described.threads) == ("cpu", 1)
    metadata = described.details["package"]
    assert isinstance(metadata, dict)
    assert metadata["AOTI_DEVICE_KEY"] == "cpu"
    assert "parameters" not in described.details  # they are in the package, and their number is unknown


def test_beside_a_gpu_it_runs_on_the_cpu(made: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("servers.engines.settings.nvidia_device_present", lambda: True)
    engine = build_engine(scores(), WEIGHTS, EngineSettings("aotinductor"), made.path)
    engine.load()
    assert (engine.describe().device, engine.describe().precision) == ("cpu", "fp32")
    with pytest.raises(EngineError, match="does not run on cuda; use --device cpu"):
        build_engine(scores(), WEIGHTS, EngineSettings("aotinductor", device="cuda:0"), made.path)


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    settings = EngineSettings("aotinductor")
    for content, message in ((None, r"run: abserve export .*--to aotinductor"), (b"no archive", "torch cannot load")):
        path = tmp_path / "model.pt2"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(EngineError, match=message):
            build_engine(scores(), WEIGHTS, settings, path).load()
    users = replace(scores(), file=tmp_path / "mine.onnx")
    with pytest.raises(EngineError, match="ONNX file, which the aotinductor engine does not execute"):
        build_engine(users, WEIGHTS, settings, tmp_path / "model.pt2")
    with pytest.raises(ExportError, match="of which torch makes no package"):
        ensure_artefact(users, WEIGHTS, tmp_path, form=FileForm("fp32", PACKAGE, "cpu-x"))


def test_a_missing_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(
        ExportError, match=r"needs a C\+\+ compiler, .* run: sudo apt-get install g\+\+, or name one in CXX"
    ):
        executed_file("aotinductor", "fp32", scores(), WEIGHTS, tmp_path)


def test_a_model_that_cannot_be_exported_names_the_engine_that_takes_it(tmp_path: Path) -> None:
    class Fixed(Scores):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return super().forward(x.reshape(2, -1, 8))

    fixed = replace(scores(), load_module=lambda _: Fixed().eval())
    with pytest.raises(ExportError, match=r"torch cannot compile scores to a package: .*; use the engine torch"):
        executed_file("aotinductor", "fp32", fixed, WEIGHTS, tmp_path)
