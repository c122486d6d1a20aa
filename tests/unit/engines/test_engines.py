"""Both engines on a small tower: the same answers, owned by the caller, described as they are in effect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError
from servers.engines.settings import EngineSettings
from servers.export.artefacts import Artefact, ensure_artefact
from servers.export.manifest import executed_form
from servers.models.images import normalise
from servers.models.samples import corpus_pixels
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import TensorSpec
from tests.cosines import row_cosines
from tests.small_tower import EMBEDDING, small_tower, with_small_tower

WEIGHTS = RandomWeights(0)
KINDS = ("torch", "onnxruntime")


def engine_of(kind: str, specification: ModelSpecification, path: Path | None, **settings: Any) -> Engine:
    return build_engine(specification, WEIGHTS, EngineSettings(kind=kind, **{"device": "cpu", **settings}), path)


@pytest.fixture(scope="module")
def specification(specification: ModelSpecification) -> ModelSpecification:
    return with_small_tower(specification)


@pytest.fixture(scope="module")
def artefact(specification: ModelSpecification, tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    form = executed_form("onnxruntime", "fp32")
    return ensure_artefact(specification, WEIGHTS, tmp_path_factory.mktemp("artefacts"), form=form)


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, specification: ModelSpecification, artefact: Artefact) -> Iterator[Engine]:
    loaded = engine_of(request.param, specification, artefact.path)
    loaded.load()
    yield loaded
    loaded.close()
    loaded.close()


@pytest.fixture(scope="module")
def images(specification: ModelSpecification) -> np.ndarray:
    return normalise(corpus_pixels(specification, 4), specification.preprocessing)


@pytest.fixture(scope="module")
def embeddings(specification: ModelSpecification, images: np.ndarray) -> np.ndarray:
    module = specification.load_module(WEIGHTS)
    with torch.inference_mode():
        return np.concatenate([module(torch.from_numpy(images[i : i + 1])).numpy() for i in range(len(images))])


def test_a_batch_answers_as_torch_does_alone(engine: Engine, images: np.ndarray, embeddings: np.ndarray) -> None:
    answer: np.ndarray = engine.infer({"pixel_values": images})["embedding"]
    assert (answer.dtype.name, answer.shape) == ("float32", (4, EMBEDDING))
    assert answer.flags.c_contiguous
    assert row_cosines(embeddings, answer).min() > 0.999999
    np.testing.assert_allclose(answer, embeddings, atol=2e-5)


def test_a_read_only_input_is_served_without_a_warning(engine: Engine, images: np.ndarray) -> None:
    frozen = np.frombuffer(images[:1].tobytes(), np.float32).reshape(1, 3, 224, 224)
    assert not frozen.flags.writeable
    answer = engine.infer({"pixel_values": frozen})["embedding"]
    np.testing.assert_array_equal(answer, engine.infer({"pixel_values": images[:1]})["embedding"])


def test_a_later_call_does_not_write_to_an_earlier_answer(engine: Engine, images: np.ndarray) -> None:
    first = engine.infer({"pixel_values": images[:2]})["embedding"]
    kept = first.copy()
    second = engine.infer({"pixel_values": images[2:]})["embedding"]
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)
    first[:] = 0  # the caller's own: may be written


def test_the_input_is_left_as_it_was(engine: Engine, images: np.ndarray) -> None:
    batch = images[:2].copy()
    engine.infer({"pixel_values": batch})
    np.testing.assert_array_equal(batch, images[:2])


def test_one_row_of_nan_leaves_the_others_alone(engine: Engine, images: np.ndarray) -> None:
    batch = images.copy()
    batch[1] = np.nan
    answer: np.ndarray = engine.infer({"pixel_values": batch})["embedding"]
    clean: np.ndarray = engine.infer({"pixel_values": images})["embedding"]
    assert np.isnan(answer[1]).all()
    np.testing.assert_allclose(answer[[0, 2, 3]], clean[[0, 2, 3]], atol=1e-5)


def test_the_description_is_read_back(engine: Engine) -> None:
    engine.warm_up([1, 2])
    seen = engine.describe()
    assert (seen.precision, seen.device, seen.max_batch_size) == ("fp32", "cpu", 32)
    assert seen.threads == len(os.sched_getaffinity(0))
    assert seen.weights == "random weights (seed 0)"
    if seen.kind == "torch":
        assert seen.version == torch.__version__
        assert seen.mode == "tuned"
        assert seen.details["parameters_by_device"] == {"cpu": 32}
        assert seen.details["parameters"] == sum(one.numel() for one in small_tower().parameters())
    else:
        assert seen.mode == "session"
        assert seen.details["providers"] == ["CPUExecutionProvider"]
        assert seen.spinning == "on"


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_count_takes_effect(kind: str, specification: ModelSpecification, artefact: Artefact) -> None:
    before = torch.get_num_threads()
    engine = engine_of(kind, specification, artefact.path, threads=1, mode="eager" if kind == "torch" else "auto")
    try:
        engine.load()
        assert engine.describe().threads == 1
    finally:
        engine.close()
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "tf32"}, "does not offer precision tf32 on cpu; use one of: fp32"),
        ({"mode": "graph"}, "does not offer mode graph on cpu"),
        ({"mode": "graf"}, "has no mode 'graf'; did you mean graph"),
        ({"device": "tpu"}, "unknown device 'tpu'; use auto, cpu or cuda:N"),
        ({"device": "cuda:"}, "device"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    kind: str, settings: dict[str, str], message: str, specification: ModelSpecification, artefact: Artefact
) -> None:
    if settings.get("device") == "cuda:" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(EngineError, match=message):
        engine_of(kind, specification, artefact.path, **settings).load()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_is_not_loaded_says_so(
    kind: str, specification: ModelSpecification, artefact: Artefact, images: np.ndarray
) -> None:
    engine = engine_of(kind, specification, artefact.path)
    for call in (lambda: engine.infer({"pixel_values": images}), engine.describe):
        with pytest.raises(EngineError, match="not loaded"):
            call()


def test_the_factory_refuses_what_it_cannot_build(specification: ModelSpecification) -> None:
    for settings, message in (
        (EngineSettings(kind="onnxruntime"), "needs an exported file; run: abserve export --model"),
        (EngineSettings(kind="xyz"), "unknown engine 'xyz'; use one of: torch, onnxruntime, tensorrt, null"),
        (EngineSettings(precision="int8"), "the torch engine has no precision 'int8'; use one of: fp32, tf32"),
        (EngineSettings(kind="tensorRT"), "unknown engine 'tensorRT'; did you mean tensorrt"),
        (EngineSettings(max_batch_size=0), "at least 1"),
        (EngineSettings(threads=-1), "all cores"),
    ):
        with pytest.raises(EngineError, match=message):
            build_engine(specification, WEIGHTS, settings, None)


def test_a_missing_or_foreign_onnx_file_is_refused(
    specification: ModelSpecification, artefact: Artefact, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="run: abserve export --model open_clip:ViT-B-32"):
        engine_of("onnxruntime", specification, tmp_path / "model.onnx").load()
    (tmp_path / "model.onnx").write_bytes(b"no protobuf")
    with pytest.raises(EngineError, match=r"cannot load model\.onnx") as caught:
        engine_of("onnxruntime", specification, tmp_path / "model.onnx").load()
    assert "\n" not in str(caught.value)
    other = replace(specification, outputs=(TensorSpec("logits", "FP32", (-1, EMBEDDING)),))
    with pytest.raises(EngineError, match="export it again"):
        engine_of("onnxruntime", other, artefact.path).load()


def test_two_onnxruntime_packages_in_one_environment_are_refused(
    specification: ModelSpecification, artefact: Artefact, tmp_path: Path
) -> None:
    """Both names as installed metadata, on the path of a real process."""
    for name in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"{name}-9.9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 9.9\n")
    code = "from servers.engines.onnxruntime import assert_one_package; assert_one_package()"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "both onnxruntime and onnxruntime-gpu are installed" in done.stderr


def test_onnxruntime_needs_no_torch(artefact: Artefact) -> None:
    """As in the stub process of Triton's python backend."""
    code = f"""
import sys, numpy as np
from dataclasses import replace
from pathlib import Path
from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.models.registry import get_specification
from servers.models.weights import parse_weights
from servers.protocol.tensors import TensorSpec
sys.modules["torch"] = None
model = replace(get_specification("openclip_vit_b32"), outputs=(TensorSpec("embedding", "FP32", (-1, {EMBEDDING})),))
engine = build_engine(model, parse_weights("random:0"),
                      EngineSettings(kind="onnxruntime", device="cpu"), Path({str(artefact.path)!r}))
engine.load()
print(engine.infer({{"pixel_values": np.zeros((1, 3, 224, 224), np.float32)}})["embedding"].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"(1, {EMBEDDING})\n", "")
