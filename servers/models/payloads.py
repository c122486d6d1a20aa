"""One model in the three forms in which an image can travel to it, all derived from its FP32 specification.

    M         pixel_values  FP32  [-1,3,s,s]   normalised by the client
    M_uint8   pixel_values  UINT8 [-1,s,s,3]   RGB bytes, resized and cropped by the client, normalised with the model
    M_jpeg    image         BYTES [-1,1]       a JPEG file of any size; decoded, resized and cropped by the server

The output is the same in all three.
"""

from __future__ import annotations

from dataclasses import replace

from servers.contract.tensors import TensorSpec
from servers.models.specification import ModelSpecification

JPEG_INPUT = "image"


def payload_variants(specification: ModelSpecification) -> tuple[ModelSpecification, ...]:
    """The FP32 model itself, its UINT8 and its JPEG variant. Raises `ValueError` for anything but one FP32 image."""
    size = specification.preprocessing.size
    if specification.payload != "fp32" or [t.item_shape for t in specification.inputs] != [(3, size, size)]:
        raise ValueError(f"{specification.name}: variants are derived from a model of one FP32 image")
    pixels = specification.inputs[0].name
    uint8 = replace(
        specification,
        name=f"{specification.name}_uint8",
        title=f"{specification.title}, UINT8 pixels",
        inputs=(TensorSpec(pixels, "UINT8", (-1, size, size, 3)),),
        payload="uint8",
        base_name=specification.name,
    )
    jpeg = replace(
        uint8,
        name=f"{specification.name}_jpeg",
        title=f"{specification.title}, JPEG files",
        inputs=(TensorSpec(JPEG_INPUT, "BYTES", (-1, 1)),),
        payload="jpeg",
        decodes_to=uint8,
    )
    return specification, uint8, jpeg
