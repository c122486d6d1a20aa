"""CUDA shared memory where there is no driver, and the accounting of its users, on a driver of our own."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from servers.contract.codec import window_array
from servers.contract.errors import (
    InternalError,
    InvalidRequestError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.contract.records import RegionReference, Window
from servers.gpu import cuda_library
from servers.gpu.cuda_library import CudaError
from servers.native.cuda_regions import NO_CUDA_MEMORY, CudaAccess, CudaRegion
from servers.native.limits import ByteBudget
from servers.native.regions import RegionTable
from servers.native.settings import NativeSettings


@pytest.mark.parametrize("library", ["libabserve_absent.so.1", "libc.so.6"])  # no such file; none of its functions
def test_without_a_driver_it_is_refused_in_one_sentence(monkeypatch, library):
    monkeypatch.setattr(cuda_library, "LIBRARY", library)
    access = CudaAccess()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="does not offer CUDA shared memory") as caught:
            access.driver()
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
        assert self.proceed.wait(10)
        assert not self.closed
        self.users -= 1

    def write(self, device, address, source, size):
        raise CudaError("CUDA_ERROR_OUT_OF_MEMORY from a test")

    def close(self, device, address):
        assert not self.users
        self.closed += 1
        raise CudaError("whatever it is, nobody can do anything about it")


def table(max_input_bytes=1000, held_bytes=1000):
    settings = NativeSettings(allow_shared_memory=True, max_body_bytes=max_input_bytes)
    return RegionTable(settings, ByteBudget(held_bytes))


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def region(driver):
    return CudaRegion("r", driver, 0, 4096, 64)


def window(region, size=8):
    return Window(region, RegionReference("r", size, 0), table().allocate)


def test_a_handle_is_closed_once_and_after_its_last_use(driver, region):
    with ThreadPoolExecutor(4) as pool:
        reading = pool.submit(window(region).fetch)
        assert driver.copying.wait(10)
        closing = [pool.submit(region.close) for _ in range(2)]
        deadline = time.monotonic() + 10
        while not region.is_closing:
            assert time.monotonic() < deadline
        with pytest.raises(InvalidRequestError, match="unregistered before its input was read"):
            window(region).fetch()
        assert not driver.closed
        driver.proceed.set()
        reading.result(10)
        for one in closing:
            one.result(10)
    region.close()
    assert driver.closed == 1


def test_outputs_that_cannot_be_written_are_errors(driver, region):
    with pytest.raises(InternalError, match="OUT_OF_MEMORY"):
        window(region).write(b"12345678")
    with pytest.raises(InvalidRequestError, match="has 9 bytes"):
        window(region).write(b"123456789")
    window(region).write(b"")
    region.close()
    with pytest.raises(InvalidRequestError, match="unregistered before its output was written"):
        window(region).write(b"12345678")


def test_an_input_is_a_view_over_host_memory_of_its_size(region):
    array = window_array(window(region), "FP32", (1, 2), "x")
    assert (array.shape, array.dtype) == ((1, 2), np.dtype(np.float32))
    with pytest.raises(InvalidRequestError, match="needs 12 bytes"):
        window_array(window(region), "FP32", (1, 3), "x")
    with pytest.raises(UnsupportedError, match="BYTES, which this server does not read from CUDA"):
        window_array(window(region), "BYTES", (1,), "x")


def test_the_host_memory_of_inputs_is_bounded_and_counted(region):
    budget = ByteBudget(60)
    allocate = RegionTable(NativeSettings(max_body_bytes=40), budget).allocate
    with pytest.raises(TooLargeError, match="41 bytes, the server takes at most 40"):
        Window(region, RegionReference("r", 41, 0), allocate).view()
    first = Window(region, RegionReference("r", 40, 0), allocate)
    array = window_array(first, "FP32", (1, 10), "x")
    del first
    assert budget.held == 40
    with pytest.raises(UnavailableError, match="memory for requests"):
        Window(region, RegionReference("r", 40, 0), allocate).view()
    del array
    assert budget.held == 0


def test_a_client_that_leaves_while_its_region_is_opened_leaves_nothing_open(driver, region, monkeypatch):
    """Until then the name is taken, so that two registrations at once cannot both succeed."""
    opening, proceed = threading.Event(), threading.Event()

    def open_slowly(_access, _name, _handle, _device, _byte_size):
        opening.set()
        assert proceed.wait(10)
        return region

    monkeypatch.setattr(CudaAccess, "open", open_slowly)
    monkeypatch.setattr(CudaAccess, "driver", lambda _access: driver)

    async def register_and_leave() -> RegionTable:
        regions = table()
        task = asyncio.ensure_future(regions.register_cuda("r", b"", 0, 64))
        await asyncio.to_thread(opening.wait, 10)
        with pytest.raises(InvalidRequestError, match="registered already"):
            await regions.register_cuda("r", b"", 0, 64)
        with pytest.raises(InvalidRequestError, match="registered already"):
            regions.register("r", "/r", 0, 64)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proceed.set()
        deadline = time.monotonic() + 10
        while not driver.closed:
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
        return regions

    regions = asyncio.run(register_and_leave())
    assert regions.rows(CudaRegion, "") == []
    with pytest.raises(InvalidRequestError, match="size ≥ 1"):
        regions.register("r", "/r", 0, 0)  # the name is free again
