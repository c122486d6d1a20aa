"""The models of one front end, by name.

Each model has its own engine, queue and statistics, as with Triton: nothing is merged across models. An arm under test
serves exactly one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from servers.engines.interface import EngineDescription
from servers.native.inference import EngineLink, InferenceService, State
from servers.protocol.errors import InvalidRequestError, NotFoundError
from servers.protocol.records import shown

MAX_NAME_CHARACTERS = 255


class ServedModels:
    """At least one service, each with another name; the first is the default one."""

    def __init__(self, services: Sequence[InferenceService], link: EngineLink, allow_control: bool = False) -> None:
        """`services` are in the order in which the engine's side has their models."""
        self._services = {service.signature.name: service for service in services}
        if not services or len(self._services) != len(services):
            raise ValueError("a server needs at least one model, and no two with the same name")
        self.default = services[0]
        self._link = link
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

    def check_ready(self) -> None:
        """Raises `UnavailableError` unless every model can answer now."""
        for service in self:
            service.check_ready()

    async def apply(self, states: Sequence[tuple[str, object]]) -> None:
        """What the engine's side says about each model; see `InferenceService.apply`."""
        await asyncio.gather(
            *(
                service.apply(
                    State(state), None if description is None else msgspec.convert(description, EngineDescription)
                )
                for service, (state, description) in zip(self, states, strict=True)
            )
        )

    def fail(self) -> None:
        """The engine's process has ended: nothing is ready, and never will be."""
        for service in self:
            service.state = State.FAILED

    def stop(self) -> None:
        """Accept nothing any more."""
        for service in self:
            service.stop()

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Returns when the model is warmed up and ready, at once if it is already. Raises `ContractError`."""
        number = self._number(name)
        if parameters:
            raise InvalidRequestError("a load takes no configuration and no files: models are chosen at the start")
        await self._link.ask("load", number)

    async def unload(self, name: str) -> None:
        """Refuse new requests at once; returns when accepted ones are finished and the engine is freed.

        Raises `ContractError`.
        """
        await self._link.ask("unload", self._number(name))

    def _number(self, name: str) -> int:
        """Raises `ContractError` without model control or for a bad name; names never reach a file system."""
        if not self._allow_control:
            raise InvalidRequestError("model control is switched off; start the server with --allow-model-control")
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or "/" in name or ".." in name:
            raise InvalidRequestError(f"a model's name has 1 to {MAX_NAME_CHARACTERS} characters, without '/' and '..'")
        return list(self).index(self.named(name))
