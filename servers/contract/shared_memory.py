"""Tensors that travel through shared memory: how a request names a piece of a region, and what a door may do with it.

The three parameters `shared_memory_region`, `shared_memory_byte_size` and `shared_memory_offset` are the protocol's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from servers.contract.errors import InvalidRequestError

REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class RegionReference:
    """A piece of a region as a request names it, in bytes from the region's beginning."""

    region: str
    byte_size: int
    offset: int

    def as_parameters(self) -> dict[str, str | int]:
        """As an output of an answer carries it."""
        parameters: dict[str, str | int] = {REGION: self.region, BYTE_SIZE: self.byte_size}
        return {**parameters, OFFSET: self.offset} if self.offset else parameters

    def check_room(self, byte_size: int) -> None:
        """Raises `InvalidRequestError` when an output of so many bytes does not fit."""
        if byte_size > self.byte_size:
            name = self.region if len(self.region) <= 64 else self.region[:61] + "..."
            raise InvalidRequestError(
                f"the output takes {byte_size} bytes, but the request gives it {self.byte_size} bytes of region "
                f"{name!r}"
            )


class RegionWindow(Protocol):
    """A piece of a registered region. An input is read from it once, into memory of the server's own."""

    @property
    def reference(self) -> RegionReference:
        """What the request said."""

    @property
    def on_device(self) -> bool:
        """Whether its memory is a GPU's: then `write` blocks."""

    def view(self) -> memoryview:
        """Memory of ours as large as the piece; whoever reads it calls `fetch` right before. Raises `ContractError`."""

    def fetch(self) -> None:
        """Copy the bytes of this moment to `view`; blocks meanwhile.

        Raises `ContractError` if the memory has been taken away.
        """

    def write(self, data: bytes | memoryview) -> None:
        """Put an output at its beginning. Raises `ContractError` if there is no room for it."""


class RegionSource(Protocol):
    """Where a door looks regions up."""

    def find(self, reference: RegionReference) -> RegionWindow:
        """Raises `ContractError` for an unknown region and for a piece that is not inside it."""


def parse_reference(parameters: Mapping[str, object], owner: str) -> RegionReference | None:
    """None where the parameters name no region. Raises `InvalidRequestError`."""
    region = parameters.get(REGION)
    if region is None:
        if BYTE_SIZE in parameters or OFFSET in parameters:
            raise InvalidRequestError(f"{owner} has a shared-memory size or offset, but no '{REGION}'")
        return None
    if not isinstance(region, str) or not 0 < len(region) <= MAX_NAME_CHARACTERS:
        raise InvalidRequestError(f"'{REGION}' of {owner} must be a name of 1 to {MAX_NAME_CHARACTERS} characters")
    byte_size, offset = parameters.get(BYTE_SIZE), parameters.get(OFFSET, 0)
    if type(byte_size) is not int or byte_size < 1:
        raise InvalidRequestError(f"'{BYTE_SIZE}' of {owner} must be a whole number ≥ 1")
    if type(offset) is not int or offset < 0:
        raise InvalidRequestError(f"'{OFFSET}' of {owner} must be a whole number ≥ 0")
    return RegionReference(region, byte_size, offset)
