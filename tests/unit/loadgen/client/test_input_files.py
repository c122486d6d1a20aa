"""The user's own inputs: what is read from each kind of file, and the sentence for what does not fit the model."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from loadgen.client.bodies import choose_items, prepare_body
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.inputs import (
    InputError,
    SampleInputs,
    image_folder,
    kind_of,
    read_inputs,
    write_given,
    write_synthetic,
)

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
    word = base64.b64encode(b"\x02\0\0\0\x00\xff").decode()
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


def one_input(tmp_path: Path, datatype: str, text: str, *, shape: tuple[int, ...] = (-1, -1)) -> SampleInputs:
    """An item with the input x, given by its JSON text."""
    signature = Signature("m", (TensorSignature("x", datatype, shape),), (TensorSignature("y", "FP32", (-1, 1)),))
    path = tmp_path / "one.json"
    path.write_text(f'{{"data": [{{"x": {text}}}]}}')
    write_given(path, signature, tmp_path / "samples", "tensors")
    return read_inputs(tmp_path / "samples", "tensors")


@pytest.mark.parametrize("elements", [[b"hello"], [b"ab", b"cdef"], [b"", b"\0" * 300, b"x"], []])
def test_base64_of_texts_has_the_length_before_each_element(tmp_path: Path, elements: list[bytes]) -> None:
    sent = b"".join(len(element).to_bytes(4, "little") + element for element in elements)
    for shape in ((-1, len(elements)), (-1, -1)):
        encoded = json.dumps({"content": {"b64": base64.b64encode(sent).decode()}, "shape": [len(elements)]})
        inputs = one_input(tmp_path, "BYTES", encoded, shape=shape)
        assert inputs.take("x", (0,)).tolist() == [elements]
    inputs = one_input(tmp_path, "BYTES", json.dumps({"b64": base64.b64encode(sent).decode()}))
    assert inputs.take("x", (0,)).tolist() == [elements]


@pytest.mark.parametrize("content", [b"hello", b"\x05\0\0\0hell", b"\x05\0\0\0hello!", b"\xff\xd8\xff\xe0 a JPEG file"])
def test_other_base64_of_texts_is_refused_with_the_form(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match=r"item 1, input x: the base64 of BYTES must hold each element after its len"):
        one_input(tmp_path, "BYTES", json.dumps({"b64": base64.b64encode(content).decode()}))


INTEGERS = {"UINT8": (0, 2**8 - 1), "UINT16": (0, 2**16 - 1), "UINT32": (0, 2**32 - 1), "UINT64": (0, 2**64 - 1),
            "INT8": (-(2**7), 2**7 - 1), "INT16": (-(2**15), 2**15 - 1), "INT32": (-(2**31), 2**31 - 1),
            "INT64": (-(2**63), 2**63 - 1)}  # fmt: skip
LARGEST = {"FP16": 65504.0, "FP32": 3.4028234663852886e38, "FP64": 1.7976931348623157e308}


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_are_exact_to_both_ends_of_their_datatype(tmp_path: Path, datatype: str) -> None:
    least, most = INTEGERS[datatype]
    values = [most, 1, least, most - 1]
    for text in (str(values), str([values[:2], values[2:]])):
        shape = (-1, 4) if "[[" not in text else (-1, 2, 2)
        taken = one_input(tmp_path, datatype, text, shape=shape).take("x", (0,))
        assert taken.ravel().tolist() == values
    for text in (f"[{most + 1}, 1]", f"[1, {least - 1}]", f"[[1], [{most + 1}]]", "[1.0, 2]", "[1, 2.5]", "[true, 2]",
                 "[1, null]", '["1", 2]', "[NaN, 1]", "[1, -Infinity]", "[1e400, 1]", f"[{10**40}, 1]"):  # fmt: skip
        with pytest.raises(InputError, match=f"item 1, input x has values that {datatype} cannot hold"):
            one_input(tmp_path, datatype, text, shape=(-1, 2) if "[[" not in text else (-1, 2, 1))


@pytest.mark.parametrize("datatype", LARGEST)
def test_floats_never_overflow_and_infinity_is_only_what_was_written(tmp_path: Path, datatype: str) -> None:
    most = LARGEST[datatype]
    assert one_input(tmp_path, datatype, f"[{most!r}, {-most!r}, 3]").take("x", (0,)).tolist() == [[most, -most, 3]]
    special = one_input(tmp_path, datatype, "[Infinity, -Infinity, NaN]").take("x", (0,))
    np.testing.assert_array_equal(special, [[np.inf, -np.inf, np.nan]])
    beyond = {"FP16": "65520", "FP32": "3.5e38", "FP64": "1e400"}[datatype]
    for text in (f"[{beyond}, 2]", f"[1, -{beyond}]", f"[{10**400}, 1]", "[1e400, 1]", "[true, 1]", '["1", 1]'):
        with pytest.raises(InputError, match=f"has values that {datatype} cannot hold"):
            one_input(tmp_path, datatype, text)


@pytest.mark.parametrize("text", ["[[1, 2], [3, 4, 5], [6]]", "[[1], 2]", '{"content": [[1, 2], [3], [4]]}'])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_lists_of_different_lengths_are_no_tensor(tmp_path: Path, datatype: str, text: str) -> None:
    """Also where they hold as many values as the shape needs."""
    if datatype == "BYTES":
        text = re.sub(r"(\d)", r'"\1"', text)
    with pytest.raises(InputError, match="item 1, input x: its lists have different lengths"):
        one_input(tmp_path, datatype, text, shape=(-1, -1, 2) if "3" in text else (-1, -1, 1))


def test_booleans_are_true_false_1_and_0(tmp_path: Path) -> None:
    assert one_input(tmp_path, "BOOL", "[true, 0, 1, false]").take("x", (0,)).tolist() == [[True, False, True, False]]
    for text in ("[2]", "[-1]", "[1.0]", '["true"]', "[null]", '{"b64": "Ag=="}'):
        with pytest.raises(InputError, match="has values that BOOL cannot hold"):
            one_input(tmp_path, "BOOL", text)
    np.savez(tmp_path / "x.npz", x=np.array([[2]], "u1").view("?"))
    signature = Signature("m", (TensorSignature("x", "BOOL", (-1, 1)),), ())
    with pytest.raises(InputError, match="has values that BOOL cannot hold"):
        write_given(tmp_path / "x.npz", signature, tmp_path / "samples", "tensors")


@pytest.mark.parametrize("datatype", [*INTEGERS, *LARGEST, "BOOL", "BYTES"])
def test_an_item_of_no_values_is_one(tmp_path: Path, datatype: str) -> None:
    for text in ("[]", '{"b64": ""}', '{"content": [], "shape": [0]}'):
        assert one_input(tmp_path, datatype, text).take("x", (0,)).shape == (1, 0)


def test_an_input_of_a_datatype_without_samples_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 3), "f4"))
    signature = Signature("m", (TensorSignature("x", "BF16", (-1, 3)),), ())
    for act in (
        lambda: one_input(tmp_path, "BF16", "[1, 2]"),
        lambda: one_input(tmp_path, "BF16", '{"b64": "AAA="}'),
        lambda: write_given(tmp_path / "x.npz", signature, tmp_path / "samples", "tensors"),
        lambda: write_synthetic(signature, tmp_path / "random", "tensors", 0),
    ):
        with pytest.raises(
            InputError, match=r"input x is BF16, which abserve cannot send; it sends inputs of BOOL, .*: cast one of"
        ):
            act()


def test_json_that_nests_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is not JSON: its lists are nested too deeply"):
        one_input(tmp_path, "FP32", "[" * 100_000)


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


BESIDE = (".DS_Store", "._ids", "Thumbs.db", "README.md", "y", "validation")
"""A hidden file, other systems' files, an expected output of perf_analyzer's layout; the last is a folder."""


def test_what_lies_beside_raw_files_is_passed_over_and_noted(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    (folder / "validation").mkdir(parents=True)
    for name, content in {"ids": b"\4" + bytes(7), "scale": bytes(8), "word": b"one\n"}.items():
        (folder / name).write_bytes(content)
    for name in BESIDE[:-1]:
        (folder / name).write_bytes(b"\0\1")
    inputs = given(folder, None, tmp_path)
    same(inputs, 0, [4], [0, 0], b"one")
    source = str(inputs.about["source"])
    assert source.startswith("raw (")
    assert all(name in source for name in BESIDE)
    (folder / "scale").unlink()
    with pytest.raises(InputError, match="the folder has no input scale"):
        given(folder, None, tmp_path)


@pytest.mark.parametrize("beside", [*BESIDE[:-1], "._a.jpg"])
def test_a_folder_of_pictures_may_hold_other_files(tmp_path: Path, beside: str) -> None:
    for name in ("a.jpg", "b.JPEG", beside):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "raw").mkdir()
    assert kind_of(tmp_path) == "images"
    assert image_folder(str(tmp_path)) == tmp_path


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


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str) -> None:
    content = json.dumps(ITEM if name.endswith("l") else {"data": [ITEM]})
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    write_given(tmp_path / name, SIGNATURE, tmp_path / "samples", "tensors")
    same(read_inputs(tmp_path / "samples", "tensors"), 0, [5, 6, 7], [0.5, 2], "höher".encode())
