"""Row-wise kernels: pixels to patch rows, patch products to the first tokens, what cuBLAS leaves to do.

Statistics are [2, CHUNKS, capacity] FP32 partial means and squared deviations, as `product_kernel` reads them.
"""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def"
# ruff: noqa: N803, N806 - compile-time constants are upper case in Triton

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def patches_kernel(
    pixels,  # [images, 3, IMAGE, IMAGE] floats or bytes, or bytes [images, IMAGE, IMAGE, 3] if INTERLEAVED
    out,  # [images·(IMAGE/PATCH)², 3·PATCH²]; columns by channel, row, column, or row, column, channel if INTERLEAVED
    IMAGE: tl.constexpr,
    PATCH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Cut images into rows of patches; bytes become (u - 128)/64, exact in 16 bits.

    One program an image, row of patches and channel (or third of the rows if INTERLEAVED): grid (images·GRID·3,). Rows
    and columns are padded to powers of two, so that no address takes a division.
    """
    GRID: tl.constexpr = IMAGE // PATCH
    RUN: tl.constexpr = 3 * PATCH if INTERLEAVED else PATCH  # neighbours in memory that stay neighbours
    PADDED_RUN: tl.constexpr = triton.next_power_of_2(RUN)
    PADDED_ROWS: tl.constexpr = triton.next_power_of_2((PATCH + 2) // 3 if INTERLEAVED else PATCH)
    STEP: tl.constexpr = (PATCH + 2) // 3
    program = tl.program_id(0)
    part = program % 3
    top = (program // 3) % GRID
    image = program // (3 * GRID)
    place = tl.arange(0, PADDED_RUN * triton.next_power_of_2(GRID))
    patch = place // PADDED_RUN
    inside = place % PADDED_RUN
    row = tl.arange(0, PADDED_ROWS)
    columns = patch < GRID
    if PADDED_RUN != RUN:
        columns = columns & (inside < RUN)
    first = pixels + image.to(tl.int64) * (3 * IMAGE * IMAGE)
    target = out + ((image * GRID + top) * GRID).to(tl.int64) * (3 * PATCH * PATCH)
    if INTERLEAVED:
        row = part * STEP + row
        valid = ((row < PATCH) & (row < (part + 1) * STEP))[:, None]
        source = first + (top * PATCH + row)[:, None] * (3 * IMAGE)
    else:
        valid = (row < PATCH)[:, None]
        source = first + part * (IMAGE * IMAGE) + (top * PATCH + row)[:, None] * IMAGE
        target += part * (PATCH * PATCH)
    valid = valid & columns[None, :]
    values = tl.load(source + (patch * RUN + inside)[None, :], mask=valid, other=0)
    if BYTES:
        # 0x6400 | u is the 16-bit float 1024 + u: no integer conversion, whose unit is slow.
        exact = (values.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        result = ((exact - 1152.0) * 0.015625).to(out.dtype.element_ty)
    else:
        result = values.to(out.dtype.element_ty)
    tl.store(target + (patch * (3 * PATCH * PATCH) + inside)[None, :] + row[:, None] * RUN, result, mask=valid)


@triton.jit(do_not_specialize=["images"])
def first_tokens_kernel(
    embedded,  # [images·(TOKENS-1), WIDTH]: the patch product
    position,  # [TOKENS-1, WIDTH]
    class_row,  # [WIDTH]
    gain,  # [WIDTH]
    offset,  # [WIDTH]
    out,  # [images·TOKENS, WIDTH]
    normalised,  # [images·TOKENS, WIDTH], written if NORMALISED
    out_statistics,  # written if CHUNKS > 0
    capacity,
    images,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUP: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Position, ln_pre and the class token; one program a token and GROUP images: grid (TOKENS, images/GROUP)."""
    token = tl.program_id(0)
    first = tl.program_id(1) * GROUP
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    valid = column < WIDTH
    patch = tl.maximum(token - 1, 0)
    added = tl.load(position + patch * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    scale = tl.load(gain + column, mask=valid, other=0.0).to(tl.float32)
    shift = tl.load(offset + column, mask=valid, other=0.0).to(tl.float32)
    classes = tl.load(class_row + column, mask=valid, other=0.0).to(tl.float32)
    for image in range(first, tl.minimum(first + GROUP, images)):
        source = embedded + (image * (TOKENS - 1) + patch) * WIDTH + column
        values = tl.load(source, mask=valid, other=0.0).to(tl.float32) + added
        result = tl.where(token == 0, classes, unit_rows(values, valid, WIDTH, EPSILON) * scale + shift)
        rounded = result.to(out.dtype.element_ty)
        row = image * TOKENS + token
        tl.store(out + row * WIDTH + column, rounded, mask=valid)
        if NORMALISED:
            result = unit_rows(rounded.to(tl.float32), valid, WIDTH, EPSILON).to(normalised.dtype.element_ty)
            tl.store(normalised + row * WIDTH + column, result, mask=valid)
        if CHUNKS > 0:
            leave_statistics(rounded, valid, out_statistics, row, capacity, WIDTH, CHUNKS)


@triton.jit
def row_kernel(
    x,  # [rows, WIDTH]
    carried,  # [WIDTH] FP32: what the true rows have more than x; unread unless CARRIED
    out,  # [rows, WIDTH]: (x + carried - mean) / deviation if NORMALISED, else x + carried, and then it may be x
    out_statistics,  # of x + carried; written unless NORMALISED
    capacity,
    WIDTH: tl.constexpr,
    EPSILON: tl.constexpr,
    CARRIED: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Before a product of cuBLAS: LayerNorm. Before one of ours, after one of cuBLAS: the true rows and statistics."""
    row = tl.program_id(0)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    valid = column < WIDTH
    values = tl.load(x + row * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    if CARRIED:
        values += tl.load(carried + column, mask=valid, other=0.0)
    if NORMALISED:
        values = unit_rows(values, valid, WIDTH, EPSILON)
    rounded = values.to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, rounded, mask=valid)
    if not NORMALISED:
        leave_statistics(rounded, valid, out_statistics, row, capacity, WIDTH, 1)


@triton.jit
def unit_rows(values, valid, WIDTH: tl.constexpr, EPSILON: tl.constexpr):
    """LayerNorm of one row without gain and offset; `values` are 0 where not `valid`."""
    mean = tl.sum(values, 0) * (1.0 / WIDTH)
    away = tl.where(valid, values - mean, 0.0)
    return away * tl.rsqrt(tl.sum(away * away, 0) * (1.0 / WIDTH) + EPSILON)


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
