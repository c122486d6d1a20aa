"""CUDA shared memory through both doors with tritonclient's own calls, on a stub of NVIDIA's driver library.

What the stub stands for, and what it cannot show, is in cuda_stub.c; tests/gpu/native has the same on a real GPU.
"""

from __future__ import annotations

import base64
import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

SOURCE = Path(__file__).with_name("cuda_stub.c")
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
class Door:
    client: Any
    module: ModuleType
    address: str

    def apart(self, work: Callable[[Door], Any]) -> Any:
        """In another thread, with a client of its own: tritonclient's cannot change threads."""
        client = self.module.InferenceServerClient(self.address)
        try:
            return work(Door(client, self.module, self.address))
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
def both(request, gpu_server, device) -> Iterator[Door]:
    """A client of one door after the other; every handle that a test has the server open is closed at its end."""
    module = tritonclient.http if request.param == "http" else tritonclient.grpc
    address = gpu_server.address if request.param == "http" else gpu_server.grpc_address
    client = module.InferenceServerClient(address)
    yield Door(client, module, address)
    client.unregister_cuda_shared_memory()
    client.unregister_system_shared_memory()
    assert device.log().count("open") == device.log().count("close")
    client.close()


def images(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 3, 224, 224), dtype=np.float32)


@pytest.mark.parametrize("rows", [1, 5])
def test_the_same_embedding_as_over_the_wire_both_ways(both, device, rows):
    data = images(rows, rows)
    given = device.allocate(64 + data.nbytes, data, 64)
    taken = device.allocate(16 + rows * ROW_BYTES)
    both.register("given", given)
    both.register("taken", taken)
    expected = both.send(data).as_numpy("embedding")
    np.testing.assert_array_equal(both.infer(rows, "given", 64).as_numpy("embedding"), expected)
    both.infer(rows, "given", 64, output=("taken", rows * ROW_BYTES, 16))
    np.testing.assert_array_equal(taken.read(rows, 16), expected)
    given.write(data[::-1].copy(), 64)  # what is there when it is asked for, not when it was registered
    np.testing.assert_array_equal(both.infer(rows, "given", 64).as_numpy("embedding"), expected[::-1])


def test_requests_that_are_merged_get_their_own_rows(both, device):
    data = images(6, 3)
    both.register("given", device.allocate(data.nbytes, data))
    taken = device.allocate(6 * ROW_BYTES)
    both.register("taken", taken)

    def one(row: int) -> None:
        both.apart(lambda door: door.infer(1, "given", row * IMAGE_BYTES, ("taken", ROW_BYTES, row * ROW_BYTES)))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(6)))
    np.testing.assert_array_equal(taken.read(6), data.reshape(6, -1)[:, :512])


def test_status_names_regions_and_no_handles_and_kinds_are_kept_apart(both, device):
    allocation = device.allocate(4096)
    both.register("a", allocation)
    both.register("b", allocation, 10)
    options = {"as_json": True} if both.module is tritonclient.grpc else {}
    status = both.client.get_cuda_shared_memory_status(**options)
    rows = {row["name"]: row for row in (status["regions"].values() if isinstance(status, dict) else status)}
    assert {name: int(row["byte_size"]) for name, row in rows.items()} == {"a": 4096, "b": 10}
    assert {int(row.get("device_id", 0)) for row in rows.values()} == {0}
    assert "abserve_cuda_stub" not in json.dumps(rows)
    system = both.client.get_system_shared_memory_status(**options)
    assert not (system["regions"] if system and isinstance(system, dict) else system)
    with pytest.raises(InferenceServerException, match="registered already"):
        both.client.register_system_shared_memory("a", "/whatever", 64)
    both.client.unregister_system_shared_memory("a")
    both.client.unregister_system_shared_memory()
    both.client.get_cuda_shared_memory_status("a")
    both.client.unregister_cuda_shared_memory("a")
    both.client.unregister_cuda_shared_memory("a")  # one that is gone is not missed
    assert device.log() == ["open", "open", "close"]
    with pytest.raises(InferenceServerException, match="'a' is not registered"):
        both.client.get_cuda_shared_memory_status("a")
    both.client.get_cuda_shared_memory_status("b")
    assert "cuda_shared_memory" in str(both.client.get_server_metadata())


def test_what_cannot_be_registered_is_refused_and_left_closed(both, device):
    allocation, freed = device.allocate(4096), device.allocate(4096)
    freed.free()
    no_handle = Allocation.__new__(Allocation)
    for handle, size, number, message in (
        (allocation.handle, 4097, 0, "end at byte 4097 of an allocation of 4096 bytes"),
        (allocation.handle, 2**62, 0, "of an allocation of 4096 bytes"),
        (allocation.handle, 0, 0, "size ≥ 1"),
        (allocation.handle, 4096, 1, "this server sees 1 of them"),
        (allocation.handle, 4096, -1, "this server sees 1 of them"),
        (allocation.handle[:63], 4096, 0, "must have 64 bytes, got 63"),
        (b"", 4096, 0, "must have 64 bytes, got 0"),
        (b"\xff" * 64, 4096, 0, "CUDA_ERROR_INVALID_VALUE"),
        (freed.handle, 4096, 0, "CUDA_ERROR_INVALID_HANDLE"),
        (allocation.handle[:4] + b"\7" + allocation.handle[5:], 4096, 0, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    ):
        no_handle.handle, no_handle.size = handle, size
        with pytest.raises(InferenceServerException, match=message) as caught:
            both.register("r", no_handle, size, number)
        assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
        assert "abserve_cuda_stub" not in str(caught.value)
    both.register("r", allocation)
    with pytest.raises(InferenceServerException, match="registered already"):
        both.register("r", allocation)
    with pytest.raises(InferenceServerException, match="1 to 256 characters"):
        both.register("n" * 257, allocation)


def test_http_bodies_without_a_handle_are_refused(gpu_server, device):
    for body in (
        b"",
        b"[]",
        b'{"raw_handle": "AA==", "device_id": 0, "byte_size": 1}',
        b'{"raw_handle": {"b64": "\\u00e4"}, "device_id": 0, "byte_size": 1}',
        b'{"raw_handle": {"b64": "A"}, "device_id": 0, "byte_size": 1}',
        b'{"raw_handle": {"b64": "AA=="}, "byte_size": 1}',
        b'{"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": "1"}',
        b'{"raw_handle": {"b64": "AA=="}, "device_id": true, "byte_size": 1}',
    ):
        answer = gpu_server.request("POST", "/v2/cudasharedmemory/region/r/register", body)
        assert answer.status == 400, (body, answer.body)
        assert json.loads(answer.body)["error"]


def test_a_handle_may_be_wrapped_as_perf_analyzers_is(gpu_server, device):
    allocation = device.allocate(IMAGE_BYTES)
    wrapped = base64.b64encode(allocation.handle).decode()
    wrapped = f"{wrapped[:72]}\n{wrapped[72:]}\n"
    body = {"raw_handle": {"b64": wrapped}, "device_id": 0, "byte_size": IMAGE_BYTES}
    answer = gpu_server.request("POST", "/v2/cudasharedmemory/region/w/register", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    assert gpu_server.request("POST", "/v2/cudasharedmemory/region/w/unregister", b"").status == 200


def test_requests_past_their_region_are_refused(both, device):
    data = images(1)
    both.register("r", device.allocate(2 * IMAGE_BYTES, data), IMAGE_BYTES)
    for rows, offset, message in ((1, 1, "which has"), (2, 0, "which has"), (1, 2**63 - 1, "which has")):
        with pytest.raises(InferenceServerException, match=message):
            both.infer(rows, "r", offset)
    item = both.module.InferInput("pixel_values", [1, 3, 224, 224], "FP32")
    item.set_shared_memory("r", IMAGE_BYTES - 4)
    with pytest.raises(InferenceServerException, match="needs 602112 bytes"):
        both.client.infer(MODEL, [item])
    with pytest.raises(InferenceServerException, match="takes 2048 bytes"):
        both.infer(1, "r", output=("r", ROW_BYTES - 1))
    with pytest.raises(InferenceServerException, match="which has"):
        both.infer(1, "r", output=("r", ROW_BYTES, IMAGE_BYTES - ROW_BYTES + 1))
    np.testing.assert_array_equal(both.infer(1, "r").as_numpy("embedding"), data.reshape(1, -1)[:, :512])


def test_a_region_that_is_being_read_is_closed_afterwards(both, device, gpu_server):
    """Unregistering is answered when the copy has ended; meanwhile the event loop answers others."""
    data = images(1)
    both.register("r", device.allocate(data.nbytes, data))
    before_ns = gpu_server.model_stats()["inference_stats"]["compute_input"]["ns"]
    (device.folder / "hold-read").touch()
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(both.apart, lambda door: door.infer(1, "r"))
        gpu_server.wait_until(lambda: (device.folder / "held").exists(), "it is being read")
        started_ns = (device.folder / "held").stat().st_mtime_ns
        unregistered = pool.submit(both.apart, lambda door: door.client.unregister_cuda_shared_memory("r"))
        gpu_server.wait_until(
            lambda: b'"r"' not in gpu_server.request("GET", "/v2/cudasharedmemory/status").body, "it is forgotten"
        )
        assert device.log() == ["open"]
        assert not unregistered.done()
        (device.folder / "hold-read").unlink()
        np.testing.assert_array_equal(answer.result(20).as_numpy("embedding"), data.reshape(1, -1)[:, :512])
        unregistered.result(20)
    assert device.log() == ["open", "close"]
    after_ns = gpu_server.model_stats()["inference_stats"]["compute_input"]["ns"]
    assert after_ns > before_ns  # a copy from the device is part of what the input took
    assert after_ns - before_ns <= (device.folder / "log").stat().st_mtime_ns - started_ns + 10**9
    with pytest.raises(InferenceServerException, match="'r' is not registered"):
        both.infer(1, "r")


def test_a_request_that_waits_when_its_region_is_unregistered_is_told_so(both, device, gpu_server):
    both.register("first", device.allocate(IMAGE_BYTES, images(1)))
    both.register("second", device.allocate(IMAGE_BYTES, images(1)))
    (device.folder / "hold-read").touch()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(both.apart, lambda door: door.infer(1, "first"))
        gpu_server.wait_until(lambda: (device.folder / "held").exists(), "the engine is busy")
        second = pool.submit(both.apart, lambda door: door.infer(1, "second"))
        gpu_server.wait_until(lambda: gpu_server.metric("abserve_native_pending_requests") == 1, "the second waits")
        both.client.unregister_cuda_shared_memory("second")  # nothing uses it yet: at once
        assert device.log() == ["open", "open", "close"]
        (device.folder / "hold-read").unlink()
        first.result(20)
        with pytest.raises(InferenceServerException, match="unregistered before its input was read"):
            second.result(20)


def test_outputs_are_written_beside_the_event_loop_and_not_after_the_region(both, device, gpu_server):
    data = images(1)
    both.register("r", device.allocate(ROW_BYTES))
    (device.folder / "hold-write").touch()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(both.apart, lambda door: door.send(data, ("r", ROW_BYTES)))
        gpu_server.wait_until(lambda: (device.folder / "held").exists(), "it is being written")
        assert gpu_server.status("/v2/health/ready") == 200
        assert not answer.done()
        (device.folder / "hold-write").unlink()
        answer.result(20)
    np.testing.assert_array_equal(device.allocations[0].read(1), data.reshape(1, -1)[:, :512])


def test_copies_that_fail_fail_their_request_and_not_the_server(both, device, gpu_server):
    data = images(1)
    both.register("r", device.allocate(IMAGE_BYTES, data))
    (device.folder / "lost").touch()
    with pytest.raises(
        InferenceServerException, match=r"cannot be read from GPU 0.*CUDA_ERROR_ILLEGAL_ADDRESS"
    ) as caught:
        both.infer(1, "r")
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    with pytest.raises(InferenceServerException, match="cannot be written to region 'r' on GPU 0") as caught:
        both.send(data, ("r", ROW_BYTES))
    assert caught.value.status() in ("500", "StatusCode.INTERNAL")
    (device.folder / "lost").unlink()
    np.testing.assert_array_equal(both.infer(1, "r").as_numpy("embedding"), data.reshape(1, -1)[:, :512])
