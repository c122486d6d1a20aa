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
from servers.models.specification import ModelSpecification
from servers.native.shared.errors import RefusedError, shutting_down
from servers.native.shared.settings import NativeSettings
from servers.protocol.errors import ContractError
from servers.protocol.records import ModelSignature
from servers.protocol.tensors import Array

_NOTHING: Mapping[str, Any] = MappingProxyType({})

DevicePlace = tuple[str, int, int]
"""Region, offset and size of a tensor in device memory."""


class ModelState(Enum):
    """READY and ACCEPTING answer inference requests. FAILED means that loading failed, or that the engine broke. A
    loaded model is ACCEPTING until all front ends know: no client sees that it is ready and is then refused. The least
    ready state comes first."""

    FAILED = "failed"
    STOPPING = "stopping"
    UNLOADED = "unloaded"
    LOADING = "loading"
    ACCEPTING = "accepting"
    READY = "ready"


def check_ready(model: str, state: ModelState) -> None:
    """Raises `RefusedError` unless a model in this state can answer now, and every front end knows."""
    if state is not ModelState.READY:
        raise not_ready(model, state)


def not_ready(model: str, state: ModelState) -> RefusedError:
    """Why a model in this state cannot answer."""
    if state is ModelState.STOPPING:
        return shutting_down()
    return RefusedError("not_ready", f"model '{model}' is not ready: {state.value}")


# Requests


class DeviceWindow(Protocol):
    """A tensor's piece of a client's device memory, for the process that executes; see `CudaWindow`."""

    def read(self) -> Array: ...

    def write(self, array: Array) -> None: ...

    def on(self, device: int | None) -> bool: ...

    def borrow(self) -> DeviceMemory: ...

    def release(self) -> None: ...


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request on its way through the queue, complete when `outputs` or `error` is set, which happens once.

    `inputs` are arrays, or `HostMemory` for an engine that takes it. `device_inputs` and `device_outputs` say which
    tensors are in CUDA shared memory; `input_windows` and `output_windows` are these, once the request is queued.
    A group stands for `count` requests of equally many rows that came together: `split(n)` makes two of it, the first
    with n requests.
    `taken` means claimed for a batch, expired or withdrawn.
    `waiter` is called in the event loop when the request is complete. `waiter`, `front_end`, `engine` and `number`
    belong to what queued it; the batcher never uses them.
    """

    inputs: Mapping[str, Any]
    rows: int
    key: BatchKey
    deadline_ns: int | None
    waiter: Callable[[QueuedRequest], None] | None
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
    input_windows: Mapping[str, DeviceWindow] | None = None
    output_windows: Mapping[str, DeviceWindow] | None = None
    borrowed: Sequence[DeviceWindow] = ()  # the windows that the engine uses itself, as the two below, until it is done
    borrowed_inputs: Mapping[str, DeviceMemory] = field(default_factory=lambda: _NOTHING)
    borrowed_outputs: Mapping[str, DeviceMemory] = field(default_factory=lambda: _NOTHING)
    trace: bytes | None = None
    """Of a traced request: see `RequestTrace.context`."""

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


# Control operations: of engines for front ends, and of front ends for engines


class ControlModel(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """Load an unloaded model and return when it is ready, or finish a model's accepted requests and free its engine."""

    model: int
    load: bool


class OpenRegion(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Register a region of a client's memory, or, in a front end, offer a registered one to requests. Memory on GPU
    `device` has an IPC handle, of which front ends hear nothing: they never read it. Memory of the system has a path:
    the client's key or, in front ends, where it is open already."""

    name: str
    byte_size: int
    offset: int = 0
    path: str = ""
    device: int | None = None
    handle: bytes = b""
    peer: bool = False
    """Whether another engine has it, and this one only wants it if its own GPU reaches the memory."""


class CloseRegions(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Close regions on devices or of the system: those with these names, without any names all."""

    on_device: bool
    names: tuple[str, ...]


class CheckCuda(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Fail unless a device answers."""


class FrontEndOpened(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The front end that sends this answers requests now."""


class ModelStatus(msgspec.Struct, array_like=True, frozen=True):
    """One model: its state, and its engine unless none is loaded."""

    state: ModelState
    description: EngineDescription | None
    version: str = ""
    """Of the model that the engine has loaded; empty: that of the front end's own specification."""


class ApplyStatus(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Use these states of all models from now on; done when every request that was accepted before is queued."""

    models: tuple[ModelStatus, ...]


EngineOperation = ControlModel | OpenRegion | CloseRegions | CheckCuda | FrontEndOpened
FrontEndOperation = ApplyStatus | OpenRegion | CloseRegions


# The two sides


class EngineLink(Protocol):
    """The way from a front end to the engine; belongs to the event loop, where it calls `QueuedRequest.waiter`."""

    def submit(self, model: int, queued: QueuedRequest) -> None:
        """Queue a checked request for a model, by its number. Raises `ContractError`, or completes it later with
        one."""

    def withdraw(self, model: int, queued: QueuedRequest) -> bool:
        """Take it back; True if the engine will not execute it and its waiter will not be called. False: it will be
        complete soon, with a `RefusedError` if it came back."""

    async def control(self, operation: EngineOperation) -> None:
        """Returns when the operation is done. Raises `ContractError`."""


class FrontEnd(Protocol):
    """A front end as the engine's side sees it."""

    def complete(self, requests: Sequence[QueuedRequest]) -> None:
        """These requests of it are complete; any thread."""

    def notify(self, operation: FrontEndOperation) -> Future[None]:
        """Let it execute an operation, after all that it was notified of before; any thread."""


def signature_of(specification: ModelSpecification, settings: NativeSettings) -> ModelSignature:
    """What requests to a model are checked against."""
    return ModelSignature(
        specification.name,
        specification.version,
        specification.inputs,
        specification.outputs,
        settings.max_batch_size,
        specification.axes,
        specification.id_counts,
    )
