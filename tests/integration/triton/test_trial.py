"""A tritonserver that is started for a moment: the wheel's, arranged as in NVIDIA's images, whole and with faults."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from servers.triton.installation import STUB, current_interpreter, read_installation
from servers.triton.trial import RELU, ServerTrial, try_installation
from tests.integration.triton.test_installed import STAND_IN, arranged

pytestmark = pytest.mark.triton


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return arranged(tmp_path / "tritonserver")


def tried(tree: Path) -> ServerTrial:
    return try_installation(read_installation(tree, current_interpreter()))


def test_a_whole_installation_answers_with_every_backend(tree: Path) -> None:
    shutil.copytree(tree / "backends" / "python", tree / "backends" / "tensorrt")
    (tree / "backends" / "tensorrt" / "libtriton_python.so").rename(
        tree / "backends" / "tensorrt" / "libtriton_tensorrt.so"
    )  # a library that loads, and cannot load a plan
    trial = tried(tree)
    assert trial.failure is None
    assert trial.backends == {"onnxruntime": None, "tensorrt": None, "python": None}
    assert trial.working == ("onnxruntime", "tensorrt", "python")
    assert 0.0 < trial.ready_seconds < 60.0


def test_an_installation_without_its_libraries_does_not_start(tree: Path) -> None:
    (tree / "lib").unlink()
    trial = tried(tree)
    assert trial.failure is not None
    assert "error while loading shared libraries: " in trial.failure
    assert trial.working == ()


def emptied(folder: Path) -> None:
    (folder / "onnxruntime" / "model.py").unlink()


def unreadable(folder: Path) -> None:
    emptied(folder)
    (folder / "onnxruntime" / "libtriton_onnxruntime.so").write_text("not a library")


def wrong(folder: Path) -> None:
    code = STAND_IN.replace("self.session.run(self.outputs, given)", "list(given.values())")
    (folder / "onnxruntime" / "model.py").write_text(code)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (emptied, "backends/onnxruntime has no libtriton_onnxruntime.so"),
        (unreadable, "unable to load shared library: "),
        (wrong, "its model answers [-1.0, 2.0] instead of [0.0, 2.0]"),
    ],
)
def test_a_backend_with_a_fault_is_named_and_the_others_answer(
    tree: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(tree / "backends")
    trial = tried(tree)
    assert trial.failure is None
    assert words in (trial.backends["onnxruntime"] or "")
    assert trial.working == ("python",)


def test_a_process_of_the_python_backend_that_lacks_its_libpython_is_not_waited_for(tree: Path) -> None:
    stub = tree / "backends" / "python" / STUB
    content = stub.read_bytes().replace(b"libpython3.", b"libpythin3.")
    stub.unlink()
    stub.write_bytes(content + current_interpreter().libpython_name.encode())
    stub.chmod(0o755)
    trial = tried(tree)
    assert "does not start: libpythin3." in (trial.backends["python"] or "")
    assert trial.failure is None
    assert trial.ready_seconds < 60.0


def test_the_file_for_the_onnxruntime_backend_is_one() -> None:
    model = onnx.load_from_string(RELU)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["Relu"]
