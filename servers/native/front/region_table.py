"""Shared memory that clients have registered, as one front end knows it."""

from __future__ import annotations

from collections.abc import Sequence

from servers.native.shared.interface import CheckCuda, CloseRegions, EngineLink, OpenRegion
from servers.native.shared.memory import RequestMemory
from servers.native.shared.regions import SystemRegion, check_range
from servers.native.shared.settings import NativeSettings
from servers.protocol.errors import ContractError, InvalidRequestError, NotFoundError, TooLargeError
from servers.protocol.records import RegionReference, RegionWindow, shown
from servers.protocol.tensors import Array

MAX_DEVICE = 2**31 - 1


class RegionTable:
    """All registered regions; used from the event loop only, except `find`. Refuses everything unless `allowed`.

    Where a method takes a name and `on_device`, an empty name means all regions on devices, or all of the system.
    """

    def __init__(self, settings: NativeSettings, memory: RequestMemory, link: EngineLink) -> None:
        self.allowed = settings.allow_shared_memory
        self._max_input_bytes = settings.max_body_bytes
        self._memory = memory
        self._link = link
        self._regions: dict[
            str, SystemRegion | OpenRegion
        ] = {}  # `OpenRegion` for device memory, which no front end reads

    def find(self, reference: RegionReference) -> RegionWindow:
        """The piece of a region that a request names. Raises `ContractError`."""
        self.check_allowed()
        region = self._regions.get(reference.region)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(reference.region)} is not registered")
        check_range(f"the piece of region {shown(region.name)}", reference.offset, reference.byte_size, least=0)
        if reference.offset + reference.byte_size > region.byte_size:
            raise InvalidRequestError(
                f"the request uses {reference.byte_size} bytes from byte {reference.offset} of region "
                f"{shown(region.name)}, which has {region.byte_size} bytes"
            )
        return RegionWindow(None if isinstance(region, OpenRegion) else region, reference, self.allocate)

    def allocate(self, byte_size: int) -> Array:
        """Memory for an input, which counts as held while it exists; any thread. Raises `ContractError`."""
        if byte_size > self._max_input_bytes:
            raise TooLargeError(f"an input has {byte_size} bytes, the server takes at most {self._max_input_bytes}")
        return self._memory.allocate(byte_size)

    async def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a client's system memory in every front end. Raises `ContractError`."""
        self.check_allowed()
        check_range(f"region {shown(name)}", offset, byte_size)
        await self._link.control(OpenRegion(name, byte_size, offset, key))

    async def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Map a client's device memory. Raises `ContractError`."""
        self.check_allowed()
        check_range(f"region {shown(name)}", 0, byte_size)
        if abs(device) > MAX_DEVICE:
            raise InvalidRequestError(f"'device_id' is the number of a GPU, at most {MAX_DEVICE}, got {device}")
        await self._link.control(OpenRegion(name, byte_size, device=device, handle=handle))

    async def unregister(self, name: str, *, on_device: bool) -> None:
        """Close regions; returns when no front end finds them and no copy uses device memory any more.

        An unknown name is not an error.
        """
        self.check_allowed()
        await self._link.control(CloseRegions(on_device, (name,) if name else ()))

    def open(self, opening: OpenRegion) -> None:
        """The engine's side has registered a region. Raises `ContractError` when its memory cannot be opened."""
        self._regions[opening.name] = opening if opening.device is not None else SystemRegion(opening, is_open=True)

    def close(self, names: Sequence[str]) -> None:
        """The engine's side has unregistered these."""
        for name in names:
            region = self._regions.pop(name, None)
            if isinstance(region, SystemRegion):
                region.close()

    def rows(self, name: str, *, on_device: bool) -> list[dict[str, object]]:
        """Regions as a status shows them: their keys and handles would give access to the memory.

        Raises `ContractError`.
        """
        self.check_allowed()
        regions = [self._regions.get(name)] if name else list(self._regions.values())
        rows: list[dict[str, object]] = []
        for region in regions:
            if isinstance(region, OpenRegion) and on_device:
                rows.append({"name": region.name, "device_id": region.device, "byte_size": region.byte_size})
            elif isinstance(region, SystemRegion) and not on_device:
                rows.append({"name": region.name, "key": "", "offset": region.offset, "byte_size": region.byte_size})
        if name and not rows:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return rows

    async def offers_cuda(self) -> bool:
        """Whether CUDA shared memory is allowed and a device answers."""
        try:
            await self.check_cuda()
        except ContractError:
            return False
        return True

    async def check_cuda(self) -> None:
        """Raises `ContractError` unless CUDA shared memory is allowed and a device answers."""
        self.check_allowed()
        await self._link.control(CheckCuda())

    def check_allowed(self) -> None:
        """Raises `InvalidRequestError` unless the server was started with shared memory."""
        if not self.allowed:
            raise InvalidRequestError("shared memory is switched off; start the server with --allow-shared-memory")
