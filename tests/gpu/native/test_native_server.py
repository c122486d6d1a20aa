"""The native server on a real GPU: CUDA shared memory between two processes, and merged batches.

    python -m pytest -m gpu tests/gpu/native

This process is the client: its tensors reach the server by CUDA's own inter-process handles.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MODEL = "openclip_vit_b32_uint8"
ITEM = (224, 224, 3)
IMAGE_BYTES = 224 * 224 * 3
ROW_BYTES = 512 * 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    def __init__(self, folder: Path, *options: str) -> None:
        self.http, self.grpc = free_port(), free_port()
        self.log = folder / f"log-{self.http}"
        with self.log.open("wb") as log:
            settings = {
                "model": "openclip_vit_b32",
                "payloads": "uint8",
                "engine": "torch",
                "precision": "fp16",
                "device": "cuda:0",
                "max_batch_size": 32,
                "http_port": self.http,
                "grpc_port": self.grpc,
                **{name[2:].replace("-", "_"): value for name, value in zip(options[::2], options[1::2], strict=True)},
            }
            self.process = subprocess.Popen([sys.executable, "-m", "servers.native", json.dumps(settings)], stderr=log)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 240
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.grpc}") as client:
            while True:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                try:
                    if client.is_server_ready():
                        return
                except InferenceServerException:
                    pass
                time.sleep(0.1)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(40) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server"), "--allow-shared-memory", "true")
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


def images(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, *ITEM), np.uint8)


def infer(port: int, data: np.ndarray) -> np.ndarray:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        tensor = tritonclient.grpc.InferInput("pixel_values", list(data.shape), "UINT8").set_data_from_numpy(data)
        return client.infer(MODEL, [tensor]).as_numpy("embedding")


def check_merged_requests(server: Server) -> None:
    """Requests of many clients at once get the answers that each gets alone."""
    requests = [images(1 + seed % 32, seed) for seed in range(64)]
    expected = [infer(server.grpc, data) for data in requests]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda data: infer(server.grpc, data), requests))
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-2)  # another bucket may take another kernel
        cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
        assert cosines.min() > 0.9999


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tensors_travel_through_cuda_memory_both_ways(
    server: Server, cuda_memory: Any, protocol: str, rows: int
) -> None:
    import torch

    data = images(rows, rows)
    module = tritonclient.http if protocol == "http" else tritonclient.grpc
    address = f"127.0.0.1:{server.http if protocol == 'http' else server.grpc}"
    given = cuda_memory.create_shared_memory_region("given", data.nbytes, 0)
    taken = cuda_memory.create_shared_memory_region("taken", rows * ROW_BYTES, 0)
    client = module.InferenceServerClient(address)
    try:
        cuda_memory.set_shared_memory_region_from_dlpack(given, [torch.from_numpy(data).cuda()])
        client.register_cuda_shared_memory("given", cuda_memory.get_raw_handle(given), 0, data.nbytes)
        client.register_cuda_shared_memory("taken", cuda_memory.get_raw_handle(taken), 0, rows * ROW_BYTES)
        tensor = module.InferInput("pixel_values", list(data.shape), "UINT8")
        tensor.set_shared_memory("given", data.nbytes)
        wanted = module.InferRequestedOutput("embedding")
        wanted.set_shared_memory("taken", rows * ROW_BYTES)
        client.infer(MODEL, [tensor], outputs=[wanted])
        written = cuda_memory.get_contents_as_numpy(taken, np.float32, [rows, 512])
        np.testing.assert_allclose(written, infer(server.grpc, data), rtol=1e-4, atol=1e-5)
        with pytest.raises(InferenceServerException, match="registered already"):
            client.register_cuda_shared_memory("given", cuda_memory.get_raw_handle(given), 0, data.nbytes)
        with pytest.raises(InferenceServerException, match="of an allocation of"):
            client.register_cuda_shared_memory("more", cuda_memory.get_raw_handle(given), 0, 2**40)
    finally:
        client.unregister_cuda_shared_memory()
        client.close()
        cuda_memory.destroy_shared_memory_region(given)
        cuda_memory.destroy_shared_memory_region(taken)
    assert infer(server.grpc, data).shape == (rows, 512)


def test_requests_of_a_merged_batch_get_their_own_rows(server: Server) -> None:
    check_merged_requests(server)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_over_cuda_memory(server: Server, perf_analyzer: Any, protocol: str) -> None:
    output = perf_analyzer.run(
        *("-m", MODEL, "-i", protocol, "-b", "8", "--concurrency-range", "4"),
        *("-u", f"127.0.0.1:{server.http if protocol == 'http' else server.grpc}"),
        *("--shared-memory", "cuda", "--output-shared-memory-size", str(8 * ROW_BYTES)),
        *("--measurement-mode", "count_windows", "--measurement-request-count", "50", "--stability-percentage", "999"),
    )
    assert "throughput" in output
