"""The native server on two real GPUs: both execute, the answers agree, and a CUDA region is used on its own GPU.

python -m pytest -m gpu tests/gpu/native/test_several_gpus.py
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc

from servers.gpu.cuda_library import CudaError, CudaLibrary, device_uuid
from servers.gpu.nvml import NvmlReader
from tests.gpu.native.test_native_server import (
    IMAGE_BYTES,
    MODEL,
    ROW_BYTES,
    Server,
    check_merged_requests,
    images,
    infer,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        gpus = CudaLibrary({}).count()
    except CudaError as exc:
        pytest.skip(str(exc))
    if gpus < 2:
        pytest.skip(f"two GPUs are needed, this machine has {gpus}")
    folder = tmp_path_factory.mktemp("server")
    started = Server(folder, "--device", "cuda:0,cuda:1", "--allow-shared-memory", "true")
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


def processes_on(gpu: int) -> set[int]:
    """The processes that have a context on a GPU, by its CUDA number."""
    reader = NvmlReader()
    try:
        (index,) = [one.index for one in reader.connect().devices if one.uuid == device_uuid(gpu)]
        return {process.pid for process in reader.edge(index).processes or ()}
    finally:
        reader.close()


def test_requests_of_many_clients_get_the_answers_of_one(server: Server) -> None:
    check_merged_requests(server)


def test_each_engine_process_has_a_context_on_its_own_gpu_only(server: Server) -> None:
    first, second, *_ = sorted(one.pid for one in psutil.Process(server.process.pid).children())
    on_first, on_second = processes_on(0), processes_on(1)
    if first not in on_first:
        pytest.skip("the driver does not show this machine's processes")
    assert second in on_second
    assert second not in on_first
    assert first not in on_second


def test_requests_from_memory_of_one_gpu_are_right_whichever_gpu_executes_them(
    server: Server, cuda_memory: Any
) -> None:
    import torch

    clients, requests = 8, 20
    inputs = [images(4, 10 + number) for number in range(clients)]
    regions = [
        cuda_memory.create_shared_memory_region(f"{name}-{number}", 4 * size, 0)
        for number in range(clients)
        for name, size in (("given", IMAGE_BYTES), ("taken", ROW_BYTES))
    ]
    pairs = list(zip(regions[::2], regions[1::2], strict=True))

    def run(number: int) -> None:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            tensor = tritonclient.grpc.InferInput("pixel_values", [4, *images(1).shape[1:]], "UINT8")
            tensor.set_shared_memory(f"given-{number}", 4 * IMAGE_BYTES)
            wanted = tritonclient.grpc.InferRequestedOutput("embedding")
            wanted.set_shared_memory(f"taken-{number}", 4 * ROW_BYTES)
            for _ in range(requests):
                client.infer(MODEL, [tensor], outputs=[wanted])

    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        try:
            for number, ((given, taken), data) in enumerate(zip(pairs, inputs, strict=True)):
                cuda_memory.set_shared_memory_region_from_dlpack(given, [torch.from_numpy(data).to("cuda:0")])
                handles = [cuda_memory.get_raw_handle(one) for one in (given, taken)]
                client.register_cuda_shared_memory(f"given-{number}", handles[0], 0, 4 * IMAGE_BYTES)
                client.register_cuda_shared_memory(f"taken-{number}", handles[1], 0, 4 * ROW_BYTES)
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(run, range(clients)))
            for (_, taken), data in zip(pairs, inputs, strict=True):
                written = cuda_memory.get_contents_as_numpy(taken, np.float32, [4, 512])
                np.testing.assert_allclose(written, infer(server.grpc, data), rtol=2e-2, atol=1e-2)
        finally:
            client.unregister_cuda_shared_memory()
            for region in regions:
                cuda_memory.destroy_shared_memory_region(region)


@pytest.mark.parametrize("gpu", [0, 1])
def test_tensors_travel_through_cuda_memory_of_either_gpu(server: Server, cuda_memory: Any, gpu: int) -> None:
    import torch

    data = images(1, gpu)
    given = cuda_memory.create_shared_memory_region("given", IMAGE_BYTES, gpu)
    taken = cuda_memory.create_shared_memory_region("taken", ROW_BYTES, gpu)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        try:
            with torch.cuda.device(gpu):  # torch exports tensors of the current device only
                cuda_memory.set_shared_memory_region_from_dlpack(given, [torch.from_numpy(data).to(f"cuda:{gpu}")])
            client.register_cuda_shared_memory("given", cuda_memory.get_raw_handle(given), gpu, IMAGE_BYTES)
            client.register_cuda_shared_memory("taken", cuda_memory.get_raw_handle(taken), gpu, ROW_BYTES)
            tensor = tritonclient.grpc.InferInput("pixel_values", list(data.shape), "UINT8")
            tensor.set_shared_memory("given", IMAGE_BYTES)
            wanted = tritonclient.grpc.InferRequestedOutput("embedding")
            wanted.set_shared_memory("taken", ROW_BYTES)
            for _ in range(4):
                client.infer(MODEL, [tensor], outputs=[wanted])
            written = cuda_memory.get_contents_as_numpy(taken, np.float32, [1, 512])
            np.testing.assert_allclose(written, infer(server.grpc, data), rtol=2e-2, atol=1e-2)
        finally:
            client.unregister_cuda_shared_memory()
            cuda_memory.destroy_shared_memory_region(given)
            cuda_memory.destroy_shared_memory_region(taken)
