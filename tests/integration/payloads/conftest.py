"""Both servers with all three payloads: once with the null engine, which is ready at once, once with the real model."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servers.export.artefacts import Artefact, ensure_artefact
from servers.export.manifest import executed_form
from servers.models.images import DecodingSettings, decode_jpeg, resize_and_crop
from servers.models.items import jpeg_paths
from servers.models.registry import get_specification, payload_variants
from servers.models.specification import ModelSpecification, Payload
from servers.models.weights import RandomWeights
from servers.protocol.tensors import Array
from servers.triton.launch import prepare
from servers.triton.process import TritonProcess
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings
from tests.integration.native.conftest import free_ports

MODEL = "openclip_vit_b32"
VARIANTS = {variant.payload: variant for variant in payload_variants(get_specification(MODEL))}
READY_SECONDS = 150
HEADER = "Inference-Header-Content-Length"
DECODING = DecodingSettings(threads=2, max_pixels=40_000_000)


@dataclass(frozen=True)
class Answer:
    """What came back over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])

    @property
    def embedding(self) -> Array:
        assert self.status == 200, self.body[:300]
        split = int(self.headers[HEADER.lower()])
        (output,) = json.loads(self.body[:split])["outputs"]
        return np.frombuffer(self.body[split:], np.float32).reshape(output["shape"])


@dataclass(frozen=True)
class Server:
    """One ready server on a port of its own."""

    name: str
    port: int
    call: Callable[[str, str, bytes, dict[str, str]], Answer]

    def infer(self, payload: Payload, array: Array, model: str | None = None) -> Answer:
        """One request with a binary tensor, binary answer."""
        tensor = VARIANTS[payload].inputs[0]
        data = tensor_bytes(array)
        document = {
            "inputs": [
                {
                    "name": tensor.name,
                    "shape": list(array.shape),
                    "datatype": tensor.datatype,
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
        head = json.dumps(document).encode()
        path = f"/v2/models/{model or VARIANTS[payload].name}/infer"
        return self.call("POST", path, head + data, {HEADER: str(len(head))})

    def infer_raw(self, payload: Payload, body: bytes) -> Answer:
        """A raw request: the body is the one input's bytes and nothing else."""
        return self.call("POST", f"/v2/models/{VARIANTS[payload].name}/infer", body, {HEADER: "0"})

    def get(self, path: str) -> Answer:
        return self.call("GET", path, b"", {})


def tensor_bytes(array: Array) -> bytes:
    if array.dtype == object:
        return b"".join(len(item).to_bytes(4, "little") + item for item in array.reshape(-1).tolist())
    return array.tobytes()


def files(*images: bytes) -> Array:
    """A batch of encoded images."""
    array = np.empty((len(images), 1), object)
    array[:, 0] = images
    return array


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Array]:
    return files


@pytest.fixture(scope="session")
def photographs() -> list[bytes]:
    return [path.read_bytes() for path in jpeg_paths()]


@pytest.fixture(scope="session")
def pixels(photographs: list[bytes], specification: ModelSpecification) -> Array:
    return np.stack([resize_and_crop(decode_jpeg(data), specification.preprocessing) for data in photographs])


def caller(port: int) -> Callable[[str, str, bytes, dict[str, str]], Answer]:
    def call(method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    return call


@contextmanager
def native(folder: Path, *options: str) -> Iterator[Server]:
    port, grpc_port = free_ports(2)
    settings = {"http_port": port, "grpc_port": grpc_port, "payloads": "fp32,uint8,jpeg", "decode_threads": 2}
    settings |= {name[2:].replace("-", "_"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    argv = [sys.executable, "-m", "servers.native", json.dumps(settings)]
    with (folder / "native.log").open("wb") as log:
        process = subprocess.Popen(argv, stderr=log)
    server = Server("native", port, caller(port))
    try:
        ends = time.monotonic() + READY_SECONDS
        while True:
            assert process.poll() is None, (folder / "native.log").read_text()
            assert time.monotonic() < ends, "not ready"
            try:
                if server.get("/v2/health/ready").status == 200:
                    break
            except OSError:
                time.sleep(0.02)
        yield server
    finally:
        process.kill()
        process.wait(60)


@contextmanager
def triton(
    folder: Path, engine: Mapping[str, Any], models: Sequence[PlacedModel], extra: Callable[[Path], None] | None = None
) -> Iterator[Server]:
    http_port, grpc_port, metrics_port = free_ports(3)
    settings = TritonSettings(
        model=MODEL,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        decode_threads=DECODING.threads,
        max_image_pixels=DECODING.max_pixels,
        work_dir=folder / "work",
        **engine,
    )
    plan = prepare(settings, models, RandomWeights(0))
    if extra is not None:
        extra(folder / "work" / "models")
    with TritonProcess(plan, folder / "triton.log") as process:
        assert process.wait_ready(READY_SECONDS)
        yield Server("triton", http_port, caller(http_port))


@pytest.fixture(scope="session")
def start_triton() -> Callable[..., object]:
    return triton


@pytest.fixture(scope="session")
def native_null(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with native(tmp_path_factory.mktemp("native-null"), "--engine", "null") as server:
        yield server


@pytest.fixture(scope="session")
def triton_null(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    engine = {"engine": "null", "max_batch_size": 32}
    with triton(tmp_path_factory.mktemp("triton-null"), engine, [PlacedModel(s) for s in VARIANTS.values()]) as server:
        yield server


@pytest.fixture(scope="session")
def uint8_artefact(specification: ModelSpecification) -> Artefact:
    folder = Path(__file__).resolve().parents[3] / ".artefacts"
    return ensure_artefact(VARIANTS["uint8"], RandomWeights(0), folder, form=executed_form("onnxruntime", "fp32"))


@pytest.fixture(scope="session")
def real_native(
    artefact: Artefact, uint8_artefact: Artefact, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = ("--engine", "onnxruntime", "--device", "cpu", "--max-batch-size", "4")
    paths = ("--artefact", str(artefact.path), "--artefact-uint8", str(uint8_artefact.path))
    with native(tmp_path_factory.mktemp("native"), *options, *paths) as server:
        yield server


@pytest.fixture(scope="session")
def real_triton(
    artefact: Artefact, uint8_artefact: Artefact, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    engine = {"engine": "onnxruntime", "device": "cpu", "threads": 2, "max_batch_size": 4}
    files_of = {"fp32": artefact, "uint8": uint8_artefact, "jpeg": uint8_artefact}
    models = [PlacedModel(s, files_of[p].path, files_of[p].manifest.to_dict()) for p, s in VARIANTS.items()]
    with triton(tmp_path_factory.mktemp("triton"), engine, models) as server:
        yield server
