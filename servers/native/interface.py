"""The interface between front ends and engines: requests in the queue, control operations, and what each side offers.

Both may be in one process, or each in its own: then `ipc` carries the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from servers.engines.interface import DeviceMemory, EngineDescription
from servers.engines.padding import BatchKey
from servers.native.cuda_memory import CudaWindow
from servers.protocol.errors import ContractError
from servers.protocol.tensors import Array

_NOTHING: Mapping[str, Any] = MappingProxyType({})

DevicePlace = tuple[str, int, int]
"""Region, offset and size of a tensor in device memory."""


class ModelState(Enum):
    """READY and ACCEPTING answer inference requests. FAILED means that loading failed, or that the engine broke.

    A loaded model is ACCEPTING until all front ends know: no client sees that it is ready and is then refused.
    """

    LOADING = "loading"
    ACCEPTING = "accepting"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"
    STOPPING = "stopping"


# Requests


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request on its way through the queue, complete when `outputs` or `error` is set, which happens once.

    `inputs` are arrays, or `HostMemory` for an engine that takes it. `device_inputs` and `device_outputs` say which
    tensors are in CUDA shared memory; `input_windows` and `output_windows` are these, once the request is queued.
    A group stands for `count` requests of equally many rows that came together: `split(n)` makes two of it, the first
    with n requests.
    `taken` means claimed for a batch, expired or withdrawn.
    `waiter`, `front_end`, `engine` and `number` belong to whoever queued it; the batcher never uses them.
    """

    inputs: Mapping[str, Any]
    rows: int
    key: BatchKey
    deadline_ns: int | None
    waiter: Waiter | None
    device_inputs: Mapping[str, DevicePlace] = field(default_factory=lambda: _NOTHING)
    device_outputs: Mapping[str, DevicePlace] = field(default_factory=lambda: _NOTHING)
    enqueued_ns: int = 0
    taken: bool = False
    outputs: Mapping[str, Array] | None = None
    error: ContractError | None = None
    count: int = 1
    split: Callable[[int], tuple[QueuedRequest, QueuedRequest]] | None = None
    front_end: FrontEnd | None = None
    engine: EngineLink | None = None
    number: int = 0
    input_windows: Mapping[str, CudaWindow] | None = None
    output_windows: Mapping[str, CudaWindow] | None = None
    borrowed: Sequence[CudaWindow] = ()  # the windows that the engine uses itself, as the two below, until it is done
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
        self.device_inputs, self.input_windows, self.borrowed_inputs, self.borrowed = _NOTHING, None, _NOTHING, ()


class Waiter(Protocol):
    """The part of a front end that waits for a queued request."""

    def wake(self, queued: QueuedRequest) -> None:
        """The request is complete; called in the event loop."""


# Control operations, which engines execute for front ends


class LoadModel(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """Load an unloaded model, and return when it is ready."""

    model: int


class UnloadModel(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Finish a model's accepted requests and free its engine."""

    model: int


class RegisterSystemMemory(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Open a client's shared-memory object in every front end."""

    name: str
    key: str
    offset: int
    byte_size: int


class RegisterCudaMemory(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Map a client's device memory."""

    name: str
    handle: bytes
    device: int
    byte_size: int


class UnregisterMemory(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Close a region, or with an empty name all regions, on devices or of the system."""

    on_device: bool
    name: str


class CheckCuda(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Fail unless a device answers."""


class FrontEndOpened(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """The front end that sends this answers requests now."""


EngineOperation = (
    LoadModel | UnloadModel | RegisterSystemMemory | RegisterCudaMemory | UnregisterMemory | CheckCuda | FrontEndOpened
)


# Control operations, which front ends execute for engines


class ModelStatus(msgspec.Struct, array_like=True, frozen=True):
    """One model: its state, and its engine unless none is loaded."""

    state: ModelState
    description: EngineDescription | None


class ApplyStatus(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """Use these states of all models from now on; done when every request that was accepted before is queued."""

    models: tuple[ModelStatus, ...]


class OpenRegion(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """Offer a registered region to requests: of the system, which is open at `path`, or of a GPU, without a path."""

    name: str
    path: str | None
    offset_or_device: int
    byte_size: int


class CloseRegions(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """Offer these regions no more."""

    names: tuple[str, ...]


FrontEndOperation = ApplyStatus | OpenRegion | CloseRegions


# The two sides


class EngineLink(Protocol):
    """The way from a front end to the engine; belongs to the event loop, where it calls `Waiter.wake`."""

    def submit(self, model: int, queued: QueuedRequest) -> None:
        """Queue a checked request for a model, by its number. Raises `UnavailableError`, or completes it with one."""

    def withdraw(self, model: int, queued: QueuedRequest) -> bool:
        """Take it back; True if the engine will not execute it and its waiter will not be called.

        False: it will be complete soon, with `RequestExpiredError` if it came back.
        """

    async def control(self, operation: EngineOperation) -> None:
        """Returns when the operation is done. Raises `ContractError`."""


class FrontEnd(Protocol):
    """A front end as the engine's side sees it."""

    def complete(self, requests: Sequence[QueuedRequest]) -> None:
        """These requests of it are complete; any thread."""

    def notify(self, operation: FrontEndOperation) -> Future[None]:
        """Let it execute an operation, after all that it was notified of before; any thread."""
