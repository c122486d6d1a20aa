"""The real `locust` command with our locustfile, as somebody uses it who knows Locust and nothing of us."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from loadgen.launch.embedded import EmbeddedDeployment, PortReservation
from tests.fake_commands import write_samples
from tests.integration.loadgen.conftest import FAKE, await_true, regions_of_load

LOCUSTFILE = Path(__file__).parents[3] / "loadgen" / "scenarios.py"


def locust(
    url: str, *options: str, seconds: int = 2, locustfile: Path = LOCUSTFILE
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", str(locustfile), "--host", url, "--headless", "--only-summary"]
    return subprocess.run(
        [*command, "-t", f"{seconds}s", *options], capture_output=True, text=True, timeout=90, check=False
    )


def test_headless_without_knowing_anything(fake_url: Callable[..., str], images: Path, tmp_path: Path) -> None:
    out = tmp_path / "raw"
    url = fake_url("--delay-ms", "5")
    options = ["-u", "4", "-r", "4", "--samples-dir", str(images), "--samples-out", str(out), "--json"]
    done = locust(url, *options)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    (path,) = out.glob("Concurrent-*.npy")
    samples = np.load(path)
    about = json.loads(path.with_suffix(".json").read_bytes())
    assert entry["name"] == "infer, batch 1"
    assert entry["num_requests"] == len(samples) == about["requests"] > 20
    assert entry["num_failures"] == about["errors"] == 0
    assert set(samples["user"]) == {0, 1, 2, 3}
    latency_ms = (samples["end_ns"] - samples["send_ns"]) / 1e6
    assert latency_ms.min() >= 5
    assert entry["total_response_time"] == pytest.approx(latency_ms.sum(), rel=0.01), "Locust is told our times"


@pytest.mark.slow  # by default the other runs of this file
def test_batches_single_users_and_processes(fake_url: Callable[..., str], images: Path, tmp_path: Path) -> None:
    out = tmp_path / "raw"
    common = ["--samples-dir", str(images), "--samples-out", str(out)]
    done = locust(fake_url(), "-u", "2", "-r", "2", "--processes", "2", "--batch-size", "3", *common, "Batched")
    assert done.returncode == 0, done.stderr
    paths = list(out.glob("Batched-*.npy"))
    assert len(paths) == 2, "one file a worker"
    for path in paths:
        assert set(np.load(path)["batch"]) == {3}
    (merged,) = out.glob("merged-Batched-*.npy")
    assert len(np.load(merged)) == sum(len(np.load(path)) for path in paths)
    assert json.loads(merged.with_suffix(".json").read_bytes())["complete"]
    done = locust(fake_url(), "-u", "5", "-r", "5", *common, "Single", seconds=1)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("Single-*.npy")
    assert set(np.load(path)["user"]) == {0}


def test_a_host_that_cannot_be_used_is_one_sentence_also_for_a_cold_start(fake_url: Callable[..., str]) -> None:
    for scenario in ("ColdStart", "Concurrent"):
        done = locust(fake_url().replace("http://", "wss://"), scenario)
        assert done.returncode == 1
        assert "is not an http:// or https:// address" in done.stderr
        assert "Traceback" not in done.stderr


def test_failures_are_locusts_failures_too(fake_url: Callable[..., str], images: Path, tmp_path: Path) -> None:
    done = locust(fake_url("--error-every", "3"), "--samples-dir", str(images), "--json", seconds=1)
    assert done.returncode == 1
    (entry,) = json.loads(done.stdout)
    assert 0 < entry["num_failures"] < entry["num_requests"]
    assert "HTTP 503: the queue is full" in done.stderr + done.stdout


def test_the_stopwatch_waits_for_the_server(unused_url: str, images: Path) -> None:
    port = unused_url.rpartition(":")[2]
    command = [sys.executable, str(FAKE), "--http-port", port, "--startup-ms", "2000"]
    late = subprocess.Popen(["sh", "-c", f"sleep 2; exec {' '.join(command)}"], stdout=subprocess.DEVNULL)
    try:
        done = locust(unused_url, "--samples-dir", str(images), "--json", "ColdStart", seconds=60)
    finally:
        late.kill()
        late.wait()
    assert done.returncode == 0, done.stderr
    times = {entry["name"]: entry["max_response_time"] for entry in json.loads(done.stdout)}
    assert times["server live"] < times["model ready"] < times["first answer"]
    assert times["model ready"] - times["server live"] > 200


@pytest.mark.parametrize(
    ("server", "options", "words"),
    [
        (False, [], "abserve serve native"),
        (True, ["--model", "other"], "no model other at"),
        (True, ["--samples-dir", "/no/such/folder"], "abserve samples --out /no/such/folder"),
        (False, ["--rate", "-5", "OpenLoop"], "--rate -5 is not possible; give 0 to 100000"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(
    fake_url: Callable[..., str], unused_url: str, server: bool, options: list[str], words: str
) -> None:
    done = locust(fake_url() if server else unused_url, *options, seconds=30)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


PROBLEMS = """
from types import SimpleNamespace
from loadgen.client.inputs import InputError
from loadgen.locust.session import LoadOptions, Session
print(LoadOptions().problem(), LoadOptions(batch_size=0).problem(), LoadOptions(request_timeout=0.0).problem(),
      LoadOptions(model="language:demo").problem(), sep="|")
print(LoadOptions(header=("A=1", "Authorization: Bearer a=b")).access.header["Authorization"].secret)
try:
    Session(SimpleNamespace(host="http://h:1"), LoadOptions(inputs="/no/such/file.npz")).load_inputs()
except InputError as exc:
    print(exc)
"""


def test_each_option_that_cannot_be_is_named() -> None:
    """In another process, because importing Locust patches this one."""
    done = subprocess.run([sys.executable, "-c", PROBLEMS], capture_output=True, text=True, check=True)
    options, header, inputs = done.stdout.splitlines()
    assert header == "Bearer a=b"
    good, batch_size, timeout, language = options.split("|")
    assert good == "None"
    assert "--batch-size 0 is not possible" in batch_size
    assert "--request-timeout 0 is not possible" in timeout
    assert language.startswith("--model language:demo: the locustfile sends tensors and reads no streamed tokens; ")
    assert "--inputs /no/such/file.npz does not exist" in inputs


def test_an_open_loop_has_its_connections_at_once(fake_url: Callable[..., str], images: Path, tmp_path: Path) -> None:
    """As docs/load.md says it, without -r: at Locust's one user a second it would end before the first request."""
    out = tmp_path / "raw"
    given = ["-u", "64", "--rate", "50", "--samples-dir", str(images), "--samples-out", str(out)]
    done = locust(fake_url(), *given, "OpenLoop", seconds=4)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("OpenLoop-*.npy")
    assert len(np.load(path)) > 20


def test_an_open_loop_without_a_rate_ends_with_a_sentence_on_the_page_too(
    fake_url: Callable[..., str], images: Path
) -> None:
    """There its users ended at once, and the test went on without a word."""
    ports = PortReservation(1)
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUSTFILE),
        "--host",
        fake_url(),
        "--samples-dir",
        str(images),
    ]
    command += ["--web-port", str(ports.ports[0]), "--autostart", "--autoquit", "0", "-t", "2s", "OpenLoop"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    ports.release()
    assert done.returncode == 1
    assert "OpenLoop needs a rate" in done.stderr
    assert "Traceback" not in done.stderr


NO_TIMER = """
import ctypes, errno
from types import SimpleNamespace
import loadgen.client.pacer

def refuse(*_):
    ctypes.set_errno(errno.EMFILE)
    return -1

loadgen.client.pacer._libc = SimpleNamespace(timerfd_create=refuse)
from loadgen.scenarios import *
"""


def test_an_open_loop_without_a_timer_ends_with_a_sentence(
    fake_url: Callable[..., str], images: Path, tmp_path: Path
) -> None:
    """Its users waited until the end of the test for requests that nobody handed out."""
    (tmp_path / "no_timer.py").write_text(NO_TIMER)
    options = ["-u", "2", "--rate", "10", "--samples-dir", str(images), "OpenLoop"]
    done = locust(fake_url(), *options, seconds=60, locustfile=tmp_path / "no_timer.py")
    assert done.returncode == 1
    assert "Too many open files); raise the limit of open files (ulimit -n)" in done.stderr
    assert "run-time limit reached" not in done.stderr


def test_a_test_that_sent_nothing_is_no_success(fake_url: Callable[..., str], images: Path) -> None:
    given = ["-u", "64", "-r", "1", "--rate", "50", "--samples-dir", str(images)]
    done = locust(fake_url(), *given, "OpenLoop", seconds=2)
    assert done.returncode == 1
    assert "the test ended before its first request" in done.stderr


SHOWN = """
import runpy, sys
from locust.argument_parser import ui_extra_args_dict
runpy.run_path(sys.argv[1])
for name, shown in ui_extra_args_dict([]).items():
    print(f"--{name.replace('_', '-')}={shown['default_value']}")
"""


def test_the_options_of_the_docstring_are_those_of_the_web_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (LOCUSTFILE.parent / "locust" / LOCUSTFILE.name).read_text()
    documented = re.findall(r"^    (--[a-z-]+)(?: \S+)? +(ABSERVE_LOAD_\w+)", text, re.MULTILINE)
    assert len(documented) >= 7
    monkeypatch.setenv("ABSERVE_LOAD_BATCH_SIZE", "13")
    done = subprocess.run([sys.executable, "-c", SHOWN, str(LOCUSTFILE)], capture_output=True, text=True, check=True)
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines())
    hidden = {"--anyone", "--metrics-port", "--metrics-host", "--header"}  # of the process, not of a test; and a secret
    assert shown.keys() == {name for name, _ in documented} - hidden
    assert shown["--batch-size"] == "13"
    assert all(variable == f"ABSERVE_LOAD{name[1:].replace('-', '_').upper()}" for name, variable in documented)


def test_against_the_native_server(tmp_path: Path) -> None:
    write_samples(tmp_path / "images", side=224)
    server = EmbeddedDeployment("native", {"engine": "null"}, tmp_path / "native.log")
    server.start()
    try:
        server.wait_ready("openclip_vit_b32", 60)
        out = tmp_path / "raw"
        options = ["-u", "8", "-r", "8", "--samples-dir", str(tmp_path / "images"), "--samples-out", str(out)]
        done = locust(server.url, *options)
        assert done.returncode == 0, done.stderr
        (path,) = out.glob("Concurrent-*.npy")
        assert (np.load(path)["status"] == 200).all()
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "shm"])
def test_other_transports_and_payloads(tmp_path: Path, protocol: str) -> None:
    """With a fixed time per answer: users that wait for each other would show. On a busy machine the first request
    leaves seconds after the start."""
    options = {"engine": "null", "model": "openclip_vit_b32", "payloads": "uint8", "added-delay-ms": "200"}
    server = EmbeddedDeployment("native", {**options, "allow-shared-memory": "true"}, tmp_path / "server.log")
    server.start()
    try:
        server.wait_ready("openclip_vit_b32_uint8", 90)
        given = ["--protocol", protocol, "--payload", "uint8", "--grpc", server.grpc_address or "", "-u", "8"]
        done = locust(server.url, *given, "-r", "8", "--samples-out", str(tmp_path / "raw"), seconds=12)
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "raw").glob("Concurrent-*.npy")
    samples = np.load(path)
    seconds = (samples["end_ns"].max() - samples["send_ns"].min()) / 1e9
    assert set(samples["status"]) == {1000 if protocol == "grpc" else 200}
    assert len(samples) / seconds > 2 / 0.2, "the users waited for each other"
    assert regions_of_load() == []


def test_page_and_channel_listen_on_loopback_unless_told_otherwise(fake_url: Callable[..., str]) -> None:
    """Neither has a password; Locust's own default is every interface."""
    ports = PortReservation(2)
    page, channel = ports.ports
    options = ["--master", "--master-bind-port", str(channel), "--web-port", str(page)]
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", fake_url(), *options]
    listening: dict[int, str] = {}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:

        def both_listen() -> bool:
            assert process.poll() is None
            connections = psutil.Process(process.pid).net_connections("inet")
            addresses = [connection.laddr for connection in connections if connection.status == "LISTEN"]
            listening.update({address.port: address.ip for address in addresses})
            return {page, channel} <= set(listening)

        try:
            await_true(both_listen, "the page and the channel")
        finally:
            process.terminate()
            ports.release()
    assert set(listening.values()) == {"127.0.0.1"}


@pytest.fixture(scope="module")
def page() -> Iterator[int]:
    """The port of a web page that is open."""
    ports = PortReservation(1)
    (port,) = ports.ports
    host = "http://127.0.0.1:9"  # which nothing answers
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", host, "--web-port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            await_true(lambda: answers(port) == 200, "the page")
            yield port
        finally:
            process.terminate()
            ports.release()


def answers(port: int, method: str = "GET", path: str = "/", **headers: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = "user_count=1&spawn_rate=1&host=http://127.0.0.1:1" if method == "POST" else None
    form = {"Content-Type": "application/x-www-form-urlencoded"} if body else {}
    sent = form | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, body, sent)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


FOREIGN: list[dict[str, str]] = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Host": "rebound.evil.example"},
    {"Host": "rebound.evil.example", "Origin": "http://rebound.evil.example"},
    {"Host": "127.0.0.1.evil.example"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_another_web_page_starts_stops_and_reads_nothing(page: int, headers: dict[str, str]) -> None:
    for method, path in (("POST", "/swarm"), ("GET", "/stop"), ("GET", "/stats/requests"), ("GET", "/stats/reset")):
        assert answers(page, method, path, **headers) == 403


def test_its_own_page_and_programs_work(page: int) -> None:
    assert answers(page) == answers(page, Sec_Fetch_Site="cross-site") == 200  # a link to it
    for host in (f"127.0.0.1:{page}", f"localhost:{page}", f"[::1]:{page}"):
        own = {"Host": host, "Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
        assert answers(page, "POST", "/swarm", **own) == 200
        assert answers(page, "POST", "/stop", **own) == 200
    assert answers(page, "GET", "/stats/requests") == 200
