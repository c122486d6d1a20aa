"""The plan builder over a TensorRT that exists only on paper: what it asks for, what it refuses, what it leaves."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "docker/tensorrt"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeTensorRT(ModuleType):
    """Records what it is asked for; builds b"plan"."""

    def __init__(self, version: str = "11.2.1.2", content: bytes | None = b"plan") -> None:
        super().__init__("tensorrt")
        self.__version__ = version
        self.builds = 0
        self.shapes: list[Any] = []
        self.parses = True
        self.content = content
        self.MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=3)
        self.BuilderFlag = SimpleNamespace(TF32="TF32")
        self.flags: list[int] = []
        self.cleared: list[str] = []

    class Logger:
        INFO = 1

        def __init__(self, _level: int) -> None:
            pass

    def Builder(self, _logger: object) -> Any:
        cache = SimpleNamespace(serialize=lambda: b"timings")
        config = SimpleNamespace(
            clear_flag=self.cleared.append,
            set_memory_pool_limit=lambda *_: None,
            create_timing_cache=lambda _: cache,
            set_timing_cache=lambda *_, **__: None,
            add_optimization_profile=lambda _: None,
            get_timing_cache=lambda: cache,
        )
        profile = SimpleNamespace(set_shape=lambda name, *shapes: self.shapes.append((name, *shapes)))

        def build(_network: object, _config: object) -> bytes | None:
            self.builds += 1
            return self.content

        return SimpleNamespace(
            create_network=self.flags.append,
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: profile,
            build_serialized_network=build,
        )

    def OnnxParser(self, _network: object, _logger: object) -> Any:
        return SimpleNamespace(
            parse_from_file=lambda _: self.parses, num_errors=1, get_error=lambda _: "no operator Foo"
        )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("build_plan")
    monkeypatch.setattr(module, "gpu", lambda: "NVIDIA H200, 9.0")
    return module


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    fake = FakeTensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    request = {
        "onnx": "model_fp16.onnx", "onnx_sha256": "abc", "precision": "fp16",
        "profile": {"ids": [[1, 1], [32, 128], [32, 512]], "mask": [[1, 1], [32, 128], [32, 512]]},
        "plan": str(tmp_path / "repository/m_tensorrt/1/model.plan"),
    }  # fmt: skip
    (tmp_path / "request.json").write_text(json.dumps(request))
    (tmp_path / "triton-tensorrt.json").write_text(json.dumps({"tensorrt": "11.2.1.2"}))
    return tmp_path


def test_a_plan_is_built_once_for_one_profile(script: ModuleType, tensorrt: FakeTensorRT, folder: Path) -> None:
    assert script.main(folder) == 0
    assert (folder / "repository/m_tensorrt/1/model.plan").read_bytes() == b"plan"
    assert tensorrt.shapes == [(name, (1, 1), (32, 128), (32, 512)) for name in ("ids", "mask")]
    assert tensorrt.flags == [8]
    manifest = json.loads((folder / "plan.json").read_text())
    assert manifest["plan_sha256"] == hashlib.sha256(b"plan").hexdigest()
    assert (manifest["tensorrt"], manifest["gpu"]) == ("11.2.1.2", "NVIDIA H200, 9.0")
    assert "up to date" in script.ensure_plan(folder)
    assert tensorrt.builds == 1


@pytest.mark.parametrize(("precision", "cleared"), [("fp16", True), ("fp32", True), ("tf32", False)])
def test_only_tf32_lets_tensorrt_use_it(
    script: ModuleType, tensorrt: FakeTensorRT, folder: Path, precision: str, cleared: bool
) -> None:
    request = json.loads((folder / "request.json").read_text())
    (folder / "request.json").write_text(json.dumps(request | {"precision": precision}))
    script.ensure_plan(folder)
    assert tensorrt.cleared == (["TF32"] if cleared else [])


@pytest.mark.parametrize("change", ["gpu", "onnx", "profile", "plan", "precision"])
def test_what_is_out_of_date_is_built_again(
    script: ModuleType, tensorrt: FakeTensorRT, folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    script.ensure_plan(folder)
    if change == "gpu":
        monkeypatch.setattr(script, "gpu", lambda: "NVIDIA L4, 8.9")
    elif change in ("onnx", "profile", "precision"):
        request = json.loads((folder / "request.json").read_text())
        others: dict[str, dict[str, object]] = {
            "onnx": {"onnx_sha256": "def"},
            "profile": {"profile": {"ids": [[1, 1], [8, 128], [8, 512]]}},
            "precision": {"precision": "fp32"},
        }
        (folder / "request.json").write_text(json.dumps(request | others[change]))
    else:
        (folder / "repository/m_tensorrt/1/model.plan").write_bytes(b"damaged")
    assert "built" in script.ensure_plan(folder)
    assert tensorrt.builds == 2


def test_another_tensorrt_is_refused(
    script: ModuleType, tensorrt: FakeTensorRT, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensorrt.__version__ = "11.1.0.106"
    assert script.main(folder) == 1
    assert "11.2.1.2" in (message := capsys.readouterr().err)
    assert "11.1.0.106" in message
    assert tensorrt.builds == 0
    assert not (folder / "repository").exists()


def test_what_tensorrt_refuses_is_said(script: ModuleType, tensorrt: FakeTensorRT, folder: Path) -> None:
    tensorrt.parses = False
    with pytest.raises(script.PlanError, match="no operator Foo"):
        script.ensure_plan(folder)
    tensorrt.parses, tensorrt.content = True, None
    with pytest.raises(script.PlanError, match="built no engine"):
        script.ensure_plan(folder)
    assert not (folder / "plan.json").exists()


def test_nothing_asked_for_is_nothing_built(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_container_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("build_plan")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(module.PlanError, match="container toolkit"):
        module.gpu()


def test_the_version_is_read_from_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("tensorrt_version")
    parts = {"Major": 11, "Minor": 2, "Patch": 1, "Build": 2}
    library = SimpleNamespace(**{f"getInferLib{part}Version": partial(int, number) for part, number in parts.items()})
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _name: library)
    monkeypatch.setattr(sys, "argv", ["tensorrt_version.py", str(tmp_path / "plan/triton-tensorrt.json")])
    assert module.main() == 0
    assert json.loads((tmp_path / "plan/triton-tensorrt.json").read_text())["tensorrt"] == "11.2.1.2"


def test_an_image_without_tensorrt_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("tensorrt_version")
    monkeypatch.setattr(module, "candidates", lambda: ["libnvinfer.so.0"])
    monkeypatch.setattr(sys, "argv", ["tensorrt_version.py", str(tmp_path / "x.json")])
    assert module.main() == 1
    assert "libnvinfer.so.0" in capsys.readouterr().err
