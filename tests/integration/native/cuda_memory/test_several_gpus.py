"""CUDA regions of a server whose two engine processes have a GPU each, here of the stub."""

from __future__ import annotations

import base64
import ctypes
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.integration.native.conftest import Answer, Server
from tests.integration.native.cuda_memory.conftest import Allocation
from tests.integration.native.test_held_memory import PENDING
from tests.integration.native.test_several_engines import TWO, children, started

ROW_BYTES = 16
OPTIONS = (*TWO, "--device", "cuda:0,cuda:1", "--fronts", "2", "--allow-shared-memory", "true")


@pytest.fixture
def server(library: Path, runner: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Server:
    """Its driver has three GPUs; the engines have the first two."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("STUB_CUDA_DEVICES", "3")
    server = runner(*OPTIONS)
    server.open("infer")
    server.wait_ready()
    return server


@contextmanager
def allocated(library: Path, *gpus: int) -> Iterator[list[Allocation]]:
    """Memory for two rows on each of these GPUs."""
    cuda = ctypes.CDLL(str(library))
    assert cuda.cuInit(0) == 0
    allocations = []
    for gpu in gpus:
        context = ctypes.c_void_p()
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu) == 0
        assert cuda.cuCtxPushCurrent_v2(context) == 0
        allocations.append(Allocation(cuda, 2 * ROW_BYTES))
        allocations[-1].write(np.full(4, 10.0 + gpu, np.float32))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    context = ctypes.c_void_p(0x1000)
    cuda.cuCtxPushCurrent_v2(context)  # for copies, which take any
    try:
        yield allocations
    finally:
        for allocation in allocations:
            allocation.free()
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))


def register(server: Server, name: str, memory: Allocation, gpu: int) -> Answer:
    handle = {"b64": base64.b64encode(memory.handle).decode()}
    body = json.dumps({"raw_handle": handle, "device_id": gpu, "byte_size": memory.size}).encode()
    return server.request("POST", f"/v2/cudasharedmemory/region/{name}/register", body)


def infer(server: Server, given: str, taken: str | None = None) -> Answer:
    place = {"shared_memory_region": given, "shared_memory_byte_size": ROW_BYTES}
    tensors: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": place}]}
    if taken is not None:
        there = {**place, "shared_memory_region": taken, "shared_memory_offset": ROW_BYTES}
        tensors["outputs"] = [{"name": "y", "parameters": there}]
    return server.request("POST", "/v2/models/rows/infer", json.dumps(tensors).encode())


def opened(process: psutil.Process) -> int:
    """How many allocations the process has mapped."""
    return sum("abserve_cuda_stub" in str(path.resolve()) for path in Path(f"/proc/{process.pid}/fd").iterdir())


def executed_by(server: Server, batches: int) -> set[int]:
    """The processes of the latest batches."""
    return {process for process, _ in started(server)[-batches:]}


def test_requests_go_to_the_gpu_of_their_regions(server: Server, library: Path) -> None:
    first, second, *_ = children(server)
    with allocated(library, 0, 1, 2) as memory:
        for gpu, name in enumerate("abc"):
            assert register(server, name, memory[gpu], gpu).status == 200
        assert (opened(first), opened(second)) == (2, 1)  # that of the third GPU goes through host memory
        for name, process in (("a", first), ("b", second), ("c", first)):
            for taken in (None, name, name):
                assert infer(server, name, taken).status == 200
            assert executed_by(server, 3) == {process.pid}
        for gpu, allocation in enumerate(memory):
            assert allocation.floats(4, ROW_BYTES) == [2 * (10.0 + gpu)] * 4
        refused = infer(server, "a", "b")
        assert refused.status == 400
        assert json.loads(refused.body)["error"] == (
            "the request's CUDA regions are on several GPUs, and none reaches all of them: give it those of one GPU"
        )
        assert server.request("POST", "/v2/cudasharedmemory/region/b/unregister", b"").status == 200
        assert (opened(first), opened(second)) == (2, 0)
        assert infer(server, "b").status == 404
        assert server.request("POST", "/v2/cudasharedmemory/unregister", b"").status == 200
        assert (opened(first), opened(second)) == (0, 0)


def test_a_gpu_that_reaches_the_memory_of_another_executes_its_requests(
    library: Path, runner: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("STUB_CUDA_DEVICES", "3")
    monkeypatch.setenv("STUB_CUDA_PEERS", "1")
    server = runner(*OPTIONS)
    server.open("infer")
    server.wait_ready()
    first, second, *_ = children(server)
    with allocated(library, 0, 1, 2) as memory, ThreadPoolExecutor(1) as client:
        for gpu, name in enumerate("abc"):
            assert register(server, name, memory[gpu], gpu).status == 200
        assert (opened(first), opened(second)) == (3, 3)
        for name, process in (("a", first), ("b", second), ("c", first)):  # nothing else to do: at home
            assert infer(server, name, name).status == 200
            assert executed_by(server, 1) == {process.pid}
        assert infer(server, "a", "b").status == 200
        assert memory[1].floats(4, ROW_BYTES) == [20.0] * 4
        count = len(started(server))
        server.open(f"hold-{first.pid}")
        held = client.submit(infer, server, "a", "a")
        server.wait_until(lambda: server.metric(PENDING) == 1 or len(started(server)) > count, "one has it")
        for name in "bc":
            assert infer(server, name, name).status == 200
        assert executed_by(server, 2) == {second.pid}
        (server.folder / f"hold-{first.pid}").unlink()
        assert held.result().status == 200
        for gpu, allocation in enumerate(memory):
            assert allocation.floats(4, ROW_BYTES) == [2 * (10.0 + gpu)] * 4
        assert server.request("POST", "/v2/cudasharedmemory/region/a/unregister", b"").status == 200
        assert (opened(first), opened(second)) == (2, 2)
        assert infer(server, "a").status == 404
        assert register(server, "a", memory[0], 0).status == 200
        assert server.request("POST", "/v2/cudasharedmemory/unregister", b"").status == 200
        assert (opened(first), opened(second)) == (0, 0)


@pytest.mark.slow  # by default the requests to both GPUs
def test_a_name_is_taken_on_both_gpus_and_for_both_kinds(server: Server, library: Path) -> None:
    first, second, *_ = children(server)
    file = Path("/dev/shm") / f"abserve_test_several_gpus_{server.port}"
    file.write_bytes(np.full(4, 7.0, np.float32).tobytes())
    region = json.dumps({"key": f"/{file.name}", "offset": 0, "byte_size": ROW_BYTES}).encode()
    try:
        with allocated(library, 0, 1) as memory:
            assert server.request("POST", "/v2/systemsharedmemory/region/s/register", region).status == 200
            assert register(server, "r", memory[1], 1).status == 200
            for refused in (
                register(server, "r", memory[0], 0),
                register(server, "s", memory[1], 1),
                server.request("POST", "/v2/systemsharedmemory/region/r/register", region),
            ):
                assert refused.status == 400
                assert "is registered already" in json.loads(refused.body)["error"]
            assert (opened(first), opened(second)) == (0, 1)
            for name in ("s", "r") * 2:  # on both front ends
                assert infer(server, name).status == 200
            assert server.request("POST", "/v2/cudasharedmemory/unregister", b"").status == 200
            assert infer(server, "s").status == 200
            assert register(server, "r", memory[0], 0).status == 200
            assert (opened(first), opened(second)) == (1, 0)
    finally:
        file.unlink()
