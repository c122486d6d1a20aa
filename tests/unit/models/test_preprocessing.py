"""Preprocessing against open_clip's own transform, and what it refuses."""

from __future__ import annotations

import io
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from servers.models.images import Float32Array, ImageError, decode_jpeg, normalise, resize_and_crop
from servers.models.items import jpeg_paths
from servers.models.specification import ModelSpecification, Preprocessing


def jpeg(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def preprocess(data: bytes, preprocessing: Preprocessing) -> Float32Array:
    """All three steps for one image: JPEG bytes → float32 (3, size, size)."""
    return normalise(resize_and_crop(decode_jpeg(data), preprocessing)[np.newaxis], preprocessing)[0]


def gradient(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 7 + y, x * y, y * 5], axis=-1)
    return Image.fromarray((pixels % 256).astype(np.uint8))


def reference(data: bytes, specification: ModelSpecification) -> np.ndarray:
    import open_clip

    preprocessing = specification.preprocessing
    transform = open_clip.image_transform(
        preprocessing.size, is_train=False, mean=preprocessing.mean, std=preprocessing.std, interpolation="bicubic"
    )
    return transform(Image.open(io.BytesIO(data)).convert("RGB")).numpy()


@pytest.mark.parametrize("path", jpeg_paths(), ids=lambda path: path.stem)
def test_a_photograph_equals_open_clips_transform_bit_for_bit(path: Path, specification: ModelSpecification) -> None:
    data = path.read_bytes()
    ours = preprocess(data, specification.preprocessing)
    assert ours.dtype == np.float32
    assert ours.flags.c_contiguous
    np.testing.assert_array_equal(ours, reference(data, specification))


@pytest.mark.parametrize(
    "size",
    [(224, 224), (225, 224), (227, 224), (224, 231), (224, 301), (1, 1), (3, 700), (449, 449), (223, 1000), (641, 479)],
    ids=str,
)
def test_odd_sizes_round_as_open_clip_rounds(size: tuple[int, int], specification: ModelSpecification) -> None:
    data = jpeg(gradient(*size), quality=90)
    np.testing.assert_array_equal(preprocess(data, specification.preprocessing), reference(data, specification))


def test_a_batch_is_normalised_item_by_item(specification: ModelSpecification) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 224, 224, 3), dtype=np.uint8)
    batch = normalise(pixels, specification.preprocessing)
    assert batch.shape == (3, 3, 224, 224)
    assert batch.flags.c_contiguous
    for index in range(3):
        np.testing.assert_array_equal(
            batch[index], normalise(pixels[index : index + 1], specification.preprocessing)[0]
        )


def test_grey_becomes_three_equal_channels() -> None:
    pixels = decode_jpeg(jpeg(gradient(40, 30).convert("L")))
    assert pixels.shape == (30, 40, 3)
    assert (pixels[..., 0] == pixels[..., 1]).all()
    assert (pixels[..., 0] == pixels[..., 2]).all()


def test_a_read_only_view_is_accepted(specification: ModelSpecification) -> None:
    data = jpeg(gradient(300, 260))
    view = memoryview(bytes(data))
    pixels = decode_jpeg(view)
    assert resize_and_crop(pixels, specification.preprocessing).flags.c_contiguous


def claiming(width: int, height: int) -> bytes:
    """A small JPEG whose header claims another size."""
    data = bytearray(jpeg(gradient(16, 16)))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def test_a_false_claim_of_65500_squared_is_refused_before_it_costs_memory() -> None:
    data = claiming(65500, 65500)
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match="65500 x 65500 pixels, at most"):
            decode_jpeg(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_pixel_limit_is_exact() -> None:
    data = jpeg(gradient(20, 10))
    assert decode_jpeg(data, max_pixels=200).shape == (10, 20, 3)
    with pytest.raises(ImageError, match="at most 199"):
        decode_jpeg(data, max_pixels=199)


def png() -> bytes:
    buffer = io.BytesIO()
    gradient(20, 20).save(buffer, "PNG")
    return buffer.getvalue()


WHOLE = jpeg(gradient(200, 200), quality=90)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"not an image",
        png(),
        WHOLE[: len(WHOLE) * 4 // 5],
        WHOLE[:100],
        jpeg(gradient(20, 20).convert("CMYK")),
    ],
    ids=["empty", "two-bytes", "text", "png", "truncated", "header-only", "cmyk"],
)
def test_what_is_no_whole_rgb_or_grey_jpeg_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="image"):
        decode_jpeg(data)
