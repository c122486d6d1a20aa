"""One request on its way from a front end through the queue to the engine, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from servers.engines.interface import DeviceMemory
from servers.engines.padding import BatchKey
from servers.protocol.errors import ContractError
from servers.protocol.tensors import Array

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request on its way through the queue, complete when `outputs` or `error` is set, which happens once.

    `inputs` are arrays, or `HostMemory` for an engine that takes it.
    `waiter`, `owner` and `number` belong to whoever queued it; the batcher never uses them. `device_inputs` and
    `device_outputs` are tensors in CUDA shared memory: as region, offset and size, and as windows once they are queued.
    One can stand for `count` requests of as many rows each that came together: `apart` makes two of it, of which the
    first stands for as many as it is told.
    `taken` means claimed for a batch, expired or withdrawn.
    """

    inputs: Mapping[str, Any]
    rows: int
    key: BatchKey
    deadline_ns: int | None
    waiter: Any
    device_inputs: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    device_outputs: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    enqueued_ns: int = 0
    taken: bool = False
    outputs: Mapping[str, Array] | None = None
    error: ContractError | None = None
    count: int = 1
    apart: Callable[[int], tuple[QueuedRequest, QueuedRequest]] | None = None
    owner: Any = None
    number: int = 0
    borrowed: Sequence[Any] = ()  # the windows that the engine uses itself, as the two below, until it is done
    borrowed_inputs: Mapping[str, DeviceMemory] = field(default_factory=lambda: _NOTHING)
    borrowed_outputs: Mapping[str, DeviceMemory] = field(default_factory=lambda: _NOTHING)

    @property
    def complete(self) -> bool:
        """Whether the engine is done with it."""
        return self.outputs is not None or self.error is not None

    def drop_inputs(self) -> None:
        """Free the inputs: a withdrawn request can stay in the queue for long, but its memory must not."""
        self.inputs = _NOTHING
        for window in self.borrowed:
            window.release()
        self.device_inputs, self.borrowed_inputs, self.borrowed = _NOTHING, _NOTHING, ()


def singles(request: QueuedRequest) -> list[QueuedRequest]:
    """One for each request that it stands for."""
    found = []
    while request.apart is not None:
        one, request = request.apart(1)
        found.append(one)
    return [*found, request]
