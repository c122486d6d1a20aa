"""Row-wise kernels: pixels to patch rows, patch products to the first tokens, and what a foreign product leaves to do.

Statistics are [2, CHUNKS, capacity] FP32 partial means and squared deviations, as `product_kernel` reads them.
"""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def"
# ruff: noqa: N803, N806 - compile-time constants are upper case in Triton

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["images"])
def patches_kernel(
    pixels,  # [images, 3, IMAGE, IMAGE] floats or bytes, or bytes [images, IMAGE, IMAGE, 3] if INTERLEAVED
    out,  # [images·(IMAGE/PATCH)², 3·PATCH²]; columns by channel, row, column, or row, column, channel if INTERLEAVED
    images,
    IMAGE: tl.constexpr,
    PATCH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut images into rows of patches; bytes become (u - 128)/64, exact in 16 bits. Grid: elements / BLOCK."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GRID: tl.constexpr = IMAGE // PATCH
    ELEMENTS: tl.constexpr = 3 * PATCH * PATCH
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = place // ELEMENTS
    inside = place % ELEMENTS
    image = row // (GRID * GRID)
    patch = row % (GRID * GRID)
    top = (patch // GRID) * PATCH
    left = (patch % GRID) * PATCH
    if INTERLEAVED:
        source = (top + inside // (3 * PATCH)) * (3 * IMAGE) + left * 3 + inside % (3 * PATCH)
    else:
        channel = inside // (PATCH * PATCH)
        source = channel * (IMAGE * IMAGE) + (top + (inside // PATCH) % PATCH) * IMAGE + left + inside % PATCH
    valid = image < images
    values = tl.load(pixels + image.to(tl.int64) * (3 * IMAGE * IMAGE) + source, mask=valid, other=0)
    if BYTES:
        # 0x6400 | u is the 16-bit float 1024 + u: no integer conversion, whose unit is slow.
        exact = (values.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        tl.store(out + place, ((exact - 1152.0) * 0.015625).to(out.dtype.element_ty), mask=valid)
    else:
        tl.store(out + place, values.to(out.dtype.element_ty), mask=valid)


@triton.jit
def first_tokens_kernel(
    embedded,  # [images·(TOKENS-1), WIDTH]: the patch product
    position,  # [TOKENS-1, WIDTH]
    class_row,  # [WIDTH]
    gain,  # [WIDTH]
    offset,  # [WIDTH]
    out,  # [images·TOKENS, WIDTH]
    out_statistics,
    capacity,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    EPSILON: tl.constexpr,
    PDL: tl.constexpr,
):
    """Position, ln_pre and the class token; one program a token row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    image = row // TOKENS
    token = row % TOKENS
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    valid = column < WIDTH
    patch = tl.maximum(token - 1, 0)
    values = tl.load(embedded + (image * (TOKENS - 1) + patch) * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    values += tl.load(position + patch * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) * (1.0 / WIDTH)
    away = tl.where(valid, values - mean, 0.0)
    deviation = tl.rsqrt(tl.sum(away * away, 0) * (1.0 / WIDTH) + EPSILON)
    scale = tl.load(gain + column, mask=valid, other=0.0).to(tl.float32)
    shift = tl.load(offset + column, mask=valid, other=0.0).to(tl.float32)
    classes = tl.load(class_row + column, mask=valid, other=0.0).to(tl.float32)
    result = tl.where(token == 0, classes, away * deviation * scale + shift).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, result, mask=valid)
    leave_statistics(result, valid, out_statistics, row, capacity, WIDTH, CHUNKS)


@triton.jit
def row_kernel(
    x,  # rows of WIDTH, row stride x_stride
    bias,  # [WIDTH]; unread unless BIAS
    out,  # [rows, WIDTH]: x + bias if SUM; may be x
    normalised,  # [rows, WIDTH]: (x + bias - mean) / deviation if NORMALISED
    out_statistics,  # of x + bias, if CHUNKS > 0
    capacity,
    x_stride,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    EPSILON: tl.constexpr,
    BIAS: tl.constexpr,
    NORMALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Around a product of cuBLAS, which has none of our epilogues: add its bias, normalise, or leave statistics."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    valid = column < WIDTH
    values = tl.load(x + row * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
        tl.store(out + row * WIDTH + column, values.to(out.dtype.element_ty), mask=valid)
    if NORMALISED:
        mean = tl.sum(values, 0) * (1.0 / WIDTH)
        away = tl.where(valid, values - mean, 0.0)
        deviation = tl.rsqrt(tl.sum(away * away, 0) * (1.0 / WIDTH) + EPSILON)
        tl.store(normalised + row * WIDTH + column, (away * deviation).to(normalised.dtype.element_ty), mask=valid)
    if CHUNKS > 0:
        leave_statistics(values.to(out.dtype.element_ty), valid, out_statistics, row, capacity, WIDTH, CHUNKS)


@triton.jit
def leave_statistics(rounded, valid, out_statistics, row, capacity, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Write one row's statistics as CHUNKS equal shares, which combine to the whole row's."""
    values = rounded.to(tl.float32)
    mean = tl.sum(values, 0) * (1.0 / WIDTH)
    away = tl.where(valid, values - mean, 0.0)
    share = tl.sum(away * away, 0) * (1.0 / CHUNKS)
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    places = out_statistics + chunk * capacity + row
    tl.store(places, tl.zeros_like(chunk).to(tl.float32) + mean, mask=chunk < CHUNKS)
    tl.store(places + CHUNKS * capacity, tl.zeros_like(chunk).to(tl.float32) + share, mask=chunk < CHUNKS)
