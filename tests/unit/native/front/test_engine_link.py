"""A front end with several engine processes: which of them gets a request, and what it makes of what they say."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from servers.engines.interface import EngineDescription
from servers.native.front.engine_link import BusyPolling, EnginePool, combined
from servers.native.shared.interface import (
    ApplyStatus,
    CheckCuda,
    CloseRegions,
    ControlModel,
    EngineOperation,
    FrontEndOperation,
    ModelState,
    ModelStatus,
    OpenRegion,
    QueuedRequest,
)
from servers.native.shared.ipc import (
    INLINE_BYTES,
    Cancel,
    Control,
    Done,
    Message,
    Submit,
    Tensor,
    UnusableMessage,
    encode,
    read_frames,
)
from servers.native.shared.memory import Arena, ByteBudget, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.protocol.errors import ContractError, InvalidRequestError, UnavailableError
from servers.protocol.records import ModelSignature
from servers.protocol.tensors import TensorSpec

SIGNATURE = ModelSignature("m", "1", (), (TensorSpec("y", "FP32", (-1, 1)),), 64)


def description(kind: str, device: str) -> EngineDescription:
    return EngineDescription(kind, "1", "fp32", "graph", device, None, 64, "none")


READY = ModelStatus(ModelState.READY, description("k", "cuda:0"))
LOADING = ModelStatus(ModelState.LOADING, None)


class EngineEnd:
    """An engine's end of its socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._unread = bytearray()
        self.received: list[Message | UnusableMessage] = []

    async def messages(self, count: int) -> list[Any]:
        """All messages, of which there are at least so many."""
        loop = asyncio.get_running_loop()
        while len(self.received) < count:
            self.received += read_frames(self._unread, await asyncio.wait_for(loop.sock_recv(self.socket, 65536), 5))
        return self.received

    def send(self, *messages: Message) -> None:
        self.socket.send(encode(messages))

    async def asked(self, count: int) -> list[Control]:
        return [message for message in await self.messages(count) if isinstance(message, Control)]

    async def numbers(self, requests: int) -> list[int]:
        """The numbers of the requests that it has got, of which there are so many."""
        while True:
            numbers = [number for message in self.received if isinstance(message, Submit) for number in message.numbers]
            if len(numbers) >= requests:
                return numbers
            await self.messages(len(self.received) + 1)


class Pool:
    """A pool, its engines' ends, and the operations that reached the front end."""

    def __init__(self, *devices: str, signature: ModelSignature = SIGNATURE, arena: Arena | None = None) -> None:
        """With an `arena` it is the second front end that uses it."""
        budget = ByteBudget(NativeSettings().max_held_bytes)
        number = 0 if arena is None else 1
        arena = Arena(2, budget.limit, 1 << 26, engines=len(devices)) if arena is None else arena
        self.memory = RequestMemory(arena, budget, number)
        self.ends = 0
        self.pool = EnginePool(devices, self.memory, [signature], self._end)
        self.executed: list[FrontEndOperation] = []
        self.engines: list[EngineEnd] = []
        self._devices = devices

    async def open(self) -> None:
        pairs = [socket.socketpair() for _ in self._devices]
        self.engines = [EngineEnd(theirs) for _, theirs in pairs]

        async def execute(operation: FrontEndOperation) -> None:
            self.executed.append(operation)

        await self.pool.open([front for front, _ in pairs], execute)

    def _end(self) -> None:
        self.ends += 1

    def submit(self, rows: int = 1, **more: Any) -> QueuedRequest:
        inputs = {"x": self.memory.allocate(4 * rows).view(np.float32).reshape(rows, 1)}
        queued = QueuedRequest(inputs, rows, (), None, None, **more)
        self.pool.submit(0, queued)
        return queued

    async def notify(self, engine: int, operation: FrontEndOperation) -> None:
        """Let an engine send an operation. Raises the error of the front end's answer."""
        before = len(self.engines[engine].received)
        self.engines[engine].send(Control(before, operation))
        (*_, answer) = await self.engines[engine].messages(before + 1)
        assert isinstance(answer, Done)
        if answer.failure is not None:
            raise ContractError(answer.failure[1])


@asynccontextmanager
async def opened(
    *devices: str, signature: ModelSignature = SIGNATURE, arena: Arena | None = None
) -> AsyncIterator[Pool]:
    pool = Pool(*devices, signature=signature, arena=arena)
    await pool.open()
    try:
        yield pool
    finally:
        for engine in pool.engines:
            engine.socket.close()
        while pool.ends < len(devices):
            await asyncio.sleep(0)


def test_the_engine_with_the_fewest_rows_gets_the_next_request_and_equals_take_turns() -> None:
    async def run() -> None:
        async with opened("cpu", "cpu", "cpu") as pool:
            requests = [pool.submit(rows) for rows in (4, 1, 2, 2, 1, 1, 1)]
            first, second, third = pool.engines
            assert await first.numbers(1) == [requests[0].number]
            assert sorted(await second.numbers(3)) == [requests[place].number for place in (1, 3, 5)]
            assert sorted(await third.numbers(3)) == [requests[place].number for place in (2, 4, 6)]
            first.send(Done([requests[0].number]))
            while not requests[0].complete:
                await asyncio.sleep(0)
            for _ in range(3):
                pool.submit()
            assert len(await first.numbers(4)) == 4  # all its rows are done, and the others have four each

    asyncio.run(run())


def test_rows_of_another_front_end_count() -> None:
    async def run() -> None:
        async with opened("cpu", "cpu") as pool, opened("cpu", "cpu", arena=pool.memory.arena) as other:
            pool.submit(4)
            for _ in range(4):
                other.submit()
            assert len(await other.engines[1].numbers(4)) == 4
            other.engines[1].send(Done(await other.engines[1].numbers(4)))
            while any(other.memory.arena.rows[1]):
                await asyncio.sleep(0)
            pool.submit()
            assert len(await pool.engines[1].numbers(1)) == 1

    asyncio.run(run())


def test_lone_requests_take_turns() -> None:
    async def run() -> None:
        async with opened("cpu", "cpu") as pool:
            for turn in range(4):
                queued = pool.submit()
                engine = pool.engines[turn % 2]
                assert (await engine.numbers(1 + turn // 2))[-1] == queued.number
                engine.send(Done([queued.number]))
                while not queued.complete:
                    await asyncio.sleep(0)

    asyncio.run(run())


def test_a_request_is_taken_back_where_it_is() -> None:
    async def run() -> None:
        async with opened("cpu", "cpu") as pool:
            _, second = pool.submit(), pool.submit()
            assert not pool.pool.withdraw(0, second)
            while not any(isinstance(message, Cancel) for message in pool.engines[1].received):
                await pool.engines[1].messages(len(pool.engines[1].received) + 1)
            await pool.engines[0].numbers(1)
            assert not any(isinstance(message, Cancel) for message in pool.engines[0].received)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("operation", "engines"),
    [
        (ControlModel(0, load=True), (0, 1)),
        (CloseRegions(True, ("r",)), (0, 1)),
        (OpenRegion("r", 8, 0, "/k"), (0,)),
        (CheckCuda(), (0,)),
    ],
)
def test_an_operation_reaches_the_engines_that_it_concerns(
    operation: EngineOperation, engines: tuple[int, ...]
) -> None:
    async def run() -> None:
        async with opened("cuda:3", "cuda:2") as pool:
            asking = asyncio.create_task(pool.pool.control(operation))
            for number in engines:
                assert not asking.done()
                (ask,) = await pool.engines[number].asked(1)
                assert ask.operation == operation
                pool.engines[number].send(Done([ask.number]))
            await asyncio.wait_for(asking, 5)
            assert sum(len(engine.received) for engine in pool.engines) == len(engines)

    asyncio.run(run())


@pytest.mark.parametrize(("device", "home"), [(2, 1), (3, 0), (0, 0)])
def test_a_cuda_region_is_opened_at_home_and_then_by_the_others(device: int, home: int) -> None:
    async def run() -> None:
        async with opened("cuda:3", "cuda:2") as pool:
            opening = OpenRegion("r", 8, device=device)
            asking = asyncio.create_task(pool.pool.control(opening))
            (ask,) = await pool.engines[home].asked(1)
            assert ask.operation == opening
            assert pool.engines[1 - home].received == []
            pool.engines[home].send(Done([ask.number]))
            (ask,) = await pool.engines[1 - home].asked(1)
            assert ask.operation == OpenRegion("r", 8, device=device, peer=True)
            pool.engines[1 - home].send(Done([ask.number], [], ("InvalidRequestError", "no path")))
            await asyncio.wait_for(asking, 5)

    asyncio.run(run())


def test_a_cuda_region_that_its_home_refuses_is_opened_by_no_other() -> None:
    async def run() -> None:
        async with opened("cuda:0", "cuda:1") as pool:
            asking = asyncio.create_task(pool.pool.control(OpenRegion("r", 8, device=1)))
            (ask,) = await pool.engines[1].asked(1)
            pool.engines[1].send(Done([ask.number], [], ("InvalidRequestError", "no such handle")))
            with pytest.raises(InvalidRequestError, match="no such handle"):
                await asyncio.wait_for(asking, 5)
            assert pool.engines[0].received == []

    asyncio.run(run())


def test_the_first_error_is_told_after_all_have_answered() -> None:
    async def run() -> None:
        async with opened("cpu", "cpu") as pool:
            asking = asyncio.create_task(pool.pool.control(ControlModel(0, load=False)))
            asks = [(await engine.asked(1))[0] for engine in pool.engines]
            pool.engines[0].send(Done([asks[0].number], [], ("UnavailableError", "later")))
            await asyncio.wait([asking], timeout=0.05)
            assert not asking.done()
            pool.engines[1].send(Done([asks[1].number]))
            with pytest.raises(UnavailableError, match="later"):
                await asking

    asyncio.run(run())


@pytest.mark.parametrize(
    ("states", "least"),
    [
        (["ready", "ready"], "ready"),
        (["ready", "accepting"], "accepting"),
        (["accepting", "loading"], "loading"),
        (["loading", "unloaded"], "unloaded"),
        (["ready", "failed"], "failed"),
        (["unloaded", "failed"], "failed"),
    ],
)
def test_a_model_is_as_ready_as_on_the_engine_where_it_is_the_least_so(states: list[str], least: str) -> None:
    for several in (states, states[::-1]):
        statuses = [ModelStatus(ModelState(state), None) for state in several]
        assert combined(statuses) == ModelStatus(ModelState(least), None)


def test_the_description_names_all_devices() -> None:
    second = ModelStatus(ModelState.READY, description("other", "cuda:1"))
    assert combined([READY, second]) == ModelStatus(ModelState.READY, description("k", "cuda:0,cuda:1"))
    assert combined([READY, LOADING]) == LOADING


def states_of(pool: Pool) -> list[ModelState]:
    return [operation.models[0].state for operation in pool.executed if isinstance(operation, ApplyStatus)]


def test_nothing_is_said_before_all_have_spoken_nor_after_one_has_ended() -> None:
    async def run() -> None:
        async with opened("cpu", "cpu") as pool:
            await pool.notify(1, ApplyStatus((READY,)))
            assert pool.executed == []
            await pool.notify(0, ApplyStatus((READY,)))
            await pool.notify(1, ApplyStatus((LOADING,)))
            assert states_of(pool) == [ModelState.READY, ModelState.LOADING]
            waiting = [pool.submit(), pool.submit()]
            pool.engines[0].socket.close()
            while not pool.ends:
                await asyncio.sleep(0)
            assert [queued.complete for queued in waiting] == [True, False]
            await pool.engines[1].numbers(1)
            await pool.notify(1, ApplyStatus((READY,)))
            assert len(pool.executed) == 2
            (number,) = await pool.engines[1].numbers(1)
            pool.engines[1].send(Done([number]))
            while not waiting[1].complete:
                await asyncio.sleep(0)
            assert waiting[1].error is None

    asyncio.run(run())


def test_a_name_belongs_to_the_engine_that_has_registered_it() -> None:
    async def run() -> None:
        async with opened("cuda:0", "cuda:1") as pool:
            await pool.notify(0, OpenRegion("r", 8, 0, "/proc/1/fd/3"))
            with pytest.raises(ContractError, match="registered already"):
                await pool.notify(1, OpenRegion("r", 8, device=1))
            await pool.notify(1, CloseRegions(False, ("r",)))  # as the engine does when one front end could not open it
            assert pool.executed == [OpenRegion("r", 8, 0, "/proc/1/fd/3")]
            await pool.notify(0, CloseRegions(False, ("r",)))
            await pool.notify(1, OpenRegion("r", 8, device=1))
            assert pool.executed[1:] == [CloseRegions(False, ("r",)), OpenRegion("r", 8, device=1)]

    asyncio.run(run())


def test_a_request_goes_where_its_cuda_regions_are() -> None:
    async def run() -> None:
        async with opened("cuda:0", "cuda:1") as pool:
            await pool.notify(0, OpenRegion("a", 64, device=0))
            await pool.notify(1, OpenRegion("b", 64, device=1))
            for _ in range(3):
                pool.submit(device_inputs={"x": ("b", 0, 4)}, device_outputs={"y": ("b", 4, 4)})
            pool.submit(device_outputs={"y": ("b", 4, 4)})
            assert len(await pool.engines[1].numbers(4)) == 4
            with pytest.raises(InvalidRequestError, match="on several GPUs"):
                pool.submit(device_inputs={"x": ("a", 0, 4)}, device_outputs={"y": ("b", 0, 4)})
            pool.submit(device_inputs={"x": ("gone", 0, 4)})  # that engine then says that it is not registered
            assert len(await pool.engines[0].numbers(1)) == 1

    asyncio.run(run())


def test_a_request_also_goes_to_an_engine_that_reaches_its_cuda_regions() -> None:
    async def run() -> None:
        async with opened("cuda:0", "cuda:1") as pool:
            await pool.notify(0, OpenRegion("b", 64, device=1, peer=True))  # a new front end may hear it in this order
            await pool.notify(1, OpenRegion("b", 64, device=1))
            await pool.notify(0, OpenRegion("a", 64, device=0))
            for _ in range(5):  # of equals the home is the first
                pool.submit(device_inputs={"x": ("b", 0, 4)})
            assert (len(await pool.engines[1].numbers(3)), len(await pool.engines[0].numbers(2))) == (3, 2)
            pool.submit(device_inputs={"x": ("a", 0, 4)}, device_outputs={"y": ("b", 0, 4)})  # only one reaches both
            assert len(await pool.engines[0].numbers(3)) == 3
            await pool.notify(0, CloseRegions(True, ("b",)))
            assert CloseRegions(True, ("b",)) not in pool.executed  # its home still has it
            pool.submit(4, device_inputs={"x": ("b", 0, 4)})
            pool.submit(device_inputs={"x": ("b", 0, 4)})
            assert len(await pool.engines[1].numbers(5)) == 5
            await pool.notify(1, CloseRegions(True, ("b",)))
            assert CloseRegions(True, ("b",)) in pool.executed

    asyncio.run(run())


def test_an_answer_of_unknown_size_travels_in_shared_memory_from_the_second_request_of_its_shape_on() -> None:
    """As those of text do, whose signature leaves the length open: 12 MB must not go through a socket."""
    signature = ModelSignature("m", "1", (), (TensorSpec("y", "FP32", (-1, -1)),), 64)
    answer = np.arange(INLINE_BYTES // 2, dtype=np.float32).reshape(2, -1)

    async def run() -> None:
        async with opened("cuda:0", signature=signature) as pool:
            (engine,) = pool.engines
            first = pool.submit(2)
            (number,) = await engine.numbers(1)
            engine.send(Done([number], [Tensor("y", "<f4", answer.shape, answer.tobytes())]))
            while first.outputs is None:
                await asyncio.sleep(0)
            second = pool.submit(2)
            other = pool.submit(3)
            await engine.numbers(3)
            rooms = [message.room for message in engine.received if isinstance(message, Submit)]
            assert rooms[0] is None  # nothing was known
            assert rooms[2] is None  # nothing is known of three rows
            assert rooms[1] is not None
            start, size = rooms[1]
            assert size >= answer.nbytes
            pool.memory.arena.view(start, answer.shape, answer.dtype)[...] = answer
            engine.send(Done([number + 1], [Tensor("y", "<f4", answer.shape, start)]))
            while second.outputs is None:
                await asyncio.sleep(0)
            assert np.array_equal(second.outputs["y"], answer)
            assert other.outputs is None

    asyncio.run(run())


def test_a_loop_polls_until_the_time_after_the_last_event_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    turns: list[Callable[[], None]] = []

    class Loop:
        def call_soon(self, callback: Callable[[], None]) -> None:
            turns.append(callback)

    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    polling = BusyPolling(0.5)
    for now, event, goes_on in [
        (100.0, True, True),
        (100.1, True, True),  # the next event is not a second poll beside the first
        (100.4, False, True),
        (100.7, False, False),
        (200.0, True, True),
        (200.6, False, False),
    ]:
        for turn in [turns.pop() for _ in list(turns)]:
            turn()
        if event:
            polling.extend()
        assert len(turns) == goes_on, now


def test_a_region_that_is_closed_leaves_nothing() -> None:
    async def run() -> None:
        async with opened("cuda:0", "cuda:1") as pool:
            await pool.notify(0, OpenRegion("r", 8, device=0))
            await pool.notify(1, OpenRegion("r", 8, device=0, peer=True))
            assert pool.pool._peers.keys() == {"r"}
            for engine in (1, 0):
                await pool.notify(engine, CloseRegions(True, ("r",)))
            assert (pool.pool._peers, pool.pool._homes) == ({}, {})

    asyncio.run(run())
