"""Language models are found by reference, without their libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servers.language.specification import is_language_model, language_model, language_names
from servers.language.weights import FileWeights, weights_sha256
from servers.models.specification import UnknownModelError
from servers.models.weights import RandomWeights, WeightsError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def folder_of(parent: Path, name: str = "My-Model 1.5", **fields: Any) -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return folder


@pytest.mark.parametrize("name", language_names())
def test_every_known_shape_is_consistent(name: str) -> None:
    model = language_model(f"language:{name}")
    low, high = model.prompt_ids
    assert 0 <= low < high < model.vocabulary
    assert not set(model.eos) & set(range(low, high + 1))
    assert all(token < model.vocabulary for token in model.eos)
    assert model.weights == RandomWeights(0)
    assert model.label == f"language:{name}"
    assert is_language_model(model.reference)


def test_the_demo() -> None:
    model = language_model("language:demo", "random:7")
    assert (model.name, model.architecture, model.vocabulary) == ("demo", "Qwen2ForCausalLM", 4096)
    assert model.weights == RandomWeights(7)
    digest = weights_sha256(model.weights, model.fields)
    assert digest != weights_sha256(RandomWeights(0), model.fields)
    assert digest != weights_sha256(RandomWeights(7), language_model("language:tiny").fields)


def test_describing_a_model_imports_no_library() -> None:
    program = (
        "import sys; from servers.language.specification import language_model; language_model('language:gpt-oss-20b');"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "safetensors"} & set(done.stdout.split())


def test_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 290]}))
    model = language_model(f"language:{folder}")
    assert model == language_model(str(folder)) == language_model(f"transformers:{folder}")
    assert (model.name, model.label, model.eos, model.max_length) == (
        "my_model_1_5", "language:My-Model 1.5", (2, 290), 128,
    )  # fmt: skip
    assert model.prompt_ids == (3, 289)
    assert model.weights == RandomWeights(0)
    assert is_language_model(str(folder))


def test_a_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "llama3.2:1b")
    assert is_language_model(str(folder))
    model = language_model(str(folder))
    assert model == language_model(f"language:{folder}") == language_model(f"transformers:{folder}")
    assert language_model(model.reference) == model
    named = folder_of(tmp_path, "randomly-pruned")
    (named / "model.safetensors").write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    assert language_model(str(folder), named.name).weights == FileWeights(named)


def test_a_folder_with_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").write_bytes(b"weights")
    model = language_model(str(folder))
    assert model.weights == FileWeights(folder)
    digest = weights_sha256(model.weights, model.fields)
    assert language_model(str(folder), f"{folder}@sha256:{digest}").weights == FileWeights(folder, digest)
    with pytest.raises(WeightsError, match="the pin requires 0000"):
        weights_sha256(FileWeights(folder, "0" * 64), model.fields)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="did you mean demo"):
        language_model("language:dem")
    with pytest.raises(UnknownModelError, match="no such folder"):
        language_model("language:/no/such/folder")
    encoder = folder_of(tmp_path, architectures=["BertModel"])
    assert not is_language_model(str(encoder))
    assert not is_language_model("open_clip:ViT-B-32")
    with pytest.raises(UnknownModelError, match="BertModel is not a causal language model"):
        language_model(str(encoder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": "many"}, "vocab_size as a whole number"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"hidden_size": None}, "hidden_size"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "code of its own"),
    ],
)
def test_a_bad_configuration_is_refused_in_a_sentence(tmp_path: Path, fields: Any, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        language_model(str(folder_of(tmp_path, **fields)))


def test_weights_that_are_not_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(WeightsError, match="pickles"):
        language_model(str(folder))
    for option in ("random:x", "some-tag", str(folder)):
        with pytest.raises(WeightsError):
            language_model("language:demo", option)
