"""What a shadow copies, drops and counts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from loadgen.client.connection import Address
from loadgen.recorder.shadow import MOST_UNDER_WAY, MOST_WAITING, PairedRequest, ReadingTime, Shadow

HEAD = "POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 1"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Shadowed:
    """A shadow with a candidate in the same event loop, and the pairs that it has made."""

    def __init__(self, port: int, timeout_s: float = 60.0, reading: ReadingTime | None = None) -> None:
        self.pairs: list[tuple[PairedRequest, PairedRequest]] = []
        self.made = asyncio.Event()
        self.shadow = Shadow(Address("127.0.0.1", port), None, paired=self._take, timeout_s=timeout_s, reading=reading)
        self.watch = asyncio.get_running_loop().create_task(self.shadow.watch())

    def _take(self, primary: PairedRequest, copy: PairedRequest | None) -> None:
        assert copy is not None
        self.pairs.append((primary, copy))
        self.shadow.freed_bytes += primary.held_bytes + copy.held_bytes
        self.made.set()

    def ask(self) -> PairedRequest:
        """A request of one byte that has passed to the primary."""
        request = self.shadow.begin("http", "/v2/models/m/infer", {}, 1, HEAD)
        assert isinstance(request, PairedRequest)
        request.add_content(b"x")
        request.forwarded(1)
        return request

    @staticmethod
    def answer(request: PairedRequest) -> None:
        request.add_answer(b"y", 2)
        request.end(200, 2)

    @property
    def held_bytes(self) -> int:
        return self.shadow.taken_bytes - self.shadow.freed_bytes

    async def end(self) -> None:
        self.watch.cancel()
        await asyncio.gather(self.watch, return_exceptions=True)


def with_candidate(serve: Serve | None, test: Callable[[int], Awaitable[None]]) -> None:
    """Run a test with a candidate that serves each connection so, or whose connections wait for ever."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=2 * MOST_UNDER_WAY) as listener:
            async with asyncio.timeout(100):
                port = listener.getsockname()[1]
                if serve is None:
                    await test(port)
                    return
                async with await asyncio.start_server(serve, sock=listener):
                    await test(port)

    asyncio.run(run())


async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One answer per connection, which is closed without a word."""
    await reader.readuntil(b"\r\n\r\nx")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny")
    writer.close()
    await writer.wait_closed()


def test_a_candidate_that_hangs_gets_so_many_copies_and_no_more() -> None:
    async def test(port: int) -> None:
        shadowed = Shadowed(port)
        requests = [shadowed.ask() for _ in range(MOST_UNDER_WAY + MOST_WAITING + 7)]
        counts = shadowed.shadow.counts
        assert (counts["copied"], counts["dropped"]) == (MOST_UNDER_WAY + MOST_WAITING, 7)
        for request in requests:
            shadowed.answer(request)
        await asyncio.sleep(0)
        await shadowed.end()
        assert (shadowed.pairs, shadowed.held_bytes) == ([], 0)

    with_candidate(None, test)


def test_a_copy_without_an_answer_ends_in_time() -> None:
    async def test(port: int) -> None:
        shadowed = Shadowed(port, timeout_s=0.01)
        shadowed.answer(shadowed.ask())
        await shadowed.made.wait()
        ((primary, copy),) = shadowed.pairs
        assert (primary.status, copy.status, copy.end_ns, shadowed.shadow.counts["failed"]) == (200, None, None, 1)
        await shadowed.end()
        assert shadowed.held_bytes == 0

    with_candidate(None, test)


def test_a_candidate_that_closes_idle_connections_fails_no_copy() -> None:
    async def test(port: int) -> None:
        shadowed = Shadowed(port)
        for number in range(1, 51):
            shadowed.made.clear()
            shadowed.answer(shadowed.ask())
            await shadowed.made.wait()
            assert len(shadowed.pairs) == number
        assert [copy.status for _, copy in shadowed.pairs] == [200] * 50
        await shadowed.end()

    with_candidate(answer_once, test)


@pytest.mark.parametrize("answered", [True, False])
def test_a_request_that_the_primary_does_not_answer_is_no_pair(answered: bool) -> None:
    async def test(port: int) -> None:
        shadowed = Shadowed(port)
        request, after = shadowed.ask(), shadowed.ask()
        if answered:
            request.add_answer(b"half", 2)
        request.end(200 if answered else None, 2, whole=False)
        shadowed.answer(after)
        await shadowed.made.wait()
        while not shadowed.shadow.counts["unpaired"]:
            await asyncio.sleep(0)
        assert [primary for primary, _ in shadowed.pairs] == [after]
        await shadowed.end()
        assert shadowed.held_bytes == 0

    with_candidate(answer_once, test)


class NoTime(ReadingTime):
    def is_over(self, cpu_ns: int, now_ns: int) -> bool:
        return True


async def answer_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\nx")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\ny")
    await reader.read()
    writer.close()


def test_a_copy_that_there_is_no_time_to_read_is_dropped_and_no_failure_of_the_candidate() -> None:
    async def test(port: int) -> None:
        shadowed = Shadowed(port, reading=NoTime())
        shadowed.answer(shadowed.ask())
        counts = shadowed.shadow.counts
        while not counts["dropped"] + counts["failed"]:
            await asyncio.sleep(0)
        assert (counts["dropped"], counts["failed"], counts["copied"], shadowed.pairs) == (1, 0, 0, [])
        await shadowed.end()
        assert shadowed.held_bytes == 0

    with_candidate(answer_half, test)
