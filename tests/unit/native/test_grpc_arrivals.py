"""gRPC messages wait for their turn to arrive: who is refused, who is cut off, and who is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest

from servers.contract.errors import ContractError
from servers.native.grpc_server import Arrivals, details_of, status_of
from servers.native.settings import NativeSettings

MESSAGE_BYTES = 1000


async def nothing() -> AsyncIterator[bytes]:
    """A client that never sends its message."""
    await asyncio.Event().wait()
    yield b""


async def no_message() -> AsyncIterator[bytes]:
    """One that ends its side at once."""
    messages: list[bytes] = []
    for message in messages:
        yield message


async def one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def outcome(call: Any) -> str:
    code = await call.code()
    name: str = code.name
    return name


async def outcome_of(stream: Any) -> str:
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def with_arrivals(
    test: Callable[[Any, Any, list[str]], Coroutine[Any, Any, None]], read_timeout_s: float, idle_s: float = 75
) -> None:
    """Run a test on an echo server with one place, whose queue has one, too, and one stream."""

    async def run() -> None:
        failures: list[str] = []
        settings = NativeSettings(
            max_held_bytes=2 * MESSAGE_BYTES,
            queue_size=1,
            read_timeout_s=read_timeout_s,
            keep_alive_timeout_s=idle_s,
        )
        arrivals = Arrivals(settings, MESSAGE_BYTES, lambda reason, _: failures.append(reason))

        async def call(_requests: Any, context: Any) -> Any:
            try:
                return await arrivals.receive(context, infers=True)
            except ContractError as error:
                await context.abort(status_of(error), details_of(error))

        async def stream(_requests: Any, context: Any) -> Any:
            try:
                async for message in arrivals.stream(context):
                    yield message
            except ContractError as error:
                await context.abort(status_of(error), details_of(error))

        server = grpc.aio.server()
        handlers = {"Call": grpc.stream_unary_rpc_method_handler(call)}
        handlers["Stream"] = grpc.stream_stream_rpc_method_handler(stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(30):
                call_method, stream_method = (
                    channel.stream_unary("/test.Echo/Call"),
                    channel.stream_stream("/test.Echo/Stream"),
                )
                await test(call_method, stream_method, failures)
        finally:
            await server.stop(None)

    asyncio.run(run())


def test_one_that_waits_is_served_after_the_one_before_is_cut_off_and_a_third_is_refused() -> None:
    async def test(call: Any, _stream: Any, failures: list[str]) -> None:
        slow = call(nothing())
        await slow.wait_for_connection()
        others = [call(one(b"second")), call(one(b"third"))]
        assert sorted([await outcome(other) for other in others]) == ["OK", "UNAVAILABLE"]
        assert await outcome(slow) == "UNAVAILABLE"
        assert failures == ["unavailable", "slow_client"]
        assert await call(one(b"next")) == b"next"

    with_arrivals(test, read_timeout_s=1)


def test_a_message_that_nobody_waits_for_has_its_full_time() -> None:
    async def test(call: Any, _stream: Any, failures: list[str]) -> None:
        assert await outcome(call(nothing())) == "UNAVAILABLE"
        assert failures == ["slow_client"]

    with_arrivals(test, read_timeout_s=0.1)


def test_a_call_without_a_message_is_refused_and_one_that_is_cancelled_gives_its_place_back() -> None:
    async def test(call: Any, _stream: Any, failures: list[str]) -> None:
        assert await outcome(call(no_message())) == "INVALID_ARGUMENT"
        assert failures == ["invalid_request"]
        slow = call(nothing())
        await slow.wait_for_connection()
        waiting = call(one(b"second"))
        slow.cancel()
        assert await waiting == b"second"

    with_arrivals(test, read_timeout_s=1000)


@pytest.mark.parametrize("leaves", [True, False], ids=["by its client", "when it is idle"])
def test_only_so_many_streams_are_open_and_one_that_ends_makes_room(leaves: bool) -> None:
    async def test(_call: Any, stream: Any, failures: list[str]) -> None:
        first = stream()
        await first.write(b"first")
        assert await first.read() == b"first"
        assert await outcome_of(stream(one(b"second"))) == "UNAVAILABLE"
        if leaves:
            first.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="did not arrive in time"):
                await first.read()
        while await outcome_of(stream(one(b"third"))) != "OK":
            await asyncio.sleep(0.01)
        assert failures == []

    with_arrivals(test, read_timeout_s=1000, idle_s=75 if leaves else 0.5)
