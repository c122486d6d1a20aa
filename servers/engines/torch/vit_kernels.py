"""Triton kernels for a vision tower: every matrix product, attention over short sequences, row-wise work.

**Products.** One kernel, with LayerNorm, GELU and the residual sum in its epilogue. A LayerNorm before the product
needs no separate kernel. With W the weight, c = W·1 its row sums and x̂ = (x - μ)·r,

    x̂ Wᵀ = r · (x Wᵀ - μ cᵀ)

so the product runs on the raw rows. The kernel that wrote the rows left partial statistics for μ and r:
[2, CHUNKS, capacity] FP32, per row and chunk of columns the mean and the sum of squared deviations, which combine
without cancellation (Chan, Golub and LeVeque 1983).

**Attention.** A whole head fits in one tile (50 tokens padded to 64, 64 elements per head), so there is no running
softmax and no transposed copy: one program loads Q, K and V of one image and head from the packed QKV product, once,
and writes its columns of the result.

**Rows.** Pixels to patch rows, patch products to the first tokens, and LayerNorm around cuBLAS products.
"""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def"
# ruff: noqa: N803, N806 - compile-time constants are upper case in Triton

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATION_NONE = tl.constexpr(0)
ACTIVATION_GELU = tl.constexpr(1)
ACTIVATION_QUICK_GELU = tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)
GELU_LIMIT = tl.constexpr(4.2)
GELU_0 = tl.constexpr(0.3988565504550934)
GELU_1 = tl.constexpr(-0.06626415997743607)
GELU_2 = tl.constexpr(0.009768049232661724)
GELU_3 = tl.constexpr(-0.0010948429116979241)
GELU_4 = tl.constexpr(9.126449731411412e-05)
GELU_5 = tl.constexpr(-5.431025783764198e-06)
GELU_6 = tl.constexpr(2.1535764460622886e-07)
GELU_7 = tl.constexpr(-5.0452735322892295e-09)
GELU_8 = tl.constexpr(5.242914435932278e-11)


@triton.jit
def gelu(x):
    """x·Φ(x) with Φ(x) - ½ = x·P(x²) on |x| ≤ 4.2: within 1.1e-5·max(1, |x|) of the exact GELU. A weighted
    least-squares fit (a test holds the bound), a fortieth of FP16's rounding. No special-function instruction, and a
    third of the arithmetic of `erf`, which would cost half as much as the product before it."""
    clamped = tl.minimum(tl.maximum(x, -GELU_LIMIT), GELU_LIMIT)
    square = clamped * clamped
    polynomial = GELU_8
    polynomial = polynomial * square + GELU_7
    polynomial = polynomial * square + GELU_6
    polynomial = polynomial * square + GELU_5
    polynomial = polynomial * square + GELU_4
    polynomial = polynomial * square + GELU_3
    polynomial = polynomial * square + GELU_2
    polynomial = polynomial * square + GELU_1
    polynomial = polynomial * square + GELU_0
    return x * (polynomial * clamped + 0.5)


@triton.jit
def combined_statistics(
    statistics, rows, m, capacity, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, EPSILON: tl.constexpr
):
    """Mean and reciprocal deviation of the rows `m` from [2, CHUNKS, capacity] partial means and squared deviations."""
    PADDED: tl.constexpr = triton.next_power_of_2(CHUNKS)
    chunk = tl.arange(0, PADDED)
    valid = (chunk < CHUNKS)[:, None] & (m < rows)[None, :]
    places = statistics + chunk[:, None] * capacity + m[None, :]
    means = tl.load(places, mask=valid, other=0.0)
    squares = tl.load(places + CHUNKS * capacity, mask=valid, other=0.0)
    mean = tl.sum(means, 0) * (1.0 / CHUNKS)
    away = tl.where(valid, means - mean[None, :], 0.0)
    variance = tl.sum(squares + away * away * (WIDTH // CHUNKS), 0) * (1.0 / WIDTH)
    return mean, tl.rsqrt(variance + EPSILON)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    a,  # [rows, K], or its tensor descriptor with blocks [BM, BK] if TMA
    weight_tiles,  # [N, K], or its tensor descriptor with blocks [BN, BK] if TMA
    bias,  # [N]; unread unless BIAS
    row_sums,  # [N]: the weight's sums over K in FP32; unread unless NORM
    statistics,  # [2, CHUNKS, capacity] FP32, of the rows of a; unread unless NORM
    residual,  # row stride residual_stride; unread unless RESIDUAL; may be `out`
    out,  # [rows, N]
    out_statistics,  # [2, N/BN, capacity] FP32, written if STATISTICS
    partial,  # [tiles, SPLIT, BM, BN] FP32 scratch; untouched unless SPLIT > 1
    arrivals,  # [tiles] int32 zeros, zero again afterwards; untouched unless SPLIT > 1
    rows,
    capacity,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STATISTICS: tl.constexpr,
    TMA: tl.constexpr,
):
    """out = activation(LN?(a) Wᵀ + bias) + residual, one program per tile and split of K."""
    program = tl.program_id(0)
    tile = program // SPLIT
    split = program % SPLIT
    tiles_n: tl.constexpr = N // BN
    in_group = tile % (GROUP * tiles_n)
    first_m = (tile // (GROUP * tiles_n)) * GROUP
    group_rows = tl.minimum(tl.cdiv(rows, BM) - first_m, GROUP)
    tile_m = first_m + in_group % group_rows
    tile_n = in_group // group_rows
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    part: tl.constexpr = K // SPLIT
    first_k = split * part
    if NORM:
        mean, deviation = combined_statistics(statistics, rows, m, capacity, CHUNKS, K, EPSILON)

    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    if TMA:
        for k in range(first_k, first_k + part, BK):
            x = a.load([tile_m * BM, k])
            y = weight_tiles.load([tile_n * BN, k])
            accumulator = tl.dot(x, y.T, accumulator)
    else:
        k_lane = first_k + tl.arange(0, BK)
        x_places = a + tl.where(m < rows, m, 0)[:, None] * K + k_lane[None, :]
        y_places = weight_tiles + n[None, :] * K + k_lane[:, None]
        for _ in range(0, part, BK):
            accumulator = tl.dot(tl.load(x_places), tl.load(y_places), accumulator)
            x_places += BK
            y_places += BK

    last = True
    if SPLIT > 1:
        # Partial sums meet in memory and the last program of a tile to arrive adds them, always in the same order.
        inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        scratch = partial + tile * (SPLIT * BM * BN) + inside
        tl.store(scratch + split * (BM * BN), accumulator, cache_modifier=".cg")
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            accumulator = tl.zeros((BM, BN), dtype=tl.float32)
            for other in tl.static_range(SPLIT):
                accumulator += tl.load(scratch + other * (BM * BN), cache_modifier=".cg")
            tl.atomic_xchg(arrivals + tile, 0)
    if last:
        if NORM:
            accumulator = (accumulator - mean[:, None] * tl.load(row_sums + n)[None, :]) * deviation[:, None]
        if BIAS:
            accumulator += tl.load(bias + n)[None, :].to(tl.float32)
        if ACTIVATION == ACTIVATION_GELU:
            accumulator = gelu(accumulator)
        elif ACTIVATION == ACTIVATION_QUICK_GELU:
            accumulator = accumulator / (1.0 + tl.exp2(accumulator * (-1.702 * LOG2_E)))
        valid = (m < rows)[:, None]
        if RESIDUAL:
            accumulator += tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=valid).to(tl.float32)
        rounded = accumulator.to(out.dtype.element_ty)
        tl.store(out + m[:, None] * N + n[None, :], rounded, mask=valid)
        if STATISTICS:
            values = rounded.to(tl.float32)
            chunk_mean = tl.sum(values, 1) * (1.0 / BN)
            away = values - chunk_mean[:, None]
            places = out_statistics + tile_n * capacity + m
            tl.store(places, chunk_mean, mask=m < rows)
            tl.store(places + tiles_n * capacity, tl.sum(away * away, 1), mask=m < rows)


@triton.jit
def attention_kernel(
    packed,  # [images·TOKENS, 3·HEADS·WIDTH]; the queries already scaled
    out,  # [images·TOKENS, HEADS·WIDTH]
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,  # TOKENS rounded up to a power of two
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two
):
    """softmax(Q Kᵀ) V for one image and head; grid (images·HEADS,)."""
    image = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    row_width: tl.constexpr = 3 * HEADS * WIDTH
    token = tl.arange(0, PADDED)
    column = tl.arange(0, WIDTH)
    valid = (token < TOKENS)[:, None]
    places = packed + (image * TOKENS + token)[:, None] * row_width + head * WIDTH + column[None, :]
    query = tl.load(places, mask=valid, other=0.0)
    key = tl.load(places + HEADS * WIDTH, mask=valid, other=0.0)
    value = tl.load(places + 2 * HEADS * WIDTH, mask=valid, other=0.0)
    scores = tl.where((token < TOKENS)[None, :], tl.dot(query, key.T) * LOG2_E, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    mixed = tl.dot(weights.to(value.dtype), value) / total[:, None]
    target = out + (image * TOKENS + token)[:, None] * (HEADS * WIDTH) + head * WIDTH + column[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=valid)


@triton.jit
def class_attention_kernel(
    packed,  # as in attention_kernel
    out,  # [images, HEADS·WIDTH]
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`attention_kernel` for the class token's query alone; one row per image out."""
    image = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    row_width: tl.constexpr = 3 * HEADS * WIDTH
    token = tl.arange(0, PADDED)
    column = tl.arange(0, WIDTH)
    valid = (token < TOKENS)[:, None]
    first = packed + image * TOKENS * row_width + head * WIDTH + column
    places = first[None, :] + token[:, None] * row_width
    query = tl.load(first).to(tl.float32)
    key = tl.load(places + HEADS * WIDTH, mask=valid, other=0.0).to(tl.float32)
    value = tl.load(places + 2 * HEADS * WIDTH, mask=valid, other=0.0).to(tl.float32)
    scores = tl.where(token < TOKENS, tl.sum(key * query[None, :], 1) * LOG2_E, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 0))
    mixed = tl.sum(weights[:, None] * value, 0) / tl.sum(weights, 0)
    tl.store(out + image * HEADS * WIDTH + head * WIDTH + column, mixed.to(out.dtype.element_ty))


@triton.jit
def patches_kernel(
    pixels,  # floats [images, 3, IMAGE, IMAGE], or [images, IMAGE, IMAGE, 3] if BYTES
    out,  # [images·(IMAGE/PATCH)², 3·PATCH²]; columns by channel, row, column, or row, column, channel if BYTES
    IMAGE: tl.constexpr,
    PATCH: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Cut images into rows of patches; bytes become (u - 128)/64, exact in 16 bits. One program per image, row of
    patches and channel (third of the rows if BYTES): grid (images·GRID·3,). Rows and columns are padded to powers of
    two, so that no address takes a division."""
    GRID: tl.constexpr = IMAGE // PATCH
    RUN: tl.constexpr = 3 * PATCH if BYTES else PATCH  # neighbours in memory that stay neighbours
    PADDED_RUN: tl.constexpr = triton.next_power_of_2(RUN)
    PADDED_ROWS: tl.constexpr = triton.next_power_of_2((PATCH + 2) // 3 if BYTES else PATCH)
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
    if BYTES:
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
    """Position, ln_pre and the class token; one program per token and GROUP images: grid (TOKENS, images/GROUP)."""
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
    carried,  # [WIDTH] FP32: the true rows are x + carried; unread unless CARRIED
    out,  # [rows, WIDTH]: (x + carried - mean) / deviation if NORMALISED, else x + carried, and then it may be x
    out_statistics,  # of x + carried; written unless NORMALISED
    capacity,
    WIDTH: tl.constexpr,
    EPSILON: tl.constexpr,
    CARRIED: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """LayerNorm before a cuBLAS product; between a cuBLAS and a Triton product the true rows and statistics."""
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
