"""Random values for a model that is not registered, and files of inputs that cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.inputs import InputError, read_inputs, write_synthetic


def signature(name: str, shape: tuple[int, ...] = (-1, 3)) -> Signature:
    return Signature("m", (TensorSignature(name, "FP32", shape),), ())


@pytest.mark.parametrize("name", ["pixel_values", "serving/input:0", "../../outside", "naïve %2F name"])
def test_an_input_may_be_called_anything_and_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a" / "b" / "samples"
    write_synthetic(signature(name), folder, "fp32", 0)
    assert list(read_inputs(folder, "fp32").arrays) == [name]
    assert [path.name for path in tmp_path.rglob("*.npy")] == [path.name for path in folder.glob("*.npy")]


def test_values_without_room_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too large to generate"):
        write_synthetic(signature("x", (-1, 10**15)), tmp_path, "fp32", 0)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="no values can be generated for m: "):
        write_synthetic(signature("x"), tmp_path / "file", "fp32", 0)


@pytest.mark.parametrize("damage", ["empty", "other", "cut", "no items"])
def test_a_damaged_file_of_inputs_is_one_sentence(tmp_path: Path, damage: str) -> None:
    write_synthetic(signature("x"), tmp_path, "fp32", 0)
    path = tmp_path / "x.fp32.npy"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "other": b"not an array", "cut": whole[:-5]}.get(damage, whole))
    if damage == "no items":
        np.save(path, np.zeros((0, 3), "<f4"))
    with pytest.raises(InputError, match=r"x\.fp32\.npy cannot be used: .*; write the samples with: abserve samples"):
        read_inputs(tmp_path, "fp32")


def test_integers_are_a_texts_where_their_name_says_so(tmp_path: Path) -> None:
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    inputs = tuple(TensorSignature(name, "INT64", (-1, -1)) for name in names)
    write_synthetic(Signature("m", inputs, ()), tmp_path, "tensors", 0)
    given = read_inputs(tmp_path, "tensors")
    ids, mask, types, positions = (given.arrays[name] for name in names)
    assert set(ids.ravel().tolist()) == {0, 1}
    assert (mask.min(), types.max()) == (1, 0)
    assert positions.tolist() == [list(range(16))] * len(ids)
    assert given.kind == "random values, 0 or 1 for input_ids"
