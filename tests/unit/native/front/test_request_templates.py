"""A kept header means what decoding it again would mean, and what may not be kept is not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.engines.padding import Padding
from servers.native.front.templates import INLINE_READ_BYTES, TemplateCache
from servers.protocol.codec import decode_request, encode_response
from servers.protocol.errors import InvalidRequestError, NotFoundError
from servers.protocol.records import InferResponse, ModelSignature, OutputTensor, RegionReference, RegionWindow
from servers.protocol.tensors import Array, Axis, TensorSpec

SIGNATURE = ModelSignature(
    "m",
    "1",
    (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("n", "UINT8", (-1, -1))),
    (TensorSpec("y", "FP32", (-1, 2)), TensorSpec("z", "INT64", (-1,))),
    max_batch_size=8,
)


class Memory:
    """A region of the system, or of a GPU, as an array."""

    def __init__(self, name: str, size: int, *, on_device: bool = False) -> None:
        self.name, self.byte_size, self.on_device = name, size, on_device
        self.content = np.zeros(size, np.uint8)

    def check(self) -> None: ...

    def read(self, offset: int, destination: Array) -> None:
        assert not self.on_device
        destination[...] = self.content[offset : offset + destination.nbytes]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        assert not self.on_device
        self.content[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


class Memories(dict[str, Memory]):
    """What is registered."""

    def add(self, *memories: Memory) -> None:
        self.update({memory.name: memory for memory in memories})

    def find(self, reference: RegionReference) -> RegionWindow:
        if reference.region not in self:
            raise NotFoundError(reference.region)
        memory = self[reference.region]
        return RegionWindow(None if memory.on_device else memory, reference, lambda size: np.empty(size, np.uint8))


NOTHING = Memories().find


def shared(region: str, size: int, offset: int = 0) -> dict[str, dict[str, object]]:
    names = {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}
    return {"parameters": names}


def request(rows: int = 2, width: int = 3, **changes: object) -> tuple[bytes, bytes]:
    x = np.arange(rows * 4, dtype="<f4")
    n = np.arange(rows * width, dtype=np.uint8)
    document = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [rows, 4], "parameters": {"binary_data_size": x.nbytes}},
            {"name": "n", "datatype": "UINT8", "shape": [rows, width], "parameters": {"binary_data_size": n.nbytes}},
        ],
        "parameters": {"binary_data_output": True},
        **changes,
    }
    return json.dumps(document).encode(), x.tobytes() + n.tobytes()


@given(st.integers(1, 8), st.integers(1, 5), st.sampled_from(["", "seven"]))
def test_a_template_gives_what_decoding_gives(rows: int, width: int, request_id: str) -> None:
    header, data = request(rows, width, id=request_id)
    body = memoryview(header + data)
    decoded = decode_request(body, len(header), SIGNATURE)
    templates = TemplateCache(SIGNATURE)
    assert templates.find(header, body.nbytes) is None
    kept = templates.keep(header, decoded, body.nbytes)
    assert kept is not None
    assert templates.find(header, body.nbytes) == kept
    assert templates.find(header, body.nbytes + 1) is None
    template, request_id_sent, offset = kept
    checked_rows, checked = SIGNATURE.validate(decoded)
    arrays = template.queued(body, offset, NOTHING, None, None).inputs
    assert template.rows == checked_rows
    assert list(arrays) == list(checked)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, checked[name])
        assert array.dtype == checked[name].dtype
        assert np.shares_memory(array, np.frombuffer(body, np.uint8))  # a view, not a copy
    for count in (rows, 1):  # the second is another shape of the same template
        outputs = {"y": np.full((count, 2), 2.5, "<f4"), "z": np.arange(count, dtype="<i8")}
        answer = template.answer(outputs, {}, SIGNATURE, b"date: today\r\n", request_id_sent)
        tensors = tuple(OutputTensor(spec.name, spec.datatype, outputs[spec.name], True) for spec in SIGNATURE.outputs)
        content, json_bytes = encode_response(InferResponse("m", "1", request_id, tensors))
        head, _, body_sent = answer.partition(b"\r\n\r\n")
        assert body_sent == content
        assert head.split(b"\r\n") == [
            b"HTTP/1.1 200 OK",
            b"date: today",
            b"content-type: application/octet-stream",
            b"inference-header-content-length: %d" % (json_bytes or 0),
            b"content-length: %d" % len(content),
        ]


@pytest.mark.parametrize("on_device", [False, True])
def test_tensors_in_shared_memory_are_those_of_the_moment(on_device: bool) -> None:
    memories = Memories()
    memories.add(Memory("in", 100, on_device=on_device), Memory("out", 50, on_device=on_device))
    document = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 4], **shared("in", 16, 8)},
            {"name": "n", "datatype": "UINT8", "shape": [1, 2], "parameters": {"binary_data_size": 2}},
        ],
        "outputs": [{"name": "z", "parameters": {"binary_data": True}}, {"name": "y", **shared("out", 8, 16)}],
    }
    header = json.dumps(document).encode()
    templates = TemplateCache(SIGNATURE)
    body = memoryview(header + b"ab")
    kept = templates.keep(header, decode_request(body, len(header), SIGNATURE, memories.find), body.nbytes)
    assert kept is not None
    template, _, offset = kept
    for value in (3.0, 4.0):
        memories["in"].content[8:24] = np.full(4, value, "<f4").view(np.uint8)
        queued = template.queued(memoryview(header + b"cd"), offset, memories.find, None, None)
        targets = template.targets(queued, memories.find)
        assert queued.inputs["n"].tolist() == [[99, 100]]
        assert queued.inputs["x"].shape == (1, 4)
        if on_device:
            assert (queued.device_inputs, queued.device_outputs) == ({"x": ("in", 8, 16)}, {"y": ("out", 16, 8)})
        else:
            assert queued.inputs["x"].tolist() == [[value] * 4]
            assert not queued.device_inputs
            assert not queued.device_outputs
        outputs = {"y": np.full((1, 2), value, "<f4"), "z": np.array([7])}
        answer = template.answer(outputs, targets, SIGNATURE, b"", b"")
        tensors = (
            OutputTensor("z", "INT64", outputs["z"], True),
            OutputTensor("y", "FP32", outputs["y"], True, RegionReference("out", 8, 16)),
        )
        assert answer.partition(b"\r\n\r\n")[2] == encode_response(InferResponse("m", "1", "", tensors))[0]
        if not on_device:
            assert memories["out"].content[16:24].view("<f4").tolist() == [value] * 2
    memories.add(Memory("in", 100, on_device=not on_device))  # of the other kind now
    assert bool(template.queued(body, offset, memories.find, None, None).device_inputs) is not on_device
    del memories["in"]
    with pytest.raises(NotFoundError):
        template.queued(body, offset, memories.find, None, None)


def test_an_answer_without_data_is_json() -> None:
    memories = Memories()
    memories.add(Memory("in", 18), Memory("out", 16))
    document = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 4], **shared("in", 16)},
            {"name": "n", "datatype": "UINT8", "shape": [1, 2], **shared("in", 2, 16)},
        ],
        "outputs": [{"name": "y", **shared("out", 8)}, {"name": "z", **shared("out", 8, 8)}],
    }
    body = memoryview(json.dumps(document).encode())
    request_ = decode_request(body, None, SIGNATURE, memories.find)
    kept = TemplateCache(SIGNATURE).keep(bytes(body), request_, body.nbytes)
    assert kept is not None
    template, _, offset = kept
    queued = template.queued(body, offset, memories.find, None, None)
    outputs = {"y": np.ones((1, 2), "<f4"), "z": np.array([7])}
    targets = template.targets(queued, memories.find)
    head, _, content = template.answer(outputs, targets, SIGNATURE, b"", b"").partition(b"\r\n\r\n")
    assert b"content-type: application/json\r\n" in head
    assert b"inference-header" not in head
    assert [output["name"] for output in json.loads(content)["outputs"]] == ["y", "z"]
    assert memories["out"].content.tobytes() == outputs["y"].tobytes() + outputs["z"].tobytes()


def test_what_several_threads_read_is_not_kept() -> None:
    signature = ModelSignature("m", "1", (TensorSpec("n", "UINT8", (-1, -1)),), SIGNATURE.outputs, max_batch_size=8)
    memories = Memories()
    for size, on_device, kept in ((INLINE_READ_BYTES, False, True), (INLINE_READ_BYTES + 1, False, False),
                                  (INLINE_READ_BYTES + 1, True, True)):  # fmt: skip
        memories.add(Memory("in", size, on_device=on_device))
        item = {"name": "n", "datatype": "UINT8", "shape": [1, size], **shared("in", size)}
        document = {"inputs": [item], "parameters": {"binary_data_output": True}}
        body = memoryview(json.dumps(document).encode())
        request_ = decode_request(body, None, signature, memories.find)
        assert (TemplateCache(signature).keep(bytes(body), request_, body.nbytes) is not None) is kept


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": {"binary_data_output": True, "timeout": 5}},
        {"parameters": {}},
        {"outputs": [{"name": "y"}], "parameters": {}},
        {
            "outputs": [
                {"name": "y", "parameters": {"binary_data": True}},
                {"name": "z", "parameters": {"binary_data": False}},
            ]
        },
        {"id": "i" * 5000},
    ],
)
def test_what_has_to_be_decoded_each_time_is_not_kept(changes: dict[str, Any]) -> None:
    header, data = request(**changes)
    body = memoryview(header + data)
    if len(header) > 5000:  # the id itself is too long for the protocol
        with pytest.raises(InvalidRequestError):
            decode_request(body, len(header), SIGNATURE)
        return
    templates = TemplateCache(SIGNATURE)
    assert templates.keep(header, decode_request(body, len(header), SIGNATURE), body.nbytes) is None
    assert templates.find(header, body.nbytes) is None


def test_requests_that_can_be_padded_to_one_size_share_a_key() -> None:
    padding = Padding(Axis("width", 2, 9, {"n": 1}, {"n": 0}), (4, 8))
    keys = []
    for width in (2, 8, 9):
        header, data = request(width=width)
        body = memoryview(header + data)
        kept = TemplateCache(SIGNATURE, padding).keep(header, decode_request(body, len(header), SIGNATURE), body.nbytes)
        assert kept is not None
        keys.append(kept[0].key)
    assert keys[0] == keys[1] != keys[2]


def test_values_in_the_header_are_not_kept() -> None:
    document = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]},
            {"name": "n", "datatype": "UINT8", "shape": [1, 2], "parameters": {"binary_data_size": 2}},
        ],
        "parameters": {"binary_data_output": True},
    }
    header = json.dumps(document).encode()
    body = memoryview(header + b"ab")
    templates = TemplateCache(SIGNATURE)
    assert templates.keep(header, decode_request(body, len(header), SIGNATURE), body.nbytes) is None


def test_a_request_that_does_not_fit_the_model_is_refused_and_not_kept() -> None:
    header, data = request(rows=9)
    body = memoryview(header + data)
    templates = TemplateCache(SIGNATURE)
    with pytest.raises(InvalidRequestError, match="batch-size"):
        templates.keep(header, decode_request(body, len(header), SIGNATURE), body.nbytes)
    assert templates.find(header, body.nbytes) is None


def test_headers_that_differ_each_time_do_not_collect() -> None:
    templates = TemplateCache(SIGNATURE)
    for index in range(1000):
        header, data = request(parameters={"binary_data_output": True, "trace": str(index)})
        body = memoryview(header + data)
        assert templates.keep(header, decode_request(body, len(header), SIGNATURE), body.nbytes) is not None
    assert len(templates._templates) <= 256


def kept_id(templates: TemplateCache, header: bytes, data: bytes) -> tuple[bool, bytes]:
    """Whether the header is known, and the id of the response to it, which is the one that decoding gives."""
    body = memoryview(header + data)
    decoded = decode_request(body, len(header), SIGNATURE)
    repeated = templates.find(header, body.nbytes)
    known = repeated is not None
    if repeated is None:
        repeated = templates.keep(header, decoded, body.nbytes)
    assert repeated is not None
    template, request_id, offset = repeated
    queued = template.queued(body, offset, NOTHING, None, None)
    for tensor in decoded.inputs:
        np.testing.assert_array_equal(queued.inputs[tensor.name], tensor.data)
    outputs = {"y": np.ones((2, 2), "<f4"), "z": np.arange(2)}
    answer = template.answer(outputs, {}, SIGNATURE, b"", request_id)
    tensors = tuple(OutputTensor(spec.name, spec.datatype, outputs[spec.name], True) for spec in SIGNATURE.outputs)
    content, json_bytes = encode_response(InferResponse("m", "1", decoded.id, tensors))
    head, _, sent = answer.partition(b"\r\n\r\n")
    assert sent == content
    assert b"content-length: %d" % len(content) in head
    assert b"inference-header-content-length: %d\r\n" % (json_bytes or 0) in head
    return known, request_id


ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.integers().map(str) | st.uuids().map(str)


@given(st.lists(ids, min_size=1, max_size=8), st.sampled_from([None, (",", ":"), (" , ", "  :\t")]), st.booleans())
def test_a_request_s_id_is_its_own(given_ids: list[str], separators: tuple[str, str] | None, first: bool) -> None:
    templates = TemplateCache(SIGNATURE)
    for request_id in given_ids:
        header, data = request()
        document = json.loads(header)
        document = {"id": request_id, **document} if first else {**document, "id": request_id}
        for ascii_only in (True, False):
            kept_id(templates, json.dumps(document, separators=separators, ensure_ascii=ascii_only).encode(), data)


def test_ids_that_differ_each_time_are_known() -> None:
    templates = TemplateCache(SIGNATURE)
    known = []
    for index in range(1000):
        header, data = request(id=f"{index}-{index:x}")
        was_known, request_id = kept_id(templates, header, data)
        known.append(was_known)
        assert request_id == f"{index}-{index:x}".encode()
    assert known == [False] + [True] * 999
    assert len(templates._templates) == 1


@pytest.mark.parametrize(
    "texts",
    [
        ('{"id":"a",%s', '{"id":"b",%s'),
        ('{"id":"",%s', '{"id":"b",%s', '{"id":"",%s'),
        ('{"id":"b","id":"b",%s', '{"id":"a","id":"b",%s', '{"id":"c","id":"d",%s'),
        ('{"id":"b","\\u0069d":"b",%s', '{"id":"a","\\u0069d":"b",%s'),
        ('{"parameters":{"id":"a"},%s', '{"parameters":{"id":"b"},%s', '{"parameters":{"id":""},%s'),
        ('{"other":["id","a"],%s', '{"other":["id","b"],%s'),
        ('{"other":{"id":"a"},"id":"a",%s', '{"other":{"id":"b"},"id":"a",%s', '{"other":{"id":"b"},"id":"c",%s'),
        ('{"id":"\\"",%s', '{"id":"\\\\",%s', '{"id":"a",%s', '{"id":"é",%s'),
        ('{"id":"a/b",%s', '{"id":"~ !",%s'),
    ],
)
def test_what_looks_like_an_id_is_none(texts: tuple[str, ...]) -> None:
    header, data = request()
    document = json.loads(header)
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in "yz"]
    rest = json.dumps({"inputs": document["inputs"], "outputs": outputs})[1:].encode()
    templates = TemplateCache(SIGNATURE)
    for _ in range(2):
        for text in texts:
            kept_id(templates, text.replace("%s", "").encode() + rest, data)
