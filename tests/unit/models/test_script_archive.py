"""TorchScript archives: the same tensors as torch finds, and nothing of the file is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from servers.models.modules import read_state
from servers.models.weights import CheckpointWeights, WeightsError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SCRIPT: Any = torch.jit


class Inner(torch.nn.Module):
    """With what a state dict leaves out: a plain tensor, a list, None and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.tensor([1, 2], dtype=torch.int64))
        self.constant = torch.ones(2)
        self.sizes = [1, 2]
        self.nothing = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values) + self.constant + self.steps[0] * self.sizes[0]


def module() -> torch.nn.Module:
    inner = Inner()
    shared = torch.nn.Linear(3, 2).half()
    shared.weight = torch.nn.Parameter(torch.randn(3, 2).half().t())  # strided
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.BatchNorm2d(4), inner, Inner(), shared)


def test_an_archive_has_the_tensors_that_torch_finds(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    SCRIPT.script(module()).save(str(path))
    expected = SCRIPT.load(str(path)).state_dict()
    state, is_archive = read_state(CheckpointWeights(path))
    assert is_archive
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor)


def test_a_traced_archive_has_them_too(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    SCRIPT.trace(Inner(), torch.zeros(1, 3)).save(str(path))
    expected = SCRIPT.load(str(path)).state_dict()
    state, _ = read_state(CheckpointWeights(path))
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }


PLANTED = """
import typing
import torch
class Planted(torch.nn.Module):
    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.training = False
    @torch.jit.export
    def __getstate__(self):
        return (self.path, self.weight, self.training)
    @torch.jit.export
    def __setstate__(self, state: typing.Tuple[str, torch.Tensor, bool]):
        self.path = state[0]
        self.weight = torch.from_file(self.path, True, 2)
        self.training = state[2]
    def forward(self, values):
        return values
"""


def test_the_code_of_an_archive_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.jit.load runs it: this one creates a file."""
    (tmp_path / "planted_module.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    from planted_module import Planted  # type: ignore[import-not-found]  # written above

    path, file = tmp_path / "model.pt", tmp_path / "planted"
    SCRIPT.script(Planted(str(file))).save(str(path))
    with pytest.raises(WeightsError, match="unreadable as a checkpoint"):
        read_state(CheckpointWeights(path))
    assert not file.exists()
    SCRIPT.load(str(path))
    assert file.exists()


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("planted",)


def test_an_archive_that_names_anything_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    with ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(Command()))
        archive.writestr("model/constants.pkl", b"")
    with pytest.raises(WeightsError, match="unreadable as a checkpoint"):
        read_state(CheckpointWeights(path))
    assert not Path("planted").exists()
