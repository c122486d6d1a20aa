"""Whatever is in a message between a front end and the engine's process, at most what it is about fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
import structlog
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from servers.engines.null import NullEngine
from servers.native.shared.interface import ApplyStatus, CheckCuda, CloseRegions, ModelState, ModelStatus, OpenRegion
from servers.native.shared.ipc import (
    Cancel,
    Control,
    Done,
    Finished,
    Form,
    Generate,
    Generated,
    Message,
    Submit,
    Tensor,
)
from tests.unit.native.both_processes import HELD, BothProcesses, Copying


@pytest.fixture(scope="module", params=[NullEngine, Copying])
def both(request: pytest.FixtureRequest) -> Iterator[BothProcesses]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    processes = BothProcesses(request.param)
    yield processes
    processes.stop()
    structlog.reset_defaults()


SAMPLES: dict[str, Message] = {
    "form": Form(2**31, 0, [("x", "<f4", (1, 4))]),
    "submit": Submit([2**40], 0, 1, [[0]]),
    "submit two": Submit([2**40, 2**40 + 1], 0, 1, [[0], [4096]]),
    "cancel": Cancel(2**40),
    "done": Done([2**40], [Tensor("y", "<f4", (1, 4), bytes(16))]),
    "two done": Done([2**40, 2**40 + 1], [Tensor("y", "<f4", (2, 4), bytes(32))]),
    "control": Control(2**40, CloseRegions(False, ("r",))),
    "control done": Done([2**40]),
    "generate": Generate(2**40, [5, 17], 8, True, 0),
    "generated": Generated([2**40], [7], [(2**40 + 1, [7, 8])], [Finished(2**40 + 2, [9], "length")]),
}

OPERATIONS: tuple[Any, ...] = (
    OpenRegion("r", 8, 0, "/no"),
    OpenRegion("r", 8, device=0),
    CheckCuda(),
    ApplyStatus((ModelStatus(ModelState.READY, None),)),
    CloseRegions(False, ("r",)),
)

numbers = st.integers(-(2**80), 2**80) | st.sampled_from(
    [-1, 0, 1, 3, 7, 4096, HELD, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30]
)
texts = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(["\ud800", "x", "<f4", "O", "|V0"])
scalars = st.none() | st.booleans() | numbers | st.floats() | texts | st.binary(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2) | st.tuples(inner, inner),
    max_leaves=6,
)


def changed(message: Message, data: st.DataObject) -> Message:
    """The message with any value in one of its fields, or of those of its tensors."""
    message = msgspec.structs.replace(message)
    fields = list(message.__struct_fields__)
    if isinstance(message, Done) and message.outputs and data.draw(st.booleans()):
        (tensor,) = message.outputs
        field = data.draw(st.sampled_from(tensor.__struct_fields__))
        message.outputs = [msgspec.structs.replace(tensor, **{field: data.draw(values)})]
        return message
    if isinstance(message, Form) and data.draw(st.booleans()):
        name, dtype, shape = data.draw(st.tuples(texts, texts, st.lists(numbers, max_size=3)))
        message.tensors = [(name, dtype, tuple(shape))]
        return message
    if isinstance(message, Control) and data.draw(st.booleans()):
        operation = data.draw(st.sampled_from(OPERATIONS))
        if operation.__struct_fields__:
            field = data.draw(st.sampled_from(operation.__struct_fields__))
            operation = msgspec.structs.replace(operation, **{field: data.draw(values)})
        message.operation = operation
        assume(not names_another(message))
        return message
    setattr(message, data.draw(st.sampled_from(fields)), data.draw(values))
    assume(not names_another(message))
    return message


def names_another(message: Any) -> bool:
    """Whether it is a proper message about somebody else's request, form or memory, which no process sends."""
    numbers = getattr(message, "numbers", [getattr(message, "number", None)])
    if isinstance(numbers, list | tuple) and any(isinstance(number, int) and 0 <= number < 2**31 for number in numbers):
        return True
    return isinstance(message, Submit) and isinstance(message.room, list | tuple) and len(message.room) == 2


def test_every_message_has_a_sample() -> None:
    assert {type(message) for message in SAMPLES.values()} == set(get_args(Message))


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("to_engine", [True, False], ids=["to the engine", "to the front end"])
@pytest.mark.parametrize("examples", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_any_value_of_any_field_costs_no_other_message(
    both: BothProcesses, examples: int, to_engine: bool, sample: str
) -> None:
    @hypothesis_settings(deadline=None, max_examples=examples)
    @given(st.data())
    def costs_no_other(data: st.DataObject) -> None:
        message = changed(SAMPLES[sample], data)

        async def send() -> None:
            honest = asyncio.create_task(both.check())  # before it, in the same turn, and after it
            await asyncio.sleep(0)
            if to_engine:
                both.client._send(message)
            else:
                both.channel.send([message])
            await honest
            await both.check()

        both.run(send())

    costs_no_other()
