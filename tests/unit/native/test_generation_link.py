"""The link between a front end and a generating engine, over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from servers.native.errors import INTERNAL_ERROR
from servers.native.generation import GenerationLink
from servers.native.ipc import Cancel, Finished, Generate, Generated, Message, UnusableMessage, encode, read_frames
from servers.native.token_requests import TokenRequest
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
