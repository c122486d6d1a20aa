"""Samples of models without photographs: lengths, padding, the user's pictures, and what is refused."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, save
from typer.testing import CliRunner

from loadgen.entry import PanelledCommand
from servers.commands.models import samples
from servers.models.items import QUANTILES, jpeg_paths, text_lengths
from servers.models.registry import DEFAULT_MODEL, get_base
from servers.models.samples import write_samples
from servers.models.specification import ModelSpecification
from servers.options.defaults import OptionError


@pytest.fixture(scope="module")
def bert() -> ModelSpecification:
    return get_base("transformers:bert-base-uncased")


def written(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    document = json.loads((folder / "samples.json").read_text())
    return document, {entry["input"]: np.load(folder / entry["path"]) for entry in document["files"]["tensors"]}


def test_token_ids_have_the_lengths_of_text_and_are_padded(bert: ModelSpecification, tmp_path: Path) -> None:
    assert write_samples(bert, tmp_path / "a")
    document, arrays = written(tmp_path / "a")
    lengths = document["lengths"]
    places = dict.fromkeys(["input_ids", "attention_mask", "token_type_ids"], 1)
    assert document["kind"] == "token ids"
    assert document["axis"] == {"name": "sequence", "places": places, "default": 128, "largest": 512}
    assert arrays.keys() == places.keys()
    assert document["count"] == len(lengths) == 64
    assert len(set(lengths)) > 30
    assert arrays["input_ids"].shape == (64, max(lengths))
    np.testing.assert_array_equal(arrays["attention_mask"].sum(axis=1), lengths)
    assert (arrays["input_ids"][arrays["attention_mask"] == 0] == 0).all()
    assert (arrays["input_ids"][arrays["attention_mask"] == 1] >= 1000).all()
    assert not write_samples(bert, tmp_path / "a")
    assert write_samples(bert, tmp_path / "a", seed=1), "another seed gives other samples"


def test_a_list_of_lengths_has_as_many_items_of_each(bert: ModelSpecification, tmp_path: Path) -> None:
    write_samples(bert, tmp_path / "a", "32, 8")
    document, arrays = written(tmp_path / "a")
    assert document["lengths"] == [32] * 64 + [8] * 64
    assert arrays["input_ids"].shape == (128, 32)


@pytest.mark.parametrize("text", ["", "0", "513", "-1", "word", "8,"])
def test_a_length_that_the_model_does_not_take_is_refused(text: str, bert: ModelSpecification, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="give text, or whole numbers from 1 to 512"):
        write_samples(bert, tmp_path / "a", text)
    assert not list(tmp_path.iterdir())


@given(st.integers(1, 500), st.integers(0, 2**32), st.integers(1, 3000))
def test_text_lengths_follow_the_table(count: int, seed: int, largest: int) -> None:
    lengths = text_lengths(count, seed, largest)
    assert lengths == text_lengths(count, seed, largest)
    assert len(lengths) == count
    assert all(min(largest, min(QUANTILES.values())) <= length <= largest for length in lengths)
    if count >= 100:
        assert np.median(lengths) == pytest.approx(min(largest, QUANTILES[0.5]), abs=2)


def test_a_users_pictures_are_resized_as_the_corpus_is(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "b.JPG").write_bytes(jpeg_paths()[1].read_bytes())
    (own / "a.jpeg").write_bytes(jpeg_paths()[0].read_bytes())
    (own / "notes.txt").touch()
    (own / "._a.jpeg").write_bytes(b"of macOS")
    model = get_base("torchvision:resnet18")
    write_samples(model, tmp_path / "corpus")
    write_samples(model, tmp_path / "given", images=own)
    document = json.loads((tmp_path / "given/samples.json").read_text())
    assert (document["kind"], document["count"], "credits" in document) == ("given", 2, False)
    assert document["source"] == "own (._a.jpeg, notes.txt passed over)"
    expected = np.load(tmp_path / "corpus/pixel_values.fp32.npy")[:2]
    np.testing.assert_array_equal(np.load(tmp_path / "given/pixel_values.fp32.npy"), expected)
    (own / "b.JPG").write_bytes(b"no picture")
    with pytest.raises(OptionError, match=r"^b\.JPG: the image is not a JPEG"):
        write_samples(model, tmp_path / "given", images=own)


def test_a_users_pictures_come_before_the_items_of_a_models_author(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "one.jpg").write_bytes(jpeg_paths()[0].read_bytes())
    items = {"pixel_values": np.zeros((2, 3, 224, 224), np.float32)}
    specification = replace(get_base(DEFAULT_MODEL), samples=items)
    write_samples(specification, tmp_path / "authors")
    assert json.loads((tmp_path / "authors" / "samples.json").read_text())["count"] == 2
    write_samples(specification, tmp_path / "mine", images=pictures)
    document = json.loads((tmp_path / "mine" / "samples.json").read_text())
    assert (document["count"], document["source"], list(document["variants"])) == (
        1, "pictures", ["fp32", "uint8", "jpeg"],
    )  # fmt: skip
    assert np.load(tmp_path / "mine" / "pixel_values.fp32.npy").any()


def test_what_does_not_fit_the_model_is_refused(bert: ModelSpecification, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="takes no images"):
        write_samples(bert, tmp_path / "a", images=tmp_path)
    with pytest.raises(OptionError, match=r"no \.jpg or \.jpeg files"):
        write_samples(get_base("torchvision:resnet18"), tmp_path / "a", images=tmp_path)


def test_elements_that_are_bytes_are_written_as_base64(tmp_path: Path) -> None:
    text = helper.make_tensor_value_info("te/xt", TensorProto.STRING, ["batch", 2])
    out = helper.make_tensor_value_info("out", TensorProto.STRING, ["batch", 2])
    graph = helper.make_graph([helper.make_node("Identity", ["te/xt"], ["out"])], "g", [text], [out])
    save(helper.make_model(graph), tmp_path / "echo.onnx")
    assert write_samples(get_base(str(tmp_path / "echo.onnx")), tmp_path / "a")
    document = json.loads((tmp_path / "a/samples.json").read_text())
    (entry,) = document["files"]["tensors"]
    assert (document["kind"], entry["path"]) == ("random values", "te%2Fxt.tensors.json")
    items = json.loads((tmp_path / "a" / entry["path"]).read_text())
    assert len(items) == document["count"]
    assert all(len(item) == 2 and all(base64.b64decode(one).isalpha() for one in item) for item in items)
    with pytest.raises(OptionError, match="takes no sequences"):
        write_samples(get_base(str(tmp_path / "echo.onnx")), tmp_path / "a", "8")


def test_the_command_refuses_with_one_sentence(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command(cls=PanelledCommand)(samples)
    arguments = ["--out", str(tmp_path / "a"), "--model", "transformers:distilbert-base-uncased"]
    refused = CliRunner().invoke(app, [*arguments, "--sequence-length", "1000"])
    assert refused.exit_code == 2
    assert "whole numbers from 1 to 512" in refused.stderr
    assert CliRunner().invoke(app, [*arguments, "--sequence-length", "4"]).exit_code == 0
    assert written(tmp_path / "a")[1]["input_ids"].shape == (64, 4)
