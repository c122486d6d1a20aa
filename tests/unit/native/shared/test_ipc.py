"""What crosses between a front end and the engine's process arrives as it was sent, however the stream is cut."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from servers.native.front.engine_link import EngineClient
from servers.native.shared.errors import INTERNAL_ERROR, REFUSALS, RefusedError, failure_reason
from servers.native.shared.interface import CheckCuda, CloseRegions, ControlModel, OpenRegion, QueuedRequest
from servers.native.shared.ipc import (
    INLINE_BYTES,
    MAX_FORMS,
    Cancel,
    Control,
    Done,
    Form,
    Message,
    ReceivedForm,
    SentForms,
    Submit,
    UnusableMessage,
    divided,
    done_message,
    encode,
    error_of,
    failure_of,
    outputs_of,
    read_frames,
    submit_message,
)
from servers.native.shared.memory import Arena, ByteBudget, RequestMemory
from servers.protocol import errors as protocol_errors
from servers.protocol.errors import ContractError, InternalError, UnavailableError
from servers.protocol.records import ModelSignature
from servers.protocol.tensors import DATATYPES, Array, TensorSpec

HELD = 2**20
ARENA = Arena(1, HELD, HELD)
ERRORS = [
    *(
        kind("what a client is told: ü")
        for kind in vars(protocol_errors).values()
        if isinstance(kind, type) and issubclass(kind, ContractError) and kind is not ContractError
    ),
    *(RefusedError(reason, "what a client is told: ü") for reason in REFUSALS),
]


@pytest.fixture
def memory() -> RequestMemory:
    return RequestMemory(ARENA, ByteBudget(HELD))


def received(messages: Iterable[Message], cuts: Iterable[int] = ()) -> list[Message]:
    """The messages, each a frame of its own, after a stream that is cut at these bytes."""
    stream = b"".join(encode([message]) for message in messages)
    unread, messages_read = bytearray(), list[Message]()
    edges = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for start, end in itertools.pairwise(edges):
        read = read_frames(unread, stream[start:end])
        messages_read += [message for message in read if not isinstance(message, UnusableMessage)]
    return messages_read


@st.composite
def tensors(draw: st.DrawFn, memory: RequestMemory) -> Array:
    """Any datatype, empty ones and BYTES included; contiguous or not; in the arena or not."""
    shape = draw(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 12)))
    if draw(st.booleans()):
        elements = np.empty(shape[:2], object)
        for place in np.ndindex(shape[:2]):
            elements[place] = draw(st.binary(max_size=5))
        return elements
    dtype = draw(st.sampled_from(list(DATATYPES.values())))
    array = draw(arrays.arrays(dtype, shape, elements=arrays.from_dtype(dtype, allow_nan=False)))
    if draw(st.booleans()):
        array = memory.placed(array)
    return array[:, :: draw(st.sampled_from([1, 2, -1]))]


def same(got: Mapping[str, Array], sent: Mapping[str, Array]) -> None:
    assert list(got) == list(sent)
    for name, array in sent.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got[name], array)


def form_of(inputs: Mapping[str, Array]) -> ReceivedForm:
    """As the engine's side has it."""
    _, form = SentForms().number(0, inputs)
    assert form is not None
    return ReceivedForm(form, None)


def request(inputs: Mapping[str, Array]) -> QueuedRequest:
    return QueuedRequest(inputs, 1, (), None, None)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_array_survives_the_way_to_the_engine_and_back(data: st.DataObject) -> None:
    memory = RequestMemory(ARENA, ByteBudget(HELD))
    inputs = {f"x{number}": data.draw(tensors(memory)) for number in range(data.draw(st.integers(1, 3)))}
    outputs = {f"y{number}": data.draw(tensors(memory)) for number in range(data.draw(st.integers(0, 3)))}
    answer_bytes = data.draw(st.sampled_from([0, INLINE_BYTES + 1, 4 * INLINE_BYTES]))
    cuts = data.draw(st.lists(st.integers(0, 3000)))
    number, form = SentForms().number(2, inputs)
    assert form is not None
    sent, kept = submit_message(7, number, request(inputs), memory, answer_bytes)
    got_form, got = received([form, sent], cuts)
    assert isinstance(got_form, Form)
    assert isinstance(got, Submit)
    assert (got.numbers, got.form, got.rows) == ([7], number, 1)
    assert ReceivedForm(got_form, None).model == 2
    assert (got.room is not None) == (answer_bytes > INLINE_BYTES)
    at_engine = ReceivedForm(got_form, None).arrays(got.data[0], ARENA)
    same(at_engine, inputs)
    for array in at_engine.values():
        assert array.dtype.hasobject or not array.size or ARENA.offset_of(array) is not None

    executed = request(at_engine)
    executed.outputs = outputs
    (done,) = received([done_message(got.numbers, executed, ARENA, got.room)], cuts)
    assert isinstance(done, Done)
    assert done.numbers == [7]
    answer = outputs_of(done, ARENA, kept[-1] if got.room else None)
    same(answer, outputs)
    held = memory.budget.held
    del kept, sent
    same(answer, outputs)  # those in the room keep it
    assert memory.budget.held <= held


def test_inputs_in_the_arena_are_not_copied_and_others_once(memory: RequestMemory) -> None:
    inside = memory.allocate(400).view(np.float32)
    inside[:] = 0
    before = memory.budget.held
    inputs: dict[str, Array] = {"x": inside, "y": np.ones(3), "z": inside[::2]}
    sent, kept = submit_message(0, 0, request(inputs), memory, 0)
    assert kept[0] is inside
    assert memory.budget.held == before + 24 + 200
    at_engine = form_of(inputs).arrays(sent.data[0], ARENA)
    inside[0] = 5
    assert (at_engine["x"][0], at_engine["z"][0]) == (5, 0)


def test_a_large_answer_is_written_to_its_room_and_what_does_not_fit_is_in_the_message(memory: RequestMemory) -> None:
    rows = np.arange(20_000, dtype=np.float32)
    sent, kept = submit_message(0, 0, request({"x": rows}), memory, rows.nbytes)
    assert sent.room is not None
    executed = request({})
    executed.outputs = {"first": rows, "small": rows[:3], "second": rows + 1}
    done = done_message([0], executed, ARENA, sent.room)
    assert [type(tensor.data) for tensor in done.outputs] == [int, int, bytes]
    answer = outputs_of(done, ARENA, kept[-1])
    same(answer, executed.outputs)
    assert np.shares_memory(answer["first"], kept[-1])
    held = memory.budget.held
    del kept, answer
    assert memory.budget.held < held


def test_without_room_for_its_inputs_or_its_answer_a_request_is_refused_and_holds_nothing(
    memory: RequestMemory,
) -> None:
    for inputs, answer_bytes in (({"x": np.zeros(HELD + 1, np.uint8)}, 0), ({"x": np.zeros(8)}, HELD)):
        with pytest.raises(UnavailableError, match="memory for requests"):
            submit_message(0, 0, request(inputs), memory, answer_bytes)
        assert memory.budget.held == 0


def test_tensors_on_a_device_are_places_and_take_no_memory(memory: RequestMemory) -> None:
    placeholder = np.broadcast_to(np.zeros((), np.float16), (3, 1000))
    queued = request({"x": placeholder})
    queued.device_inputs, queued.device_outputs = {"x": ("r", 8, 6000)}, {"y": ("r", 0, 8)}
    sent, kept = submit_message(0, 0, queued, memory, 0)
    assert (kept, memory.budget.held) == ([], 0)
    (got,) = received([sent])
    assert isinstance(got, Submit)
    assert got.device_inputs is not None
    assert got.device_outputs is not None
    assert {name: tuple(place) for name, place in got.device_inputs.items()} == {"x": ("r", 8, 6000)}
    assert {name: tuple(place) for name, place in got.device_outputs.items()} == {"y": ("r", 0, 8)}
    same(form_of({"x": placeholder}).arrays(got.data[0], ARENA), {"x": placeholder})
    executed = request({})
    executed.outputs, executed.device_outputs = {"y": np.ones((1, 2), np.float32)}, {"y": ("r", 0, 8)}
    (done,) = received([done_message([0], executed, ARENA)])
    assert isinstance(done, Done)
    assert outputs_of(done, ARENA, None)["y"].shape == (1, 2)


names = st.text(max_size=10)
failures = st.none() | st.tuples(names, names)
numbers = st.integers(0, 2**63)
operations: st.SearchStrategy[Any] = st.one_of(
    st.builds(ControlModel, numbers, st.booleans()),
    st.builds(OpenRegion, names, numbers, numbers, names, st.none() | numbers, st.binary()),
    st.builds(CloseRegions, st.booleans(), st.lists(names).map(tuple)),
    st.just(CheckCuda()),
)


@given(
    st.lists(
        st.one_of(
            st.builds(Cancel, numbers),
            st.builds(Done, st.lists(numbers), st.just([]), failures),
            st.builds(Control, numbers, operations),
        ),
        max_size=10,
    ),
    st.lists(st.integers(0, 500)),
)
def test_messages_come_out_in_order_however_the_stream_is_cut(messages: list[Message], cuts: list[int]) -> None:
    assert received(messages, cuts) == messages
    assert received(messages, range(10_000)) == messages
    assert read_frames(bytearray(), encode(messages)) == messages


@pytest.mark.parametrize("sent", ERRORS, ids=failure_reason)
def test_an_error_keeps_its_class_its_reason_and_its_message(sent: ContractError) -> None:
    queued = request({})
    queued.error = sent
    (done,) = received([done_message([0], queued, ARENA)])
    assert isinstance(done, Done)
    assert done.failure is not None
    error = error_of(done.failure)
    assert (type(error), failure_reason(error), str(error)) == (type(sent), failure_reason(sent), str(sent))


def test_what_clients_must_not_read_does_not_cross() -> None:
    error = error_of(failure_of(ValueError("/a/secret/path")))
    assert (type(error), str(error)) == (InternalError, INTERNAL_ERROR)


def test_a_form_is_sent_once_and_the_latest_are_kept() -> None:
    forms = SentForms()
    first = {"x": np.zeros((1, 4), np.float32)}
    number, form = forms.number(0, first)
    assert form is not None
    assert forms.number(0, first) == (number, None)
    assert forms.number(1, first)[1] is not None  # another model may pad it differently
    assert forms.number(0, {"x": np.zeros((2, 4), np.float32)})[1] is not None
    assert forms.number(0, {"x": np.zeros((1, 4), np.float64)})[1] is not None
    seen = {forms.number(0, {"x": np.zeros((1, size), np.float32)})[0] for size in range(5, 5 + 2 * MAX_FORMS)}
    assert max(seen) < MAX_FORMS
    again, form = forms.number(0, first)
    assert form is not None  # its number stands for another one by now
    assert form.number == again


def test_several_requests_are_one_tensor_of_pieces_and_divided_again(memory: RequestMemory) -> None:
    arrays_sent = [memory.placed(np.full((2, 3), value, np.float32)) for value in (1, 2, 3)]
    form = form_of({"x": arrays_sent[0]})
    offsets = [[ARENA.offset_of(array)] for array in arrays_sent]
    together = form.addresses(offsets, ARENA)["x"]
    assert (together.shape, together.nbytes, len(together)) == ((6, 3), 72, 6)
    assert [address - ARENA.address for address in together.addresses] == [offset for (offset,) in offsets]
    executed = request({})
    executed.outputs = outputs = {"y": np.concatenate(arrays_sent), "z": np.arange(6, dtype=np.int64)}
    (done,) = received([done_message([5, 9, 6], executed, ARENA)])
    assert isinstance(done, Done)
    answers = dict(divided(done))
    assert list(answers) == [5, 9, 6]
    for place, number in enumerate(answers):
        same(answers[number], {name: array[2 * place : 2 * place + 2] for name, array in outputs.items()})


class Written:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def test_a_request_keeps_its_form_when_another_one_gets_its_number(memory: RequestMemory) -> None:
    """All in one turn of the event loop, in which requests of one form are sent together."""
    signature = ModelSignature("m", "1", (), (TensorSpec("y", "FP32", (-1, 1)),), 8)
    widths = [1, *range(2, MAX_FORMS + 3), 1]
    slot = memory.allocate(max(widths))
    requests = [request({"x": slot[:width].reshape(1, width)}) for width in widths]

    async def submit() -> bytes:
        client, written = EngineClient(memory, [signature], lambda: None), Written()
        client.connection_made(written)  # type: ignore[arg-type]  # only written to
        for queued in requests:
            client.submit(0, queued)
        while not written.data:
            await asyncio.sleep(0)
        return written.data

    forms: dict[int, Form] = {}
    sent_widths: dict[int, int] = {}
    for message in read_frames(bytearray(), asyncio.run(submit())):
        if isinstance(message, Form):
            forms[message.number] = message
        else:
            assert isinstance(message, Submit)
            sent_widths |= dict.fromkeys(message.numbers, forms[message.form].tensors[0][2][1])
    assert [sent_widths[queued.number] for queued in requests] == widths
