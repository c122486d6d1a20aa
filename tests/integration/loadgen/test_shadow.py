"""`abserve shadow` before real sockets: clients get the primary's answers, whatever the candidate does."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton
from typer.testing import CliRunner

from loadgen.client.grpc import DATA, PREFIX, SETTINGS, frame_head
from loadgen.entry import build
from loadgen.findings.shadow import ShadowFound
from loadgen.verdict.result import Result
from tests.again import again
from tests.shadowing import (
    INFER,
    Answers,
    Handler,
    answer_500,
    ask,
    die,
    doubling,
    echo,
    flood_bytes,
    flood_chunks,
    hang,
    serving,
    serving_grpc,
    shadowing,
    speak_nonsense,
    tensor_request,
)
from tests.toy_language_server import toy_server


@pytest.mark.parametrize(
    "candidate", [echo, hang, die, answer_500, speak_nonsense, flood_bytes, flood_chunks, None],
    ids=["echoes", "hangs", "dies", "500", "nonsense", "floods", "floods in chunks", "refuses"],
)  # fmt: skip
def test_clients_get_the_answers_of_the_primary_whatever_the_candidate_does(
    candidate: Answers | None, tmp_path: Path
) -> None:
    with serving(echo) as primary, serving(candidate or echo) as second:
        if candidate is None:
            second.socket.close()
        with shadowing(primary.url, second.url, tmp_path / "run") as running, ThreadPoolExecutor(4) as clients:
            bodies = [[b"%d-%d" % (user, turn) * 50 for turn in range(100)] for user in range(4)]
            answers = list(clients.map(ask, [running.port] * 4, bodies))
            assert answers == [[(200, body) for body in of_user] for of_user in bodies]
            record = running.end().of(ShadowFound).record
    assert len([path for path, *_ in primary.got if path == INFER]) == 400
    assert record is not None
    assert record.pairs + record.dropped <= 400
    assert record.wrong == 0
    if candidate is echo:
        assert record.failed == record.dropped == 0
    elif candidate is answer_500:
        assert (record.failed, record.pairs > 0) == (0, True)


def test_the_candidate_gets_the_requests_to_models_and_no_others(tmp_path: Path) -> None:
    big = bytes(range(256)) * 4096
    with (
        serving(echo) as primary,
        serving(echo) as second,
        shadowing(primary.url, second.url, tmp_path / "run") as running,
    ):
        asked = [(INFER + "?key=1", b"small"), (INFER, big), ("/v2/models/m/load", b"x"), ("/v1/completions", b"{}")]
        for path, body in asked:
            assert ask(running.port, [body], path) == [(200, body)]
        assert all(second.came.acquire(timeout=100) for _ in range(3))
        running.end()
    copied = sorted((path, body) for path, _, body in second.got)
    copied = [each for each in copied if each[1]]
    assert copied == sorted((path, body) for path, body in asked if "load" not in path)
    headers = second.got[0][1]
    assert (headers["Authorization"], headers["Host"]) == ("Bearer t", second.url.removeprefix("http://"))


def compared(folder: Path, primary: Answers, candidate: Answers, *options: str) -> Result:
    """600 requests of four clients through a shadow in blocks of 0.1 s; one in 50 has an input of 7 values."""
    with (
        serving(primary) as first,
        serving(candidate) as second,
        shadowing(first.url, second.url, folder, "--block-seconds", "0.1", *options) as running,
        ThreadPoolExecutor(4) as clients,
    ):
        bodies = [tensor_request([float(turn)] * (7 if turn % 50 == 13 else 2)) for turn in range(150)]
        answers = list(clients.map(ask, [running.port] * 4, [bodies] * 4))
        assert all(status == 200 for of_user in answers for status, _ in of_user)
        return running.end()


def checks(result: Result) -> dict[str, bool | None]:
    return {check.name: check.ok for check in result.checks}


def test_a_candidate_that_takes_30_percent_longer_is_found(tmp_path: Path) -> None:
    """On a busy machine a check such as `copies_in_time` may refuse a verdict, or the interval may be too wide."""
    result = compared(tmp_path / "run", doubling(0.020), doubling(0.026))
    (leading,) = (comparison for comparison in result.comparisons if comparison.leading)
    assert (leading.metric, leading.method) == ("typical_latency", "anytime-valid over pairs")
    refused = {check.name for check in result.checks if check.ok is False and check.severity == "invalidates"}
    assert leading.verdict in ({"invalid"} if refused else {"baseline_better", "inconclusive"})
    assert not refused & {"parity", "request_errors"}
    assert result.parity is not None
    assert [(case.ok, case.images > 0) for case in result.parity.cases] == [(True, True)] * 2
    assert (tmp_path / "run/report.html").exists()


@again
def test_equal_servers_have_no_winner(tmp_path: Path) -> None:
    """One run in twenty may name one, and four runs in 160,000."""
    result = compared(tmp_path / "run", doubling(0.010), doubling(0.010))
    (leading,) = (comparison for comparison in result.comparisons if comparison.leading)
    assert leading.verdict in {"inconclusive", "no_difference", "invalid"}
    assert checks(result)["parity"] is True


def test_wrong_answers_to_one_rare_shape_are_found(tmp_path: Path) -> None:
    result = compared(tmp_path / "run", doubling(0.001), doubling(0.001, wrong=lambda values: len(values) == 7))
    assert result.parity is not None
    assert {case.name: case.ok for case in result.parity.cases} == {"m: x FP32 [1, 7]": False, "m: x FP32 [1, 2]": True}
    assert checks(result)["parity"] is False
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}
    assert result.of(ShadowFound).record.wrong == result.parity.cases[0].images  # type: ignore[union-attr]


def test_a_candidate_that_fails_gets_no_verdict(tmp_path: Path) -> None:
    result = compared(tmp_path / "run", doubling(0.001), answer_500)
    assert [(check.ok, check.arms) for check in result.checks if check.name == "request_errors"] == [(False, ("b",))]
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}


def ask_grpc(address: str, sizes: list[int]) -> bool:
    """Whether all answers of one client are right; some of its requests are compressed."""
    with triton.InferenceServerClient(address) as client:
        for number, size in enumerate(sizes):
            x = np.full((1, size), number, np.float32)
            tensor = triton.InferInput("x", [1, size], "FP32").set_data_from_numpy(x)
            answer = client.infer(
                "m", [tensor], headers={"key": "t"}, compression_algorithm="gzip" if number % 3 == 1 else None
            )
            if not np.array_equal(answer.as_numpy("y"), 2 * x):
                return False
    return True


def test_calls_over_grpc_are_copied_and_compared(tmp_path: Path) -> None:
    """Their messages are smaller and larger than the windows of a connection that has just begun."""
    with (
        serving_grpc() as primary,
        serving_grpc(lambda x: len(x) == 7, grpc.Compression.Gzip) as candidate,
        shadowing(None, None, tmp_path / "run", "--block-seconds", "0.1", grpc=(primary, candidate)) as running,
        ThreadPoolExecutor(3) as clients,
    ):
        sizes = [7 if turn % 50 == 13 else 100_000 if turn % 50 == 33 else 2 for turn in range(150)]
        assert all(clients.map(ask_grpc, [f"127.0.0.1:{running.port}"] * 3, [sizes] * 3))
        result = running.end()
    record = result.of(ShadowFound).record
    assert record is not None
    assert (record.failed, 1 <= record.wrong <= 9, record.pairs > 200) == (0, True, True)
    assert result.parity is not None
    assert {case.name: case.ok for case in result.parity.cases} == {
        f"m: x FP32 [1, {size}]": size != 7 for size in (2, 7, 100_000)
    }
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}


Speak = Callable[[socket.socket], None]


@contextlib.contextmanager
def speaking(speak: Speak) -> Iterator[str]:
    """The address of a server that does this with each connection."""

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                speak(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Connection) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(60)


GREETING = frame_head(SETTINGS, 0, 0, 0)


def never_greet(connection: socket.socket) -> None:
    while connection.recv(2**16):
        pass


def take_nothing(connection: socket.socket) -> None:
    connection.sendall(GREETING)
    connection.recv(1)
    connection.settimeout(None)
    threading.Event().wait(100)


def close(connection: socket.socket) -> None:
    connection.recv(1)


def speak_http(connection: socket.socket) -> None:
    connection.recv(2**16)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def flood_with(piece: bytes, first: bytes = b"") -> Speak:
    def flood(connection: socket.socket) -> None:
        connection.sendall(GREETING + frame_head(DATA, 0, 1, len(first)) + first)
        while True:
            connection.sendall(frame_head(DATA, 0, 1, len(piece)) + piece)

    return flood


@pytest.mark.parametrize(
    "candidate",
    [
        never_greet, take_nothing, close, speak_http, flood_with(bytes(16_384), PREFIX.pack(0, 2**31)),
        flood_with((PREFIX.pack(0, 1) + b"x") * 2000), None,
    ],
    ids=["never greets", "takes nothing", "closes", "HTTP", "one message", "many messages", "refuses"],
)  # fmt: skip
def test_calls_get_the_answers_of_the_primary_whatever_the_candidate_does(
    candidate: Speak | None, tmp_path: Path
) -> None:
    with serving_grpc() as primary, speaking(candidate or close) as second:
        other = "127.0.0.1:1" if candidate is None else second
        with (
            shadowing(None, None, tmp_path / "run", grpc=(primary, other)) as running,
            ThreadPoolExecutor(3) as clients,
        ):
            assert all(clients.map(ask_grpc, [f"127.0.0.1:{running.port}"] * 3, [[2, 50_000] * 30] * 3))
            record = running.end().of(ShadowFound).record
    assert record is not None
    assert (record.wrong, record.compared) == (0, 0)
    assert record.failed + record.dropped <= 180


def names(name: bytes) -> Answers:
    return lambda handler, body: handler.send(name + body)


def test_servers_that_take_turns_answer_every_request_once(tmp_path: Path) -> None:
    """Of clients that keep their connections, while no request is copied."""
    options = ("--swap", "--share", "0.000001", "--block-seconds", "0.1")
    with serving(names(b"A")) as first, serving(names(b"B")) as second:
        with shadowing(first.url, second.url, tmp_path / "run", *options) as running, ThreadPoolExecutor(4) as clients:
            bodies = [b"%d" % number for number in range(100)]
            answers: list[tuple[int, bytes]] = []
            while len({answer[:1] for _, answer in answers}) < 2 or len(answers) < 2000:
                answers += [each for of_user in clients.map(ask, [running.port] * 4, [bodies] * 4) for each in of_user]
            running.end()
        assert {status for status, _ in answers} == {200}
        asked = [len([path for path, *_ in server.got if path == INFER]) for server in (first, second)]
    assert asked == [sum(answer[:1] == name for _, answer in answers) for name in (b"A", b"B")]


def break_off(handler: Handler, _: bytes) -> None:
    handler.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    die(handler, b"")


@pytest.mark.parametrize("candidate", [die, break_off, answer_500])
def test_in_turns_a_candidate_that_fails_has_failed_and_not_its_clients(candidate: Answers, tmp_path: Path) -> None:
    options = ("--swap", "--share", "1", "--block-seconds", "0.1")
    with (
        serving(doubling()) as first,
        serving(candidate) as second,
        shadowing(first.url, second.url, tmp_path / "run", *options) as running,
    ):
        outcomes: list[bool] = []
        while outcomes.count(True) < 300 or outcomes.count(False) < 3:
            try:
                outcomes.append(ask(running.port, [tensor_request([1.0])])[0][0] == 200)
            except (OSError, http.client.HTTPException):
                outcomes.append(False)
        result = running.end()
    assert [(check.ok, check.arms) for check in result.checks if check.name == "request_errors"] == [(False, ("b",))]
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}


def test_clients_of_grpc_follow_the_turns_without_an_error(tmp_path: Path) -> None:
    options = ("--swap", "--share", "0.000001", "--block-seconds", "0.1")
    with (
        serving_grpc() as first,
        serving_grpc(factor=3) as second,
        shadowing(None, None, tmp_path / "run", *options, grpc=(first, second)) as running,
        triton.InferenceServerClient(f"127.0.0.1:{running.port}") as client,
    ):
        x = np.ones((1, 50_000), np.float32)
        factors: list[float] = []
        while len([None for before, after in itertools.pairwise(factors) if before != after]) < 6:
            tensor = triton.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)
            factors.append(float(client.infer("m", [tensor]).as_numpy("y")[0, -1]))
        running.end()
    assert set(factors) == {2.0, 3.0}


def test_in_turns_a_slow_candidate_and_wrong_answers_are_found(tmp_path: Path) -> None:
    def wrong(values: list[float]) -> bool:
        return len(values) == 7

    result = compared(tmp_path / "run", doubling(0.005), doubling(0.040, wrong), "--swap")
    (leading,) = (comparison for comparison in result.comparisons if comparison.leading)
    assert (leading.metric, leading.verdict, result.experiment.seed != 0) == ("typical_latency", "invalid", True)
    assert leading.ratio is not None
    assert leading.ratio > 1.5
    assert (checks(result)["parity"], checks(result)["request_errors"]) == (False, True)
    record = result.of(ShadowFound).record
    assert record is not None
    assert (record.swap, record.wrong > 0) == (True, True)


CHAT: dict[str, object] = {"messages": [{"role": "user", "content": ""}]}
FORMS: list[tuple[str, dict[str, object]]] = [
    ("/v1/completions", {"prompt": [1, 2, 3], "stream": True}), ("/v1/completions", {"prompt": "words"}),
    ("/v1/chat/completions", {**CHAT, "stream": True}), ("/v1/chat/completions", CHAT),
    ("/v2/models/planted/generate_stream", {"text_input": "words", "stream": True}),
]  # fmt: skip


def ask_in_turn(port: int, temperature: float | None, path: str, form: dict[str, object]) -> None:
    """40 requests for different texts."""
    bodies = []
    for number in range(40):
        each = {**form, "model": "planted", "max_tokens": 6}
        if temperature is not None:
            each["temperature"] = temperature
        if "messages" in each:
            each["messages"] = [{"role": "user", "content": f"{number} please"}]
        else:
            name = "prompt" if "prompt" in each else "text_input"
            each[name] = [number, 7] if isinstance(each[name], list) else f"{number} please"
        bodies.append(json.dumps(each).encode())
    assert {status for status, _ in ask(port, bodies, path)} == {200}


OTHER_WEIGHTS = "--seed 1", 0, False
CERTAINTIES = (OTHER_WEIGHTS, ("", 0, True), ("--usage end --first-tokens 3", 0, True), ("--seed 1", 0.7, True))


# By default all of the first form, and of the others what tells that their texts are read.
@pytest.mark.parametrize(
    ("path", "form", "flags", "temperature", "ok"),
    [
        pytest.param(*form, *case, marks=() if case == OTHER_WEIGHTS or form == FORMS[0] else pytest.mark.slow)
        for form in FORMS
        for case in CERTAINTIES
    ],
)
def test_texts_are_compared_where_they_are_certain(
    path: str, form: dict[str, object], flags: str, temperature: float, ok: bool, tmp_path: Path
) -> None:
    fast = "--first-ms 2 --step-ms 0.1"
    with (
        toy_server(fast) as first,
        toy_server(f"{fast} {flags}") as second,
        shadowing(first.url, second.url, tmp_path / "run", "--block-seconds", "0.1") as running,
    ):
        ask_in_turn(running.port, temperature, path, form)
        result = running.end()
    record = result.of(ShadowFound).record
    assert record is not None
    assert (record.failed, record.dropped, result.parity is not None) == (0, 0, True)
    assert result.parity is not None
    kind = path.rpartition("/")[2]
    assert [(case.name, case.ok) for case in result.parity.cases] == (
        [(f"planted: {kind}, temperature 0", ok)] if temperature == 0 else []
    )
    assert record.pairs >= 16  # the last copies are dropped at the end
    assert (record.compared, record.drawn)[temperature != 0] == record.pairs
    assert record.wrong == (0 if ok else record.pairs)
    (parity,) = (check for check in result.checks if check.name == "parity")
    assert (parity.ok, parity.severity) == ((ok, "invalidates") if temperature == 0 else (None, "warns"))


@pytest.mark.parametrize(
    "flags", ["--cut-every 1", "--error-every 1 --error-after 2", "--instead json --instead-share 1"]
)
def test_texts_that_break_off_are_failures(flags: str, tmp_path: Path) -> None:
    with (
        toy_server("--first-ms 2 --step-ms 0.1") as first,
        toy_server(f"--first-ms 2 --step-ms 0.1 {flags}") as second,
        shadowing(first.url, second.url, tmp_path / "run", "--block-seconds", "0.1") as running,
    ):
        ask_in_turn(running.port, 0.7, *FORMS[0])
        result = running.end()
    assert checks(result)["request_errors"] is ("json" in flags)


def test_the_first_token_has_a_time_of_its_own(tmp_path: Path) -> None:
    """The candidate is as fast to the last byte, and takes four times as long to the first token."""
    with (
        toy_server("--first-ms 20 --step-ms 20 --early-empty-ms 15") as first,
        toy_server("--first-ms 80 --step-ms 8 --early-empty-ms 75") as second,
        shadowing(first.url, second.url, tmp_path / "run", "--block-seconds", "0.1") as running,
        openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="hidden", max_retries=0) as client,
    ):
        for number in range(40):
            stream = client.chat.completions.create(
                model="planted", messages=[{"role": "user", "content": f"{number} please"}], max_tokens=6, stream=True
            )
            assert sum(len(chunk.choices) for chunk in stream)
        result = running.end()
    ratios = {comparison.metric: comparison.ratio for comparison in result.comparisons}
    assert ratios["typical_first_byte"] is not None
    assert ratios["typical_latency"] is not None
    assert ratios["typical_first_byte"] > 1.5 * ratios["typical_latency"]


def test_prometheus_reads_a_shadow_while_it_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        serving(echo) as primary,
        serving(echo) as second,
        shadowing(primary.url, second.url, tmp_path / "run", "--metrics-listen", str(port)) as running,
    ):
        ask(running.port, [b"x"] * 7)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=100)) as connection:
            connection.request("GET", "/metrics")
            shown = connection.getresponse().read().decode()
    assert "\nabserve_shadow_requests_total 7.0\n" in shown


def test_after_its_minutes_there_is_a_report_and_the_traffic_still_passes(tmp_path: Path) -> None:
    with (
        serving(echo) as primary,
        serving(echo) as second,
        shadowing(primary.url, second.url, tmp_path / "run", "--minutes", "0.001") as running,
    ):
        assert running.process.stdout is not None
        for line in running.process.stdout:
            if line.startswith("report: "):
                break
        assert ask(running.port, [b"late"]) == [(200, b"late")]
        record = running.end().of(ShadowFound).record
        assert record is not None
        assert (record.copied, record.pairs, b"late" in [body for *_, body in second.got]) == (0, 0, False)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for options in (
        ["--primary", "http://127.0.0.1:1/v1", "--candidate", "http://127.0.0.1:2"],
        ["--primary", "http://127.0.0.1:1", "--candidate", "ftp://x"],
        ["--primary", "http://127.0.0.1:1", "--candidate", "http://127.0.0.1:2", "--listen", "9000"],
        [],
        ["--primary", "http://127.0.0.1:1", "--candidate-grpc", "127.0.0.1:2"],
        ["--primary-grpc", "127.0.0.1:1"],
        ["--primary-grpc", "http://127.0.0.1:1", "--candidate-grpc", "127.0.0.1:2"],
    ):
        assert CliRunner().invoke(build(), ["shadow", *options, "--out", str(tmp_path / "run")]).exit_code == 2
    assert not (tmp_path / "run").exists()
