"""The variants of a model, how they are named, and the decoder that JPEG needs."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
from PIL import Image

from servers.models.images import (
    MAX_PASSES,
    MAX_SCANS,
    DecodingSettings,
    ImageDecoder,
    ImageError,
    decode_jpeg,
    resize_and_crop,
)
from servers.models.items import jpeg_paths
from servers.models.registry import (
    DEFAULT_MODEL,
    UnknownModelError,
    get_specification,
    get_variant,
    get_variants,
    payload_variants,
)
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array, TensorSpec


def test_one_specification_gives_three_models() -> None:
    fp32, uint8, jpeg = payload_variants(get_specification(DEFAULT_MODEL))
    assert [one.name for one in (fp32, uint8, jpeg)] == [
        "openclip_vit_b32", "openclip_vit_b32_uint8", "openclip_vit_b32_jpeg",
    ]  # fmt: skip
    assert (fp32.payload, uint8.payload, jpeg.payload) == ("fp32", "uint8", "jpeg")
    assert uint8.inputs == (TensorSpec("pixel_values", "UINT8", (-1, 224, 224, 3)),)
    assert jpeg.inputs == (TensorSpec("image", "BYTES", (-1, 1)),)
    assert fp32.outputs == uint8.outputs == jpeg.outputs
    assert {model.base for model in (fp32, uint8, jpeg)} == {"openclip_vit_b32"}
    assert [model.executed for model in (fp32, uint8, jpeg)] == [fp32, uint8, uint8]


def test_variants_are_found_from_each_other_and_from_a_list() -> None:
    jpeg = get_specification("openclip_vit_b32_jpeg")
    assert get_variant("openclip_vit_b32_uint8", "jpeg") is jpeg
    assert get_variants("openclip_vit_b32_jpeg", "") == (jpeg,)
    names = [s.name for s in get_variants("openclip_vit_b32", " jpeg, fp32,jpeg")]
    assert names == ["openclip_vit_b32_jpeg", "openclip_vit_b32"]
    with pytest.raises(UnknownModelError, match="unknown payload 'png'; use one of: tensors, fp32, uint8, jpeg"):
        get_variants("openclip_vit_b32", "fp32,png")


def test_only_a_model_of_one_image_has_variants(specification: ModelSpecification) -> None:
    uint8 = get_variant(specification.name, "uint8")
    assert payload_variants(uint8) == (uint8,)


@pytest.fixture
def decoder(specification: ModelSpecification) -> ImageDecoder:
    return ImageDecoder(specification.preprocessing, DecodingSettings(threads=3))


def batch(*images: bytes) -> Array:
    array = np.empty((len(images), 1), object)
    array[:, 0] = images
    return array


def test_a_batch_is_decoded_in_its_order(decoder: ImageDecoder, specification: ModelSpecification) -> None:
    photographs = [path.read_bytes() for path in jpeg_paths()]
    pixels = decoder.start(batch(*photographs)).result()
    for row, data in zip(pixels, photographs, strict=True):
        np.testing.assert_array_equal(row, resize_and_crop(decode_jpeg(data), specification.preprocessing))
    decoder.close()


def test_the_first_bad_image_is_the_error_and_names_its_place(decoder: ImageDecoder) -> None:
    good = jpeg_paths()[8].read_bytes()
    with pytest.raises(ImageError, match=r"^image 1: the image is not a JPEG"):
        decoder.start(batch(good, b"", good[:-300])).result()
    with pytest.raises(ImageError, match=r"^the image is not a JPEG"):
        decoder.start(batch(b"")).result()
    decoder.close()


def test_what_has_not_begun_can_be_dropped(specification: ModelSpecification) -> None:
    decoder = ImageDecoder(specification.preprocessing, DecodingSettings(threads=1))
    gate = threading.Event()
    decoder._threads.submit(gate.wait)
    decoding = decoder.start(batch(*[jpeg_paths()[8].read_bytes()] * 4))
    decoding.cancel()
    gate.set()
    assert all(image.cancelled() for image in decoding.images)
    decoder.close()


def test_a_narrow_picture_is_refused_before_it_is_resized_to_gigabytes(specification: ModelSpecification) -> None:
    with pytest.raises(ImageError, match="too narrow: 2 x 30000"):
        resize_and_crop(np.zeros((30_000, 2, 3), np.uint8), specification.preprocessing)
    assert resize_and_crop(np.zeros((600, 2, 3), np.uint8), specification.preprocessing).shape == (224, 224, 3)


def test_a_picture_of_countless_scans_is_refused() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    assert decode_jpeg(data).shape == (64, 64, 3)
    scan = data.rindex(b"\xff\xda")
    with pytest.raises(ImageError, match=f"more than {MAX_SCANS} scans"):
        decode_jpeg(data[:scan] + data[scan:-2] * (MAX_SCANS + 1) + data[-2:])


def test_a_picture_whose_scans_have_too_many_pixels_together_is_refused() -> None:
    """100 scans of 40 million pixels in 475 KB took 17 s."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    scan, scans = data.rindex(b"\xff\xda"), data.count(b"\xff\xda")
    assert decode_jpeg(data, 64 * 64).shape == (64, 64, 3)
    more = data[:scan] + data[scan:-2] * (MAX_PASSES - scans + 2) + data[-2:]
    with pytest.raises(ImageError, match=f"13 scans of 64 x 64 pixels, at most {12 * 64 * 64} pixels"):
        decode_jpeg(more, 64 * 64)
