"""The models that can be served; adding one means adding its FP32 specification to `_MODELS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from servers.models import openclip
from servers.models.payloads import payload_variants
from servers.models.specification import PAYLOADS, ModelSpecification

_MODELS = (openclip.SPECIFICATION,)

SPECIFICATIONS: Mapping[str, ModelSpecification] = MappingProxyType(
    {variant.name: variant for model in _MODELS for variant in payload_variants(model)}
)
"""Every model in every payload variant, by its own name."""

DEFAULT_MODEL = next(iter(SPECIFICATIONS))


class UnknownModelError(Exception):
    """No such model, or no such payload of it; the message lists those that are."""


def get_specification(name: str) -> ModelSpecification:
    """The specification of a registered model or variant. Raises `UnknownModelError`."""
    try:
        return SPECIFICATIONS[name]
    except KeyError:
        raise UnknownModelError(f"unknown model {name!r}; known: {', '.join(SPECIFICATIONS)}") from None


def get_variant(name: str, payload: str) -> ModelSpecification:
    """The variant of the model named (or of the model that `name` is a variant of) for one payload.

    Raises `UnknownModelError`.
    """
    base = get_specification(name).base
    for specification in SPECIFICATIONS.values():
        if (specification.base, specification.payload) == (base, payload):
            return specification
    raise UnknownModelError(f"unknown payload {payload!r}; known: {', '.join(PAYLOADS)}")


def get_variants(name: str, payloads: str) -> tuple[ModelSpecification, ...]:
    """The variants for a list such as `fp32,uint8`, in its order; for an empty one the model named alone.

    Raises `UnknownModelError`.
    """
    wanted = [payload.strip() for payload in payloads.split(",") if payload.strip()]
    if not wanted:
        return (get_specification(name),)
    return tuple(get_variant(name, payload) for payload in dict.fromkeys(wanted))
