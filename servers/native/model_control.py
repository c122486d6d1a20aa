"""Loading and unloading of served models while the server runs, for both doors.

A name is only ever compared with the names of the models that this process was started with: nothing is looked up in,
read from or written to a file system because of one.
"""

from __future__ import annotations

from collections.abc import Mapping

from servers.contract.errors import InvalidRequestError
from servers.native.served_models import ServedModels

MAX_NAME_CHARACTERS = 255


class ModelControl:
    """Refuses everything unless `allowed`."""

    def __init__(self, models: ServedModels, allowed: bool) -> None:
        self._models = models
        self._allowed = allowed

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Returns when the model is warmed up and ready, at once if it is already. Raises `ContractError`."""
        self.check(name)
        if parameters:
            raise InvalidRequestError("a load takes no configuration and no files here: models are set at the start")
        await self._models.named(name).load()

    async def unload(self, name: str) -> None:
        """New requests are refused at once; returns when accepted ones are finished and the engine is freed.

        Raises `ContractError`.
        """
        self.check(name)
        await self._models.named(name).unload()

    def check(self, name: str) -> None:
        """Raises `ContractError` when it is not allowed, or the name cannot be one."""
        if not self._allowed:
            raise InvalidRequestError(
                "model control is switched off on this server; it is started with --allow-model-control to allow it"
            )
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or "/" in name or ".." in name:
            raise InvalidRequestError(
                f"a model's name has 1 to {MAX_NAME_CHARACTERS} printable characters, without '/' and '..'"
            )
