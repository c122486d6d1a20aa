"""The life of the native server of a language model: clients that leave or do not read, full queues, failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from threading import Thread
from typing import Any

import pytest

from servers.native.shared.errors import HOLDS_ENOUGH
from tests.integration.language.conftest import EventStream, StartGated, post
from tests.integration.native.conftest import Server, wait_until

STREAM = "/v2/models/scripted/generate_stream"
pytestmark = pytest.mark.slow  # each test starts servers of its own
FRONTS = pytest.mark.parametrize("fronts", ["0", "1"], ids=["one process", "own process"])


def request(tokens: int, first: int = 5) -> dict[str, Any]:
    return {"input_ids": [first, 17], "max_tokens": tokens}


def number(server: Server, name: str) -> int:
    path = server.folder / name
    return int(path.read_text() or 0) if path.exists() else 0


def ready(start: StartGated, *options: str) -> Server:
    server = start(*options)
    (server.folder / "load").touch()
    server.wait_ready()
    return server


def hold(server: Server, step: int = 1) -> None:
    """The engine's steps from this one on wait."""
    written = server.folder / "hold.new"
    written.write_text(str(step))
    written.rename(server.folder / "hold")


def release(server: Server) -> None:
    (server.folder / "hold").unlink(missing_ok=True)


@FRONTS
def test_it_is_ready_only_once_the_engine_is_warm(gated: StartGated, fronts: str) -> None:
    server = gated("--fronts", fronts)
    server.wait_live()
    assert server.status("/v2/health/ready") == 503
    assert server.request("POST", STREAM, json.dumps(request(3)).encode()).status == 503
    status, answer = post(server, "/v1/completions", {"prompt": [5], "max_tokens": 3})
    assert status == 503
    assert answer["error"]["type"] == "ServiceUnavailableError"
    (server.folder / "load").touch()
    server.wait_ready()
    assert post(server, "/v2/models/scripted/generate", request(3))[0] == 200


@FRONTS
def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(gated: StartGated, fronts: str) -> None:
    server = gated("--fronts", fronts)
    (server.folder / "load").write_text("fail")
    assert server.process.wait(60) == 1
    log = (server.folder / f"log-{server.port}").read_text()
    assert "the model cannot be served" in log
    assert "the weights are missing: fetch them" in log


@FRONTS
def test_a_client_that_leaves_in_the_middle_frees_its_slot_within_one_step(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1")
    hold(server, 3)
    with EventStream(server, STREAM, request(200)) as stream:
        held_after_two(server, stream)
    wait_until(lambda: server.metric("abserve_native_client_disconnects_total{") == 1, "the server has noticed")
    release(server)
    wait_until(lambda: server.metric("abserve_native_slots_in_use{") == 0, "the slot is free")
    assert number(server, "steps") == 3  # the step that was running, and no other
    assert post(server, "/v2/models/scripted/generate", request(3))[0] == 200


def held_after_two(server: Server, stream: EventStream) -> None:
    """Two tokens have come, and the third step waits."""
    assert stream.read_head() == 200
    stream.read_until(b"data: ")
    wait_until(lambda: number(server, "steps") == 3, "the engine is in the third step")


@FRONTS
def test_a_client_that_leaves_while_it_waits_never_gets_a_slot(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1")
    hold(server)
    with EventStream(server, STREAM, request(3)) as stream:
        wait_until(lambda: number(server, "steps") == 1, "the first has the slot")
        with EventStream(server, STREAM, request(100)):
            pass
        wait_until(lambda: server.metric("abserve_native_client_disconnects_total{") == 1, "the server has noticed")
        release(server)
        assert stream.read_head() == 200
        assert len(stream.events()) == 3
    assert server.metric("abserve_native_prompt_tokens_total{") == 2


@FRONTS
def test_more_requests_than_may_wait_get_503_with_one_sentence(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1", "--queue-size", "2")
    hold(server)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(EventStream(server, STREAM, request(3)))]
        wait_until(lambda: number(server, "steps") == 1, "the first has the slot")
        streams += [stack.enter_context(EventStream(server, STREAM, request(3))) for _ in range(2)]
        completion = {"prompt": [5], "max_tokens": 3, "stream": True}
        refused = [
            stack.enter_context(EventStream(server, path, document))
            for path, document in (("/v1/completions", completion), (STREAM, request(3)))
        ]
        server.metric("abserve_native_ready{")  # comes after them, so they are with the engine when it is answered
        release(server)
        for stream in refused:
            assert stream.read_head() == 503
            assert b"Exceeds maximum queue size of 2 requests" in stream.read_until(b"}")
            assert b"retry-after: 1" in stream.head
        for stream in streams:
            assert stream.read_head() == 200
            assert len(stream.events()) == 3
    assert server.metric('abserve_native_requests_failure_total{model="scripted",reason="queue_full"') == 2


def test_requests_for_free_slots_do_not_count_as_waiting(gated: StartGated) -> None:
    server = ready(gated, "--fronts", "1", "--slots", "8", "--queue-size", "1")
    hold(server)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(EventStream(server, STREAM, request(3)))]
        wait_until(lambda: number(server, "steps") == 1, "the first has a slot")
        streams += [stack.enter_context(EventStream(server, STREAM, request(3))) for _ in range(7)]
        server.metric("abserve_native_ready{")  # comes after them, so they are with the engine when it is answered
        release(server)
        for stream in streams:
            assert stream.read_head() == 200
            assert len(stream.events()) == 3


@FRONTS
def test_a_client_that_does_not_read_is_cut_off_after_a_bound(gated: StartGated, fronts: str) -> None:
    """Its socket takes a little, the server's buffer a bounded amount; then the request is cancelled."""
    server = ready(gated, "--fronts", fronts, "--slots", "2", "--max-length", "100000", "--read-timeout-s", "60")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", server.port))
    body = json.dumps({"prompt": [5] * 10, "max_tokens": 90_000, "stream": True, "ignore_eos": True}).encode()
    reader.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    cut_off = 'abserve_native_requests_failure_total{model="scripted",reason="slow_client"'
    wait_until(lambda: server.metric(cut_off) == 1, "it is cut off")
    wait_until(lambda: server.metric("abserve_native_slots_in_use{") == 0, "the slot is free")
    assert 0 < server.metric("abserve_native_output_tokens_total{") < 80_000
    reader.close()
    assert post(server, "/v2/models/scripted/generate", request(3))[0] == 200


@FRONTS
def test_a_client_that_stops_reading_for_too_long_is_cut_off(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--max-length", "100000", "--read-timeout-s", "0.3")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", server.port))
    # Enough for the buffers of both systems and more than the server's own low mark, less than its bound.
    body = json.dumps({"prompt": [5] * 10, "max_tokens": 20_000, "stream": True, "ignore_eos": True}).encode()
    reader.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    wait_until(lambda: server.metric("abserve_native_slots_in_use{") == 0, "the slot is free")
    reader.close()


@FRONTS
def test_what_the_systems_buffers_hold_is_unread_too(gated: StartGated, fronts: str) -> None:
    """Clients with small buffers hold no slot, though the server's system takes all that is written; one that has read
    what came keeps its own, however long the next token takes."""
    server = ready(gated, "--fronts", fronts, "--slots", "4", "--max-length", "10000", "--read-timeout-s", "0.3")
    hold(server, 2000)
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(EventStream(server, STREAM, request(2010)))
        for _ in range(3):
            sink = stack.enter_context(socket.socket())
            sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sink.connect(("127.0.0.1", server.port))
            body = json.dumps(request(5000)).encode()
            sink.sendall(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (STREAM.encode(), len(body)) + body
            )
        assert reader.read_head() == 200
        drain = Thread(target=reader.read_until, args=(b"0\r\n\r\n",))
        drain.start()
        cut_off = 'abserve_native_requests_failure_total{model="scripted",reason="slow_client"'
        wait_until(lambda: server.metric(cut_off) == 3, "all but the reader are cut off")
        release(server)
        drain.join(60)
        assert len(reader.events()) == 2010
    wait_until(lambda: server.metric("abserve_native_slots_in_use{") == 0, "the slots are free")


@FRONTS
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_closes_its_half_gets_its_whole_stream(gated: StartGated, fronts: str, version: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "2")
    hold(server, 3)
    with EventStream(server, STREAM, request(9), version) as late:
        held_after_two(server, late)
        late.socket.shutdown(socket.SHUT_WR)
        with EventStream(server, STREAM, request(9), version) as early:
            early.socket.shutdown(socket.SHUT_WR)
            server.metric("abserve_native_ready{")
            release(server)
            for stream in (early, late):
                assert stream.read_until(b"the end").count(b"data: ") == 9
    assert server.metric("abserve_native_client_disconnects_total{") == 0


@FRONTS
def test_a_client_has_only_so_many_requests_where_that_is_limited(gated: StartGated, fronts: str) -> None:
    """A flood of one address keeps another's request waiting for no more than its own steps."""
    server = ready(gated, "--fronts", fronts, "--slots", "4", "--max-client-requests", "2")
    hold(server)
    with EventStream(server, STREAM, request(40)) as one, EventStream(server, STREAM, request(40)) as two:
        wait_until(lambda: number(server, "steps") == 1, "the first has a slot")
        server.metric("abserve_native_ready{")
        with EventStream(server, STREAM, request(3)) as third, elsewhere(server, request(3)) as other:
            server.metric("abserve_native_ready{")
            hold(server, 8)  # so the first two stay unfinished
            assert third.read_head() == 503
            assert b"this client has 2 requests under way" in third.read_until(b"}")
            answer = bytearray()
            while answer.count(b"data:") < 3:
                answer += other.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
        release(server)
        for stream in (one, two):
            assert stream.read_head() == 200
            assert len(stream.events()) == 40
    assert post(server, "/v2/models/scripted/generate", request(3))[0] == 200


def elsewhere(server: Server, document: dict[str, Any]) -> socket.socket:
    """The same request from another address."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=("127.0.0.2", 0))
    body = json.dumps(document).encode()
    client.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (STREAM.encode(), len(body)) + body)
    return client


@FRONTS
def test_accepted_work_is_finished_at_the_end(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1")
    hold(server)
    with EventStream(server, STREAM, request(20)) as stream:
        wait_until(lambda: number(server, "steps") == 1, "it has the slot")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/v2/health/live") is None, "nothing new is accepted")
        release(server)
        assert stream.read_head() == 200
        events = stream.events()
    assert len(events) == 20
    assert events[-1]["finish_reason"] == "length"
    assert server.process.wait(60) == 0


@FRONTS
def test_work_that_takes_too_long_ends_with_an_error_event(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1", "--shutdown-timeout-s", "1")
    hold(server, 3)
    with EventStream(server, STREAM, request(200)) as stream:
        held_after_two(server, stream)
        server.process.send_signal(signal.SIGTERM)
        events = stream.events()
    assert "shutting down" in events[-1]["error"]
    assert server.process.wait(60) in (0, 1)


@FRONTS
def test_whole_answers_that_take_too_long_end_with_503(gated: StartGated, fronts: str) -> None:
    """Two clients wait for the end of answers that have begun."""
    server = ready(gated, "--fronts", fronts, "--slots", "2", "--shutdown-timeout-s", "1")
    hold(server)
    path = "/v2/models/scripted/generate"
    with EventStream(server, path, request(200)) as first, EventStream(server, path, request(200)) as second:
        server.metric("abserve_native_ready{")  # comes after them, so they are with the engine when it is answered
        hold(server, 4)
        wait_until(lambda: number(server, "steps") == 4, "the engine is in the fourth step")
        assert server.metric("abserve_native_slots_in_use{") == 2
        server.process.send_signal(signal.SIGTERM)
        for stream in (first, second):
            assert stream.read_head() == 503
            assert b"shutting down" in stream.read_until(b"}")
    assert server.process.wait(60) in (0, 1)


def test_a_whole_answer_that_finds_no_memory_is_refused(gated: StartGated) -> None:
    server = ready(gated, "--fronts", "0", "--max-length", "100000", "--max-held-bytes", "100000")
    status, answer = post(server, "/v2/models/scripted/generate", request(30_000))
    assert (status, answer["error"]) == (503, HOLDS_ENOUGH)
    assert post(server, "/v2/models/scripted/generate", request(3))[0] == 200


@FRONTS
def test_an_engine_that_fails_ends_streams_with_an_error_event_and_the_server(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1")
    hold(server, 3)
    completion = {"prompt": [5], "max_tokens": 200, "stream": True, "ignore_eos": True}
    with EventStream(server, "/v1/completions", completion) as stream:
        held_after_two(server, stream)
        (server.folder / "fail").touch()
        release(server)
        *chunks, error, done = stream.events()
    assert chunks
    assert done == "[DONE]"
    assert error["error"]["message"] == "the engine has ended, send the request again later"
    assert server.process.wait(60) == 1
    assert "the device is lost" in (server.folder / f"log-{server.port}").read_text()


def test_the_death_of_the_engines_process_is_an_error_event_and_the_end(gated: StartGated) -> None:
    server = ready(gated, "--fronts", "1", "--slots", "1")
    hold(server, 3)
    with EventStream(server, STREAM, request(200)) as stream:
        held_after_two(server, stream)
        os.kill(number(server, "pid"), signal.SIGKILL)
        events = stream.events()
    assert events[-1] == {"error": "the engine has ended, send the request again later"}
    assert server.process.wait(60) == 1


def test_a_front_end_that_dies_frees_its_slots_and_is_started_again(gated: StartGated) -> None:
    server = ready(gated, "--fronts", "1", "--slots", "1")
    hold(server, 3)
    with EventStream(server, STREAM, request(200)) as stream:
        held_after_two(server, stream)
        engine = number(server, "pid")
        (front_end,) = [child for child in server.processes[1:] if child.pid != engine]
        front_end.kill()
        release(server)
        assert stream.read_until(b"never")
    server.wait_ready()
    assert post(server, "/v2/models/scripted/generate", request(3))[0] == 200
    assert server.metric("abserve_native_slots_in_use{") == 0


@FRONTS
def test_a_prompt_that_the_engine_refuses_late_is_one_failed_request(gated: StartGated, fronts: str) -> None:
    """Half-read streams beside it go on."""
    server = ready(gated, "--fronts", fronts)
    with EventStream(server, STREAM, request(200)) as stream:
        assert stream.read_head() == 200
        for _ in range(5):
            assert post(server, "/v2/models/scripted/generate", request(3))[0] == 200
        assert len(stream.events()) == 200
