"""What the service `models` puts into the volume: launch plans, sample inputs, Triton's repository."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from servers.export.manifest import FileForm
from tests.unit.triton.test_config import parse

SCRIPT = Path(__file__).resolve().parents[3] / "docker/model_volume.py"
_spec = importlib.util.spec_from_file_location("model_volume", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
model_volume = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(model_volume)
VolumeError, fill, link_whole = model_volume.VolumeError, model_volume.fill, model_volume.link_whole
parse_backends = model_volume.parse_backends


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A volume whose export is two small files: how a model is exported is tested elsewhere."""

    def exported(_specification: object, _weights: object, root: Path, *, form: FileForm, **_: Any) -> Any:
        path = (
            root
            / f"{form.precision}-{form.operators}"
            / ("model.onnx" if form.precision == "fp32" else "model_fp16.onnx")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{form.precision} {form.operators}".encode())
        return SimpleNamespace(path=path)

    monkeypatch.setattr(model_volume, "ensure_artefact", exported)
    return tmp_path


def settings(**more: str) -> dict[str, str]:
    return {**os.environ, "ABSERVE_NATIVE_ENGINE": "null", **more}


def ports_are_free() -> bool:
    for port in (8100, 8101):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                return False
    return True


@pytest.mark.skipif(not ports_are_free(), reason="a server listens on port 8100 or 8101 here")
def test_a_gpu_volume_has_both_backends_and_a_request_for_a_plan(volume: Path) -> None:
    fill(volume, "gpu", settings())
    plan = json.loads((volume / "launch/native.json").read_text())
    assert plan["title"] == "native null fp16"
    assert json.loads(plan["argv"][-1])["host"] == "0.0.0.0"
    assert (volume / "samples/samples.json").exists()
    repository = volume / "repository"
    assert (repository / "openclip_vit_b32_onnx/1/model.onnx").read_bytes() == b"fp16 fused"
    assert 'backend: "onnxruntime"' in (repository / "openclip_vit_b32_onnx/config.pbtxt").read_text()
    assert 'backend: "tensorrt"' in (repository / "openclip_vit_b32_tensorrt/config.pbtxt").read_text()
    request = json.loads((volume / "plan/request.json").read_text())
    assert (volume / "plan" / request["onnx"]).read_bytes() == b"fp16 standard"
    assert Path(request["plan"]).parent.is_dir()
    image = [3, 224, 224]
    assert request["profile"] == {"pixel_values": [[1, *image], [32, *image], [32, *image]]}

    fill(volume, "gpu", settings(ABSERVE_MODELS_TRITON_BACKENDS="onnxruntime"))
    assert [path.name for path in repository.iterdir()] == ["openclip_vit_b32_onnx"]
    assert not (volume / "plan/request.json").exists()
    assert not list(volume.rglob("*.part"))


@pytest.mark.skipif(not ports_are_free(), reason="a server listens on port 8100 or 8101 here")
@pytest.mark.parametrize(
    ("asked", "in_effect", "file", "tf32"),
    [
        ("", "fp16", "fp16", "0"),
        ("auto", "fp16", "fp16", "0"),
        ("fp32", "fp32", "fp32", "0"),
        ("tf32", "tf32", "fp32", "1"),
    ],
)
def test_one_setting_is_the_precision_of_every_server_and_backend(
    volume: Path, asked: str, in_effect: str, file: str, tf32: str
) -> None:
    fill(volume, "gpu", settings(ABSERVE_MODELS_PRECISION=asked))
    assert json.loads((volume / "launch/native.json").read_text())["title"] == f"native null {in_effect}"
    assert (volume / "repository/openclip_vit_b32_onnx/1/model.onnx").read_bytes() == f"{file} fused".encode()
    request = json.loads((volume / "plan/request.json").read_text())
    assert request["precision"] == in_effect
    assert (volume / "plan" / request["onnx"]).read_bytes() == f"{file} standard".encode()
    for backend in ("onnx", "tensorrt"):
        config = parse((volume / f"repository/openclip_vit_b32_{backend}/config.pbtxt").read_text())
        assert config.parameters["precision"].string_value == in_effect
        assert {one.data_type for one in (*config.input, *config.output)} == {pb.TYPE_FP32}
        for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
            assert accelerator.parameters["use_tf32"] == tf32


def test_a_precision_without_files_is_refused_and_a_cpu_has_its_own() -> None:
    assert model_volume.parse_precision({}, "cpu") == "fp32"
    for wrong in ("bf16", "half"):
        with pytest.raises(VolumeError, match=f"PRECISION={wrong}: use auto, fp32, tf32 or fp16"):
            model_volume.parse_precision({"ABSERVE_MODELS_PRECISION": wrong}, "gpu")


@pytest.mark.skipif(not ports_are_free(), reason="a server listens on port 8100 or 8101 here")
def test_both_servers_of_a_gpu_volume_get_the_same_batching(volume: Path) -> None:
    batching = {"MAX_BATCH_SIZE": "6", "MAX_QUEUE_DELAY_US": "700"}
    both = {f"ABSERVE_{server}_{name}": value for server in ("NATIVE", "TRITON") for name, value in batching.items()}
    fill(volume, "gpu", settings(**both))
    native = json.loads(json.loads((volume / "launch/native.json").read_text())["argv"][-1])
    assert (native["max_batch_size"], native["max_queue_delay_us"]) == (6, 700)
    for config in (volume / "repository").glob("*/config.pbtxt"):
        text = config.read_text()
        assert "\nmax_batch_size: 6\n" in text
        assert "max_queue_delay_microseconds: 700 " in text
    (shapes,) = json.loads((volume / "plan/request.json").read_text())["profile"].values()
    assert [shape[0] for shape in shapes] == [1, 6, 6]


def test_a_batch_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(VolumeError, match="ABSERVE_TRITON_MAX_BATCH_SIZE=many: give a whole number"):
        model_volume._number({"ABSERVE_TRITON_MAX_BATCH_SIZE": "many"}, "ABSERVE_TRITON_MAX_BATCH_SIZE", 32)


def test_settings_that_the_server_refuses_end_it(volume: Path) -> None:
    with pytest.raises(VolumeError, match="serve native"):
        fill(volume, "gpu", settings(ABSERVE_NATIVE_MODE="quick"))


@pytest.mark.parametrize("text", ["", "torch", "onnxruntime,torch"])
def test_backends_that_there_are_not(text: str) -> None:
    with pytest.raises(VolumeError, match="TRITON_BACKENDS"):
        parse_backends({"ABSERVE_MODELS_TRITON_BACKENDS": text})


def test_a_link_costs_no_disk_and_replaces_what_was_there(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "deep/b"
    source.write_bytes(b"1")
    link_whole(source, target)
    link_whole(source, target)
    assert target.samefile(source)
