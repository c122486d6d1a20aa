"""The models of one server process, by name.

Each model has its own engine, queue and statistics, as with Triton: nothing is merged across models. An arm under test
serves exactly one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from servers.contract.errors import InvalidRequestError, NotFoundError
from servers.contract.records import shown
from servers.native.inference import InferenceService, State

MAX_NAME_CHARACTERS = 255


class ServedModels:
    """At least one service, each with another name; the first is the default one."""

    def __init__(self, services: Sequence[InferenceService], allow_control: bool = False) -> None:
        self._services = {service.signature.name: service for service in services}
        if not services or len(self._services) != len(services):
            raise ValueError("a server needs at least one model, and no two with the same name")
        self.default = services[0]
        self._allow_control = allow_control

    def __iter__(self) -> Iterator[InferenceService]:
        return iter(self._services.values())

    def find(self, name: str, version: str | None = None) -> InferenceService:
        """The service of a model that is not unloaded. Raises `NotFoundError`."""
        service = self.named(name, version)
        service.check_loaded()
        return service

    def named(self, name: str, version: str | None = None) -> InferenceService:
        """The service of a model, whatever its state. Raises `NotFoundError`."""
        service = self._services.get(name)
        if service is None:
            raise NotFoundError(f"Request for unknown model: {shown(name)} is not found")
        if version is not None and version != service.signature.version:
            raise NotFoundError(f"Request for unknown model: {shown(name)} version {shown(version)} is not found")
        return service

    @property
    def ready(self) -> bool:
        return all(service.ready for service in self)

    @property
    def failed(self) -> bool:
        return any(service.state is State.FAILED for service in self)

    def check_ready(self) -> None:
        """Raises `UnavailableError` unless every model can answer now."""
        for service in self:
            service.check_ready()

    def start(self, on_failure: Callable[[], None], front_ends_open: threading.Event) -> None:
        """Begin to load all models; see `InferenceService.start`."""
        for service in self:
            service.start(on_failure, front_ends_open)

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Returns when the model is warmed up and ready, at once if it is already. Raises `ContractError`."""
        self._check_control(name)
        if parameters:
            raise InvalidRequestError("a load takes no configuration and no files: models are chosen at the start")
        await self.named(name).load()

    async def unload(self, name: str) -> None:
        """Refuse new requests at once; returns when accepted ones are finished and the engine is freed.

        Raises `ContractError`.
        """
        self._check_control(name)
        await self.named(name).unload()

    def _check_control(self, name: str) -> None:
        """Raises `InvalidRequestError` without model control or for a bad name; names never reach a file system."""
        if not self._allow_control:
            raise InvalidRequestError("model control is switched off; start the server with --allow-model-control")
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or "/" in name or ".." in name:
            raise InvalidRequestError(f"a model's name has 1 to {MAX_NAME_CHARACTERS} characters, without '/' and '..'")

    def stop(self, timeout: float) -> bool:
        """Execute the queues and free the engines; blocks. False if that took longer than `timeout` in all."""
        ends = time.perf_counter() + timeout
        finished = [service.stop(max(0.0, ends - time.perf_counter())) for service in self]
        return all(finished)
