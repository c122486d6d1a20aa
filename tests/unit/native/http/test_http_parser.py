"""Whole requests come out of bytes however these are cut, without a socket and without an event loop."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.native.http.parser import HeadReader, HttpRequest, RequestHead, RequestParser
from servers.native.shared.errors import HttpError, RefusedError, failure_reason
from servers.native.shared.memory import ALIGNMENT, Arena, ByteBudget, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.protocol.errors import ContractError, NotFoundError, UnavailableError

INFER = "/v2/models/m/infer"
SETTINGS = NativeSettings(max_body_bytes=5000)
ARENA = Arena(1, 10_000, SETTINGS.max_body_bytes + ALIGNMENT)


def parser(budget: ByteBudget | None = None, refusal: ContractError | None = None) -> tuple[RequestParser, ByteBudget]:
    budget = budget or ByteBudget(10_000)

    def check(_head: RequestHead) -> None:
        if refusal is not None:
            raise refusal

    return RequestParser(HeadReader(SETTINGS), RequestMemory(ARENA, budget), check), budget


def post(body: bytes, *lines: str, path: str = INFER) -> bytes:
    head = "\r\n".join([f"POST {path} HTTP/1.1", f"Content-Length: {len(body)}", *lines, "", ""])
    return head.encode() + body


def chunked(*chunks: bytes) -> bytes:
    head = f"POST {INFER} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def requests(connection: RequestParser, stream: bytes, cuts: list[int]) -> list[tuple[str, bytes]]:
    """As a connection reads them: into the body's own memory where that is offered, else through a buffer."""
    whole: list[tuple[str, bytes]] = []
    unparsed = bytearray()

    def note(complete: HttpRequest | RequestHead | None) -> None:
        if isinstance(complete, HttpRequest):
            whole.append((complete.head.path, bytes(complete.body)))
            complete.release()

    edges = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for start, end in itertools.pairwise(edges):
        data = stream[start:end]
        while data:
            space = None if unparsed else connection.space()
            if space is not None:
                count = min(len(space), len(data))
                space[:count] = data[:count]
                data = data[count:]
                note(connection.received(count))
                continue
            unparsed += data
            data = b""
            while unparsed:
                used, complete = connection.parse(unparsed, 0, len(unparsed))
                if not used:
                    break
                del unparsed[:used]
                note(complete)
    assert not unparsed
    return whole


@given(
    st.lists(st.one_of(st.binary(max_size=300), st.lists(st.binary(min_size=1, max_size=40), max_size=4)), max_size=5),
    st.lists(st.integers(0, 2500), max_size=30),
)
def test_every_cut_of_a_stream_gives_the_same_requests_and_holds_nothing_afterwards(
    bodies: list[bytes | list[bytes]], cuts: list[int]
) -> None:
    stream = b"".join(post(body) if isinstance(body, bytes) else chunked(*body) for body in bodies)
    connection, budget = parser()
    assert requests(connection, stream, cuts) == [
        (INFER, body if isinstance(body, bytes) else b"".join(body)) for body in bodies
    ]
    assert budget.held == 0
    assert not connection.in_body


def test_a_request_holds_its_bytes_until_it_is_released() -> None:
    connection, budget = parser()
    data = bytearray(post(b"x" * 100))
    used, request = connection.parse(data, 0, len(data))
    assert used == len(data)
    assert isinstance(request, HttpRequest)
    assert budget.held == 100
    for _ in range(2):
        request.release()
        assert budget.held == 0


def test_bytes_that_the_engine_may_still_read_are_held_as_long_as_it_can() -> None:
    connection, budget = parser()
    data = bytearray(post(b"x" * 100))
    _, request = connection.parse(data, 0, len(data))
    assert isinstance(request, HttpRequest)
    view = request.body
    request.release()
    assert budget.held == 100
    del view
    assert budget.held == 0


def test_a_head_comes_alone_while_its_body_is_missing() -> None:
    connection, budget = parser()
    data = bytearray(post(b"x" * 100, "Expect: 100-continue")[:-70])
    used, head = connection.parse(data, 0, len(data))
    assert used == len(data)
    assert isinstance(head, RequestHead)
    assert head.expects_continue
    assert (connection.in_body, connection.body_arrived, budget.held) == (True, 30, 30)
    connection.give_up()
    assert (connection.in_body, connection.body_arrived, budget.held) == (False, 0, 0)


def test_a_refused_request_has_its_body_dropped_and_the_next_one_is_read() -> None:
    refusal = NotFoundError("unknown")
    connection, budget = parser(refusal=refusal)
    data = bytearray(post(b"x" * 100) + post(b"y", path="/v2"))
    used, request = connection.parse(data, 0, len(data))
    assert isinstance(request, HttpRequest)
    assert (request.refusal, bytes(request.body), budget.held) == (refusal, b"", 0)
    _, other = connection.parse(data, used, len(data))
    assert isinstance(other, HttpRequest)
    assert (other.refusal, bytes(other.body)) == (None, b"y")


def test_who_waits_for_leave_to_send_a_refused_body_is_told_before() -> None:
    connection, _ = parser(refusal=NotFoundError("unknown"))
    data = bytearray(post(b"x" * 100, "Expect: 100-continue")[:-100])
    with pytest.raises(HttpError, match="unknown") as caught:
        connection.parse(data, 0, len(data))
    assert caught.value.status == 404


@pytest.mark.parametrize("line", ["Expect: 100-continue\r\nContent-Length: 9", "Transfer-Encoding: chunked"])
def test_a_refusal_before_the_body_is_counted_under_its_own_reason(line: str) -> None:
    connection, _ = parser(refusal=RefusedError("not_ready", "loading"))
    data = bytearray(f"POST {INFER} HTTP/1.1\r\n{line}\r\n\r\n".encode())
    with pytest.raises(HttpError) as caught:
        connection.parse(data, 0, len(data))
    assert (caught.value.status, failure_reason(caught.value)) == (503, "not_ready")


def test_a_body_without_room_takes_no_more_bytes_and_can_be_dropped() -> None:
    connection, budget = parser(ByteBudget(200))
    data = bytearray(post(b"x" * 150)[:-140])
    connection.parse(data, 0, len(data))
    assert budget.hold(190)
    assert connection.starved
    assert connection.space() is None
    rest = bytearray(b"x" * 140)
    assert connection.parse(rest, 0, len(rest)) == (0, None)
    budget.release(1)
    space = connection.space()
    assert space is not None
    assert len(space) == 1
    del space
    connection.drop_body(UnavailableError("full"))
    assert budget.held == 189
    used, request = connection.parse(rest, 0, len(rest))
    assert used == len(rest)
    assert isinstance(request, HttpRequest)
    assert str(request.refusal) == "full"


@pytest.mark.parametrize("sent", [post(bytes(4000))[:-1000], chunked(bytes(3000))[:-100]], ids=["length", "chunks"])
def test_a_body_that_makes_way_gives_its_memory_back_and_its_request_is_refused(sent: bytes) -> None:
    connection, budget = parser()
    used, head = connection.parse(bytearray(sent), 0, len(sent))
    while used < len(sent) and (more := connection.parse(bytearray(sent), used, len(sent))[0]) > used:
        used = more
    assert isinstance(head, RequestHead)
    assert budget.held > 2000
    connection.make_way()
    assert budget.held == 0
    rest = bytearray(1000)
    if head.chunked:
        with pytest.raises(HttpError, match="memory"):
            connection.parse(rest, 0, len(rest))
        return
    used, request = connection.parse(rest, 0, len(rest))
    assert isinstance(request, HttpRequest)
    assert isinstance(request.refusal, UnavailableError)
    assert request.body.nbytes == 0


def test_a_body_is_late_when_it_comes_more_slowly_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    connection, _budget = parser()
    data = bytearray(post(bytes(4000))[:-1000])
    connection.parse(data, 0, len(data))
    assert not connection.late(50.0)
    assert connection.late(50.1)
