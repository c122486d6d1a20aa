"""Models that are known without their libraries: the shipped ones, and a user's own after the first time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from servers.models import descriptions, registry
from servers.models.registry import describe, get_base
from servers.models.sources import module_file
from servers.models.specification import served_name
from servers.models.weights import RandomWeights, WeightsError

HEAVY = {"torch", "transformers", "torchvision", "timm", "open_clip", "sklearn", "scipy"}
SERVERS = ("native", "fastapi")
MODELS = ("open_clip:RN50", "timm:resnet50", "torchvision:resnet50", "transformers:bert-base-uncased")
RUN = """
import json, sys
from loadgen.entry import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["abserve", *command]
    try:
        main()
    except SystemExit as exc:
        assert not exc.code, exc.code
print(*sys.modules, file=sys.stderr)
"""
FILE = """
import torch
from pathlib import Path
from servers.models import Input, Output, UserModel
from neighbour import WIDTH

with open(Path(__file__).parent / "log/runs", "a") as file:
    print("run", file=file)


def net():
    inputs = [Input("x", "INT64", ["batch", "n"], values=(3, 9), padding=0)]
    return UserModel(Net(), inputs, [Output("y", "INT64", ["batch", WIDTH])], {"n": (4, 16)})


class Net(torch.nn.Module):
    def forward(self, x):
        return x.sum(1, keepdim=True).expand(-1, WIDTH)
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reference(tmp_path: Path) -> str:
    """A user's model, whose file leaves a line each time it is executed."""
    (tmp_path / "log").mkdir()
    neighbour = served_name(f"near {tmp_path.name}")  # the folders of other tests are on sys.path, too
    (tmp_path / "model.py").write_text(FILE.replace("neighbour", neighbour))
    (tmp_path / f"{neighbour}.py").write_text("WIDTH = 2")
    return f"{tmp_path}/model.py:net"


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], int]:
    """Forgets what this process knows, as another process; returns how often the file has been executed so far."""

    def start() -> int:
        for kept in (registry._variants, registry.describe, module_file._executed):
            kept.cache_clear()
        sys.modules.pop(served_name(f"near {tmp_path.name}"), None)
        runs = tmp_path / "log/runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0

    return start


def imported(*commands: tuple[str, ...]) -> set[str]:
    """The slow libraries that these commands import, which one process executes."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return HEAVY & set(done.stderr.split())


def test_no_library_is_imported_before_a_server_starts() -> None:
    models = [model for model in MODELS if descriptions.shipped(model) is not None]
    if not models:
        pytest.skip("the catalogue is of other versions of the libraries")
    commands = [("serve", server, "--model", model, "--print-launch") for server in SERVERS for model in models]
    assert imported(*commands) == set()


def test_no_library_is_imported_to_list_models_or_to_write_samples(tmp_path: Path) -> None:
    if descriptions.catalogue().versions != descriptions.versions():
        pytest.skip("the catalogue is of other versions of the libraries")
    samples = ("samples", "--model", "transformers:bert-base-uncased", "--out", str(tmp_path / "samples"))
    assert imported(("models",), samples) == set()


def test_a_users_file_is_executed_by_the_first_command_only(reference: str, tmp_path: Path) -> None:
    command = ("serve", "native", "--model", reference, "--print-launch")
    assert "torch" in imported(command)
    assert imported(command) == set()
    assert (tmp_path / "log/runs").read_text().splitlines() == ["run"]


def test_what_is_kept_is_the_same_model(reference: str, start: Callable[[], int]) -> None:
    first = get_base(reference)
    assert start() == 1
    second = get_base(reference)
    assert second.make_items is not None
    items = second.make_items(0, [3, 5])
    assert start() == 1
    assert second.described == first.described
    assert first.make_items is not None
    assert np.array_equal(first.make_items(0, [3, 5])["x"], items["x"])
    assert second.load_module(RandomWeights(0)) is not None
    assert start() == 2


@pytest.mark.parametrize("changed", ["model.py", "near_*.py", "weights.pt"])
def test_a_file_that_has_changed_is_described_again(
    changed: str, reference: str, tmp_path: Path, start: Callable[[], int]
) -> None:
    get_base(reference)
    start()
    with next(tmp_path.glob(changed), tmp_path / changed).open("a") as file:
        file.write("\n")
    get_base(reference)
    assert start() == 2


def test_a_model_that_has_changed_otherwise_is_not_loaded_and_its_description_is_renewed(
    reference: str, tmp_path: Path, start: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptions, "_imported", lambda _: {})  # as if it lay in another folder
    monkeypatch.setattr(descriptions, "_key", lambda _: "the same")
    get_base(reference)
    start()
    next(tmp_path.glob("near_*.py")).write_text("WIDTH = 3  # no more 2")
    with pytest.raises(WeightsError, match=r"model\.py:net is no longer as it was described"):
        get_base(reference).load_module(RandomWeights(0))
    start()
    assert get_base(reference).load_module(RandomWeights(0)) is not None
    assert get_base(reference).outputs[0].item_shape == (3,)


@pytest.mark.parametrize("content", [b"", b"\xff{", b"[]", b'{"key": 1}'])
def test_a_damaged_description_is_made_again(
    content: bytes, reference: str, tmp_path: Path, start: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    get_base(reference)
    start()
    [kept] = (tmp_path / "cache/abserve/descriptions").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(content)
    get_base(reference)
    assert start() == 2
    assert len(caplog.records) == 1
    assert json.loads(kept.read_bytes()) == json.loads(whole)


def test_a_cache_that_cannot_be_written_is_left_out(
    reference: str, tmp_path: Path, start: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    for runs in (1, 2):
        assert get_base(reference).name == "model_net"
        assert start() == runs
    assert not (tmp_path / "cache").exists()


def test_a_catalogue_of_another_version_of_a_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions, "version", lambda _: "0.0.1")
    assert descriptions.shipped("torchvision:resnet50") is None
    assert descriptions.shipped("language:demo") is None


def test_the_default_model_is_that_of_the_catalogue() -> None:
    assert (
        descriptions.catalogue().models[registry.DEFAULT_MODEL].description
        == describe(registry.DEFAULT_MODEL).described
    )
