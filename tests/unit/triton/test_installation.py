"""Which tritonserver is started, and the shared libpython of its python backend, with scripted files and tools."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servers.options.defaults import OptionError
from servers.triton import installation as module
from servers.triton import launch
from servers.triton.installation import (
    Installation,
    Interpreter,
    TritonError,
    cache_folder,
    find_folder,
    find_libpython,
    libpython_remedy,
    provide_libpython,
    read_installation,
)
from servers.triton.launch import choose_backend, prepare_repository
from servers.triton.settings import TritonSettings


def executable(path: Path, content: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{content}\n")
    path.chmod(0o755)


@pytest.fixture
def image(tmp_path: Path) -> Callable[..., Path]:
    """A folder as in NVIDIA's images; `python` is that of the stub."""

    def make(*backends: str, python: str = "3.99", version: str = "2.61.0\n") -> Path:
        folder = tmp_path / "opt" / "tritonserver"
        executable(folder / "bin" / "tritonserver")
        (folder / "TRITON_VERSION").write_text(version)
        (folder / "lib").mkdir()
        for name in backends:
            (folder / "backends" / name).mkdir(parents=True)
            (folder / "backends" / name / f"libtriton_{name}.so").touch()
        if "python" in backends:
            executable(folder / "backends" / "python" / module.STUB, f"# libpython{python}.so.1.0\nexit 1")
        return folder

    return make


def test_an_image_tells_its_version_and_its_backends(image: Any, interpreter: Interpreter) -> None:
    folder = image("onnxruntime", "python", "tensorrt")
    found = read_installation(folder, interpreter)
    assert found.title == "Triton 2.61"
    assert found.backends == ("onnxruntime", "python", "tensorrt")
    assert found.binary == folder / "bin" / "tritonserver"
    assert found.libraries == folder / "lib"
    assert found.stub == folder / "backends" / "python" / module.STUB
    assert found.stub_in_place
    assert found.libpython is not None


def test_a_stub_for_another_python_does_not_count(image: Any, interpreter: Interpreter) -> None:
    found = read_installation(image("python", python="3.12"), interpreter)
    assert (found.stub, found.stub_python) == (None, "3.12")


@pytest.mark.parametrize(("text", "title"), [("", "Triton"), ("not a version", "Triton"), ("2.7.1", "Triton 2.7")])
def test_a_version_that_is_not_stated_is_left_out(image: Any, interpreter: Interpreter, text: str, title: str) -> None:
    assert read_installation(image(version=text), interpreter).title == title


def test_the_folder_is_the_one_asked_for_then_that_on_path_then_nvidias(
    image: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidias = image()
    monkeypatch.setattr(module, "IMAGE_FOLDER", nvidias)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_folder(None) == nvidias
    executable(tmp_path / "mine" / "bin" / "tritonserver")
    monkeypatch.setenv("PATH", str(tmp_path / "mine" / "bin"))
    assert find_folder(None) == tmp_path / "mine"
    assert find_folder(nvidias) == nvidias
    monkeypatch.setattr(module, "IMAGE_FOLDER", tmp_path / "nothing")
    monkeypatch.setenv("PATH", "")
    assert find_folder(None) is None
    with pytest.raises(OptionError, match=r"--tritonserver .*has no executable bin/tritonserver"):
        find_folder(tmp_path)


def settings(tmp_path: Path, **options: Any) -> TritonSettings:
    return TritonSettings(work_dir=tmp_path / "work", http_port=18471, grpc_port=18472, metrics_port=18473, **options)


@pytest.mark.parametrize(
    ("backends", "options", "has_plan", "wanted"),
    [
        (("tensorrt", "onnxruntime", "python"), {}, True, "tensorrt"),
        (("tensorrt", "onnxruntime", "python"), {}, False, "onnxruntime"),
        (("tensorrt", "onnxruntime", "python"), {"device": "cpu"}, True, "onnxruntime"),
        (("python",), {}, True, "python"),
        (("tensorrt", "onnxruntime", "python"), {"engine": "torch"}, True, "python"),
        (("tensorrt", "onnxruntime"), {"backend": "tensorrt"}, False, "tensorrt"),
        (("onnxruntime", "python"), {"backend": "python"}, True, "python"),
    ],
)
def test_the_backend(
    image: Any,
    interpreter: Interpreter,
    tmp_path: Path,
    backends: tuple[str, ...],
    options: dict[str, Any],
    *,
    has_plan: bool,
    wanted: str,
) -> None:
    installation = read_installation(image(*backends), interpreter)
    assert choose_backend(settings(tmp_path, **options), installation, lambda: has_plan) == wanted


@pytest.mark.parametrize(
    ("backends", "python", "options", "message"),
    [
        (("python",), "3.99", {"backend": "tensorrt"}, r"--backend tensorrt: .* its backends: python"),
        ((), "3.99", {}, r"--backend python: .* its backends: none"),
        (("python", "vllm"), "3.99", {"backend": "vllm"}, r"--backend vllm generates tokens, .* use another --backend"),
        (("python",), "3.12", {}, r"needs Python 3\.12, for which .*/opt/tritonserver has the process"),
        (("onnxruntime", "python"), "3.12", {"engine": "torch"}, r"needs Python 3\.12"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(
    image: Any,
    interpreter: Interpreter,
    tmp_path: Path,
    backends: tuple[str, ...],
    python: str,
    options: dict[str, Any],
    message: str,
) -> None:
    installation = read_installation(image(*backends, python=python), interpreter)
    with pytest.raises(OptionError, match=message):
        choose_backend(settings(tmp_path, **options), installation, lambda: False)


def test_a_folder_without_a_library_is_not_a_backend(image: Any, interpreter: Interpreter, tmp_path: Path) -> None:
    folder = image("python")
    (folder / "backends" / "onnxruntime").mkdir()
    installation = read_installation(folder, interpreter)
    assert installation.backends == ("python",)
    assert choose_backend(settings(tmp_path), installation, lambda: True) == "python"


def test_a_backend_that_is_code_needs_the_process_of_the_python_backend(
    image: Any, interpreter: Interpreter, tmp_path: Path
) -> None:
    folder = image("python", python="3.12")
    (folder / "backends" / "onnxruntime").mkdir()
    (folder / "backends" / "onnxruntime" / "model.py").touch()
    installation = read_installation(folder, interpreter)
    assert installation.backends == ("onnxruntime", "python")
    with pytest.raises(OptionError, match=r"the onnxruntime backend needs Python 3\.12, .* or use another"):
        choose_backend(settings(tmp_path), installation, lambda: True)


def test_a_process_that_lacks_a_library_is_found_before_the_start(
    image: Any, interpreter: Interpreter, tmp_path: Path
) -> None:
    """Triton would wait for it for as long as a model may take to load."""
    folder = image("python")
    stub = folder / "backends" / "python" / module.STUB
    words = "libpython3.99.so.1.0: cannot open shared object file: No such file or directory"
    executable(stub, f"echo '{stub}: error while loading shared libraries: {words}' >&2; exit 127")
    with pytest.raises(OptionError, match=rf"the python backend, whose process in {folder} does not .*: {words}"):
        choose_backend(settings(tmp_path), read_installation(folder, interpreter), lambda: True)


@pytest.fixture
def installation(image: Any, interpreter: Interpreter) -> Installation:
    return read_installation(image("onnxruntime", "python"), interpreter)


def own_repository(tmp_path: Path, config: str) -> Path:
    folder = tmp_path / "mine"
    (folder / "my_model" / "1").mkdir(parents=True)
    (folder / "my_model" / "config.pbtxt").write_text(config)
    return folder


def test_your_own_repository_is_served_as_it_is(tmp_path: Path, installation: Installation) -> None:
    folder = own_repository(tmp_path, 'backend: "onnxruntime"\nmax_batch_size: 6\n')
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    options = settings(tmp_path, triton_repository=folder, model="my_model")
    plan = prepare_repository(options, installation)
    assert {f"--model-repository={folder}", "--model-control-mode=explicit", "--load-model=my_model"} <= set(plan.argv)
    assert not [word for word in plan.argv if word.startswith(("--disable-auto-complete", "--pinned-memory"))]
    assert (plan.model, plan.max_batch_size) == ("my_model", 6)
    assert plan.title == "Triton 2.61, onnxruntime backend, your my_model"
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("release", "host", "allowed"),
    [("2.68", "127.0.0.1", True), ("2.100", "::1", True), ("2.68", "0.0.0.0", False), ("2.67", "127.0.0.1", False),
     ("", "127.0.0.1", False)],
)  # fmt: skip
def test_clients_of_this_machine_may_use_shared_memory_in_every_release(
    tmp_path: Path, installation: Installation, release: str, host: str, allowed: bool
) -> None:
    folder = own_repository(tmp_path, 'backend: "onnxruntime"\nmax_batch_size: 6\n')
    options = settings(tmp_path, triton_repository=folder, model="my_model", host=host)
    plan = prepare_repository(options, replace(installation, version=release))
    assert ("--allow-client-shm=true" in plan.argv) is allowed


@pytest.mark.parametrize(
    ("stub", "numpy", "code", "refused"),
    [
        (
            "numpy.core",
            "2.4.1",
            "x.as_numpy()",
            r"model.py uses as_numpy .* empty tensors with NumPy 2",
        ),
        ("numpy.core", "2.0.0", "pb_utils.Tensor('y', z)", "uses as_numpy or pb_utils.Tensor"),
        ("numpy.core", "1.26.4", "x.as_numpy()", None),
        ("numpy.core numpy._core", "2.4.1", "x.as_numpy()", None),
        ("numpy.core", "2.4.1", "pb_utils.Tensor.from_dlpack('y', z)", None),
    ],
)
def test_a_model_that_would_get_empty_tensors_is_refused(
    tmp_path: Path,
    installation: Installation,
    monkeypatch: pytest.MonkeyPatch,
    stub: str,
    numpy: str,
    code: str,
    refused: str | None,
) -> None:
    assert installation.stub is not None
    installation.stub.write_text(f"#!/bin/sh\n# libpython3.99.so {stub}\n")
    monkeypatch.setattr(launch, "version", lambda _package: numpy)
    folder = own_repository(tmp_path, 'backend: "python"')
    (folder / "my_model" / "1" / "model.py").write_text(code)
    options = settings(tmp_path, triton_repository=folder, model="my_model")
    if refused is None:
        assert prepare_repository(options, installation).model == "my_model"
    else:
        with pytest.raises(OptionError, match=refused):
            prepare_repository(options, installation)


ENSEMBLE = 'platform: "ensemble" ensemble_scheduling { step [ { model_name: "decode" }, { model_name: "elsewhere" } ] }'


@pytest.mark.parametrize(
    ("python", "files", "words"),
    [
        ("3.12", ("model.py",), r"^decode, a step of model my_model, needs Python 3\.12, for which .* this is Python"),
        ("3.99", (), r"^decode, a step of model my_model, has no model\.py in its version folder"),
        ("3.99", ("model.py",), None),
    ],
)
def test_a_step_in_python_is_checked_like_the_model_itself(
    tmp_path: Path,
    image: Any,
    interpreter: Interpreter,
    python: str,
    files: tuple[str, ...],
    words: str | None,
) -> None:
    folder = own_repository(tmp_path, ENSEMBLE)
    (folder / "decode" / "1").mkdir(parents=True)
    (folder / "decode" / "config.pbtxt").write_text('backend: "python"')
    for file in files:
        (folder / "decode" / "1" / file).touch()
    installation = read_installation(image("python", python=python), interpreter)
    options = settings(tmp_path, triton_repository=folder, model="my_model")
    if words is None:
        assert prepare_repository(options, installation).title == "Triton 2.61, ensemble, your my_model"
    else:
        with pytest.raises(OptionError, match=words):
            prepare_repository(options, installation)


def test_a_model_without_a_config_is_one_of_the_python_backend_by_its_code(
    tmp_path: Path, image: Any, interpreter: Interpreter
) -> None:
    folder = own_repository(tmp_path, "")
    (folder / "my_model" / "config.pbtxt").unlink()
    (folder / "my_model" / "1" / "model.py").touch()
    options = settings(tmp_path, triton_repository=folder, model="my_model")
    with pytest.raises(OptionError, match=r"model my_model needs Python 3\.12"):
        prepare_repository(options, read_installation(image("python", python="3.12"), interpreter))


def test_a_model_that_the_repository_does_not_have(tmp_path: Path, installation: Installation) -> None:
    options = settings(tmp_path, triton_repository=own_repository(tmp_path, ""), model="another")
    with pytest.raises(OptionError, match=r"has no model another; its models: my_model"):
        prepare_repository(options, installation)


NAME = "libpython3.99.so.1.0"
UNPACK = f'mkdir -p "$3/usr/lib/x86_64-linux-gnu" && cp "$2" "$3/usr/lib/x86_64-linux-gnu/{NAME}"'


@pytest.fixture
def debian(interpreter: Interpreter, tmp_path: Path) -> Interpreter:
    """A distribution's Python without the library."""
    shutil.rmtree(tmp_path / "lib")
    return replace(interpreter, base_prefix=Path("/usr"))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_this_pythons_own_folders_come_before_the_cache(interpreter: Interpreter, tmp_path: Path) -> None:
    cache_folder(interpreter).mkdir(parents=True)
    (cache_folder(interpreter) / NAME).touch()
    assert find_libpython(interpreter) == tmp_path / "lib" / NAME
    (tmp_path / "lib" / NAME).unlink()
    assert find_libpython(interpreter) == cache_folder(interpreter) / NAME


def test_fetched_with_apt_into_the_environment(debian: Interpreter, tools: Path) -> None:
    executable(tools / "apt-get", '[ "$*" = "download libpython3.99" ] && echo library > libpython3.99_1_amd64.deb')
    executable(tools / "dpkg-deb", UNPACK)
    said: list[str] = []
    path = provide_libpython(debian, said.append)
    assert path == debian.prefix / "share" / "abserve" / "libpython" / NAME
    assert path.read_text() == "library\n"
    assert len(said) == 1
    assert provide_libpython(debian, said.append) == path
    assert len(said) == 1, "it was there the second time"


def test_private_package_lists_where_the_system_has_none(debian: Interpreter, tools: Path) -> None:
    executable(
        tools / "apt-get",
        'for last; do :; done; case "$*" in\n'
        '  "download "*) echo "E: Unable to locate package libpython3.99" >&2; exit 100;;\n'
        '  *Dir::State::Lists=*" update") touch updated;;\n'
        '  *Dir::State::Lists=*" download libpython3.99") [ -e updated ] && echo x > l.deb;;\n'
        "esac",
    )
    executable(tools / "dpkg-deb", UNPACK)
    assert provide_libpython(debian, lambda _message: None).is_file()


def test_a_failed_fetch_says_why_and_what_to_do(debian: Interpreter, tools: Path) -> None:
    executable(tools / "apt-get", 'echo "E: Could not resolve deb.debian.org" >&2; exit 100')
    with pytest.raises(TritonError) as error:
        provide_libpython(debian, lambda _message: None)
    assert "Could not resolve deb.debian.org" in str(error.value)
    assert "sudo apt-get install libpython3.99" in str(error.value)
    assert not cache_folder(debian).exists()


def test_another_builds_library_is_never_fetched(interpreter: Interpreter, tmp_path: Path, tools: Path) -> None:
    shutil.rmtree(tmp_path / "lib")
    executable(tools / "apt-get", "echo called > called; exit 1")
    said: list[str] = []
    with pytest.raises(TritonError, match="--enable-shared"):
        provide_libpython(interpreter, said.append)
    assert said == []


def test_pyenv_has_its_own_remedy(interpreter: Interpreter) -> None:
    pyenv = replace(interpreter, base_prefix=Path("/home/me/.pyenv/versions/3.11.7"))
    assert libpython_remedy(pyenv) == "run PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force 3.11.7"
