"""The register of clients' shared memory, on the engine's side."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable

import msgspec
import structlog

from servers.gpu.cuda_library import CudaError
from servers.native.engine.cuda_memory import HANDLE_BYTES, CudaDriver, CudaRegion, CudaWindow
from servers.native.shared.interface import CloseRegions, FrontEndOperation, OpenRegion
from servers.native.shared.regions import SystemRegion
from servers.protocol.errors import ContractError, InvalidRequestError, NotFoundError, TooLargeError, UnsupportedError
from servers.protocol.records import MAX_REGION_NAME_CHARACTERS, shown
from servers.protocol.tensors import Array

log = structlog.get_logger("abserve.cuda")


NO_CUDA_MEMORY = "this server does not offer CUDA shared memory; use system shared memory or send the data"


MAX_REGIONS = 1024


DESCRIPTOR_SHARE = 4
"""Each region of system memory holds a file descriptor in every process: at most a quarter of what a process may have,
since clients need the others."""


class RegionRegister:
    """The names of all regions, and the device memory behind some; any thread, one change at a time."""

    def __init__(
        self,
        notify_all: Callable[[FrontEndOperation], None],
        *,
        device: Callable[[], int | None] = lambda: None,
        others_come: bool = True,
    ) -> None:
        """`notify_all` lets every front end execute an operation, and raises the first `ContractError`. `device` says
        which GPU executes, if that is known. `others_come`: front ends may begin later, and have to open what is
        registered then."""
        self._device = device
        self._notify_all = notify_all
        self._others_come = others_come
        self._most = min(MAX_REGIONS, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTOR_SHARE))
        self._lock = threading.Lock()
        self._openings: dict[str, OpenRegion] = {}
        self._of_system: dict[str, SystemRegion] = {}  # open for front ends to come, whose clients may unlink the names
        self._on_device: dict[str, CudaRegion] = {}
        self._cuda: CudaDriver | None = None
        self._cuda_lock = threading.Lock()
        self._without_cuda = ""  # why, as it is logged once

    @property
    def openings(self) -> list[OpenRegion]:
        """What a new front end has to open."""
        return list(self._openings.values())

    def open(self, opening: OpenRegion) -> None:
        """Open a client's memory, that of the system in every front end. Raises `ContractError`."""
        with self._lock:
            self._check_new(opening.name)
            if opening.device is None:
                region = SystemRegion(opening)
                self._offer(msgspec.structs.replace(opening, path=region.path))
                if self._others_come:
                    self._of_system[opening.name] = region
                return
            on_device = open_region(self.cuda(), opening, self._device())
            try:
                self._offer(msgspec.structs.replace(opening, handle=b""))
            except ContractError:
                on_device.close()
                raise
            self._on_device[opening.name] = on_device

    def close(self, closing: CloseRegions) -> None:
        """Close regions; returns when no copy uses device memory any more."""
        with self._lock:
            names = tuple(
                opening.name
                for opening in self._openings.values()
                if (opening.device is not None) == closing.on_device
                and (not closing.names or opening.name in closing.names)
            )
            if not names:
                return
            for name in names:
                del self._openings[name]
                self._of_system.pop(name, None)
            self._notify_all(CloseRegions(closing.on_device, names))
            for region in [self._on_device.pop(name) for name in names if name in self._on_device]:
                region.close()

    def cuda(self) -> CudaDriver:
        """The driver, which is loaded at its first use; blocks for up to a second then. Raises `UnsupportedError`
        unless a device answers."""
        with self._cuda_lock:
            if self._cuda is None:
                try:
                    self._cuda = CudaDriver()
                except CudaError as exc:
                    if not self._without_cuda:
                        self._without_cuda = str(exc)
                        log.info("CUDA shared memory is not offered", reason=self._without_cuda)
                    raise UnsupportedError(NO_CUDA_MEMORY) from exc
            return self._cuda

    def window(self, name: str, offset: int, byte_size: int, like: Array | None) -> CudaWindow:
        """The piece of a region on a GPU for a tensor like this one. Raises `NotFoundError`."""
        region = self._on_device.get(name)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return CudaWindow(region, offset, byte_size, like)

    def _offer(self, opening: OpenRegion) -> None:
        try:
            self._notify_all(opening)
        except ContractError:
            self._notify_all(CloseRegions(opening.device is not None, (opening.name,)))
            raise
        self._openings[opening.name] = opening

    def _check_new(self, name: str) -> None:
        if not 0 < len(name) <= MAX_REGION_NAME_CHARACTERS:
            raise InvalidRequestError(f"a region's name must have 1 to {MAX_REGION_NAME_CHARACTERS} characters")
        if name in self._openings:
            raise InvalidRequestError(f"region {shown(name)} is registered already: unregister it first")
        if len(self._openings) >= self._most:
            raise TooLargeError(f"{self._most} regions are registered, the server's limit: unregister one first")


def open_region(driver: CudaDriver, opening: OpenRegion, own: int | None) -> CudaRegion:
    """Map a client's memory; blocks. Raises `InvalidRequestError`. Memory of another GPU than `own`, which executes, is
    mapped so that `own` reaches it by itself. If `own` cannot, or is not known, it is mapped on its own GPU and copied
    through the host; a peer is refused then."""
    name, device = shown(opening.name), opening.device
    assert device is not None
    if len(opening.handle) != HANDLE_BYTES:
        raise InvalidRequestError(f"a raw handle must have {HANDLE_BYTES} bytes, got {len(opening.handle)}")
    if not 0 <= device < driver.device_count:
        raise InvalidRequestError(f"GPU {device} does not exist: this server sees {driver.device_count}, from 0 on")
    if opening.peer and own is None:
        raise InvalidRequestError(f"region {name} is for engines on a GPU")
    place = device if own is None else own
    try:
        try:
            address = driver.open(place, opening.handle)
        except CudaError:
            if opening.peer or place == device:
                raise
            place = device
            address = driver.open(place, opening.handle)
    except CudaError as exc:
        raise InvalidRequestError(
            f"the raw handle of region {name} cannot be opened on GPU {place}: give the one that "
            f"cudaIpcGetMemHandle made in another running process of this machine ({exc})"
        ) from exc
    region = CudaRegion(opening.name, driver, place, address, opening.byte_size)
    try:
        available = driver.bytes_behind(place, address)
    except CudaError as exc:
        region.close()
        raise InvalidRequestError(f"the size of region {name} cannot be read ({exc})") from exc
    if opening.byte_size > available:
        region.close()
        raise InvalidRequestError(f"region {name} ends at byte {opening.byte_size} of an allocation of {available}")
    return region
