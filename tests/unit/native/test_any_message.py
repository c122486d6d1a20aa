"""Whatever is in a message between a front end and the engine's process, at most what it is about fails."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import structlog
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from servers.contract.errors import ContractError, UnavailableError
from servers.contract.tensors import TensorSpec
from servers.engines.batches import bucket_sizes
from servers.engines.interface import Engine, EngineDescription
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.engines.torch_device import RunnerEngine
from servers.models.specification import ModelSpecification
from servers.native.arena import Arena, Layout, RequestMemory
from servers.native.engine_client import EngineClient
from servers.native.engine_process import EngineServer
from servers.native.inference import signature_of
from servers.native.limits import ByteBudget
from servers.native.messages import (
    Answer,
    Ask,
    Cancel,
    Done,
    DoneMany,
    Form,
    Message,
    Submit,
    SubmitMany,
    Tensor,
)
from servers.native.queued_request import QueuedRequest
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics

HELD = 2**20
ROWS = ModelSpecification(
    name="rows",
    title="rows",
    version="1",
    inputs=(TensorSpec("x", "FP32", (-1, 4)),),
    outputs=(TensorSpec("y", "FP32", (-1, 4)),),
    max_batch_size=8,
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
)


class Copying(RunnerEngine):
    """Takes addresses and has two batches in flight, as an engine on a GPU."""

    def load(self) -> None:
        def execute(given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
            out[0].copy_(given[0])

        self._start(lambda _bucket: execute, bucket_sizes(self._settings.max_batch_size), torch.device("cpu"))

    def describe(self) -> EngineDescription:
        return self._description(version="1", precision="fp32", mode="graph", device="cpu", threads=1, details={})


class Failed:
    """The waiter of a request whose answer nobody checks."""

    def wake(self, queued: QueuedRequest) -> None:
        pass


class Waiting:
    def __init__(self) -> None:
        self.event = asyncio.Event()

    def wake(self, queued: QueuedRequest) -> None:
        self.event.set()


class BothProcesses:
    """The engine's side in a thread and a front end's in this one, over the sockets that connect their processes."""

    def __init__(self, engine: type[Engine]) -> None:
        settings = NativeSettings(fronts=1, max_batch_size=8, max_queue_delay_us=0)
        arena = Arena(Layout.of(1, HELD, HELD))
        self.memory = RequestMemory(arena, ByteBudget(HELD))
        self._loop = asyncio.new_event_loop()
        supervisor, at_engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        front, back = socket.socketpair()
        self.supervisor = supervisor
        offers = [(ROWS, lambda _: engine(ROWS, EngineSettings(kind="null", max_batch_size=8)))]
        self.server = EngineServer(settings, offers, [Statistics(8)], arena, at_engine)
        self.client = EngineClient(self.memory, [signature_of(ROWS, settings)], lambda: None)
        self.ready = asyncio.Event()
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        socket.send_fds(supervisor, [b"f"], [back.fileno()])
        back.close()
        front.setblocking(False)
        self.run(self._open(front))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(work, 20))

    async def _open(self, front: socket.socket) -> None:
        async def states(states: Sequence[Any]) -> None:
            if states[0][0] == "ready":
                self.ready.set()

        async def nothing(*_arguments: object) -> None:
            pass

        await self.client.open(front, {"states": states, "open": nothing, "forget": nothing})
        await self.client.ask("opened")
        await self.ready.wait()

    @property
    def channel(self) -> Any:
        (channel,) = self.server._channels.values()
        return channel

    async def infer(self, value: float, waiter: Any = None) -> QueuedRequest:
        array = self.memory.placed(np.full((1, 4), value, np.float32))
        queued = QueuedRequest({"x": array}, 1, [("x", (4,))], None, Waiting())
        self.client.submit(0, queued)
        await queued.waiter.event.wait()
        return queued

    async def check(self) -> None:
        """Several clients are answered, at most after having been asked to send it again."""

        async def honest(value: float) -> None:
            queued = await self.infer(value)
            if isinstance(queued.error, UnavailableError):
                queued = await self.infer(value)
            assert queued.error is None, queued.error
            assert queued.outputs is not None
            np.testing.assert_array_equal(queued.outputs["y"], np.full((1, 4), value))

        await asyncio.gather(*(honest(value) for value in (1.0, 2.0, 3.0)))
        with suppress(ContractError):
            await self.client.ask("unregister", False, "r")
        assert self.thread.is_alive()

    def stop(self) -> None:
        self.supervisor.close()
        self.thread.join(20)
        for channel in self.server._channels.values():
            channel.end()
        for used in (self.server._supervisor, self.server._wakes, self.server._waker, self.server._epoll):
            used.close()
        assert self.client._transport is not None
        self.client._transport.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


@pytest.fixture(scope="module", params=[NullEngine, Copying])
def both(request: pytest.FixtureRequest) -> Iterator[BothProcesses]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    processes = BothProcesses(request.param)
    yield processes
    processes.stop()
    structlog.reset_defaults()


SAMPLES: dict[type[Message], Message] = {
    Form: Form(2**31, 0, [("x", "<f4", (1, 4))]),
    Submit: Submit(2**40, 0, 1, None, [0]),
    SubmitMany: SubmitMany([2**40, 2**40 + 1], 0, 1, [[0], [4096]]),
    Cancel: Cancel(2**40),
    Done: Done(2**40, [Tensor("y", "<f4", (1, 4), bytes(16))]),
    DoneMany: DoneMany([2**40, 2**40 + 1], [Tensor("y", "<f4", (2, 4), bytes(32))]),
    Ask: Ask(2**40, "unregister", [False, "r"]),
    Answer: Answer(2**40, None),
}

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
    if isinstance(message, Done | DoneMany) and data.draw(st.booleans()):
        (tensor,) = message.outputs
        field = data.draw(st.sampled_from(tensor.__struct_fields__))
        message.outputs = [msgspec.structs.replace(tensor, **{field: data.draw(values)})]
        return message
    if isinstance(message, Form) and data.draw(st.booleans()):
        name, dtype, shape = data.draw(st.tuples(texts, texts, st.lists(numbers, max_size=3)))
        message.tensors = [(name, dtype, tuple(shape))]
        return message
    setattr(message, data.draw(st.sampled_from(fields)), data.draw(values))
    assume(not names_another(message))
    return message


def names_another(message: Any) -> bool:
    """Whether it is a proper message about somebody else's request, form or memory, which no process sends."""
    given = getattr(message, "numbers", None) or [getattr(message, "number", None)]
    if isinstance(given, list | tuple) and any(isinstance(one, int) and 0 <= one < 2**31 for one in given):
        return True
    return isinstance(message, Submit) and isinstance(message.room, list | tuple) and len(message.room) == 2


@pytest.mark.parametrize("kind", get_args(Message), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("to_engine", [True, False], ids=["to the engine", "to the front end"])
@hypothesis_settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_of_any_field_costs_no_other_message(
    both: BothProcesses, to_engine: bool, kind: type[Message], data: st.DataObject
) -> None:
    message = changed(SAMPLES[kind], data)

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
