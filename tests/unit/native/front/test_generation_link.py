"""The link between a front end and a generating engine, over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from servers.language.engine import Emission, GenerationRequest
from servers.native.engine.generation_loop import GenerationLoop
from servers.native.engine.process import FrontEndChannel, FrontEnds
from servers.native.front.generation import GenerationLink
from servers.native.front.token_requests import TokenRequest
from servers.native.shared.errors import INTERNAL_ERROR
from servers.native.shared.interface import ApplyStatus, ModelState
from servers.native.shared.ipc import (
    Cancel,
    Finished,
    Generate,
    Generated,
    Message,
    UnusableMessage,
    encode,
    read_frames,
)
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.protocol.errors import ContractError


class Sink:
    """Keeps what it gets; raises in the method that is `broken`."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.got: list[int] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tokens(self, tokens: Sequence[int]) -> None:
        if self.broken == "tokens":
            raise RuntimeError("as the test asked")
        self.got += tokens

    def finished(self, tokens: Sequence[int], finish: str) -> None:
        if self.broken == "finished":
            raise RuntimeError("as the test asked")
        self.got += tokens
        self.end.set_result(finish)

    def failed(self, error: ContractError) -> None:
        self.end.set_result(str(error))


@pytest.mark.parametrize("broken", ["tokens", "finished"])
@pytest.mark.parametrize("several", [False, True])
def test_an_answer_that_cannot_be_sent_fails_and_the_others_go_on(broken: str, several: bool) -> None:
    async def run() -> list[Message | UnusableMessage]:
        front_end, engine = socket.socketpair()
        engine.setblocking(False)
        ended = asyncio.Event()
        link = GenerationLink(0, lambda _: None, ended.set)
        await link.open(front_end)
        bad, good = Sink(broken), Sink()
        numbers = [link.submit(sink, TokenRequest([5], 9, True, True), 0) for sink in (bad, good)]
        step = Generated([], [], [(number, [1, 2]) for number in numbers]) if several else Generated(numbers, [1, 1])
        last = Generated([], [], [], [Finished(number, [3], "length") for number in numbers])
        engine.send(encode([step, last]))
        async with asyncio.timeout(20):
            assert await bad.end == INTERNAL_ERROR
            assert await good.end == "length"
            assert good.got == ([1, 2, 3] if several else [1, 3])
            unread, sent = bytearray(), list[Message | UnusableMessage]()
            while len(sent) < (3 if broken == "tokens" else 2):
                sent += read_frames(unread, await asyncio.get_running_loop().sock_recv(engine, 4096))
            engine.close()
            await ended.wait()
        return sent

    sent = asyncio.run(run())
    first = sent[0]
    assert isinstance(first, Generate)
    assert [type(message) for message in sent[:2]] == [Generate, Generate]
    assert sent[2:] == ([Cancel(first.number)] if broken == "tokens" else [])


def test_a_message_of_the_engine_that_cannot_be_used_fails_only_its_own_answer() -> None:
    async def run() -> list[Message | UnusableMessage]:
        front_end, engine = socket.socketpair()
        engine.setblocking(False)
        link = GenerationLink(0, lambda _: None, lambda: None)
        await link.open(front_end)
        sinks = [Sink(), Sink()]
        first, second = (link.submit(sink, TokenRequest([5], 9, True, True), 0) for sink in sinks)
        unusable = encode([Generated([first], [1])]).replace(b"\x91\x00\x91\x01", b"\x91\x00\x91\xc0")  # no token
        engine.send(unusable + encode([Generated([], [], [], [Finished(second, [3], "length")])]))
        async with asyncio.timeout(20):
            assert [await sink.end for sink in sinks] == [INTERNAL_ERROR, "length"]
            unread, sent = bytearray(), list[Message | UnusableMessage]()
            while len(sent) < 3:
                sent += read_frames(unread, await asyncio.get_running_loop().sock_recv(engine, 4096))
        engine.close()
        await asyncio.sleep(0)
        return sent

    assert asyncio.run(run())[2:] == [Cancel(0)]


class TwoSlots:
    """A generating engine without a model: an answer has the tokens that its prompt has."""

    slots, max_length, vocabulary, eos, waiting = 2, 64, 100, (), 0

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    @property
    def active(self) -> int:
        return len(self.requests)

    def load(self) -> None:
        pass

    warm_up = close = load

    def settings(self) -> dict[str, object]:
        return {}

    def add(self, request: GenerationRequest) -> None:
        self.requests.append(request)

    def cancel(self, number: int) -> None:
        self.requests = [request for request in self.requests if request.number != number]

    def step(self) -> list[Emission]:
        emissions = [Emission(request.number, tuple(request.prompt), "length") for request in self.requests]
        self.requests = []
        return emissions


@contextmanager
def generation_loop(fronts: int) -> Iterator[tuple[GenerationLoop, list[socket.socket]]]:
    """A loop with the sockets of its front ends."""
    settings = NativeSettings(fronts=fronts)
    arena = RequestMemory.alone(settings).arena
    loop = GenerationLoop(TwoSlots, settings, Statistics(2), arena, lambda: None)
    pairs = [socket.socketpair() for _ in range(fronts)]
    for front, engine in pairs:
        front.settimeout(20)
        loop.add(engine)
    try:
        yield loop, [front for front, _ in pairs]
    finally:
        if loop._thread.is_alive():
            loop.stop(60)
        loop._front_ends.close()  # of a loop whose thread has not begun
        for end in (end for pair in pairs for end in pair):
            end.close()


def finished(front: socket.socket, count: int) -> list[Finished]:
    """The ends of so many answers."""
    unread, ends = bytearray(), list[Finished]()
    while len(ends) < count:
        received = front.recv(65536)
        assert received, "the engine's side has ended"
        for message in read_frames(unread, received):
            ends += message.finished if isinstance(message, Generated) else ()
    return ends


def test_a_message_that_cannot_be_used_ends_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = GenerationLoop._accept

    def fails(self: GenerationLoop, channel: FrontEndChannel, message: Generate) -> None:
        accept(self, channel, message)
        if message.number == 1:
            raise RuntimeError("planted")

    monkeypatch.setattr(GenerationLoop, "_accept", fails)
    unusable = encode([Generate(2, [5], 9, True, 0)]).replace(b"\x91\x05", b"\x91\xc0")  # a token that is nil
    with generation_loop(1) as (loop, (front,)):
        loop.start()
        front.send(encode([Generate(1, [5], 9, True, 0)]) + unusable + encode([Generate(3, [7], 9, True, 0)]))
        answers = finished(front, 3)
    assert {(answer.number, answer.finish, answer.failure is None) for answer in answers} == {
        (1, "error", False),
        (2, "error", False),
        (3, "length", True),
    }


def test_no_front_end_hears_that_a_model_is_ready_before_it_was_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first front end has ended, so that it knows everything at once."""
    told = list[tuple[int, ModelState]]()

    def notified(self: FrontEndChannel, operation: ApplyStatus) -> Future[None]:
        told.append((ends.index(self.socket), operation.models[0].state))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(FrontEndChannel, "notify", notified)
    with generation_loop(2) as (loop, _):
        ends = list(loop._incoming)
        monkeypatch.setattr(FrontEnds, "open_count", 2)  # both have announced themselves
        monkeypatch.setattr(loop._front_ends, "turn", lambda _seconds: setattr(loop, "_stop_by", 0.0))
        loop._set_state(ModelState.ACCEPTING)
        loop._serve(TwoSlots())
    first_ready = told.index((0, ModelState.READY))
    assert {place for place, state in told[:first_ready] if state is ModelState.ACCEPTING} == {0, 1}
    assert {state for _, state in told[first_ready:]} == {ModelState.READY}
