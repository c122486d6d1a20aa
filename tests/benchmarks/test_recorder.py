"""What `abserve record` and `abserve shadow` add to a request of 150 KB over HTTP at 500 requests/s, beside aiohttp.

    python -m pytest tests/benchmarks/test_recorder.py -m benchmark -s

A native server with the null engine, another that records itself, the recorder, a shadow that copies a tenth of the
requests to the same server, and a proxy of aiohttp run side by side, each in a process. One client sends requests that
are due at equal distances on four connections, to each of the servers and through each of the three, in alternating
rounds; each request has another content. A latency counts from the moment at which a request is due. Per round the
percentiles through one of them are compared with those of the server alone.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns, sleep

import numpy as np
import pytest

from tests.benchmarks.test_native_cpu import NATIVE, connect, receive_answer, request_bytes, running

RATE, CONNECTIONS, SECONDS, ROUNDS = 500, 4, 4.0, 7
PAYLOAD = 150_528
MOST_BYTES = "300000000"
MOST_P50_MS, MOST_P99_MS = 1.0, 3.0
PROXY = """
import sys
from aiohttp import ClientSession, DummyCookieJar, TCPConnector, web

async def session(app):
    async with ClientSession(
        cookie_jar=DummyCookieJar(), auto_decompress=False, connector=TCPConnector(limit=0)
    ) as app["session"]:
        yield

async def passed(request):
    url = sys.argv[2] + request.raw_path
    body = request.content if request.body_exists else None
    headers = {name: value for name, value in request.headers.items() if name != "Transfer-Encoding"}
    async with request.app["session"].request(
        request.method, url, headers=headers, data=body, allow_redirects=False
    ) as answer:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response

app = web.Application(client_max_size=2**30)
app.cleanup_ctx.append(session)
app.router.add_route("*", "/{path:.*}", passed)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
"""


@contextmanager
def relaying(*options: str) -> Iterator[int]:
    """The port of `abserve record` or `abserve shadow` with these options."""
    command = [sys.executable, "-m", "loadgen.entry", *options, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().split(" ")[0].rpartition(":")[2])
    finally:
        process.terminate()
        sys.stdout.write(process.communicate()[0][-500:])


@contextmanager
def recording_itself(environment: pytest.MonkeyPatch, folder: Path) -> Iterator[int]:
    """The port of a server that records itself."""
    environment.setenv("ABSERVE_NATIVE_RECORD", str(folder))
    environment.setenv("ABSERVE_NATIVE_RECORD_MAX_BYTES", MOST_BYTES)
    with running(NATIVE, "1") as (_, port):
        environment.undo()
        yield port


def latencies_ms(port: int) -> np.ndarray:
    """Of one round."""
    request, measured = request_bytes(PAYLOAD), [np.zeros(0)] * CONNECTIONS
    count, gap_ns = int(RATE * SECONDS / CONNECTIONS), int(1e9 / RATE)
    start_ns = perf_counter_ns() + 200_000_000

    def user(number: int) -> None:
        times = []
        with connect(port) as connection:
            for turn in range(count):
                due_ns = start_ns + (turn * CONNECTIONS + number) * gap_ns
                sleep(max(0.0, (due_ns - perf_counter_ns()) / 1e9))
                connection.sendall(request[:-8] + perf_counter_ns().to_bytes(8))
                receive_answer(connection)
                times.append((perf_counter_ns() - due_ns) / 1e6)
        measured[number] = np.array(times[count // 10 :])

    users = [threading.Thread(target=user, args=(number,)) for number in range(CONNECTIONS)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    return np.concatenate(measured)


@pytest.mark.benchmark
@pytest.mark.timeout(600)
def test_recording_and_shadowing_add_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(NATIVE, "1") as (_, server),
        monkeypatch.context() as own,
        recording_itself(own, tmp_path / "own") as recorded,
        running(PROXY, f"http://127.0.0.1:{server}") as (_, proxy),
        relaying(
            *("record", "--to", f"http://127.0.0.1:{server}"),
            *("--out", str(tmp_path / "traffic"), "--max-bytes", MOST_BYTES),
        ) as recording,
        relaying(
            *("shadow", "--primary", f"http://127.0.0.1:{server}", "--candidate", f"http://127.0.0.1:{server}"),
            *("--out", str(tmp_path / "shadow")),
        ) as shadow,
    ):
        ports = {"server": server, "itself": recorded, "recorder": recording, "shadow": shadow, "aiohttp": proxy}
        rounds: dict[str, list[np.ndarray]] = {name: [] for name in ports}
        for turn in range(ROUNDS):
            for name in [*ports] if turn % 2 else [*reversed(ports)]:
                rounds[name].append(np.percentile(latencies_ms(ports[name]), (50, 99)))
    values = {name: np.array(found) for name, found in rounds.items()}
    added = {name: np.median(values[name] - values["server"], axis=0) for name in [*ports][1:]}
    ratios = {name: np.median(values[name] / values["server"], axis=0) for name in added}
    sys.stdout.write(f"server alone: p50 and p99 {np.median(values['server'], axis=0).round(2)} ms\n")
    for name in added:
        sys.stdout.write(f"{name}: adds {added[name].round(2)} ms, {ratios[name].round(2)} times the server's\n")
    for name in ("itself", "recorder", "shadow"):
        assert added[name][0] <= MOST_P50_MS
        assert added[name][1] <= MOST_P99_MS
        assert added[name][0] <= added["aiohttp"][0]
