"""A user's ONNX file with all that belongs to it: weights in other files, and types that the protocol does not have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from servers.engines.batches import random_inputs
from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.export.artefacts import users_manifest
from servers.models.files import load_onnx, onnx_parts, place_parts
from servers.models.items import valid_items
from servers.models.samples import write_samples
from servers.models.sources import onnx_file
from servers.models.specification import UnknownModelError
from servers.models.weights import CheckpointWeights, WeightsError, parse_weights, pin, verify

PLACES = ("initializer", "constant", "subgraph", "function", "sparse")


def external(name: str, location: str) -> Any:
    tensor = numpy_helper.from_array(np.ones((3, 3), "f4"), name)
    onnx.external_data_helper.set_external_data(tensor, location, 0, 36)
    tensor.ClearField("raw_data")
    return tensor


def write(path: Path, locations: dict[str, str]) -> None:
    """A model with one external tensor at each place; the data files hold 36 bytes."""
    made = {place: external("w", location) for place, location in locations.items()}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:]))
    graph = model.graph
    if "initializer" in made:
        graph.initializer.append(made["initializer"])
    if "constant" in made:
        graph.node.append(helper.make_node("Constant", [], ["c"], value=made["constant"]))
    if "subgraph" in made:
        inner = helper.make_graph([], "inner", [], [], [made["subgraph"]])
        graph.node.append(helper.make_node("If", ["flag"], ["chosen"], then_branch=inner, else_branch=inner))
    if "function" in made:
        body = [helper.make_node("Constant", [], ["o"], value=made["function"])]
        model.functions.append(helper.make_function("own", "F", [], ["o"], body, [helper.make_opsetid("", 17)]))
    if "sparse" in made:
        sparse = onnx.SparseTensorProto(values=made["sparse"], dims=[9])
        graph.sparse_initializer.append(sparse)
    path.write_bytes(model.SerializeToString())
    for location in locations.values():
        data = path.parent / location
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_bytes(np.ones(9, "f4").tobytes())


def hashes(path: Path) -> tuple[str | None, str | None, str]:
    specification = onnx_file.specify(str(path))
    assert specification is not None
    pinned = pin(CheckpointWeights(path), None)
    assert isinstance(pinned, CheckpointWeights)
    return specification.definition_sha256, pinned.sha256, users_manifest(specification, pinned, path).sha256


@pytest.mark.parametrize("place", PLACES)
def test_new_weights_beside_an_unchanged_graph_are_another_model(tmp_path: Path, place: str) -> None:
    path = tmp_path / "m.onnx"
    write(path, {place: "weights/part 1.data"})
    before = hashes(path)
    assert len(set(before)) == 1
    (tmp_path / "weights/part 1.data").write_bytes(np.full(9, 2, "f4").tobytes())
    after = hashes(path)
    assert len(set(after)) == 1
    assert after != before
    with pytest.raises(WeightsError, match="but the pin requires"):
        verify(path, path.name, before[1])
    verify(path, path.name, after[1])


def test_each_of_several_files_counts(tmp_path: Path) -> None:
    path, files = tmp_path / "m.onnx", {place: f"{place}/größe.bin" for place in PLACES}
    write(path, files)
    seen = {hashes(path)}
    for location in files.values():
        (tmp_path / location).write_bytes(bytes(36))
        seen.add(hashes(path))
    assert len(seen) == len(files) + 1


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, {"initializer": "m.onnx.data"})
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(UnknownModelError, match=r"m.onnx: its weights are in the file m.onnx.data, which cannot be re"):
        onnx_file.specify(str(path))
    with pytest.raises(WeightsError, match=r"cannot read the file m.onnx.data with its weights"):
        pin(CheckpointWeights(path), None)


FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
MAPS = helper.make_map_type_proto(TensorProto.INT64, FLOATS)
SEQUENCE = helper.make_sequence_type_proto(FLOATS)
TYPES = {
    "a sequence of maps": (helper.make_sequence_type_proto(MAPS), "zipmap=False"),
    "a map": (MAPS, "zipmap=False"),
    "a sequence of tensors": (SEQUENCE, "ConcatFromSequence"),
    "a sequence of sequences": (helper.make_sequence_type_proto(SEQUENCE), "ConcatFromSequence"),
    "an optional tensor of FLOAT": (helper.make_optional_type_proto(FLOATS), "always present or without it"),
    "an optional sequence of tensors": (helper.make_optional_type_proto(SEQUENCE), "always present or without it"),
    "a sparse tensor of FLOAT": (helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [None, 3]), "dense tensor"),
    "a tensor of COMPLEX64": (helper.make_tensor_type_proto(TensorProto.COMPLEX64, [None, 3]), "add a Cast"),
    "a tensor of FLOAT8E4M3FN": (helper.make_tensor_type_proto(TensorProto.FLOAT8E4M3FN, [None, 3]), "add a Cast"),
}


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("words", TYPES)
def test_a_type_that_the_protocol_lacks_is_named_with_the_remedy(tmp_path: Path, words: str, side: str) -> None:
    kind, remedy = TYPES[words]
    good, odd = helper.make_tensor_value_info("good", TensorProto.FLOAT, ["n", 3]), helper.make_value_info("odd", kind)
    sides = ([good, odd], [good]) if side == "input" else ([good], [good, odd])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(helper.make_graph([], "g", *sides)).SerializeToString())
    with pytest.raises(UnknownModelError) as refused:
        onnx_file.specify(str(tmp_path / "m.onnx"))
    assert f"m.onnx: odd is {words}, which the protocol does not have; " in str(refused.value)
    assert remedy in str(refused.value)


def linked(tmp_path: Path, layout: str) -> Path:
    """A product of x with external weights, as a link named model.onnx: in Hugging Face's cache, beside weights that
    are no link, to a file with its weights beside it, and through a link to the folder."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots/1"
    for place in (blobs, folder):
        place.mkdir(parents=True)
    weights = numpy_helper.from_array(np.arange(9, dtype="f4").reshape(3, 3), "w")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, blobs / "aaaa", save_as_external_data=True, location="ext.data", size_threshold=0)
    (folder / "model.onnx").symlink_to("../../blobs/aaaa")
    if layout == "hub":
        (folder / "ext.data").symlink_to((blobs / "ext.data").rename(blobs / "bbbb"))
    elif layout == "beside the link":
        (blobs / "ext.data").rename(folder / "ext.data")
    elif layout == "folder":
        (tmp_path / "latest").symlink_to("blobs")
        (blobs / "aaaa").rename(blobs / "model.onnx")
        return tmp_path / "latest/model.onnx"
    return folder / "model.onnx"


@pytest.mark.parametrize("layout", ["hub", "beside the link", "beside the file", "folder"])
@pytest.mark.parametrize("relative", [True, False])
def test_a_model_behind_links_is_loaded_under_its_own_name(
    tmp_path: Path, layout: str, relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = linked(tmp_path, layout)
    monkeypatch.chdir(path.parent)
    specification = onnx_file.specify(os.path.relpath(path, Path.cwd()) if relative else str(path))
    assert specification is not None
    assert (specification.title, specification.name) == ("model.onnx", "model")
    weights = pin(parse_weights(str(path)), None)
    assert isinstance(weights, CheckpointWeights)
    assert specification.file is not None
    assert users_manifest(specification, weights, specification.file).sha256 == weights.sha256
    engine = build_engine(specification, weights, EngineSettings("onnxruntime", device="cpu", threads=1), path)
    engine.load()
    x = np.ones((2, 3), "f4")
    np.testing.assert_array_equal(engine.infer({"x": x})["y"], x @ np.arange(9, dtype="f4").reshape(3, 3))
    engine.close()
    assert load_onnx(path).graph.initializer[0].raw_data == np.arange(9, dtype="f4").tobytes()
    placed = tmp_path / "repository/1"
    place_parts(onnx_parts(path), placed, "served.onnx")
    session = ort.InferenceSession(placed / "served.onnx")
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x @ np.arange(9, dtype="f4").reshape(3, 3))


def test_integers_are_a_texts_where_the_file_or_their_name_says_so(tmp_path: Path) -> None:
    """Ids are places in a table of weights, perhaps cast; masks and types have the names that exporters give them."""
    names = ("input_ids", "decoder_input_ids", "attention_mask", "token_type_ids", "position_ids", "scores")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in names]
    inputs.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]))
    tables = [numpy_helper.from_array(np.ones((rows, 2), "f4"), f"table{rows}") for rows in (3000, 50)]
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["cast"], to=TensorProto.INT32),
        helper.make_node("Gather", ["table3000", "cast"], ["y"]),
        helper.make_node("Gather", ["table50", "decoder_input_ids"], ["z"]),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "length", 2]) for name in "yz"]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, tables)), tmp_path / "text.onnx")
    specification = onnx_file.specify(str(tmp_path / "text.onnx"))
    assert specification is not None
    for made in (valid_items(specification, 0, [9] * 8), random_inputs(specification, 8, 0, {"length": 9})):
        assert 1000 <= made["input_ids"].min() < made["input_ids"].max() < 3000
        assert 25 <= made["decoder_input_ids"].min() < made["decoder_input_ids"].max() < 50
        assert (made["attention_mask"].min(), made["token_type_ids"].max()) == (1, 0)
        assert made["position_ids"].tolist() == [list(range(9))] * 8
        assert set(made["scores"].ravel().tolist()) == {0, 1}
        assert all(made[name].dtype == np.int64 for name in names)
    write_samples(specification, tmp_path / "samples")
    assert json.loads((tmp_path / "samples/samples.json").read_bytes())["kind"] == "random values, 0 or 1 for scores"
