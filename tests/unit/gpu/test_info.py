"""The /gpu-info document: what a runtime's own report proves, and the one that is assembled for Triton."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.gpu.info import Runtime, engine_in_log, gpu_info, placed_nodes, triton_info
from servers.gpu.readings import DeviceIdentity, EdgeReading, NvmlConnection, Reading
from tests.scripted_reader import NullReader

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class OneGpu(NullReader):
    def __init__(self, *uuids: str) -> None:
        super().__init__()
        self._uuids = uuids

    def connect(self) -> NvmlConnection:
        devices = tuple(DeviceIdentity(n, uuid) for n, uuid in enumerate(self._uuids))
        return NvmlConnection("ok", devices=devices, device_count=len(devices))

    def reading(self, index: int) -> Reading:
        return Reading()

    def edge(self, index: int) -> EdgeReading:
        return EdgeReading()


def machine(*uuids: str) -> dict[str, object]:
    return gpu_info(None, OneGpu(*uuids))


@pytest.mark.parametrize(
    ("kind", "device", "details", "result"),
    [
        ("torch", "cpu", {"parameters_by_device": {"cpu": 3}}, "cpu"),
        ("torch", "cuda:0", {"parameters_by_device": {"cuda:0": 3}}, "unknown"),
        ("torch", "cuda:0", {"parameters_by_device": {"cuda:0": 3}, "kernel_probe": {"kernel_count": 0}}, "unknown"),
        ("torch", "cuda:0", {"parameters_by_device": {"cuda:0": 3}, "kernel_probe": {"kernel_count": 5}}, "gpu"),
        (
            "torch",
            "cuda:0",
            {"parameters_by_device": {"cuda:0": 3, "cpu": 1}, "kernel_probe": {"kernel_count": 5}},
            "partial",
        ),
        ("onnxruntime", "cuda:0", {"nodes_by_provider": {CUDA: 9}}, "gpu"),
        ("onnxruntime", "cuda:0", {"nodes_by_provider": {CUDA: 9, CPU: 2}}, "partial"),
        ("onnxruntime", "cuda:0", {"nodes_by_provider": {CUDA: 9, CPU: 2}, "cpu_time_ratio": 0.004}, "gpu"),
        ("onnxruntime", "cuda:0", {"nodes_by_provider": {CPU: 11}}, "cpu"),
    ],
)
def test_placement(kind: str, device: str, details: dict[str, Any], result: str) -> None:
    runtime = gpu_info(Runtime(kind, "1.0", device, details), OneGpu("GPU-1"))["runtime"]
    assert isinstance(runtime, dict)
    assert runtime["placement"]["result"] == result
    assert runtime["used_device_uuid"] == (None if device == "cpu" else "GPU-1")


def test_the_device_is_named_by_the_runtime_or_by_being_the_only_one() -> None:
    def used(told: object, *uuids: str) -> Any:
        details = {} if told is None else {"device_uuid": told}
        return gpu_info(Runtime("torch", "1", "cuda:1", details), OneGpu(*uuids))["runtime"]["used_device_uuid"]  # type: ignore[index]

    assert used(None, "GPU-1", "GPU-2") is None
    assert used("GPU-2", "GPU-1", "GPU-2") == "GPU-2"
    assert used("2a-bc", "GPU-1") == "GPU-2a-bc"
    assert used("MIG-7", "GPU-1") == "MIG-7"


def test_of_several_devices_none_is_the_one_that_the_server_uses() -> None:
    runtime = gpu_info(Runtime("torch", "1", "cuda:0,cuda:1", {"device_uuid": "GPU-1"}), OneGpu("GPU-1"))["runtime"]
    assert isinstance(runtime, dict)
    assert (runtime["device"], runtime["used_device_uuid"]) == ("cuda:0,cuda:1", None)
    assert runtime["used_device_uuids"] == []  # one is told for two devices
    both = gpu_info(Runtime("torch", "1", "cuda:0,cuda:1", {"device_uuid": "GPU-1,2a"}), OneGpu("GPU-1"))["runtime"]
    assert isinstance(both, dict)
    assert (both["used_device_uuid"], both["used_device_uuids"]) == (None, ["GPU-1", "GPU-2a"])
    on_cpu = gpu_info(Runtime("torch", "1", "cpu,cpu"), OneGpu("GPU-1"))["runtime"]
    assert isinstance(on_cpu, dict)
    assert on_cpu["placement"]["result"] == "cpu"


LOG = (
    "I1120 loading\n"
    '2026-11-20T09:18:19Z I 3951 python_model.py:68] "engine ready: {\\"in_effect\\": {\\"kind\\": \\"onnxruntime\\", '
    '\\"device\\": \\"cuda:0\\", \\"details\\": {\\"nodes_by_provider\\": {\\"CUDAExecutionProvider\\": 7}}}, '
    '\\"load_ns\\": 1}"\n'
)
VERBOSE = (
    "V1120 [V:onnxruntime] Node(s) placed on [CPUExecutionProvider]. Number of nodes: 4\n"
    "V1120 [V:onnxruntime] Node(s) placed on [CUDAExecutionProvider]. Number of nodes: 300\n"
)


def test_triton_with_our_engine_in_its_log() -> None:
    config = {"backend": "python", "instance_group": [{"kind": "KIND_CPU"}]}
    runtime = triton_info({"version": "2.51.0"}, config, LOG, machine("GPU-1"))["runtime"]
    assert isinstance(runtime, dict)
    assert (runtime["kind"], runtime["version"], runtime["engine"]) == ("triton", "2.51.0", "onnxruntime")
    assert (runtime["device"], runtime["placement"]["result"]) == ("cuda:0", "gpu")
    assert runtime["used_device_uuid"] == "GPU-1"
    assert engine_in_log("engine ready: {broken") is None


@pytest.mark.parametrize("kind", ["torch", "onnxruntime"])
def test_the_engine_inside_triton_tells_which_of_several_gpus(kind: str) -> None:
    """Its words cross Triton's log, as a string in JSON."""
    in_effect = {"kind": kind, "device": "cuda:0", "details": {"device_uuid": "GPU-3"}}
    words = json.dumps({"in_effect": in_effect, "load_ns": 1})
    log = f"2026-11-20T09:18:19Z I 3951 python_model.py:68] {json.dumps(f'engine ready: {words}')}\n"
    for text in (log, f"I1120 engine ready: {words}\n"):
        runtime = triton_info({}, {"backend": "python"}, text, machine("GPU-1", "GPU-2", "GPU-3", "GPU-4"))["runtime"]
        assert isinstance(runtime, dict)
        assert runtime["used_device_uuid"] == "GPU-3"
    untold = triton_info({}, {"backend": "tensorrt"}, None, machine("GPU-1", "GPU-2"))["runtime"]
    assert isinstance(untold, dict)
    assert untold["used_device_uuid"] is None


def test_engines_inside_triton_on_several_gpus_are_told_as_one() -> None:
    def ready(number: int, uuid: str, kernels: int) -> str:
        details = {
            "device_uuid": uuid,
            "parameters_by_device": {f"cuda:{number}": 152},
            "kernel_probe": {"kernel_count": kernels},
        }
        in_effect = {"kind": "torch", "device": f"cuda:{number}", "details": details}
        return f"I1120 engine ready: {json.dumps({'in_effect': in_effect, 'load_ns': 1})}\n"

    def runtime(log: str, *gpus: int) -> Any:
        config = {"backend": "python", "instance_group": [{"kind": "KIND_GPU", "count": 1, "gpus": list(gpus)}]}
        return triton_info({}, config, log, machine("GPU-1", "GPU-2", "GPU-3"))["runtime"]

    log = ready(1, "GPU-3", 90) + ready(0, "GPU-2", 97)
    both = runtime(log, 0, 1)
    assert (both["device"], both["used_device_uuids"]) == ("cuda:0,cuda:1", ["GPU-2", "GPU-3"])
    assert both["placement"]["result"] == "gpu"
    assert both["placement"]["params_by_device"] == {"cuda:0": 152, "cuda:1": 152}
    assert both["kernel_probe"] == {"kernel_count": 90}
    # After a reload on another GPU the last one counts, and one that the log lacks is not made up.
    assert runtime(log, 0)["used_device_uuids"] == ["GPU-2"]
    assert runtime(log, 0, 2)["used_device_uuids"] == ["GPU-2"]
    strange = {"kind": "torch", "device": "cuda:1", "details": {"kernel_probe": [1], "parameters_by_device": 7}}
    told = f"I1120 engine ready: {json.dumps({'in_effect': strange, 'load_ns': 1})}\n"
    assert runtime(told + ready(0, "GPU-2", 97), 0, 1)["used_device_uuids"] == ["GPU-2"]


def test_triton_with_a_native_backend_and_its_verbose_log() -> None:
    config = {"backend": "onnxruntime", "instance_group": [{"kind": "KIND_GPU"}]}
    runtime = triton_info({}, config, VERBOSE, machine("GPU-1"))["runtime"]
    assert isinstance(runtime, dict)
    assert runtime["placement"]["ep_nodes"] == placed_nodes(VERBOSE) == {CPU: 4, CUDA: 300}
    assert (runtime["device"], runtime["placement"]["result"]) == ("cuda", "partial")


@pytest.mark.parametrize(
    ("config", "device", "result"),
    [
        ({"backend": "onnxruntime", "instance_group": [{"kind": "KIND_CPU"}]}, "cpu", "cpu"),
        ({"backend": "python", "instance_group": [{"kind": "KIND_CPU"}]}, "unknown", "unknown"),
        ({"backend": "onnxruntime", "instance_group": [{"kind": "KIND_GPU"}]}, "unknown", "unknown"),
        ({"backend": "tensorrt"}, "cuda", "unknown"),
    ],
)
def test_triton_without_a_log(config: dict[str, Any], device: str, result: str) -> None:
    runtime = triton_info({}, config, None, machine("GPU-1"))["runtime"]
    assert isinstance(runtime, dict)
    assert (runtime["device"], runtime["placement"]["result"]) == (device, result)


@pytest.fixture
def site() -> Iterator[tuple[str, dict[str, str]]]:
    """An HTTP server whose routes are a dictionary."""
    routes: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = routes.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write((found or '{"error": "no"}').encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", routes
    server.shutdown()
    thread.join()
    server.server_close()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadgen.entry", "gpu-info", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""},  # where nothing listens
    )


def test_the_command_asks_a_native_server(site: tuple[str, dict[str, str]]) -> None:
    url, routes = site
    document = gpu_info(Runtime("torch", "2.15", "cpu", {"parameters_by_device": {"cpu": 3}}), OneGpu("GPU-1"))
    routes["/gpu-info"] = json.dumps(document)
    assert json.loads(command(url, "--json").stdout) == document
    shown = command(url).stdout
    assert "GPU-1" in shown
    assert "torch 2.15 on cpu, placement: cpu" in shown


def test_the_command_assembles_tritons(site: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    url, routes = site
    routes["/v2"] = '{"name": "triton", "version": "2.51.0"}'
    routes["/v2/models/m/config"] = '{"backend": "python"}'
    routes["/exporter/gpu-info"] = json.dumps(machine("GPU-1"))
    (tmp_path / "triton.log").write_text(LOG)
    done = command(
        url, "--model", "m", "--log", str(tmp_path / "triton.log"), "--exporter", f"{url}/exporter", "--json"
    )
    document = json.loads(done.stdout)
    assert document["devices"][0]["uuid"] == "GPU-1"
    assert document["runtime"]["placement"]["result"] == "gpu"
    failed = command(url, "--model", "other")
    assert failed.returncode == 2
    assert "'other'" in failed.stderr
    routes["/v2/repository/index"] = '[{"name": "m"}, {"name": "othr"}]'
    assert "did you mean othr?" in command(url, "--model", "other").stderr
    routes["/v2/repository/index"] = '[{"name": "m"}]'
    assert json.loads(command(url, "--exporter", f"{url}/exporter", "--json").stdout)["runtime"]["version"] == "2.51.0"


@pytest.mark.parametrize(
    "document", ["[]", "{}", '{"status": "ok", "devices": 3}', '{"status": "ok", "devices": [{}]}']
)
def test_an_exporter_with_another_document_is_one_sentence(site: tuple[str, dict[str, str]], document: str) -> None:
    url, routes = site
    routes |= {"/v2": "{}", "/v2/models/m/config": "{}", "/exporter/gpu-info": document}
    done = command(url, "--model", "m", "--exporter", f"{url}/exporter")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_the_command_without_a_server() -> None:
    done = command("127.0.0.1:1")
    assert done.returncode == 1
    assert "http://127.0.0.1:1/gpu-info does not answer (Connection refused)" in done.stderr
    assert done.stderr.count("\n") == 1
    wrong = command("127.0.0.1:one")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "correct the URL" in wrong.stderr


@pytest.mark.parametrize("answer", [b"\0\0\x12\4\0\0\0\0\0", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"])
def test_a_port_that_does_not_speak_http_is_one_sentence(answer: bytes) -> None:
    def grpc() -> None:
        with listener.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=grpc, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = command(url)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"{url}/gpu-info does not answer with HTTP; is it a server" in result.stderr


def test_this_machine() -> None:
    done = command("--json")
    assert json.loads(done.stdout)["schema"] == "abserve.gpu-info/1"
