"""A message that came before with other values is known by its other bytes, and answered as one that is decoded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from servers.models.specification import ModelSpecification
from servers.native.engine.process import EngineSide
from servers.native.front.inference import InferenceService
from servers.native.front.region_table import RegionTable
from servers.native.grpc.messages import MessageTemplates, decode_message, id_field, parse_message
from servers.native.local_link import LocalLink
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.protocol.tensors import TensorSpec

SETTINGS = NativeSettings()
MEMORY = RequestMemory.alone(SETTINGS)
LINK = LocalLink(EngineSide(SETTINGS, [], [], MEMORY.arena))
FIND = RegionTable(SETTINGS, MEMORY, LINK).find
SPECIFICATION = ModelSpecification(
    name="two",
    title="two",
    version="1",
    inputs=(TensorSpec("a", "FP32", (-1, -1)), TensorSpec("b", "UINT8", (-1, 3))),
    outputs=(TensorSpec("y", "FP32", (-1, -1)), TensorSpec("z", "INT64", (-1, 1))),
    max_batch_size=8,
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
)
SERVICE = InferenceService(0, SPECIFICATION, SETTINGS, LINK, MEMORY, Statistics(SETTINGS.max_batch_size))


def message(rows: int, value: float, **changes) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="two", **changes)
    request.inputs.add(name="a", datatype="FP32", shape=[rows, 4])
    request.inputs.add(name="b", datatype="UINT8", shape=[rows, 3])
    request.raw_input_contents.append(np.full((rows, 4), value, "<f4").tobytes())
    request.raw_input_contents.append(np.full((rows, 3), value, np.uint8).tobytes())
    return request


def keep(templates: MessageTemplates, request: service_pb2.ModelInferRequest) -> memoryview:
    content = memoryview(request.SerializeToString())
    parsed = parse_message(content)
    templates.keep(content, parsed[1], decode_message(parsed, FIND), SERVICE)
    return content


def test_a_message_with_other_values_is_found_and_its_tensors_are_its_own() -> None:
    templates = MessageTemplates()
    keep(templates, message(2, 1))
    content = memoryview(message(2, 7).SerializeToString())
    repeated = templates.find(content)
    assert repeated is not None
    template, _, offset = repeated
    assert (template.rows, template.service) == (2, SERVICE)
    arrays = template.queued(content, offset, FIND, None, None).inputs
    assert arrays["a"].tolist() == [[7.0] * 4] * 2
    assert arrays["b"].tolist() == [[7] * 3] * 2
    assert np.shares_memory(arrays["b"], np.frombuffer(content, np.uint8))


@pytest.mark.parametrize("other", [message(3, 1), message(2, 1, model_version="1")])
def test_a_message_with_other_bytes_around_its_tensors_is_not_found(other) -> None:
    templates = MessageTemplates()
    keep(templates, message(2, 1))
    assert templates.find(memoryview(other.SerializeToString())) is None


def test_messages_of_one_size_are_kept_apart() -> None:
    templates = MessageTemplates()
    for version in ("", "1"):
        keep(templates, message(2, 1, model_version=version, id="x" * (4 - 3 * len(version))))
    other = memoryview(message(2, 3, model_version="1", id="y").SerializeToString())
    repeated = templates.find(other)
    assert repeated is not None
    template, _, offset = repeated
    assert template.queued(other, offset, FIND, None, None).inputs["b"].tolist() == [[3] * 3] * 2


def answered(templates: MessageTemplates, content: memoryview, *, streamed: bool) -> str | None:
    """The id of the response to a known message with its own values; None to one that is not known."""
    repeated = templates.find(content)
    if repeated is None:
        return None
    template, request_id, offset = repeated
    arrays = template.queued(content, offset, FIND, None, None).inputs
    request = decode_message(parse_message(content), FIND)
    for tensor in request.inputs:
        np.testing.assert_array_equal(arrays[tensor.name], tensor.data)
    outputs = {"y": np.ones((2, 1), "<f4"), "z": np.ones((2, 1), "<i8")}
    answer = b"".join(template.answer(outputs, {}, request_id, streamed=streamed))
    assert int.from_bytes(answer[1:5], "big") == len(answer) - 5
    if streamed:
        response = service_pb2.ModelStreamInferResponse.FromString(answer[5:]).infer_response
        assert response.parameters["triton_final_response"].bool_param
    else:
        response = service_pb2.ModelInferResponse.FromString(answer[5:])
    assert (response.model_name, response.model_version) == ("two", "1")
    assert list(response.raw_output_contents) == [outputs["y"].tobytes(), outputs["z"].tobytes()]
    assert response.id == request.id
    return str(response.id)


@given(
    st.lists(st.text(max_size=20) | st.integers().map(str) | st.just("x" * 126) | st.just("x" * 200), min_size=1),
    st.booleans(),
)
def test_a_message_s_id_is_its_own(ids: list[str], streamed: bool) -> None:
    templates = MessageTemplates()
    for request_id in ids:
        content = memoryview(message(2, len(request_id), id=request_id).SerializeToString())
        assert answered(templates, content, streamed=streamed) in (None, request_id)
        keep(templates, message(2, 1, id=request_id))
        assert answered(templates, content, streamed=streamed) == request_id


@pytest.mark.parametrize("streamed", [False, True])
def test_ids_that_differ_each_time_are_known(streamed: bool) -> None:
    templates = MessageTemplates()
    keep(templates, message(2, 1, id="first"))
    for number in (*range(300), 2**62, f"{7:032x}"):
        content = memoryview(message(2, 5, id=str(number), model_version="").SerializeToString())
        assert answered(templates, content, streamed=streamed) == str(number)
        assert templates.tensor_offset(len(content)) == bytes(content).index(np.full((2, 4), 5, "<f4").tobytes())
    assert templates._count == 1


def test_of_several_ids_the_last_one_counts() -> None:
    templates = MessageTemplates()
    once = message(2, 1, id="b").SerializeToString()
    first = id_field(memoryview(once))
    twice = memoryview(once[: first[0]] + b"\x1a\x01a" + once[first[0] :])
    assert service_pb2.ModelInferRequest.FromString(bytes(twice)).id == "b"
    for _ in range(2):
        for content in (twice, memoryview(once)):
            parsed = parse_message(content)
            templates.keep(content, parsed[1], decode_message(parsed, FIND), SERVICE)
            for streamed in (False, True):
                assert answered(templates, content, streamed=streamed) == "b"
    other = memoryview(bytes(twice).replace(b"\x1a\x01a", b"\x1a\x01c"))
    assert answered(templates, other, streamed=False) in (None, "b")


def never_kept() -> list[service_pb2.ModelInferRequest]:
    timeout = message(1, 1)
    timeout.parameters["timeout"].int64_param = 10
    typed = message(1, 1)
    del typed.raw_input_contents[:]
    typed.inputs[0].contents.fp32_contents[:] = [1] * 4
    typed.inputs[1].contents.uint_contents[:] = [1] * 3
    long = message(1, 1)
    long.parameters["padding"].string_param = "x" * 5000
    return [timeout, typed, long]


@pytest.mark.parametrize("request_", never_kept(), ids=["timeout", "typed", "long"])
def test_what_its_other_bytes_do_not_say_is_never_kept(request_) -> None:
    templates = MessageTemplates()
    assert templates.find(keep(templates, request_)) is None


@pytest.mark.parametrize("streamed", [False, True])
def test_the_answer_is_a_whole_message_with_its_prefix(streamed) -> None:
    templates = MessageTemplates()
    repeated = templates.find(keep(templates, message(2, 1, id="seven")))
    assert repeated is not None
    template, request_id, _ = repeated
    for width in (3, 3, 50_000, 0):
        y, z = np.arange(2 * width, dtype="<f4").reshape(2, width), np.array([[5], [6]], "<i8")
        answer = b"".join(template.answer({"y": y, "z": z}, {}, request_id, streamed=streamed))
        assert answer[0] == 0
        assert int.from_bytes(answer[1:5], "big") == len(answer) - 5
        if streamed:
            response = service_pb2.ModelStreamInferResponse.FromString(answer[5:]).infer_response
            assert response.parameters["triton_final_response"].bool_param
        else:
            response = service_pb2.ModelInferResponse.FromString(answer[5:])
        assert (response.model_name, response.id) == ("two", "seven")
        assert [(output.name, output.shape) for output in response.outputs] == [("y", [2, width]), ("z", [2, 1])]
        assert list(response.raw_output_contents) == [y.tobytes(), z.tobytes()]


def test_messages_that_differ_each_time_do_not_accumulate() -> None:
    templates = MessageTemplates()
    contents = [keep(templates, message(1, 1, id="é" + str(number))) for number in range(1000, 2000)]
    assert sum(templates.find(content) is not None for content in contents) <= 256
    assert templates.find(contents[-1]) is not None


@given(
    st.binary(max_size=400) | st.lists(st.sampled_from([b"\x0a", b"\x12", b"\x1a", b"\x00", b"\x01a"])).map(b"".join)
)
def test_any_bytes_have_an_id_or_none(content: bytes) -> None:
    start, end = id_field(memoryview(content))
    assert 0 <= start <= end <= len(content)
    assert (start, end) == (0, 0) or content[start : start + 2] == bytes([0x1A, end - start - 2])
    assert MessageTemplates().find(memoryview(content)) is None
