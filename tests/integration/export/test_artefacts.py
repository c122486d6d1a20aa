"""Exporting for real: a small model for the ways in which it can go wrong, the real one for what people get."""

from __future__ import annotations

import hashlib
import io
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from rich.console import Console

from servers.commands.export import ExportSettings, _build_plan
from servers.engines.interface import EngineError
from servers.export.artefacts import (
    Artefact,
    artefact_folder,
    current_plan,
    ensure_artefact,
    executed_file,
    find_artefact,
)
from servers.export.manifest import ExportError, FileForm, package_versions, read_manifest
from servers.models.files import FolderError
from servers.models.specification import ModelSpecification
from servers.models.weights import (
    CheckpointWeights,
    PretrainedWeights,
    RandomWeights,
    WeightsError,
    WeightsSource,
    parse_weights,
)
from servers.protocol.tensors import TensorSpec
from tests.scripted_trtexec import ScriptedTrtexec


class Patches(torch.nn.Module):
    """Mean colour of 7×7 patches, projected: small, and it tells photographs apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(147, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.nn.functional.avg_pool2d(x, 32).flatten(1))


class Swapped(Patches):
    """Computes something else while it is exported: an exporter's mistake."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(-x if torch.compiler.is_exporting() else x)


def small(specification: ModelSpecification, kind: type[Patches] = Patches) -> ModelSpecification:
    def load(source: WeightsSource) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(source.seed if isinstance(source, RandomWeights) else 0)
            return kind().eval().requires_grad_(False)

    return replace(specification, name="small", outputs=(TensorSpec("embedding", "FP32", (-1, 16)),), load_module=load)


def files_under(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"}


WHOLE = {"small/random-0/model.onnx", "small/random-0/manifest.json"}


def test_an_artefact_is_made_once_and_again_only_for_a_reason(
    specification: ModelSpecification, tmp_path: Path
) -> None:
    model, weights = small(specification), RandomWeights(0)
    steps: list[str] = []
    first = ensure_artefact(model, weights, tmp_path, progress=steps.append)
    assert first.made_now
    assert "exporting to ONNX" in steps
    assert files_under(tmp_path) == WHOLE
    of_a_killed_export = tmp_path / "small/.random-0.0a1b2c3d.part"
    of_a_killed_export.mkdir()
    (of_a_killed_export / "model.onnx").touch()
    assert not ensure_artefact(model, weights, tmp_path).made_now
    assert files_under(tmp_path) == WHOLE
    assert ensure_artefact(model, weights, tmp_path, force=True).made_now
    folder = artefact_folder(tmp_path, model, weights)
    manifest, graph = folder / "manifest.json", first.path.read_bytes()
    whole = manifest.read_text()
    document = json.loads(whole)
    document["versions"]["torch"] = "1.0"
    assert find_artefact(tmp_path, model, weights) is not None
    assert find_artefact(tmp_path, replace(model, version="2"), weights) is None
    first.path.write_bytes(graph + b"\0")
    assert find_artefact(tmp_path, model, weights) is None
    first.path.write_bytes(graph)
    manifest.write_text(json.dumps(document))
    assert find_artefact(tmp_path, model, weights) is None
    manifest.write_text(whole)
    assert find_artefact(tmp_path, model, weights) is not None
    manifest.write_text("{")
    assert ensure_artefact(model, weights, tmp_path).made_now
    assert files_under(tmp_path) == WHOLE


def test_seeds_have_folders_of_their_own(specification: ModelSpecification, tmp_path: Path) -> None:
    artefact = ensure_artefact(small(specification), RandomWeights(1), tmp_path)
    two = ensure_artefact(small(specification), RandomWeights(2), tmp_path)
    assert artefact.path != two.path
    assert artefact.manifest.sha256 != two.manifest.sha256
    assert artefact.manifest.weights == "random weights (seed 1)"


def test_another_checkpoint_of_the_same_name_is_another_artefact(
    specification: ModelSpecification, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "weights.pt"
    checkpoint.write_bytes(b"one")
    weights = CheckpointWeights(checkpoint)
    made = ensure_artefact(small(specification), weights, tmp_path / "artefacts")
    assert made.manifest.weights_sha256 == hashlib.sha256(b"one").hexdigest()
    assert not ensure_artefact(small(specification), weights, tmp_path / "artefacts").made_now
    checkpoint.write_bytes(b"two")
    assert ensure_artefact(small(specification), weights, tmp_path / "artefacts").made_now


def test_a_tag_whose_file_changed_is_refused_until_it_is_wanted(
    specification: ModelSpecification, tmp_path: Path
) -> None:
    old, new = ("a" * 40, b"one"), ("b" * 40, b"two")
    newest = [old]

    def find(source: PretrainedWeights) -> Path:
        commit, content = next((version for version in (old, new) if version[0] == source.revision), newest[0])
        path = tmp_path / "snapshots" / commit / "weights.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    model, weights, root = replace(small(specification), find_pretrained=find), parse_weights("tag"), tmp_path / "made"
    first = ensure_artefact(model, weights, root).manifest
    hashes = [hashlib.sha256(content).hexdigest() for _, content in (old, new)]
    assert (first.weights, first.weights_sha256) == (f"pretrained weights tag, SHA-256 {hashes[0]}", hashes[0])
    assert first.weights_revision == old[0]
    assert not ensure_artefact(model, weights, root).made_now
    newest[0] = new
    with pytest.raises(WeightsError) as caught:
        ensure_artefact(model, weights, root)
    assert str(caught.value) == (
        f"the file of tag has SHA-256 {hashes[1]}, but the last export was made from {hashes[0]}; "
        f"keep the old one with --weights tag@{old[0]}@sha256:{hashes[0]}, or take the new one with "
        f"abserve export --force --weights tag@{new[0]}@sha256:{hashes[1]}"
    )
    assert not ensure_artefact(model, parse_weights(f"tag@{old[0]}"), root).made_now
    assert not ensure_artefact(model, parse_weights(f"tag@sha256:{hashes[0]}"), root).made_now
    assert ensure_artefact(model, weights, root, force=True).manifest.weights_sha256 == hashes[1]
    assert not ensure_artefact(model, weights, root).made_now


def test_bad_parity_is_an_error_and_leaves_nothing(specification: ModelSpecification, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no artefact was kept"):
        ensure_artefact(small(specification, Swapped), RandomWeights(0), tmp_path)
    assert files_under(tmp_path) == set()


def test_bad_parity_keeps_the_artefact_that_was_there(specification: ModelSpecification, tmp_path: Path) -> None:
    good = ensure_artefact(small(specification), RandomWeights(0), tmp_path)
    with pytest.raises(ExportError):
        ensure_artefact(small(specification, Swapped), RandomWeights(0), tmp_path, force=True)
    assert find_artefact(tmp_path, small(specification), RandomWeights(0)) == replace(good, made_now=False)


def test_two_at_once_export_once(specification: ModelSpecification, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(ensure_artefact, small(specification), RandomWeights(0), tmp_path) for _ in range(2)]
        assert sorted(future.result().made_now for future in futures) == [False, True]
    assert files_under(tmp_path) == WHOLE


def test_each_engine_gets_the_file_that_it_executes(
    specification: ModelSpecification, tmp_path: Path, trtexec: ScriptedTrtexec
) -> None:
    model, root = small(specification), tmp_path / "artefacts"

    def executed(precision: str, release: str = "10.13.3", max_batch_size: int = 8) -> Path:
        path, manifest = executed_file(
            "tensorrt", precision, model, RandomWeights(0), root, max_batch_size=max_batch_size, release=release
        )
        assert manifest is None
        current = current_plan(precision, model, RandomWeights(0), root, max_batch_size, release)
        assert current == path
        return path

    path, manifest = executed_file("onnxruntime", "fp32", model, RandomWeights(0), root)
    assert manifest is not None
    assert path.name == manifest.file == "model.onnx"
    with pytest.raises(EngineError, match="TensorRT is not installed; run: pip install tensorrt"):
        executed_file("tensorrt", "fp32", model, RandomWeights(0), root)
    assert current_plan("fp32", model, RandomWeights(0), root, 8, "10.13.3") is None
    assert trtexec.built == 0
    plan = executed("fp32")
    assert plan.parent == root / "small" / "random-0-tensorrt"
    standard = artefact_folder(root, model, RandomWeights(0))
    assert f"--onnx={standard}/model.onnx" in plan.read_text()
    assert executed("fp32") == plan
    assert trtexec.built == 1
    assert len({plan, executed("tf32"), executed("fp16"), executed("fp32", max_batch_size=4)}) == 4
    standard.rename(root / "of another seed")
    assert current_plan("fp32", model, RandomWeights(0), root, 8, "10.13.3") is None
    with pytest.raises(ExportError, match=r"TensorRT 10\.14\.1 executes only .* has trtexec 10\.13\.3; install"):
        executed("fp32", release="10.14.1")


def test_the_command_builds_for_the_library_that_triton_loads(
    specification: ModelSpecification, tmp_path: Path, trtexec: ScriptedTrtexec, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ensure_artefact(small(specification), RandomWeights(0), tmp_path)

    def shown(**options: Any) -> str:
        console = Console(file=(written := io.StringIO()), width=500)
        settings = ExportSettings(artefacts=tmp_path, to="tensorrt", **options)
        _build_plan(console, small(specification), RandomWeights(0), made, "fp32", settings)
        return written.getvalue()

    (tmp_path / "libnvinfer.so.10.13.3").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert "TensorRT 10.13.3, " in shown()
    assert "kept" in (kept := shown())
    assert "-tensorrt-11.2.1-" in kept.partition("\n")[0]  # the container's
    assert "TensorRT 10.13.3, " in shown(force=True)
    assert "TensorRT 10.13.3, " in shown(max_batch_size=4)
    assert trtexec.built == 3


def test_a_place_that_cannot_be_written_is_named(specification: ModelSpecification, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot write"):
        ensure_artefact(small(specification), RandomWeights(0), tmp_path / "file")


@pytest.mark.parametrize(
    ("operators", "imports"),
    [pytest.param("standard", {"": 18}, marks=pytest.mark.slow), ("fused", {"": 19, "com.microsoft": 1})],
)
def test_the_real_artefact_is_one_file_with_a_free_batch_and_a_full_manifest(
    operators: str, imports: dict[str, int], specification: ModelSpecification, artefact_dir: Path
) -> None:
    artefact = ensure_artefact(specification, RandomWeights(0), artefact_dir, form=FileForm("fp32", operators))
    manifest = read_manifest(artefact.path.parent)
    assert manifest == artefact.manifest
    assert manifest.sha256 == hashlib.sha256(artefact.path.read_bytes()).hexdigest()
    assert manifest.bytes == artefact.path.stat().st_size
    assert manifest.versions == package_versions()
    assert [m.batch for m in manifest.parity] == [1, 2, 7]
    for measured in manifest.parity:
        assert measured.cosine_min is not None
        assert measured.cosine_min > 0.999999
        assert measured.max_abs is not None
        assert 0 <= measured.max_abs < 1e-4
    assert files_under(artefact.path.parent) == {"model.onnx", "manifest.json"}
    model = onnx.load(artefact.path, load_external_data=False)
    assert {entry.domain: entry.version for entry in model.opset_import} == imports
    assert manifest.operators == operators
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 3, 224, 224]
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["pixel_values", "embedding"]


COMMAND = "import typer; from servers.commands.export import export; a = typer.Typer(); a.command()(export); a()"


def run_export(arguments: Sequence[str], file_limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if file_limit_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))

    return subprocess.run(
        [sys.executable, "-W", "error", "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
        timeout=120,
    )


def test_the_command_prints_the_essentials_and_nothing_of_the_exporter(artefact: Artefact, artefact_dir: Path) -> None:
    done = run_export(["--artefacts", str(artefact_dir)])
    assert (done.returncode, done.stderr) == (0, "")
    for text in (artefact.manifest.sha256, "random weights (seed 0)", "batch 7: cosine 1.0000000", "up to date"):
        assert text in done.stdout


@pytest.mark.slow
def test_a_disk_that_fills_up_gives_one_sentence_and_no_half_artefact(tmp_path: Path) -> None:
    """A limit on the size of a file stands for the disk; the failure comes while the 352 MB are written."""
    done = run_export(["--artefacts", str(tmp_path)], file_limit_bytes=100_000_000)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no space left on the disk of ")
    assert done.stderr.count("\n") == 1
    assert "exporting to ONNX" in done.stdout
    assert files_under(tmp_path) == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet"], "error: unknown model 'resnet'; did you mean torchvision:resnet50? List all names"),
        (["--weights", "random:x"], "error: --weights random:x: the seed must be a whole number"),
        (["--weights", "./none.pt"], "error: --weights ./none.pt: no such file\n"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_export([*arguments, "--artefacts", str(tmp_path)])
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
