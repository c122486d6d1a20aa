"""The shared-memory regions of a server: which names are taken, and the device memory behind them.

It belongs to the engine's side, so that all front ends have the same regions, and so that device memory is opened in
the process that executes.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from servers.engines.interface import DeviceMemory
from servers.native.cuda_regions import CudaAccess, CudaRegion
from servers.native.regions import SystemRegion, check_range
from servers.protocol.errors import ContractError, InvalidRequestError, NotFoundError, TooLargeError
from servers.protocol.records import MAX_REGION_NAME_CHARACTERS, shown
from servers.protocol.tensors import Array

MAX_REGIONS = 1024
DESCRIPTOR_SHARE = 4
"""Each region of system memory holds a file descriptor in every process: at most a quarter of what a process may have,
since clients need the others."""

Tell = Callable[..., None]
"""Call a method of every front end and wait for all. Raises the first `ContractError`."""
Opening = tuple[str, str | None, int, int]
"""The arguments of `RegionTable.open`."""


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """The piece of a region of device memory that one tensor of a request has.

    Its shape and type are those of `like`, which has no content; without it they are not known before the execution.
    """

    region: CudaRegion
    offset: int
    byte_size: int
    like: Array | None = None

    def read(self) -> Array:
        """A copy of the input on the host; blocks. Raises `ContractError` if the region is gone.

        It does not count as held: of each model at most the batches in flight have copies, and one that is formed.
        """
        assert self.like is not None
        array = np.empty(self.like.shape, self.like.dtype)
        self.region.read(self.offset, array.reshape(-1).view(np.uint8))
        return array

    def write(self, array: Array) -> None:
        """Write an output; blocks. Raises `ContractError`, also when the output does not fit."""
        self._check_fits(array)
        self.region.write(self.offset, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def on(self, device: int | None) -> bool:
        """Whether an engine on this device can use the memory itself."""
        return self.region.device == device and self.like is not None

    def borrow(self) -> DeviceMemory:
        """The memory itself, which stays open until `release`. Raises `ContractError`."""
        assert self.like is not None
        self._check_fits(self.like)
        return DeviceMemory(self.region.borrow(self.offset), self.region.device, self.like.shape, self.like.dtype)

    def release(self) -> None:
        """The engine does not use the memory any more."""
        self.region.release()

    def _check_fits(self, array: Array) -> None:
        if array.nbytes > self.byte_size:
            raise InvalidRequestError(
                f"the output has {array.nbytes} bytes, but the request gives it {self.byte_size} bytes"
            )


class RegionRegister:
    """All registered regions; any thread, one change at a time."""

    def __init__(self, tell: Tell, *, others_come: bool = True) -> None:
        """`others_come`: front ends may begin later, and have to open what is registered then."""
        self._tell = tell
        self._others_come = others_come
        self._most = min(MAX_REGIONS, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTOR_SHARE))
        self._lock = threading.Lock()
        self._openings: dict[str, Opening] = {}
        self._of_system: dict[str, SystemRegion] = {}  # open for front ends to come, whose clients may unlink the names
        self._on_device: dict[str, CudaRegion] = {}
        self._cuda = CudaAccess()

    @property
    def openings(self) -> list[Opening]:
        """What a new front end has to open."""
        return list(self._openings.values())

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open system memory in every front end. Raises `ContractError`."""
        with self._lock:
            self._check_new(name, offset, byte_size)
            region = SystemRegion(name, key, offset, byte_size)
            self._open((name, region.path, offset, byte_size))
            if self._others_come:
                self._of_system[name] = region

    def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Map device memory of a client. Raises `ContractError`."""
        with self._lock:
            self._check_new(name, 0, byte_size)
            region = self._cuda.open(name, handle, device, byte_size)
            try:
                self._open((name, None, device, byte_size))
            except ContractError:
                region.close()
                raise
            self._on_device[name] = region

    def unregister(self, on_device: bool, name: str) -> None:
        """Forget a region of this kind, for an empty name all; returns when no copy uses device memory any more."""
        with self._lock:
            names = [
                one for one, path, *_ in self._openings.values() if (path is None) == on_device and name in ("", one)
            ]
            for one in names:
                del self._openings[one]
                self._of_system.pop(one, None)
            self._tell("forget", names)
            for region in [self._on_device.pop(one) for one in names if one in self._on_device]:
                region.close()

    def check_cuda(self) -> None:
        """Raises `ContractError` unless a device answers."""
        self._cuda.driver()

    def window(self, name: str, offset: int, byte_size: int, like: Array | None) -> DeviceWindow:
        """The piece of a region on a GPU for a tensor like this one. Raises `NotFoundError`."""
        region = self._on_device.get(name)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return DeviceWindow(region, offset, byte_size, like)

    def _open(self, opening: Opening) -> None:
        try:
            self._tell("open", *opening)
        except ContractError:
            self._tell("forget", [opening[0]])
            raise
        self._openings[opening[0]] = opening

    def _check_new(self, name: str, offset: int, byte_size: int) -> None:
        if not 0 < len(name) <= MAX_REGION_NAME_CHARACTERS:
            raise InvalidRequestError(f"a region's name must have 1 to {MAX_REGION_NAME_CHARACTERS} characters")
        if name in self._openings:
            raise InvalidRequestError(f"region {shown(name)} is registered already: unregister it first")
        if len(self._openings) >= self._most:
            raise TooLargeError(f"{self._most} regions are registered, the server's limit: unregister one first")
        check_range(f"region {shown(name)}", offset, byte_size)
