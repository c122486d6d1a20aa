"""The shared-memory regions that clients have registered, of both kinds, by name: one name means one region."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from servers.contract.errors import ContractError, InvalidRequestError, NotFoundError, TooLargeError
from servers.contract.shared_memory import MAX_NAME_CHARACTERS, RegionReference, RegionWindow
from servers.native.cuda_regions import CudaAccess, CudaRegion
from servers.native.served_models import shown
from servers.native.system_regions import Region

MAX_REGIONS = 1024
"""Each in system shared memory holds two file descriptors."""
MAX_ADDRESS = 2**64

R = TypeVar("R", Region, CudaRegion)


class RegionTable:
    """Used from the event loop alone, but for `find`. Everything is refused unless `allowed`."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._regions: dict[str, Region | CudaRegion] = {}
        self._opening: set[str] = set()
        self._cuda = CudaAccess()

    def find(self, reference: RegionReference) -> RegionWindow:
        """The piece of a region that a request names. Raises `ContractError`."""
        self.check_allowed()
        region = self._regions.get(reference.region)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(reference.region)} is not registered")
        _check_range(f"the piece of region {shown(region.name)}", reference.offset, reference.byte_size)
        if reference.offset + reference.byte_size > region.byte_size:
            raise InvalidRequestError(
                f"the request uses {reference.byte_size} bytes from byte {reference.offset} of region "
                f"{shown(region.name)}, which has {region.byte_size} bytes"
            )
        return region.window(reference)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a client's system memory. Raises `ContractError`."""
        self._check_new(name)
        _check_range(f"region {shown(name)}", offset, byte_size)
        self._regions[name] = Region(name, key, offset, byte_size)

    async def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Map a client's device memory. Raises `ContractError`."""
        self._check_new(name)
        _check_range(f"region {shown(name)}", 0, byte_size)
        self._opening.add(name)
        opening = asyncio.ensure_future(asyncio.to_thread(self._cuda.open, name, handle, device, byte_size))
        try:
            region = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        finally:
            self._opening.discard(name)
        self._regions[name] = region

    def unregister(self, name: str) -> None:
        """Forget one region of system memory, or all for an empty name; one that is not there is not missed."""
        self.check_allowed()
        for region in self._named(name, Region):
            del self._regions[region.name]
            region.close()

    async def unregister_cuda(self, name: str) -> None:
        """Likewise for device memory; returns when no copy uses it any more and it is unmapped."""
        self.check_allowed()
        regions = self._named(name, CudaRegion)
        for region in regions:  # at once, so that no request finds one while another is being closed
            del self._regions[region.name]
        for region in regions:
            await asyncio.to_thread(region.close)

    def status(self, name: str) -> Iterable[Region]:
        """One region of system memory, or all for an empty name. Raises `ContractError`."""
        self.check_allowed()
        return self._existing(name, Region)

    def cuda_status(self, name: str) -> Iterable[CudaRegion]:
        """Likewise for device memory."""
        self.check_allowed()
        return self._existing(name, CudaRegion)

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
        await asyncio.to_thread(self._cuda.driver)

    def check_allowed(self) -> None:
        """Raises `InvalidRequestError` unless the server was started for it."""
        if not self.allowed:
            raise InvalidRequestError(
                "shared memory is switched off on this server; it is started with --allow-shared-memory to allow it"
            )

    def _check_new(self, name: str) -> None:
        self.check_allowed()
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise InvalidRequestError(f"a region's name must have 1 to {MAX_NAME_CHARACTERS} characters")
        if name in self._regions or name in self._opening:
            raise InvalidRequestError(f"region {shown(name)} is registered already: unregister it first")
        if len(self._regions) + len(self._opening) >= MAX_REGIONS:
            raise TooLargeError(f"{MAX_REGIONS} regions are registered, the server's limit: unregister one first")

    def _named(self, name: str, kind: type[R]) -> list[R]:
        found = [self._regions.get(name)] if name else list(self._regions.values())
        return [region for region in found if isinstance(region, kind)]

    def _existing(self, name: str, kind: type[R]) -> list[R]:
        found = self._named(name, kind)
        if name and not found:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return found


def _close_unwanted(opening: asyncio.Future[CudaRegion]) -> None:
    """Of a client that did not wait for its registration."""
    if not opening.cancelled() and opening.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, opening.result().close)


def _check_range(what: str, offset: int, byte_size: int) -> None:
    if offset < 0 or byte_size < 1:
        raise InvalidRequestError(f"{what} needs an offset ≥ 0 and a size ≥ 1")
    if offset + byte_size >= MAX_ADDRESS:
        raise InvalidRequestError(f"offset and size of {what} overflow: their sum does not fit 64 bits")
