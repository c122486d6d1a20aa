"""CUDA shared memory that clients have registered: device memory of another process, opened by its IPC handle.

The engines take their batches from host memory, so an input is copied from the device to the host in the engine thread
right before its batch is gathered, and an output back in a worker thread before its answer is sent. Each copy counts as
a use of the region: its handle is closed when it is unregistered and no copy is under way, and whoever unregistered it
is answered after that, so that a client may then free its memory.

A handle is a secret of its owner, as a key of system shared memory is: no message and no status has one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import structlog

from servers.contract.errors import InternalError, InvalidRequestError, TooLargeError, UnsupportedError
from servers.contract.shared_memory import RegionReference
from servers.contract.tensors import Array
from servers.gpu.cuda_library import CudaError
from servers.native.cuda_driver import HANDLE_BYTES, CudaDriver
from servers.native.served_models import shown

log = structlog.get_logger("abserve.cuda")

NO_CUDA_MEMORY = "this server does not offer CUDA shared memory; use system shared memory or send the data"


class CudaAccess:
    """The driver, loaded when somebody first needs it; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._driver: CudaDriver | None = None
        self._told = False

    def driver(self) -> CudaDriver:
        """Blocks for up to a second the first time. Raises `UnsupportedError` where no device answers."""
        with self._lock:
            if self._driver is None:
                try:
                    self._driver = CudaDriver()
                except CudaError as exc:
                    if not self._told:
                        log.info("CUDA shared memory is not offered", reason=str(exc))
                        self._told = True
                    raise UnsupportedError(NO_CUDA_MEMORY) from exc
            return self._driver

    def open(self, name: str, handle: bytes, device: int, byte_size: int) -> CudaRegion:
        """Map a client's memory; blocks. Raises `ContractError`."""
        driver = self.driver()
        if len(handle) != HANDLE_BYTES:
            raise InvalidRequestError(
                f"the raw handle of region {shown(name)} must have {HANDLE_BYTES} bytes, got {len(handle)}"
            )
        if not 0 <= device < driver.device_count:
            raise InvalidRequestError(
                f"region {shown(name)} cannot be on GPU {device}: this server sees {driver.device_count} of them, "
                "numbered from 0"
            )
        try:
            address = driver.open(device, handle)
        except CudaError as exc:
            raise InvalidRequestError(
                f"the raw handle of region {shown(name)} cannot be opened on GPU {device}: give the one that "
                f"cudaIpcGetMemHandle made in another process of this machine that still runs ({exc})"
            ) from exc
        memory = DeviceMemory(name, driver, device, address)
        try:
            available = driver.bytes_behind(device, address)
        except CudaError as exc:
            memory.close()
            raise InvalidRequestError(f"the size of region {shown(name)} cannot be read ({exc})") from exc
        if byte_size > available:
            memory.close()
            raise InvalidRequestError(
                f"region {shown(name)} would end at byte {byte_size} of an allocation of {available} bytes"
            )
        return CudaRegion(name, device, byte_size, memory)


class DeviceMemory:
    """An opened handle with the number of those who use it at this moment; any thread."""

    def __init__(self, name: str, driver: CudaDriver, device: int, address: int) -> None:
        self._name = name
        self._driver = driver
        self._device = device
        self._address = address
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        self._closed = threading.Event()

    def read(self, offset: int, destination: Array) -> None:
        """Fill `destination`, a contiguous array of bytes. Raises `InvalidRequestError`."""
        with self._used("its input was read"):
            try:
                self._driver.read(self._device, self._address + offset, destination.ctypes.data, destination.nbytes)
            except CudaError as exc:
                raise InvalidRequestError(
                    f"region {shown(self._name)} cannot be read from GPU {self._device}: is its owner gone? ({exc})"
                ) from exc

    def write(self, offset: int, source: Array) -> None:
        """Copy a contiguous array of bytes there. Raises `ContractError`."""
        with self._used("its output was written"):
            try:
                self._driver.write(self._device, self._address + offset, source.ctypes.data, source.nbytes)
            except CudaError as exc:
                raise InternalError(
                    f"the output cannot be written to region {shown(self._name)} on GPU {self._device} ({exc})"
                ) from exc

    def close(self) -> None:
        """Let nobody use it from now on; returns when the last copy has ended and the handle is closed. Idempotent."""
        with self._lock:
            idle = self._users == 0 and not self._closing
            self._closing = True
        if idle:
            self._unmap()
        self._closed.wait()

    @contextmanager
    def _used(self, purpose: str) -> Iterator[None]:
        with self._lock:
            if self._is_closing():
                raise InvalidRequestError(f"region {shown(self._name)} was unregistered before {purpose}")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self._users == 0 and self._is_closing()
            if last:
                self._unmap()

    def _is_closing(self) -> bool:
        return self._closing

    def _unmap(self) -> None:
        try:
            self._driver.close(self._device, self._address)
        except CudaError as exc:  # there is nothing left that anybody could do about it
            log.warning("a CUDA shared-memory region could not be closed", region=shown(self._name), reason=str(exc))
        finally:
            self._closed.set()


class CudaRegion:
    """One registered piece of device memory."""

    def __init__(self, name: str, device: int, byte_size: int, memory: DeviceMemory) -> None:
        self.name = name
        self.device = device
        self.byte_size = byte_size
        self._memory = memory

    def window(self, reference: RegionReference) -> CudaWindow:
        """A piece that is inside it."""
        return CudaWindow(self._memory, reference)

    def close(self) -> None:
        """Blocks until the last copy has ended; whoever comes later is refused. Idempotent."""
        self._memory.close()


class CudaWindow:
    """A piece of a region that one request names, and host memory of the same size when it is an input."""

    __slots__ = ("_host", "_memory", "reference")
    on_device = True

    def __init__(self, memory: DeviceMemory, reference: RegionReference) -> None:
        self._memory = memory
        self._host: Array | None = None
        self.reference = reference

    def view(self) -> memoryview:
        """Host memory that `fetch` fills; its pages are taken by that and not before. Raises `TooLargeError`."""
        if self._host is None:
            try:
                self._host = np.empty(self.reference.byte_size, np.uint8)
            except MemoryError as exc:
                raise TooLargeError(
                    f"the piece of region {shown(self.reference.region)} is larger than the server's memory"
                ) from exc
        return self._host.data

    def fetch(self) -> None:
        """Copy the input from the device; blocks. Raises `InvalidRequestError`."""
        self.view()
        assert self._host is not None
        self._memory.read(self.reference.offset, self._host)

    def write(self, data: bytes | memoryview) -> None:
        """Copy an output to the device; blocks, so never in the event loop. Raises `ContractError`."""
        self.reference.check_room(len(data))
        if data:
            self._memory.write(self.reference.offset, np.frombuffer(data, np.uint8))
