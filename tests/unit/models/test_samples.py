"""The sample folder: what it holds, when it is written again, and that it is never half written."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from servers.models.files import FolderError, atomic_folder
from servers.models.images import decode_jpeg, normalise, resize_and_crop
from servers.models.items import credits_text, jpeg_paths
from servers.models.samples import write_samples
from servers.models.specification import ModelSpecification


@pytest.fixture
def folder(specification: ModelSpecification, tmp_path: Path) -> Path:
    target = tmp_path / "samples"
    assert write_samples(specification, target)
    return target


def test_the_three_forms_hold_the_same_pictures(folder: Path, specification: ModelSpecification) -> None:
    fp32 = np.load(folder / "pixel_values.fp32.npy")
    uint8 = np.load(folder / "pixel_values.uint8.npy")
    assert (fp32.dtype, fp32.shape) == (np.float32, (len(jpeg_paths()), 3, 224, 224))
    assert (uint8.dtype, uint8.shape) == (np.uint8, (len(jpeg_paths()), 224, 224, 3))
    np.testing.assert_array_equal(normalise(uint8, specification.preprocessing), fp32)
    for index in range(len(fp32)):
        decoded = decode_jpeg((folder / "jpeg" / f"{index:02d}.jpg").read_bytes())
        np.testing.assert_array_equal(resize_and_crop(decoded, specification.preprocessing), uint8[index])


def test_the_manifest_describes_every_file(folder: Path) -> None:
    document = json.loads((folder / "samples.json").read_text())
    assert document["schema"] == "abserve.samples/2"
    entries = [entry for files in document["files"].values() for entry in files]
    for entry in entries:
        assert hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest() == entry["sha256"]
    named = {entry["path"] for entry in entries} | {"samples.json"}
    assert named == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert [entry["input"] for entry in (*document["files"]["fp32"], *document["files"]["uint8"])] == [
        "pixel_values"
    ] * 2
    assert document["count"] == len(document["files"]["jpeg"]) == len(jpeg_paths())
    assert (document["kind"], document["item"], document["axis"], document["lengths"]) == (
        "photographs", "image", None, None,
    )  # fmt: skip
    assert (document["reference"], document["model"]) == ("open_clip:ViT-B-32", "openclip_vit_b32")
    assert document["kinds"] == {"embedding": "embedding"}
    assert "CC0" in document["credits"]
    assert document["variants"] == {
        payload: {"model": model, "inputs": [{"name": name, "datatype": datatype, "item_shape": shape}]}
        for payload, model, name, datatype, shape in (
            ("fp32", "openclip_vit_b32", "pixel_values", "FP32", [3, 224, 224]),
            ("uint8", "openclip_vit_b32_uint8", "pixel_values", "UINT8", [224, 224, 3]),
            ("jpeg", "openclip_vit_b32_jpeg", "image", "BYTES", [1]),
        )
    }


def test_an_up_to_date_folder_is_left_alone_and_a_touched_one_is_not(
    folder: Path, specification: ModelSpecification
) -> None:
    assert not write_samples(specification, folder)
    with (folder / "pixel_values.uint8.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert write_samples(specification, folder)
    assert not write_samples(specification, folder)


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path, specification: ModelSpecification) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FolderError, match="something other than samples"):
        write_samples(specification, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_failure_leaves_the_old_content_and_no_rest(tmp_path: Path) -> None:
    final = tmp_path / "place"
    with atomic_folder(final) as fresh:
        (fresh / "file").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(final) as fresh:  # noqa: PT012
        (fresh / "file").write_text("new")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    assert (final / "file").read_text() == "old"


def test_more_space_than_there_is_says_how_much(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"no space left .* MB are needed"), atomic_folder(tmp_path / "x", 1 << 60):
        pytest.fail("must not start")
    assert not list(tmp_path.iterdir())


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from servers.commands.models import samples; from servers.models.samples import write_samples;"
        "print([m for m in ('torch', 'onnxruntime', 'open_clip') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_picture_is_credited_and_the_corpus_is_small() -> None:
    rows = [line for line in credits_text().splitlines() if line.startswith("| ") and ".jpg |" in line]
    assert [row.split("|")[1].strip() for row in rows] == [path.name for path in jpeg_paths()]
    assert all("CC0" in row.split("|")[4] or "public domain" in row.split("|")[4] for row in rows)
    assert sum(path.stat().st_size for path in jpeg_paths()) < 3_000_000
