"""Samples of different lengths: how a folder is read, what a request holds of it, and what may vary in it."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadgen.client.bodies import choose_items, find_variation, prepare_body, raw_tensors
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.inputs import InputError, SampleInputs, as_model_inputs, read_inputs, served_model

LENGTHS = (3, 12, 7, 12)
SIGNATURE = Signature(
    "bert",
    (TensorSignature("attention_mask", "INT64", (-1, -1)), TensorSignature("input_ids", "INT64", (-1, -1))),
    (TensorSignature("last_hidden_state", "FP32", (-1, -1, 4)),),
)


def write_sequences(folder: Path, **changes: object) -> Path:
    """Four sequences as `abserve samples` writes them."""
    folder.mkdir()
    mask = np.array([[1] * n + [0] * (max(LENGTHS) - n) for n in LENGTHS], "<i8")
    ids = mask * np.random.default_rng(0).integers(1000, 30000, mask.shape)
    ids[:, 0] = 101
    np.save(folder / "input_ids.tensors.npy", ids)
    np.save(folder / "attention_mask.tensors.npy", mask)
    places = {"input_ids": 1, "attention_mask": 1}
    manifest = {
        "schema": "abserve.samples/2", "kind": "token ids", "item": "sequence", "count": 4, "seed": 3,
        "axis": {"name": "sequence", "places": places, "default": 128, "largest": 512}, "lengths": LENGTHS,
        "variants": {"tensors": {"model": "bert_base", "inputs": []}},
    }  # fmt: skip
    (folder / "samples.json").write_text(json.dumps({**manifest, **changes}))
    return folder


@pytest.fixture
def sequences(tmp_path: Path) -> SampleInputs:
    return read_inputs(write_sequences(tmp_path / "samples"), "tensors")


def test_a_request_is_cut_at_its_longest_item(sequences: SampleInputs) -> None:
    for items, longest in (((0,), 3), ((0, 2), 7), ((0, 1, 2), 12)):
        for name in ("input_ids", "attention_mask"):
            whole = sequences.arrays[name][list(items)]
            np.testing.assert_array_equal(sequences.take(name, items), whole[:, :longest])
            assert not whole[:, longest:].any(), "only padding was cut off"


def test_the_record_says_what_is_sent(sequences: SampleInputs, tmp_path: Path) -> None:
    about = sequences.describe()
    assert [about[key] for key in ("kind", "item", "count", "length_min", "length_median", "length_max", "seed")] == [
        "token ids", "sequence", 4, 3, 7, 12, 3,
    ]  # fmt: skip
    assert served_model(tmp_path / "samples", "tensors") == "bert_base"
    assert served_model(tmp_path / "samples", "jpeg") is None


def test_bodies_of_one_length_hold_only_its_items(sequences: SampleInputs) -> None:
    assert {item for items in choose_items(sequences, 4, 0, length=12) for item in items} == {1, 3}
    with pytest.raises(InputError, match="no sequence has the length 5"):
        choose_items(sequences, 1, 0, length=5)


@pytest.mark.parametrize(
    ("ids", "mask", "problem"),
    [
        (20, 21, "item 1 has several lengths along the sequence axis: input_ids 20, attention_mask 21"),
        (513, 513, "item 1 has the length 513, and the model takes at most 512"),
    ],
)
def test_the_users_own_inputs_have_lengths_that_the_model_takes(
    sequences: SampleInputs, tmp_path: Path, ids: int, mask: int, problem: str
) -> None:
    arrays = {"input_ids": np.ones((4, ids), "<i8"), "attention_mask": np.ones((4, mask), "<i8")}
    with pytest.raises(InputError, match=problem):
        as_model_inputs(replace(sequences, arrays=arrays, lengths=(), shapes={}), sequences, tmp_path / "samples")


def test_only_the_tokens_of_an_item_vary(sequences: SampleInputs) -> None:
    """Not the mask, not the padding, not the first and the last token; and what is sent can be made again."""
    variation = find_variation(sequences, SIGNATURE)
    assert variation is not None
    assert variation.name == "input_ids"
    for item, length in enumerate(LENGTHS):
        before, made = sequences.take("input_ids", (item,)), set()
        for number in range(256):
            varied = variation.varied(sequences, item, number)
            after = varied.take("input_ids", (0,))
            np.testing.assert_array_equal(
                varied.take("attention_mask", (0,)), sequences.take("attention_mask", (item,))
            )
            assert after.shape == (1, length)
            assert (after[0, 0], after[0, -1]) == (before[0, 0], before[0, -1])
            assert 101 <= after.min() <= after.max() < 30000
            made.add(after.tobytes())
        assert len(made) == 256
    tensor = raw_tensors(sequences, SIGNATURE, (0, 2), variation)[1]
    assert tensor.places == (8, 7 * 8 + 8), "the second element of each row of seven"


def test_masks_alone_do_not_vary(sequences: SampleInputs) -> None:
    only = Signature("m", SIGNATURE.inputs[:1], ())
    assert find_variation(sequences, only) is None


@pytest.mark.parametrize(
    ("texts", "varies"),
    [
        ([b"a sentence", "höhere Worte\n".encode()], True),
        ([b"a sentence", b"12"], False),
        ([b'{"name": 1}', b'{"name": 2}'], False),
        ([b"word\x00", b"word"], False),
    ],
)
def test_words_vary_where_that_is_safe(tmp_path: Path, texts: list[bytes], varies: bool) -> None:
    (tmp_path / "t.tensors.json").write_text(json.dumps([[base64.b64encode(text).decode(), "eA=="] for text in texts]))
    inputs = read_inputs(tmp_path, "tensors")
    signature = Signature("m", (TensorSignature("t", "BYTES", (-1, 2)),), ())
    variation = find_variation(inputs, signature)
    assert (variation is not None) == varies
    if variation is None:
        return
    made = [variation.varied(inputs, 1, number).arrays["t"] for number in range(20)]
    assert len({array[0, 0] for array in made}) == 20
    for array in made:
        assert len(array[0, 0].decode()) == len(texts[1].decode())
        assert array[0, 1] == b"x"
    body = prepare_body(inputs, signature, (0, 1), variation)
    places = raw_tensors(inputs, signature, (0, 1), variation)[0].places
    data = body.body[-body.payload_bytes :]
    for item, place in enumerate(places):
        word = texts[item][variation.places[item] :][: variation.byte_size]
        assert data[place : place + variation.byte_size] == word


@pytest.mark.parametrize(
    "changes", [{"lengths": [1, 2]}, {"lengths": "text"}, {"axis": 3}, {"axis": {"places": {"input_ids": "x"}}}]
)
def test_a_damaged_description_is_one_sentence(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"samples\.json"):
        read_inputs(write_sequences(tmp_path / "samples", **changes), "tensors")


def test_samples_that_the_model_does_not_take_are_refused(sequences: SampleInputs) -> None:
    narrow = Signature("m", (TensorSignature("input_ids", "INT64", (-1, 5)),), ())
    with pytest.raises(InputError, match=r"takes items of shape \[5\], the samples have \[3\]"):
        prepare_body(sequences, narrow, (0,))


def test_either_name_of_a_models_own_tensors_is_read(tmp_path: Path) -> None:
    folder = write_sequences(tmp_path / "samples")
    assert read_inputs(folder, "fp32").count == 4
    with pytest.raises(InputError, match=r"has no \*\.uint8\.npy"):
        read_inputs(folder, "uint8")
