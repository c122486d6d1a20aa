"""A native server on a stub of NVIDIA's driver library, and this process as the client that allocates on it.

What the stub stands for, and what it cannot show, is in cuda_stub.c; tests/gpu/native has the same on a real GPU.
"""

from __future__ import annotations

import base64
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

SOURCE = Path(__file__).parents[1] / "cuda_stub.c"
MODEL = "openclip_vit_b32"
ROW_BYTES = 512 * 4
IMAGE_BYTES = 3 * 224 * 224 * 4


class Allocation:
    """Device memory of this process."""

    def __init__(self, cuda: ctypes.CDLL, size: int) -> None:
        self._cuda = cuda
        self._address = ctypes.c_uint64()
        assert cuda.cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(size)) == 0
        handle = ctypes.create_string_buffer(64)
        assert cuda.cuIpcGetMemHandle(handle, self._address) == 0
        self.handle = handle.raw
        self.size = size

    def write(self, data: np.ndarray, offset: int = 0) -> None:
        place = ctypes.c_uint64(self._address.value + offset)
        assert self._cuda.cuMemcpyHtoD_v2(place, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)) == 0

    def read(self, rows: int, offset: int = 0) -> np.ndarray:
        data = np.empty((rows, 512), np.float32)
        place = ctypes.c_uint64(self._address.value + offset)
        assert self._cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(data.ctypes.data), place, ctypes.c_size_t(data.nbytes)) == 0
        return data

    def floats(self, count: int, offset: int = 0) -> list[float]:
        data = np.empty(count, np.float32)
        place = ctypes.c_uint64(self._address.value + offset)
        assert self._cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(data.ctypes.data), place, ctypes.c_size_t(data.nbytes)) == 0
        values: list[float] = data.tolist()
        return values

    def free(self) -> None:
        self._cuda.cuMemFree_v2(self._address)


@dataclass
class Device:
    """The stub, loaded here as by a client; `folder` holds its log and its gates for the server."""

    library: Path
    folder: Path
    cuda: ctypes.CDLL
    allocations: list[Allocation]

    def allocate(self, size: int, data: np.ndarray | None = None, offset: int = 0) -> Allocation:
        self.allocations.append(Allocation(self.cuda, size))
        if data is not None:
            self.allocations[-1].write(data, offset)
        return self.allocations[-1]

    def log(self) -> list[str]:
        """What the server did with handles."""
        path = self.folder / "log"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stub of libcuda.so.1")
    target = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, SOURCE, "-lpthread", "-lrt"], check=True)
    return target


@pytest.fixture(scope="module")
def gpu_server(library, tmp_path_factory, native_starter):
    """A native server that finds the stub; its gates are in the folder `gates`."""
    folder = tmp_path_factory.mktemp("gates")
    with pytest.MonkeyPatch.context() as patch:  # for the server alone: this process loads the stub without gates
        patch.setenv("LD_LIBRARY_PATH", str(library.parent))
        patch.setenv("STUB_CUDA_FOLDER", str(folder))
        return native_starter(folder, "--engine", "null", "--allow-shared-memory", "true")


@pytest.fixture
def device(gpu_server, library) -> Iterator[Device]:
    cuda = ctypes.CDLL(str(library))
    context = ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    for name in ("log", "held"):
        (gpu_server.folder / name).unlink(missing_ok=True)
    opened = Device(library, gpu_server.folder, cuda, [])
    yield opened
    for gate in ("hold-read", "hold-write", "lost"):
        (gpu_server.folder / gate).unlink(missing_ok=True)
    for allocation in opened.allocations:
        allocation.free()
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))


@dataclass
class FrontEnd:
    client: Any
    module: ModuleType
    address: str

    def apart(self, work: Callable[[FrontEnd], Any]) -> Any:
        """In another thread, with a client of its own: tritonclient's cannot change threads."""
        client = self.module.InferenceServerClient(self.address)
        try:
            return work(FrontEnd(client, self.module, self.address))
        finally:
            client.close()

    def register(self, name: str, allocation: Allocation, size: int | None = None, device: int = 0) -> None:
        handle = base64.b64encode(allocation.handle)  # as tritonclient.utils.cuda_shared_memory.get_raw_handle
        self.client.register_cuda_shared_memory(name, handle, device, allocation.size if size is None else size)

    def infer(self, rows: int, region: str, offset: int = 0, output: tuple | None = None) -> Any:
        return self.client.infer(MODEL, [self.input(rows, region, offset)], outputs=self.outputs(output))

    def input(self, rows: int, region: str, offset: int = 0) -> Any:
        item = self.module.InferInput("pixel_values", [rows, 3, 224, 224], "FP32")
        item.set_shared_memory(region, rows * IMAGE_BYTES, offset=offset)
        return item

    def send(self, data: np.ndarray, output: tuple | None = None) -> Any:
        """Over the wire."""
        item = self.module.InferInput("pixel_values", list(data.shape), "FP32")
        item.set_data_from_numpy(data)
        return self.client.infer(MODEL, [item], outputs=self.outputs(output))

    def outputs(self, output: tuple | None) -> list[Any] | None:
        if output is None:
            return None
        wanted = self.module.InferRequestedOutput("embedding")
        wanted.set_shared_memory(*output)
        return [wanted]


@pytest.fixture(params=["http", "grpc"])
def both(request, gpu_server, device) -> Iterator[FrontEnd]:
    """A client of HTTP, then one of gRPC; every handle that a test has the server open is closed at its end."""
    module = tritonclient.http if request.param == "http" else tritonclient.grpc
    address = gpu_server.address if request.param == "http" else gpu_server.grpc_address
    client = module.InferenceServerClient(address)
    yield FrontEnd(client, module, address)
    client.unregister_cuda_shared_memory()
    client.unregister_system_shared_memory()
    assert device.log().count("open") == device.log().count("close")
    client.close()


def images(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 3, 224, 224), dtype=np.float32)
