"""Starting, not being ready, stopping, and not starting at all."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.integration.native.conftest import free_port


def log_of(server) -> str:
    return (server.folder / f"log-{server.port}").read_text()


def test_live_while_loading_and_inference_is_503_until_ready(controlled):
    server = controlled()
    server.wait_live()
    ready = server.request("GET", "/v2/health/ready")
    assert ready.status == 503
    assert "not ready: loading" in json.loads(ready.body)["error"]
    for path in ("/v2/models/rows/ready", "/v2/models/rows/config"):
        assert server.request("GET", path).status == 503
    assert server.request("GET", "/v2/models/rows").status == 200
    refused = server.infer([1.0] * 4)
    assert refused.status == 503
    assert refused.headers["retry-after"]
    index = json.loads(server.request("POST", "/v2/repository/index").body)
    assert index == [{"name": "rows", "version": "1", "state": "LOADING"}]
    assert json.loads(server.request("POST", "/v2/repository/index", b'{"ready": true}').body) == []
    server.open("load", "infer")
    server.wait_ready()
    assert server.infer([1.0] * 4).status == 200


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ((signal.SIGTERM,), 0),
        ((signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT), 130),
        ((signal.SIGTERM, signal.SIGINT), 0),
    ],
    ids=["SIGTERM", "Ctrl-C again and again", "SIGTERM, then Ctrl-C"],
)
@pytest.mark.parametrize("fronts", [0, 2])
def test_a_signal_finishes_accepted_work_and_takes_no_more(controlled, signals, status, fronts):
    server = controlled("--max-batch-size", "1", "--max-queue-delay-us", "0", "--fronts", str(fronts))
    server.open("load")
    server.wait_ready()
    with ThreadPoolExecutor(6) as pool, socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(1000)
        futures = [pool.submit(server.infer, [float(value)] * 4) for value in range(20, 26)]
        # the engine has the first, the queue has five
        server.wait_until(lambda: server.metric("abserve_native_pending_requests") == 5, "six requests in flight")
        for count, number in enumerate(signals):
            server.process.send_signal(number)
            server.wait_until(lambda: server.status("/v2/health/live") is None, "new connections are refused")
            server.wait_until(lambda count=count: log_of(server).count("already") == count, "the signal has come")
        assert idle.recv(1000) == b""
        assert not any(future.done() for future in futures)
        server.open("infer")
        for value, future in zip(range(20, 26), futures, strict=True):
            answer = future.result()
            assert answer.status == 200
            assert json.loads(answer.body)["outputs"][0]["data"] == [float(value)] * 4
    assert server.process.wait(60) == status
    assert (server.folder / "closed").exists()


def test_what_is_not_finished_in_time_is_refused_and_the_process_ends(controlled):
    server = controlled("--max-batch-size", "1", "--shutdown-timeout-s", "3", grpc=True)
    server.open("load")
    server.wait_ready()
    with ThreadPoolExecutor(4) as pool, triton.InferenceServerClient(server.grpc_address) as client:
        futures = [pool.submit(server.infer, [float(value)] * 4) for value in range(20, 24)]
        tensor = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
        answers: queue.Queue = queue.Queue()
        client.async_infer("rows", [tensor], lambda result, error: answers.put((result, error)))
        # the engine has one and never ends with it, four wait
        server.wait_until(lambda: server.metric("abserve_native_pending_requests") == 4, "five requests in flight")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0  # the engine would hold it for ever
        for future in futures:
            answer = future.result()
            assert (answer.status, answer.headers["content-type"]) == (503, "application/json")
            assert answer.headers["retry-after"]
            assert "shutting down" in json.loads(answer.body)["error"]
        assert "UNAVAILABLE" in str(answers.get(timeout=60)[1])
    assert "refused" in log_of(server)


def test_a_thread_that_hangs_does_not_keep_the_process(controlled):
    server = controlled("--shutdown-timeout-s", "2", "--allow-model-control", "true")
    server.open("load")
    server.wait_ready()
    with ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(server.infer, [1.0] * 4)
        server.wait_until((server.folder / "infer-reached").exists, "the engine has it, and never ends with it")
        unloading = pool.submit(server.request, "POST", "/v2/repository/models/rows/unload")
        server.wait_until(lambda: server.status("/v2/models/rows") == 404, "it is being unloaded")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert [stuck.result().status, unloading.result().status] == [503, 503]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_loading_ends_the_process_soon(controlled, number, status):
    server = controlled()
    server.wait_live()
    server.process.send_signal(number)
    assert server.process.wait(60) == status


SIGNALLED = """
import os, sys
number = int(sys.argv.pop())
from servers.native import front_server as server
from servers.native.__main__ import main
run = server.NativeServer.run
def run_signalled(self, sockets):
    os.kill(os.getpid(), number)
    run(self, sockets)
server.NativeServer.run = run_signalled
os._exit(main())
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_before_the_event_loop_listens_for_any_is_not_lost(number, status):
    settings = json.dumps({"engine": "null", "http_port": free_port(), "grpc_port": 0, "fronts": 0})
    process = subprocess.Popen([sys.executable, "-c", SIGNALLED, settings, str(int(number))], stderr=subprocess.PIPE)
    try:
        assert process.wait(60) == status
    finally:
        process.kill()
        process.communicate()


INTERRUPTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "pydantic":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # as from a terminal
sys.meta_path.insert(0, Interrupting())
from servers.native.__main__ import main
main()
"""


def test_ctrl_c_while_it_imports_ends_the_process_without_a_traceback():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_a_load_that_fails_ends_the_process_with_the_reason(controlled):
    server = controlled()
    server.wait_live()
    (server.folder / "load.tmp").write_text("fail")
    (server.folder / "load.tmp").rename(server.folder / "load")
    assert server.process.wait(60) == 1
    log = log_of(server)
    assert "the weights are missing: fetch them" in log
    assert "Traceback" not in log


def test_a_server_whose_engine_is_lost_answers_that_and_ends(controlled):
    """A lost GPU fails every batch from then on: a server that stays ready would be sent requests for ever."""
    server = controlled("--max-queue-delay-us", "0")
    server.open("load", "infer")
    server.wait_ready()
    assert server.infer([666.0] * 4).status == 500  # of that request alone
    assert server.infer([1.0] * 4).status == 200
    server.open("dead")
    assert server.infer([1.0] * 4).status == 500
    assert server.process.wait(60) == 1
    assert "the engine is broken" in log_of(server)


def test_a_lost_engine_of_a_server_that_loads_on_demand_can_be_loaded_again(controlled):
    server = controlled("--allow-model-control", "true")
    server.open("load", "infer")
    server.wait_ready()
    for action in ("unload", "load"):
        assert server.request("POST", f"/v2/repository/models/rows/{action}").status == 200
    server.open("dead")
    assert server.infer([1.0] * 4).status == 500
    server.wait_until(lambda: server.status("/v2/health/ready") == 503, "not ready")
    assert server.infer([1.0] * 4).status == 503
    (server.folder / "dead").unlink()
    assert server.request("POST", "/v2/repository/models/rows/load").status == 200
    assert server.infer([1.0] * 4).status == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-batch-size", "0"], "--max-batch-size"),
        (["--engine", "magic"], "--engine"),
        (["--precision", "magic"], "no precision 'magic'"),
        (["--model", "nope"], "unknown model 'nope'"),
        (["--weights", "/no/such.pt"], "no such file"),
        (["--host", "256.0.0.1"], "--host"),
    ],
)
def test_options_that_cannot_be_honoured_are_told_in_one_sentence(native, options, message):
    server = native(*options)
    assert server.process.wait(60) == 1
    assert message in log_of(server)
    assert len(log_of(server).splitlines()) == 1


def test_a_taken_port_is_told_before_anything_is_loaded(native):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        server = native(port=holder.getsockname()[1])
        assert server.process.wait(60) == 1
        assert log_of(server).splitlines() == [
            f"abserve native server: port {server.port} on 127.0.0.1 is taken; "
            "stop what listens there or choose another with --http-port"
        ]


COMMAND = "import typer; from servers.commands.native import serve_native; typer.run(serve_native)"


def test_the_printed_plan_starts_the_server(native, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "ABSERVE_NATIVE_ENGINE": "null", "ABSERVE_NATIVE_QUEUE_SIZE": "7"}
    printed = subprocess.run(
        [sys.executable, "-c", COMMAND, "--http-port", str(port), "--grpc-port", "0", "--print-launch"],
        env=environment, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    plan = json.loads(printed.stdout)
    assert plan["argv"][1:6] == ["-P", "-m", "abserve", "-m", "servers.native"]
    assert plan["http_url"] == f"http://127.0.0.1:{port}"
    (argument,) = plan["argv"][6:]
    options = [(f"--{name}", value) for name, value in json.loads(argument).items()]
    server = native(*chain.from_iterable(options), port=port)
    server.wait_ready()
    config = json.loads(server.request("GET", "/v2/models/openclip_vit_b32/config").body)
    assert config["dynamic_batching"]["default_queue_policy"]["max_queue_size"] == 7


def test_the_command_becomes_the_server_and_dies_by_its_signals(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise RuntimeError('of the folder in which the command was started')")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", COMMAND, "--engine", "null", "--http-port", str(port), "--grpc-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if b"] ready " in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_command_refuses_in_one_sentence():
    for options, message in (
        (["--max-batch-size", "0"], "--max-batch-size 0: must be greater than or equal to 1"),
        (["--weights", ""], "--weights is empty"),
    ):
        done = subprocess.run([sys.executable, "-c", COMMAND, *options], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
