"""A model whose files change is loaded beside the served version, and replaces it only when it has proved itself."""

from __future__ import annotations

import http.client
import json
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import tritonclient.grpc

from tests.integration.native.conftest import Server, _starter, _stop, wait_until

MODEL = """
import pathlib
import time

import torch

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale

def scaled():
    while pathlib.Path(__file__).with_name("hold").exists():
        time.sleep(0.01)
    return Scaled()

sample = torch.zeros(1, 4)
"""
RELOADS = 4


def write_weights(file: Path, scale: float) -> None:
    """Replace the file in one step, so that the server never reads half of it."""
    fresh = file.with_suffix(".new")
    torch.save({"scale": torch.tensor([scale])}, fresh)
    fresh.rename(file)


class Reloading:
    """A server of a model that multiplies by its only weight."""

    def __init__(self, start: Callable[..., Server], folder: Path, *options: str) -> None:
        self.hold = folder / "hold"
        """While it exists nothing is loaded."""
        self.weights = folder / "weights.pt"
        self.model = folder / "model.py"
        self.model.write_text(MODEL)
        write_weights(self.weights, 1.0)
        self.server = start(
            *("--model", f"{self.model}:scaled", "--weights", str(self.weights), "--device", "cpu"),
            *("--max-batch-size", "8", "--choices", "off", *options),
            grpc=True,
        )
        self.server.wait_ready()
        self.name = json.loads(self.server.request("POST", "/v2/repository/index").body)[0]["name"]
        self.inputs = [item["name"] for item in self.metadata()["inputs"]]

    def metadata(self, version: str = "") -> dict[str, Any]:
        return dict(json.loads(self.server.request("GET", self.path(version)).body))

    def path(self, version: str = "") -> str:
        return f"/v2/models/{self.name}" + (f"/versions/{version}" if version else "")

    @property
    def version(self) -> str:
        (version,) = self.metadata()["versions"]
        return str(version)

    def hang_up(self) -> None:
        os.kill(self.server.process.pid, signal.SIGHUP)

    @property
    def log(self) -> str:
        return (self.server.folder / f"log-{self.server.port}").read_text()

    @property
    def processes(self) -> int:
        return len(psutil.Process(self.server.process.pid).children())

    def body(self, value: float) -> tuple[bytes, dict[str, str]]:
        tensor = {"name": self.inputs[0], "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
        document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        header = json.dumps(document).encode()
        return header + struct.pack("<4f", *[value] * 4), {"Inference-Header-Content-Length": str(len(header))}

    def ask(self, connection: http.client.HTTPConnection, value: float, version: str = "") -> tuple[int, str, float]:
        """The status, the version that the answer names, and the factor by which it has multiplied."""
        connection.request("POST", self.path(version) + "/infer", *self.body(value))
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            return response.status, "", 0.0
        length = int(response.headers["Inference-Header-Content-Length"])
        return 200, json.loads(content[:length])["model_version"], struct.unpack("<4f", content[length:])[3] / value


@pytest.fixture
def reloading(tmp_path: Path) -> Iterator[Callable[..., Reloading]]:
    servers: list[Server] = []
    start = _starter(tmp_path, lambda _: ["-m", "servers.native"], servers)
    yield lambda *options: Reloading(start, tmp_path, *options)
    _stop(servers)


def test_reloads_under_load_lose_no_request_and_mix_no_answer(reloading) -> None:
    """Version V multiplies by V, so the number in each answer must be its factor: over HTTP by templates, with a named
    version, as JSON, and over gRPC."""
    served = reloading("--reload", "signal", "--fronts", "2")
    ended = threading.Event()
    wrong: list[object] = []
    answered = [0] * 4

    def binary(number: int) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)) as connection:
            while not ended.is_set():
                status, version, factor = served.ask(connection, 3.0)
                if status != 200 or float(version) != factor:
                    wrong.append((status, version, factor))
                answered[number] += 1

    def as_json(number: int) -> None:
        tensor = {"name": served.inputs[0], "datatype": "FP32", "shape": [1, 4], "data": [2.0] * 4}
        while not ended.is_set():
            answer = served.server.request("POST", served.path() + "/infer", json.dumps({"inputs": [tensor]}).encode())
            document = json.loads(answer.body)
            if answer.status != 200 or float(document["model_version"]) * 2 != document["outputs"][0]["data"][0]:
                wrong.append((answer.status, document))
            answered[number] += 1

    def grpc(number: int) -> None:
        tensor = tritonclient.grpc.InferInput(served.inputs[0], [1, 4], "FP32")
        tensor.set_data_from_numpy(torch.full((1, 4), 5.0).numpy())
        with closing(tritonclient.grpc.InferenceServerClient(served.server.grpc_address)) as client:
            while not ended.is_set():
                result = client.infer(served.name, [tensor])
                response = result.get_response()
                if (result.as_numpy(response.outputs[0].name) != 5 * float(response.model_version)).any():
                    wrong.append(response)
                answered[number] += 1

    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(work, number) for number, work in enumerate((binary, binary, as_json, grpc))]
        try:
            for version in range(2, 2 + RELOADS):
                write_weights(served.weights, float(version))
                served.hang_up()
                served.server.wait_until(lambda version=version: served.version == str(version), "it is served")
                before = list(answered)
                served.server.wait_until(
                    lambda before=before: all(now > then for now, then in zip(answered, before, strict=True)), "all ask"
                )
        finally:
            ended.set()
        for client in running:
            client.result(60)
    assert wrong == []
    served.server.wait_until(lambda: served.processes == 3, "the engine before has ended")
    assert served.server.model_stats()["inference_stats"]["fail"]["count"] == 0
    assert served.server.model_stats()["inference_count"] == sum(answered)


def test_only_the_version_that_is_served_answers_by_its_number(reloading) -> None:
    served = reloading("--reload", "signal")
    with closing(http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)) as connection:
        assert served.ask(connection, 1.0, "1") == (200, "1", 1.0)
        write_weights(served.weights, 7.0)
        served.hang_up()
        served.server.wait_until(lambda: served.version == "2", "it is served")
        assert served.ask(connection, 1.0, "2") == (200, "2", 7.0)
        assert served.ask(connection, 1.0, "1")[0] == 404
    assert served.metadata("2")["versions"] == ["2"]
    assert served.server.request("GET", served.path("1")).status == 404
    assert served.server.model_stats()["version"] == "2"


def test_a_request_whose_body_comes_after_the_switch_is_answered_by_the_new_version(reloading) -> None:
    served = reloading("--reload", "signal")
    body, headers = served.body(2.0)
    with closing(http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)) as connection:
        assert served.ask(connection, 2.0) == (200, "1", 1.0)
        connection.putrequest("POST", served.path() + "/infer")
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders(body[:20])
        write_weights(served.weights, 9.0)
        served.hang_up()
        served.server.wait_until(lambda: served.processes == 2 and served.version == "2", "the reload is over")
        connection.send(body[20:])
        response = connection.getresponse()
        assert (response.status, struct.unpack("<4f", response.read()[-16:])[0]) == (200, 18.0)


@pytest.mark.parametrize("damage", ["truncated", "not finite", "missing", "another model"])
def test_a_damaged_file_is_rolled_back_with_one_sentence(reloading, damage: str) -> None:
    served = reloading("--reload", "signal")
    if damage == "truncated":
        served.weights.write_bytes(served.weights.read_bytes()[:300])
    elif damage == "not finite":
        write_weights(served.weights, float("nan"))
    elif damage == "missing":
        served.weights.unlink()
    else:
        served.model.write_text(MODEL.replace("zeros(1, 4)", "zeros(1, 5)"))
    served.hang_up()
    served.server.wait_until(lambda: "not reloaded" in served.log, "the failure is logged")
    wait_until(lambda: served.processes == 2, "the new engine has ended")
    with closing(http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)) as connection:
        assert served.ask(connection, 2.0) == (200, "1", 1.0)
        served.model.write_text(MODEL)
        write_weights(served.weights, 4.0)
        served.hang_up()
        served.server.wait_until(lambda: served.version == "2", "what is mended is served")
        assert served.ask(connection, 2.0) == (200, "2", 4.0)
    (failure,) = [line for line in served.log.splitlines() if "[error" in line]
    assert "reason=" in failure
    assert "Traceback" not in served.log


def test_bursts_of_signals_end_with_the_last_file(reloading) -> None:
    served = reloading("--reload", "signal")
    for scale in range(2, 12):
        write_weights(served.weights, float(scale))
        for _ in range(10):
            served.hang_up()
    with closing(http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)) as connection:
        served.server.wait_until(lambda: served.ask(connection, 2.0)[2] == 11.0, "the last file is served")
    wait_until(lambda: served.processes == 2, "no other engine is left")


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_new_engine_that_dies_changes_nothing(reloading, devices: str) -> None:
    served = reloading("--reload", "signal", "--device", devices)
    engines = len(devices.split(","))
    served.hold.touch()
    write_weights(served.weights, 2.0)
    served.hang_up()
    wait_until(lambda: served.processes == 2 * engines + 1, "the new engines load")
    max(psutil.Process(served.server.process.pid).children(), key=lambda child: child.pid).kill()
    served.server.wait_until(lambda: "died with status -9" in served.log, "it is logged")
    wait_until(lambda: served.processes == engines + 1, "no new engine is left")
    served.hold.unlink()
    with closing(http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)) as connection:
        assert served.ask(connection, 2.0) == (200, "1", 1.0)
        served.hang_up()
        served.server.wait_until(lambda: served.version == "2", "the next attempt succeeds")
        for _ in range(2 * engines):
            assert served.ask(connection, 2.0) == (200, "2", 2.0)


def test_a_file_that_changes_is_loaded_without_a_signal(reloading) -> None:
    served = reloading("--reload", "poll")
    served.model.write_text(MODEL.replace("x * self.scale", "x + self.scale"))
    served.server.wait_until(lambda: served.version == "2", "it is served")
    with closing(http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)) as connection:
        assert served.ask(connection, 2.0) == (200, "2", 1.5)


def test_the_server_ends_in_the_middle_of_a_reload(reloading) -> None:
    served = reloading("--reload", "signal")
    served.hold.touch()
    write_weights(served.weights, 2.0)
    served.hang_up()
    wait_until(lambda: served.processes == 3, "the new engine loads")
    children = psutil.Process(served.server.process.pid).children()
    served.server.process.terminate()
    assert served.server.process.wait(60) == 0
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_a_front_end_that_begins_after_a_reload_serves_its_version(reloading) -> None:
    served = reloading("--reload", "signal")
    write_weights(served.weights, 3.0)
    served.hang_up()
    wait_until(lambda: served.processes == 2 and served.version == "2", "the reload is over")
    front, _ = sorted(psutil.Process(served.server.process.pid).children(), key=lambda child: child.pid)
    front.kill()
    wait_until(lambda: served.processes == 2 and front not in psutil.Process(served.server.process.pid).children(), "2")
    served.server.wait_ready()
    with closing(http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)) as connection:
        assert served.ask(connection, 2.0) == (200, "2", 3.0)
