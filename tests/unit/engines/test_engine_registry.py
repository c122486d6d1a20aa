"""An engine is one module that a package registers: nothing of abserve changes for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from servers.engines import settings
from servers.engines.factory import ENGINES_PYTHON, build_engine, engines_here, environment_of, second_interpreter
from servers.engines.interface import EngineError
from servers.engines.settings import ENTRY_POINTS, EngineSettings, engine_kind, engine_names
from servers.models.registry import get_specification
from servers.models.weights import RandomWeights

MODULE = '''
"""An engine from outside the package: it answers with zeros."""
import numpy as np
from servers.engines.interface import Engine
from servers.engines.settings import EngineKind

KIND = EngineKind("zero_engine:ZeroEngine", {"cpu": ("eager",)}, {"cpu": ("fp32",)}, ("json",), install="pip install x")
NEEDY = EngineKind("zero_engine:ZeroEngine", {"cpu": ("eager",)}, {"cpu": ("fp32",)}, ("no_such_library",),
                   install="pip install no-such-library")

class ZeroEngine(Engine):
    def load(self): self.loaded = True
    def infer(self, inputs):
        rows = len(next(iter(inputs.values())))
        return {one.name: np.zeros((rows, *one.item_shape), one.dtype) for one in self._specification.outputs}
    def describe(self):
        return self._description(version="1", precision="fp32", mode="eager", device="cpu", threads=1, details={})
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that registers the engines zero, needy, wrong and broken."""
    (tmp_path / "zero_engine.py").write_text(MODULE)
    folder = tmp_path / "zero_engine-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: zero-engine\nVersion: 1\n")
    points = {"zero": "KIND", "needy": "NEEDY", "wrong": "MODULE_NAME", "broken": "KIND"}
    lines = [f"{name} = {'no_module' if name == 'broken' else 'zero_engine'}:{place}" for name, place in points.items()]
    lines[2] = "wrong = zero_engine:np"
    (folder / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings._registered.cache_clear()
    yield
    settings._registered.cache_clear()
    sys.modules.pop("zero_engine", None)


@pytest.mark.usefixtures("outside")
def test_an_engine_from_outside_is_found_and_executes() -> None:
    assert "zero" in engine_names()
    requested = EngineSettings("zero", device="cpu")
    requested.check_here()
    specification = get_specification("openclip_vit_b32")
    engine = build_engine(specification, RandomWeights(0), requested)
    engine.load()
    answers = engine.infer({specification.inputs[0].name: np.zeros((2, 3, 224, 224), np.float32)})
    assert {name: array.shape for name, array in answers.items()} == {specification.outputs[0].name: (2, 512)}
    assert engine.describe().kind == "zero"
    assert environment_of("zero") is None


@pytest.mark.usefixtures("outside")
def test_a_missing_library_names_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINES_PYTHON, str(tmp_path / "none"))
    with pytest.raises(EngineError, match=r"needs no_such_library.*run: pip install no-such-library"):
        environment_of("needy")


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("name", "words"),
    [("broken", "cannot be imported"), ("wrong", "not an EngineKind"), ("zeros", "did you mean zero")],
)
def test_a_wrong_registration_is_one_sentence(name: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        engine_kind(name)


@pytest.mark.usefixtures("outside")
def test_the_second_environment_is_used_where_it_has_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\ncase "$*" in *no_such_library*) exit 0;; *) exit 1;; esac\n')
    other.chmod(0o755)
    monkeypatch.setenv(ENGINES_PYTHON, str(other))
    assert environment_of("needy") == other
    assert environment_of("zero") is None  # this one has what it needs
    other.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(EngineError, match="no_such_library"):
        environment_of("needy")
    monkeypatch.setenv(ENGINES_PYTHON, sys.executable)
    assert second_interpreter() is None  # so that a command never enters itself again


@pytest.mark.usefixtures("outside")
def test_the_second_environment_is_started_only_for_engines_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, started = tmp_path / "python", tmp_path / "started"
    other.write_text(f'#!/bin/sh\ntouch {started}\ncase "$*" in *no_such_library*) exit 0;; *) exit 1;; esac\n')
    other.chmod(0o755)
    monkeypatch.setenv(ENGINES_PYTHON, str(other))
    specification, asked = get_specification("openclip_vit_b32"), EngineSettings(device="cpu", precision="fp32")
    assert engines_here(specification, asked, ("zero",)) == {"installed": ["zero"], "elsewhere": [], "missing": []}
    assert not started.exists()
    assert engines_here(specification, asked)["elsewhere"] == ["needy"]
    assert started.exists()
