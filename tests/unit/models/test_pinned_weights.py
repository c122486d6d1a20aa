"""Weights by commit and by hash: a hub's cache on disk, read by open_clip's and the hub's own code, offline."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from servers.commands.native import check, launch_plan
from servers.models.sources.open_clip import find_pretrained, load_image_tower
from servers.models.weights import (
    CheckpointWeights,
    PretrainedWeights,
    RandomWeights,
    WeightsError,
    WeightsSource,
    parse_weights,
    pin,
)

TAG = "laion2b_s34b_b79k"
OLD, NEW = "a" * 40, "b" * 40
HASH = "c" * 64


@pytest.fixture(scope="module")
def shapes() -> dict[str, torch.Size]:
    with torch.device("meta"):
        tower = load_image_tower(RandomWeights(0))
    return {name: value.shape for name, value in tower.state_dict().items()}


def write_checkpoint(path: Path, value: float, shapes: dict[str, torch.Size]) -> str:
    """All parameters are `value`, one stored number each: kilobytes in place of 350 MB. Returns the file's hash."""
    torch.save({name: torch.full((), value).expand(shape) for name, shape in shapes.items()}, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shapes: dict[str, torch.Size]) -> dict[str, tuple[Path, str]]:
    """Two commits of the tag's repository, as downloads leave them: each one's file and hash. NEW is the newest."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--laion--CLIP-ViT-B-32-laion2B-s34B-b79K"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(NEW)
    found = {}
    for commit, value in ((OLD, 1.0), (NEW, 2.0)):
        path = repository / "snapshots" / commit / "open_clip_pytorch_model.bin"
        path.parent.mkdir(parents=True)
        found[commit] = path, write_checkpoint(path, value, shapes)
    return found


def loaded(source: WeightsSource) -> float:
    return float(load_image_tower(source).state_dict()["class_embedding"][0])


def test_a_tag_is_pinned_to_the_commit_and_the_content_that_the_hub_has_now(hub: dict[str, tuple[Path, str]]) -> None:
    source = pin(parse_weights(TAG), find_pretrained)
    assert source == PretrainedWeights(TAG, NEW, hub[NEW][1])
    assert source.text == f"{TAG}@{NEW}@sha256:{hub[NEW][1]}"
    assert source.label == f"pretrained weights {TAG}, SHA-256 {hub[NEW][1]}"
    assert parse_weights(source.text) == pin(source, find_pretrained) == source
    assert loaded(source) == 2.0


def test_a_revision_is_loaded_whatever_the_hub_has_now(hub: dict[str, tuple[Path, str]]) -> None:
    source = pin(parse_weights(f"{TAG}@{OLD}"), find_pretrained)
    assert source == PretrainedWeights(TAG, OLD, hub[OLD][1])
    assert loaded(source) == 1.0
    assert loaded(parse_weights(TAG)) == 2.0
    with pytest.raises(WeightsError, match=f"--weights {TAG}: the download of revision {'d' * 40} failed"):
        loaded(PretrainedWeights(TAG, "d" * 40))


def test_a_file_that_changed_behind_its_pin_is_refused(
    hub: dict[str, tuple[Path, str]], shapes: dict[str, torch.Size]
) -> None:
    source = pin(parse_weights(TAG), find_pretrained)
    other = write_checkpoint(hub[NEW][0], 3.0, shapes)
    with pytest.raises(WeightsError) as caught:
        load_image_tower(source)
    assert str(caught.value) == f"--weights {TAG}: the file has SHA-256 {other}, but the pin requires {hub[NEW][1]}"
    assert loaded(parse_weights(TAG)) == 3.0, "without a pin it is loaded"


def test_a_checkpoint_is_pinned_and_refused_alike(tmp_path: Path, shapes: dict[str, torch.Size]) -> None:
    path = tmp_path / "mine.pt"
    sha256 = write_checkpoint(path, 1.0, shapes)
    source = pin(parse_weights(str(path)), None)
    assert source == CheckpointWeights(path, sha256) == parse_weights(f"{path}@sha256:{sha256}")
    assert source.label == f"checkpoint mine.pt, SHA-256 {sha256}"
    assert loaded(source) == 1.0
    with pytest.raises(
        WeightsError, match=f"--weights mine.pt: the file has SHA-256 {sha256}, but the pin requires {HASH}"
    ):
        load_image_tower(parse_weights(f"{path}@sha256:{HASH}"))
    path.unlink()
    with pytest.raises(WeightsError, match=r"^mine\.pt: cannot read the file \(No such file or directory\)$"):
        pin(CheckpointWeights(path), None)


def test_a_server_is_launched_with_the_pin(tmp_path: Path) -> None:
    path = tmp_path / "mine.pt"
    path.write_bytes(b"one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings, models, _ = check({"weights": str(path), "http_port": port, "grpc_port": 0, "engine": "torch"})
    pinned = f"{path}@sha256:{hashlib.sha256(b'one').hexdigest()}"
    assert settings.weights == pinned
    assert pinned in " ".join(launch_plan(settings, models, lambda _: (path, None)).argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{TAG}@main", "after @ give a commit of 40 hexadecimal digits, or sha256: and 64"),
        (f"{TAG}@sha256:12", "after @ give a commit"),
        (f"{TAG}@sha256:{HASH}@{OLD}", "after @ give a commit"),
        (f"random:0@sha256:{HASH}", "the seed must be a whole number"),
        ("random:18446744073709551616", "the seed must be a whole number ≥ 0 of at most 19 digits"),
        (f"@{OLD}", "--weights is empty"),
        (f"{__file__}@{OLD}", "a file has no revision"),
        (f"./none.pt@sha256:{HASH}", r"--weights \./none\.pt: no such file"),
    ],
)
def test_a_pin_that_pins_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        parse_weights(text)


def test_a_missing_checkpoint_names_the_closest_file(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    with pytest.raises(WeightsError, match=r"no such file; did you mean weights\.pt\?"):
        parse_weights(str(tmp_path / "weigths.pt"))


def test_random_weights_need_no_pin() -> None:
    assert pin(RandomWeights(3), find_pretrained) == parse_weights(RandomWeights(3).text) == RandomWeights(3)


def test_a_tag_that_is_on_no_hub_has_no_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip.pretrained

    config = {"url": "https://example.org/a.pt"}
    monkeypatch.setattr(open_clip.pretrained, "get_pretrained_cfg", lambda *_: config)
    with pytest.raises(WeightsError, match="not on a hub and has no revisions; pin it with @sha256:"):
        find_pretrained(PretrainedWeights("elsewhere", OLD))
