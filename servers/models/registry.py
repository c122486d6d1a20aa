"""The models that can be served; to add one, add its FP32 specification to `_MODELS`.

Each has the three forms in which an image can travel to it, all derived from its FP32 specification, with one output:

    M         pixel_values  FP32  [-1,3,s,s]   normalised by the client
    M_uint8   pixel_values  UINT8 [-1,s,s,3]   RGB bytes, resized and cropped by the client, normalised with the model
    M_jpeg    image         BYTES [-1,1]       a JPEG file of any size; decoded, resized and cropped by the server
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from servers.contract.tensors import TensorSpec
from servers.models import openclip
from servers.models.specification import PAYLOADS, ModelSpecification, choose_from


def payload_variants(specification: ModelSpecification) -> tuple[ModelSpecification, ...]:
    """The FP32 model itself, its UINT8 and its JPEG variant. Raises `ValueError` unless it takes one FP32 image."""
    size = specification.preprocessing.size
    if specification.payload != "fp32" or [t.item_shape for t in specification.inputs] != [(3, size, size)]:
        raise ValueError(f"{specification.name}: variants are derived from a model of one FP32 image")
    uint8 = replace(
        specification,
        name=f"{specification.name}_uint8",
        title=f"{specification.title}, UINT8 pixels",
        inputs=(TensorSpec(specification.inputs[0].name, "UINT8", (-1, size, size, 3)),),
        payload="uint8",
        base_name=specification.name,
    )
    jpeg = replace(
        uint8,
        name=f"{specification.name}_jpeg",
        title=f"{specification.title}, JPEG files",
        inputs=(TensorSpec("image", "BYTES", (-1, 1)),),
        payload="jpeg",
        decodes_to=uint8,
    )
    return specification, uint8, jpeg


_MODELS = (openclip.SPECIFICATION,)

SPECIFICATIONS: Mapping[str, ModelSpecification] = MappingProxyType(
    {variant.name: variant for model in _MODELS for variant in payload_variants(model)}
)
"""Every model in every payload variant, by its own name."""

DEFAULT_MODEL = next(iter(SPECIFICATIONS))


class UnknownModelError(Exception):
    """The model, or its variant for a payload, does not exist; the message names the closest one."""


def get_specification(name: str) -> ModelSpecification:
    """The specification of a registered model or variant. Raises `UnknownModelError`."""
    if name not in SPECIFICATIONS:
        raise UnknownModelError(f"unknown model {name!r}; {choose_from(name, SPECIFICATIONS)}")
    return SPECIFICATIONS[name]


def get_variant(name: str, payload: str) -> ModelSpecification:
    """The variant for `payload` of the model `name`, or of the model that `name` is a variant of.

    Raises `UnknownModelError`.
    """
    base = get_specification(name).base
    for specification in SPECIFICATIONS.values():
        if (specification.base, specification.payload) == (base, payload):
            return specification
    raise UnknownModelError(f"unknown payload {payload!r}; {choose_from(payload, PAYLOADS)}")


def get_variants(name: str, payloads: str) -> tuple[ModelSpecification, ...]:
    """The variants for a list such as `fp32,uint8`, in its order; for an empty one the model `name` alone.

    Raises `UnknownModelError`.
    """
    wanted = [payload.strip() for payload in payloads.split(",") if payload.strip()]
    if not wanted:
        return (get_specification(name),)
    return tuple(get_variant(name, payload) for payload in dict.fromkeys(wanted))
