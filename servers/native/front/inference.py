"""Inference behind HTTP and gRPC: the served models of a front end, each of which checks requests, passes them to the
engine, and makes the responses.

Each model has its own engine, queue and statistics, as with Triton: nothing is merged across models. An arm under test
serves exactly one.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import prod
from typing import Generic, TypeVar

from servers.engines.interface import EngineDescription
from servers.engines.padding import batch_key, pad_to_text, padding_of
from servers.models.images import Decoding, DecodingSettings, ImageDecoder
from servers.models.specification import ModelSpecification
from servers.native.front.templates import INLINE_READ_BYTES, TemplateCache
from servers.native.shared.errors import FailureLog, RefusedError, expired
from servers.native.shared.interface import (
    ControlModel,
    EngineLink,
    ModelState,
    ModelStatus,
    QueuedRequest,
    check_ready,
    signature_of,
)
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import MAX_TIMEOUT_US, NativeSettings
from servers.native.shared.statistics import RequestTimes, Statistics
from servers.protocol.codec import read_elements, write_output
from servers.protocol.errors import InvalidRequestError, NotFoundError
from servers.protocol.records import (
    InferRequest,
    InferResponse,
    InputTensor,
    ModelSignature,
    OutputTensor,
    RegionReference,
    RegionWindow,
    RequestedOutput,
    shown,
)
from servers.protocol.tensors import Array

log = FailureLog("abserve.front")

DECODING_S = 30.0
PIECE_BYTES = 4 * 2**20
"""What one thread reads at a time: a core copies this much in half a millisecond."""

S_co = TypeVar("S_co", bound="ModelService", covariant=True)


def wake_all(requests: Sequence[QueuedRequest]) -> None:
    """Tell the waiters that their requests are complete; in the event loop. One that fails stops no other."""
    for queued in requests:
        if queued.waiter is not None:
            try:
                queued.waiter(queued)
            except Exception:
                log.exception("a request failed unexpectedly")


class RequestDecoder:
    """The decoder of one model that takes JPEG files. Belongs to one event loop.

    It decodes at most `queue_size` requests at a time, as many as may wait for the engine afterwards, each for at most
    `DECODING_S`.
    """

    def __init__(
        self,
        specification: ModelSpecification,
        settings: DecodingSettings,
        queue_size: int,
        memory: RequestMemory,
        statistics: Statistics,
    ) -> None:
        self._memory = memory
        self._statistics = statistics
        self.pending = 0
        self.idle = asyncio.Event()  # no request is being decoded
        self.idle.set()
        self._queue_size = queue_size
        self._pixels = specification.executed.inputs[0].name
        self._decoder = ImageDecoder(specification.preprocessing, settings)

    async def decode(self, files: InputTensor, deadline_ns: int | None) -> Mapping[str, Array]:
        """The engine's inputs for a request's files; a thread reads those in shared memory.

        Raises `ImageError`, and `RefusedError` at once if too many wait or at `deadline_ns` of `perf_counter_ns`.
        """
        if self.pending >= self._queue_size:
            raise RefusedError("queue_full", f"Exceeds maximum queue size of {self._queue_size} requests")
        self._count(1)
        decoding: Decoding | None = None
        timeout_s = float("inf") if deadline_ns is None else max(0.0, (deadline_ns - time.perf_counter_ns()) / 1e9)
        try:
            async with asyncio.timeout(min(timeout_s, DECODING_S)):
                images = files.data if files.window is None else await asyncio.to_thread(read_elements, files)
                decoding = self._decoder.start(images, self._memory.allocate)
                for image in decoding.images:
                    await asyncio.wrap_future(image)
        except TimeoutError:
            if timeout_s < DECODING_S:
                raise expired() from None
            message = f"the images were not decoded within {DECODING_S:g} s, send fewer"
            raise RefusedError("expired", message) from None
        finally:
            self._count(-1)
            if decoding is not None:
                decoding.cancel()  # only a failure leaves images to cancel
        return {self._pixels: decoding.pixels}

    def _count(self, change: int) -> None:
        self.pending += change
        (self.idle.clear if self.pending else self.idle.set)()
        self._statistics.set_decoding(self.pending)

    def close(self) -> None:
        """End the threads."""
        self._decoder.close()


class ModelService(ABC):
    """One served model as a front end has it. Belongs to one event loop; any thread may read.

    The engine's side says what its `state` and its engine's `description` are, which is None unless one is loaded.
    """

    def __init__(self, signature: ModelSignature, settings: NativeSettings, statistics: Statistics) -> None:
        self.signature = signature
        self.settings = settings
        self.statistics = statistics
        self.description: EngineDescription | None = None
        self.state = ModelState.LOADING

    generates = False
    """Whether its answers are tokens, one after the other."""

    @property
    def ready(self) -> bool:
        """Loaded, warmed up and not shutting down."""
        return self.state is ModelState.READY

    @abstractmethod
    def parameters(self, description: EngineDescription) -> dict[str, str]:
        """The settings in effect as text, of the engine and of the server, without those that do not apply."""

    @abstractmethod
    def batching(self) -> dict[str, object]:
        """How requests are executed together, in Triton's configuration."""

    async def apply(self, status: ModelStatus) -> None:
        """What the engine's side says; returns when the engine has got every request that was accepted before."""
        self.set_status(status)

    def set_status(self, status: ModelStatus) -> None:
        """What the engine's side says, unless the server stops."""
        if status.version and status.version != self.signature.version:
            self.signature = replace(self.signature, version=status.version)
        if self.state is not ModelState.STOPPING:
            self.state = status.state
            self.description = status.description

    def fail(self) -> None:
        """The engine's process has ended: the model is not ready, and never will be."""
        self.state = ModelState.FAILED

    def stop(self) -> None:
        """Accept nothing any more."""
        self.state = ModelState.STOPPING

    def check_loaded(self) -> None:
        """Raises `NotFoundError` for an unloaded model, which is as unknown as any other until it is loaded again."""
        if self.state is ModelState.UNLOADED:
            raise NotFoundError(f"Request for unknown model: '{self.signature.name}' is unloaded")

    def check_accepting(self) -> None:
        """Raises `UnavailableError` unless the model can answer now."""
        if self.state is not ModelState.ACCEPTING:
            self.check_ready()

    def check_ready(self) -> None:
        """Raises `UnavailableError` unless the model can answer now, and every front end knows."""
        check_ready(self.signature.name, self.state)


class InferenceService(ModelService):
    """A model that takes and answers tensors."""

    def __init__(
        self,
        number: int,
        specification: ModelSpecification,
        settings: NativeSettings,
        link: EngineLink,
        memory: RequestMemory,
        statistics: Statistics,
    ) -> None:
        super().__init__(signature_of(specification, settings), settings, statistics)
        self.specification = specification
        self.padding = padding_of(specification, settings.pad_sizes)
        self.templates = TemplateCache(self.signature, self.padding)
        """Of requests over HTTP."""
        self.decoding: DecodingSettings | None = None  # None for a model that takes tensors
        self._decoder: RequestDecoder | None = None
        if specification.payload == "jpeg":
            self.decoding = DecodingSettings(settings.decode_threads, settings.max_image_pixels)
            self._decoder = RequestDecoder(specification, self.decoding, settings.queue_size, memory, statistics)
        self._number = number
        self._link = link
        self._memory = memory
        self.direct = self._decoder is None and not settings.added_delay_ms and not settings.queue_timeout_us
        """Whether a checked request needs only the queue, so that `enqueue` can replace `infer`."""
        self.successor: InferenceService | None = None
        """The same model on another link, in another version: requests that are not queued yet are for it."""

    def parameters(self, description: EngineDescription) -> dict[str, str]:
        details, delay_ms, plans = description.details, self.settings.added_delay_ms, description.details.get("plans")
        parameters = {
            "engine": description.kind,
            "engine_version": description.version,
            "precision": description.precision,
            "mode": description.mode,
            "device": description.device,
            "weights": description.weights,
            "model": self.specification.label,
            "payload": self.specification.payload,
            "lone_requests_wait": "false",  # unlike Triton's batcher, for the whole queue delay
            "pad_to": None if self.specification.padded_axis is None else pad_to_text(self.settings.pad_sizes),
            "threads": description.threads,
            "kernels": None if description.threads is None else details.get("kernels"),
            "batches_in_flight": details.get("batches_in_flight"),
            "plans": _by_plan(plans) if isinstance(plans, Mapping) and plans else None,
            "choices": details.get("choices"),
            "spinning": description.spinning,
            "decode_threads": None if self.decoding is None else self.decoding.thread_count,
            "max_image_pixels": None if self.decoding is None else self.decoding.max_pixels,
            "fronts": self.settings.fronts,
            "added_delay_ms": f"{delay_ms:g}" if delay_ms else None,
        }
        return {name: str(value) for name, value in parameters.items() if value is not None}

    def batching(self) -> dict[str, object]:
        settings = self.settings
        queue_policy: dict[str, object] = {"max_queue_size": settings.queue_size, "timeout_action": "REJECT"}
        if settings.queue_timeout_us:
            queue_policy["default_timeout_microseconds"] = settings.queue_timeout_us
        return {
            "dynamic_batching": {
                "preferred_batch_size": [],
                "max_queue_delay_microseconds": settings.max_queue_delay_us,
                "preserve_ordering": True,
                "default_queue_policy": {**queue_policy, "allow_timeout_override": True},
            }
        }

    def on(self, link: EngineLink) -> InferenceService:
        """The same model on another link, not ready until `apply` says so; see `ServedModels.replace`."""
        service = copy(self)
        service._link, service.state, service.description = link, ModelState.LOADING, None
        service.templates = TemplateCache(self.signature, self.padding)  # answers name the version
        return service

    def latest(self) -> InferenceService:
        """The service that has replaced this one, or this one."""
        service = self
        while service.successor is not None:
            service = service.successor
        return service

    async def apply(self, status: ModelStatus) -> None:
        await super().apply(status)
        if status.state not in (ModelState.READY, ModelState.ACCEPTING) and self._decoder is not None:
            await self._decoder.idle.wait()

    def stop(self) -> None:
        super().stop()
        if self._decoder is not None:
            self._decoder.close()

    def enqueue(self, queued: QueuedRequest) -> None:
        """Queue a checked request. Raises `ContractError`."""
        self.check_accepting()
        self._link.submit(self._number, queued)

    def withdraw(self, queued: QueuedRequest) -> bool:
        return self._link.withdraw(self._number, queued)

    async def infer(
        self, request: InferRequest, times: RequestTimes, caller_deadline_ns: int | None = None
    ) -> InferResponse:
        """Answer one request, and add the time for decoding images and writing outputs to `times`.

        The deadline is the request's own timeout or the caller's (`perf_counter_ns`), whichever comes first. Cancelling
        the caller's task takes the request out of the queue, or waits until the engine is done with it: the arrays of
        `request` are read until this returns. Raises `ContractError`.
        """
        self.latest().check_accepting()
        rows, arrays = self.signature.validate(request)
        timeout_us = self._timeout_us(request)
        loop = asyncio.get_running_loop()
        start_ns = time.perf_counter_ns()
        deadline_ns = start_ns + timeout_us * 1000 if timeout_us else caller_deadline_ns
        if caller_deadline_ns is not None and deadline_ns is not None:
            deadline_ns = min(deadline_ns, caller_deadline_ns)
        if self._decoder is not None:
            arrays = await self._decoder.decode(request.inputs[0], deadline_ns)
            times.decode_ns += time.perf_counter_ns() - start_ns
        else:
            arrays = {**arrays, **await self._fetch(request)}
        complete = asyncio.Event()

        def wake(_queued: QueuedRequest) -> None:  # keeps no request: they would refer to each other
            complete.set()

        key = batch_key(((name, array.shape) for name, array in arrays.items()), self.padding)
        queued = QueuedRequest(arrays, rows, key, deadline_ns, wake)
        queued.device_inputs = _device_places(request.inputs)
        queued.device_outputs = _device_places(request.outputs or ())
        queued.trace = times.trace_context
        del arrays
        service = self.latest()
        service._link.submit(self._number, queued)  # also while the model is being unloaded: it was accepted before
        timer = None
        if deadline_ns is not None:
            timer = loop.call_later((deadline_ns - time.perf_counter_ns()) / 1e9, service._expire, queued)
        try:
            await complete.wait()
        except asyncio.CancelledError:
            if not service.withdraw(queued) and not queued.complete:
                await complete.wait()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if self.settings.added_delay_ms:
            await _sleep_at_least(self.settings.added_delay_ms / 1000)
        if queued.error is not None:
            raise copy(queued.error)  # else its traceback would keep this frame and its arrays
        executed_ns = time.perf_counter_ns()
        response = _response(service.signature, request, queued.outputs or {})
        times.encode_ns += time.perf_counter_ns() - executed_ns
        return response

    async def _fetch(self, request: InferRequest) -> Mapping[str, Array]:
        """The inputs in system shared memory, copied into the server's own. Raises `ContractError`."""
        fetched: dict[str, Array] = {}
        for item in request.inputs:
            if item.window is None or item.window.on_device:
                continue
            if item.datatype == "BYTES":
                fetched[item.name] = await asyncio.to_thread(read_elements, item)
            elif item.window.reference.byte_size > INLINE_READ_BYTES:
                await _fetch_in_pieces(item.window)
            else:
                item.window.fetch()
        return fetched

    def _timeout_us(self, request: InferRequest) -> int:
        timeout = request.parameters.get("timeout", self.settings.queue_timeout_us)
        if type(timeout) is not int or not 0 <= timeout <= MAX_TIMEOUT_US:
            raise InvalidRequestError(f"'timeout' must be a whole number of microseconds from 0 to {MAX_TIMEOUT_US}")
        return timeout

    def _expire(self, queued: QueuedRequest) -> None:
        if self.withdraw(queued):
            queued.error = expired()
            wake_all([queued])


async def _fetch_in_pieces(window: RegionWindow) -> None:
    """Read a large input with several threads. Raises the first `ContractError`, after all have ended."""
    window.view()  # the memory, before the threads fill it
    starts = range(0, window.reference.byte_size, PIECE_BYTES)
    pieces = [asyncio.to_thread(window.fetch, start, start + PIECE_BYTES) for start in starts]
    for result in await asyncio.gather(*pieces, return_exceptions=True):
        if result is not None:
            raise result


async def _sleep_at_least(seconds: float) -> None:
    """Unlike `asyncio.sleep`, whose timers may fire a millisecond early."""
    ends = time.perf_counter() + seconds
    while (left := ends - time.perf_counter()) > 0:
        await asyncio.sleep(left)


def _device_places(tensors: Sequence[InputTensor | RequestedOutput]) -> Mapping[str, tuple[str, int, int]]:
    """By name: region, offset and size of those on a GPU."""
    return {
        tensor.name: window.place for tensor in tensors if (window := tensor.window) is not None and window.on_device
    }


def _response(signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array]) -> InferResponse:
    """The response, with outputs in system shared memory written; the engine has written those on a GPU.

    Raises `ContractError`.
    """
    datatypes = {spec.name: spec.datatype for spec in signature.outputs}
    requested = request.outputs or [RequestedOutput(name, request.binary_output) for name in datatypes]
    tensors = []
    for output in requested:
        data, window = outputs[output.name], output.window
        reference: RegionReference | None = None
        if window is not None and window.on_device:
            size = prod(data.shape) * data.itemsize
            reference = RegionReference(window.reference.region, size, window.reference.offset)
        elif window is not None:
            reference = write_output(window, data)
        tensors.append(OutputTensor(output.name, datatypes[output.name], data, output.binary, reference))
    return InferResponse(signature.name, signature.version, request.id, tuple(tensors))


def _by_plan(plans: Mapping[str, str]) -> str:
    """Plans by batch size as text, each plan once."""
    sizes: dict[str, list[str]] = {}
    for size, plan in plans.items():
        sizes.setdefault(plan, []).append(size)
    return "; ".join(f"{', '.join(listed)}: {plan}" for plan, listed in sizes.items())


def check_version(response: InferResponse, version: str | None) -> None:
    """Raise `NotFoundError` if a request that named a version was answered by the one that has replaced it."""
    if version is not None and version != response.model_version:
        raise _unknown(response.model_name, version)


def _unknown(name: str, version: str | None = None) -> NotFoundError:
    asked = shown(name) if version is None else f"{shown(name)} version {shown(version)}"
    return NotFoundError(f"Request for unknown model: {asked} is not found")


MAX_NAME_CHARACTERS = 255


class ServedModels(Generic[S_co]):
    """At least one service, each with another name; the first is the default one."""

    def __init__(self, services: Sequence[S_co], link: EngineLink | None = None, allow_control: bool = False) -> None:
        """`services` are in the order in which the engine's side has their models; `link` is for model control."""
        self._services = {service.signature.name: service for service in services}
        if not services or len(self._services) != len(services):
            raise ValueError("a server needs at least one model, and no two with the same name")
        self.default = services[0]
        self._link = link
        self._allow_control = allow_control

    def __iter__(self) -> Iterator[S_co]:
        return iter(self._services.values())

    def find(self, name: str, version: str | None = None) -> S_co:
        """The service of a model that is not unloaded. Raises `NotFoundError`."""
        service = self.named(name, version)
        service.check_loaded()
        return service

    def named(self, name: str, version: str | None = None) -> S_co:
        """The service of a model, whatever its state. Raises `NotFoundError`."""
        service = self._services.get(name)
        if service is None:
            raise _unknown(name)
        if version is not None and version != service.signature.version:
            raise _unknown(name, version)
        return service

    @property
    def ready(self) -> bool:
        return all(service.ready for service in self)

    def check_ready(self) -> None:
        """Raises `UnavailableError` unless every model can answer now."""
        for service in self:
            service.check_ready()

    async def apply(self, models: Sequence[ModelStatus]) -> None:
        """What the engine's side says about each model; see `InferenceService.apply`."""
        await asyncio.gather(*(service.apply(status) for service, status in zip(self, models, strict=True)))

    def replace(self, services: Sequence[S_co]) -> None:
        """Use these services of the same models, in the same order, from the next request on."""
        self._services = {service.signature.name: service for service in services}
        self.default = services[0]

    def fail(self) -> None:
        """The engine's process has ended: nothing is ready, and never will be."""
        for service in self:
            service.fail()

    def stop(self) -> None:
        """Accept nothing any more."""
        for service in self:
            service.stop()

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Returns when the model is warmed up and ready, at once if it is already. Raises `ContractError`."""
        number = self._number(name)
        if parameters:
            raise InvalidRequestError("a load takes no configuration and no files: models are chosen at the start")
        assert self._link is not None
        await self._link.control(ControlModel(number, load=True))

    async def unload(self, name: str) -> None:
        """Refuse new requests at once; returns when accepted ones are finished and the engine is freed.

        Raises `ContractError`.
        """
        number = self._number(name)
        assert self._link is not None
        await self._link.control(ControlModel(number, load=False))

    def _number(self, name: str) -> int:
        """Raises `ContractError` without model control or for a bad name; names never reach a file system."""
        if not self._allow_control or self._link is None:
            raise InvalidRequestError("model control is switched off; start the server with --allow-model-control")
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or "/" in name or ".." in name:
            raise InvalidRequestError(f"a model's name has 1 to {MAX_NAME_CHARACTERS} characters, without '/' and '..'")
        return list(self).index(self.named(name))
