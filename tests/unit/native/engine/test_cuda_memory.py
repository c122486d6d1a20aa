"""CUDA shared memory where there is no driver, and the accounting of its users, on a driver of our own."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from servers.gpu import cuda_library
from servers.gpu.cuda_library import CudaError
from servers.native.engine import region_register
from servers.native.engine.cuda_memory import CudaRegion, CudaWindow
from servers.native.engine.process import EngineSide
from servers.native.engine.region_register import NO_CUDA_MEMORY, RegionRegister, open_region
from servers.native.front.region_table import RegionTable
from servers.native.local_link import LocalLink
from servers.native.shared.interface import CloseRegions, OpenRegion
from servers.native.shared.memory import Arena, ByteBudget, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.protocol.codec import window_array
from servers.protocol.errors import (
    InternalError,
    InvalidRequestError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.protocol.records import RegionReference, RegionWindow


@pytest.mark.parametrize("library", ["libabserve_absent.so.1", "libc.so.6"])  # no such file; none of its functions
def test_without_a_driver_it_is_refused_in_one_sentence(monkeypatch, library):
    monkeypatch.setattr(cuda_library, "LIBRARY", library)
    register = RegionRegister(lambda _operation: None)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="does not offer CUDA shared memory") as caught:
            register.cuda()
        assert str(caught.value) == NO_CUDA_MEMORY
        assert library in str(caught.value.__cause__)


class Driver:
    """Copies that take as long as a test wants; notes when a handle is closed."""

    def __init__(self):
        self.copying = threading.Event()
        self.proceed = threading.Event()
        self.closed = 0
        self.users = 0

    def read(self, device, address, destination, size):
        self.users += 1
        self.copying.set()
        assert self.proceed.wait(60)
        assert not self.closed
        self.users -= 1

    def write(self, device, address, source, size):
        raise CudaError("CUDA_ERROR_OUT_OF_MEMORY from a test")

    def close(self, device, address):
        assert not self.users
        self.closed += 1
        raise CudaError("whatever it is, nobody can do anything about it")


def table(max_input_bytes=1000, held_bytes=1000):
    """A front end's regions, registered on an engine's side in the same process; in an event loop."""
    settings = NativeSettings(allow_shared_memory=True, max_body_bytes=max_input_bytes)
    memory = RequestMemory(Arena(1, held_bytes, max_input_bytes), ByteBudget(held_bytes))
    link = LocalLink(EngineSide(settings, [], [], memory.arena))
    regions = RegionTable(settings, memory, link)

    async def execute(operation):
        if isinstance(operation, OpenRegion):
            regions.open(operation)
        elif isinstance(operation, CloseRegions):
            regions.close(operation.names)

    link.open(execute)
    return regions


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def region(driver):
    return CudaRegion("r", driver, 0, 4096, 64)


def window(region, size=8):
    return CudaWindow(region, 0, size, np.empty(size, np.uint8))


def test_a_handle_is_closed_once_and_after_its_last_use(driver, region):
    with ThreadPoolExecutor(4) as pool:
        reading = pool.submit(window(region).read)
        assert driver.copying.wait(60)
        closing = [pool.submit(region.close) for _ in range(2)]
        deadline = time.monotonic() + 60
        while not region.is_closing:
            assert time.monotonic() < deadline
        with pytest.raises(InvalidRequestError, match="unregistered before its input was read"):
            window(region).read()
        assert not driver.closed
        driver.proceed.set()
        reading.result(60)
        for ended in closing:
            ended.result(60)
    region.close()
    assert driver.closed == 1


def test_outputs_that_cannot_be_written_are_errors(driver, region):
    with pytest.raises(InternalError, match="OUT_OF_MEMORY"):
        window(region).write(np.zeros(2, np.float32))
    with pytest.raises(InvalidRequestError, match="has 9 bytes"):
        window(region).write(np.zeros(9, np.uint8))
    window(region).write(np.zeros(0, np.float32))
    region.close()
    with pytest.raises(InvalidRequestError, match="unregistered before its output was written"):
        window(region).write(np.zeros(2, np.float32))


def no_host_memory(_size):
    raise AssertionError("the engine's side reads it")


def test_an_input_on_a_device_takes_no_memory_of_the_front_end(region):
    piece = RegionWindow(None, RegionReference("r", 8, 0), no_host_memory)
    array = window_array(piece, "FP32", (1, 2), "x")
    assert (array.shape, array.dtype) == ((1, 2), np.dtype(np.float32))
    with pytest.raises(InvalidRequestError, match="needs 12 bytes"):
        window_array(piece, "FP32", (1, 3), "x")
    with pytest.raises(UnsupportedError, match="BYTES, which this server does not read from CUDA"):
        window_array(piece, "BYTES", (1,), "x")


def test_the_host_memory_of_inputs_is_bounded_and_counted():
    async def run() -> None:
        regions = table(40, 60)
        budget = regions._memory.budget
        memory = SimpleNamespace(check=lambda: None)
        with pytest.raises(TooLargeError, match="41 bytes, the server takes at most 40"):
            RegionWindow(memory, RegionReference("r", 41, 0), regions.allocate).view()
        first = RegionWindow(memory, RegionReference("r", 40, 0), regions.allocate)
        view = first.view()
        del first
        assert budget.held == 40
        with pytest.raises(UnavailableError, match="memory for requests"):
            RegionWindow(memory, RegionReference("r", 40, 0), regions.allocate).view()
        del view
        assert budget.held == 0

    asyncio.run(run())


def test_a_name_is_taken_while_its_region_is_opened_and_a_client_that_leaves_loses_nothing(region, driver, monkeypatch):
    """Two registrations at once cannot both succeed, and what a client began can be undone by name."""
    opening, proceed = threading.Event(), threading.Event()

    def open_slowly(_driver, _opening, _own):
        opening.set()
        assert proceed.wait(60)
        return region

    monkeypatch.setattr(region_register, "open_region", open_slowly)
    monkeypatch.setattr(RegionRegister, "cuda", lambda _register: driver)

    async def run() -> None:
        regions = table()
        leaving = asyncio.ensure_future(regions.register_cuda("r", b"", 0, 64))
        await asyncio.to_thread(opening.wait, 10)
        others = [
            asyncio.ensure_future(regions.register_cuda("r", b"", 0, 64)),
            asyncio.ensure_future(regions.register("r", "/r", 0, 64)),
        ]
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        proceed.set()
        for other in others:
            with pytest.raises(InvalidRequestError, match="registered already"):
                await other
        assert regions.rows("", on_device=True) == [{"name": "r", "device_id": 0, "byte_size": 64}]
        assert not driver.closed
        await regions.unregister("r", on_device=True)
        assert regions.rows("", on_device=True) == []
        assert driver.closed == 1

    asyncio.run(run())


def test_a_region_that_a_front_end_cannot_open_is_closed_again(region, driver, monkeypatch):
    monkeypatch.setattr(region_register, "open_region", lambda *_arguments: region)
    monkeypatch.setattr(RegionRegister, "cuda", lambda _register: driver)

    async def run() -> None:
        regions = table()
        monkeypatch.setattr(regions, "open", refuse)
        with pytest.raises(InvalidRequestError, match="planted"):
            await regions.register_cuda("r", b"", 0, 64)
        assert driver.closed == 1
        monkeypatch.undo()
        with pytest.raises(InvalidRequestError, match="cannot be opened"):
            await regions.register("r", "/abserve_no_such_memory", 0, 64)  # the name is free again

    asyncio.run(run())


def refuse(*_arguments):
    raise InvalidRequestError("planted")


class PeerDriver:
    """A driver that maps memory of GPU 1 on those GPUs that reach it."""

    device_count = 3

    def __init__(self, *reaching):
        self.reaching = reaching
        self.tried = []

    def open(self, device, _handle):
        self.tried.append(device)
        if device not in self.reaching:
            raise CudaError("no path")
        return 4096

    def bytes_behind(self, _device, _address):
        return 64


@pytest.mark.parametrize(
    ("own", "peer", "reaching", "place", "tried"),
    [
        (1, False, (1,), 1, [1]),
        (0, False, (0, 1), 0, [0]),  # by itself
        (0, False, (1,), 1, [0, 1]),  # through the host
        (0, True, (0, 1), 0, [0]),
        (0, True, (1,), None, [0]),
        (None, False, (1,), 1, [1]),
        (None, True, (1,), None, []),
        (0, False, (), None, [0, 1]),
    ],
)
def test_memory_is_mapped_where_the_engine_reaches_it(own, peer, reaching, place, tried):
    driver: Any = PeerDriver(*reaching)
    opening = OpenRegion("r", 64, device=1, handle=bytes(64), peer=peer)
    if place is None:
        with pytest.raises(InvalidRequestError):
            open_region(driver, opening, own)
    else:
        assert open_region(driver, opening, own).device == place
    assert driver.tried == tried


def test_a_region_is_opened_for_the_gpu_that_auto_is(monkeypatch: pytest.MonkeyPatch) -> None:
    opened_for: list[int | None] = []

    class Opened:
        def close(self) -> None:
            pass

    def open_region(_driver: object, _opening: object, gpu: int | None) -> Opened:
        opened_for.append(gpu)
        return Opened()

    monkeypatch.setattr(region_register, "open_region", open_region)
    settings, nothing = NativeSettings(device="auto"), cast(Any, None)
    side: Any = EngineSide(settings, [], [], nothing, wake=nothing)
    side.regions.cuda = lambda: None
    side.regions.open(OpenRegion("a", 8, 0, device=1, handle=b""))
    side.hosts.append(SimpleNamespace(description=None))
    side.hosts.append(SimpleNamespace(description=SimpleNamespace(device="cuda:0")))
    side.regions.open(OpenRegion("b", 8, 0, device=1, handle=b""))
    assert opened_for == [None, 0]
