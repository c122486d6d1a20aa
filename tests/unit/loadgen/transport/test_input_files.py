"""The user's own inputs: what is read from each kind of file, and the sentence for what does not fit the model."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.transport.bodies import choose_items, prepare_body
from loadgen.transport.endpoint import Signature, TensorSignature
from loadgen.transport.input_files import kind_of, write_given
from loadgen.transport.inputs import InputError, SampleInputs, read_inputs

SIGNATURE = Signature(
    "m",
    (
        TensorSignature("ids", "INT64", (-1, -1)),
        TensorSignature("scale", "FP32", (-1, 2)),
        TensorSignature("word", "BYTES", (-1, 1)),
    ),
    (TensorSignature("y", "FP32", (-1, 4)),),
)
ITEM = {"ids": [5, 6, 7], "scale": [0.5, 2], "word": ["höher"]}


def given(path: Path, content: object, tmp_path: Path) -> SampleInputs:
    if path.suffix == ".jsonl":
        assert isinstance(content, list)
        path.write_text("\n".join(map(json.dumps, content)) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    write_given(path, SIGNATURE, tmp_path / "samples", "tensors")
    return read_inputs(tmp_path / "samples", "tensors")


def same(inputs: SampleInputs, item: int, ids: list[int], scale: list[float], word: bytes) -> None:
    np.testing.assert_array_equal(inputs.take("ids", (item,)), [ids])
    np.testing.assert_array_equal(inputs.take("scale", (item,)), np.array([scale], "<f4"))
    assert inputs.take("word", (item,))[0, 0] == word
    assert [inputs.arrays[name].dtype for name in ("ids", "scale")] == [np.dtype("<i8"), np.dtype("<f4")]


def test_a_file_of_perf_analyzer_works_unchanged(tmp_path: Path) -> None:
    raw = base64.b64encode(np.array([9, 8], "<i8").tobytes()).decode()
    word = base64.b64encode(b"\x00\xff").decode()
    document = {
        "data": [
            ITEM,
            {"ids": {"content": [1, 2, 3, 4], "shape": [4]}, "scale": {"content": [1, 2]}, "word": ["b"]},
            [{**ITEM, "ids": {"b64": raw}}, {**ITEM, "word": {"b64": word}}],
        ],
        "validation_data": [{"y": [1, 2, 3, 4]}],
    }
    inputs = given(tmp_path / "data.json", document, tmp_path)
    assert inputs.count == 4, "the steps of a stream are items too"
    same(inputs, 0, [5, 6, 7], [0.5, 2], "höher".encode())
    same(inputs, 1, [1, 2, 3, 4], [1, 2], b"b")
    same(inputs, 2, [9, 8], [0.5, 2], "höher".encode())
    same(inputs, 3, [5, 6, 7], [0.5, 2], b"\x00\xff")
    about = inputs.describe()
    assert (about["kind"], about["source"]) == ("given", "data.json (validation_data ignored)")


def test_json_lines_and_arrays_hold_the_same_items(tmp_path: Path) -> None:
    lines = given(tmp_path / "data.jsonl", [ITEM, {**ITEM, "ids": [1, 2, 3]}], tmp_path)
    np.savez(
        tmp_path / "data.npz",
        ids=np.array([[5, 6, 7], [1, 2, 3]], "<i8"),
        scale=np.array([[0.5, 2]] * 2, "<f4"),
        word=np.array([["höher"]] * 2),
    )
    arrays = given(tmp_path / "data.npz", None, tmp_path / "arrays")
    for inputs in (lines, arrays):
        same(inputs, 1, [1, 2, 3], [0.5, 2], "höher".encode())
    assert lines.describe()["sha256"] == arrays.describe()["sha256"]


def test_a_folder_of_raw_files_is_one_item(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "ids").write_bytes(np.array([4, 3], "<i8").tobytes())
    (folder / "scale").write_bytes(np.array([1, 2], "<f4").tobytes())
    (folder / "word").write_text("one\n")
    assert kind_of(folder) == "raw files"
    same(given(folder, None, tmp_path), 0, [4, 3], [1, 2], b"one")
    (folder / "a.jpg").touch()
    for name in ("ids", "scale", "word"):
        (folder / name).unlink()
    assert kind_of(folder) == "images"


def test_items_of_different_shapes_never_share_a_request(tmp_path: Path) -> None:
    lengths = [2, 3, 3, 2, 5, 3]
    inputs = given(tmp_path / "d.jsonl", [{**ITEM, "ids": list(range(n))} for n in lengths], tmp_path)
    chosen = choose_items(inputs, 4, seed=0, count=40)
    assert {frozenset(lengths[item] for item in items) for items in chosen} == {frozenset([n]) for n in (2, 3, 5)}
    for items in chosen:
        prepare_body(inputs, SIGNATURE, items)
    with pytest.raises(InputError, match="cannot share a request"):
        inputs.take("ids", (0, 1))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"ids": [1]}, "item 1 has no input scale; the model takes ids, scale, word"),
        ({**ITEM, "other": [1]}, "item 1 has other, which the model does not take"),
        ({**ITEM, "ids": [1.5]}, "item 1, input ids has values that INT64 cannot hold"),
        ({**ITEM, "ids": ["x"]}, "item 1, input ids has values that INT64 cannot hold"),
        ({**ITEM, "scale": [1]}, r"item 1, input scale has 1 values, and the shape \[2\] needs 2"),
        (
            {**ITEM, "scale": {"content": [1, 2], "shape": [1, 2]}},
            r"of shape \[1, 2\], and the model takes \[2\]",
        ),
        ({**ITEM, "scale": {"b64": "AAA="}}, "input scale has 2 bytes, which is not a multiple of 4"),
        ({**ITEM, "scale": {"b64": "§"}}, "input scale is not base64"),
        ({**ITEM, "scale": {}}, 'has neither "content" nor "b64"'),
        ({**ITEM, "word": [3]}, "input word takes texts, and 3 is not one"),
        ({**ITEM, "ids": {"content": [1], "shape": "1"}}, "the shape 1 is not a list of whole numbers"),
        ([1], "item 1 is not an object of inputs"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, item: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        given(tmp_path / "data.json", {"data": [item]}, tmp_path)


def test_files_that_cannot_be_used_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    np.savez(tmp_path / "wrong.npz", ids=np.ones((2, 3)), scale=np.ones((2, 2), "<f4"), word=np.array([["a"]] * 2))
    np.savez(tmp_path / "uneven.npz", ids=np.ones((1, 3), "<i8"), scale=np.ones((2, 2), "<f4"),
             word=np.array([["a"]] * 2))  # fmt: skip
    np.savez(tmp_path / "one.npz", ids=np.int64(3), scale=np.ones((2, 2), "<f4"), word=np.array([["a"]] * 2))
    (tmp_path / "bad.json").write_text('{"data": [')
    (tmp_path / "bad.jsonl").write_text("{}\n{")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "note.txt").touch()
    (tmp_path / "empty").mkdir()
    for name, message in {
        "bad.npz": "bad.npz: ",
        "wrong.npz": r"input ids is INT64, and the array is float64; convert it with astype\('int64'\)",
        "one.npz": "the array ids is a single value; its first dimension must be the items",
        "bad.json": "it is not JSON: Expecting value",
        "uneven.npz": "different numbers of items",
        "bad.jsonl": "line 1 has no input ids",
        "empty.jsonl": "it holds no items",
        "note.txt": "has an unknown ending",
        "missing.json": "does not exist",
        "empty": "holds no files",
    }.items():
        with pytest.raises(InputError, match=message):
            write_given(tmp_path / name, SIGNATURE, tmp_path / "samples", "tensors")
    with pytest.raises(InputError, match='no list "data"'):
        given(tmp_path / "data.json", [1], tmp_path)
