"""What every test folder shares: the real model's exported file, made once and kept in the project's .artefacts."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings

from loadgen.metrics import barrier
from servers.export import tensorrt
from servers.export.artefacts import Artefact, ensure_artefact
from servers.export.manifest import executed_form
from servers.models.registry import DEFAULT_MODEL, get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from tests import fork_server
from tests import perf_analyzer as analyzer
from tests.scripted_trtexec import ScriptedTrtexec

PROJECT = Path(__file__).resolve().parents[1]
os.environ["ABSERVE_ANYWAY"] = "1"  # the tests themselves keep the cores busy
os.environ["ABSERVE_NATIVE_CHOICES"] = "off"  # no start of a native server measures, but in the tests of choices
# Else these two are ignored, here and in all that is started, where a shell started pytest in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fork_server.install()
gc.set_threshold(50_000, 20, 20)  # each file ends with a collection
barrier.RAISES = True  # a fault of the program does not hide behind a sentence

hypothesis_settings.register_profile("busy cores", deadline=None, max_examples=50)  # of each run; others may use them
hypothesis_settings.load_profile("busy cores")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collection, which would search all that was imported again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        fork_server.restore_environment()


@pytest.hookimpl(trylast=True)  # what the file's fixtures held is gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, exclude the objects that are left from garbage collection, which took a second to search two
    million of them for cycles; not at the end, where libraries would list what was not freed."""
    fork_server.restore_environment()
    if nextitem is None:
        gc.unfreeze()
    elif nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of an analysis or a report that fails costs itself only."""
    monkeypatch.setattr(barrier, "RAISES", False)


@pytest.fixture
def real_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test whose subject is the process: its programs start as a user's do."""
    monkeypatch.setattr(fork_server, "off", True)


@pytest.fixture(scope="session")
def specification() -> ModelSpecification:
    """The default model."""
    return get_specification(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def artefact(specification: ModelSpecification) -> Artefact:
    """The default model with random:0 as ONNX Runtime executes it; takes seconds once and is only hashed afterwards."""
    form = executed_form("onnxruntime", "fp32")
    return ensure_artefact(specification, RandomWeights(0), PROJECT / ".artefacts", form=form)


@pytest.fixture(scope="session")
def artefact_dir(artefact: Artefact) -> Path:
    """What `--artefacts` takes: the folder in which the exported file is up to date."""
    return PROJECT / ".artefacts"


@pytest.fixture(scope="session")
def perf_analyzer() -> Any:
    """NVIDIA's load generator, fetched once into a cache (see perf_analyzer.py beside this file), else a skip."""
    try:
        return analyzer.find_perf_analyzer()
    except analyzer.PerfAnalyzerUnavailableError as exc:
        pytest.skip(str(exc))


@pytest.fixture
def trtexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedTrtexec:
    """On PATH, of release 10.13.3; the machine has nothing else of TensorRT."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    monkeypatch.setattr(tensorrt, "PACKAGES", ("a-package-that-nobody-has",))
    scripted = ScriptedTrtexec(folder)
    scripted.install("10.13.3")
    return scripted
