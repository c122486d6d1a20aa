"""The models that can be served; adding one means adding its specification to `SPECIFICATIONS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from servers.models import openclip
from servers.models.specification import ModelSpecification

SPECIFICATIONS: Mapping[str, ModelSpecification] = MappingProxyType(
    {specification.name: specification for specification in (openclip.SPECIFICATION,)}
)

DEFAULT_MODEL = next(iter(SPECIFICATIONS))


class UnknownModelError(Exception):
    """No such model is registered; the message lists those that are."""


def get_specification(name: str) -> ModelSpecification:
    """The specification of a registered model. Raises `UnknownModelError`."""
    try:
        return SPECIFICATIONS[name]
    except KeyError:
        raise UnknownModelError(f"unknown model {name!r}; known: {', '.join(SPECIFICATIONS)}") from None
