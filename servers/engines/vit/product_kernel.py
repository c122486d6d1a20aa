"""One Triton kernel for every matrix product of the tower, with LayerNorm, GELU and the residual sum in its epilogue.

A LayerNorm before the product needs no kernel of its own. With W the weight, c = W·1 its row sums and x̂ = (x - μ)·r,

    x̂ Wᵀ = r · (x Wᵀ - μ cᵀ)

so the product runs on the raw rows, and μ and r come from partial statistics that whoever wrote the rows left behind:
per row and chunk of columns the mean and the sum of squared deviations, which combine without cancellation
(Chan, Golub and LeVeque 1983).
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
    """x·Φ(x) with Φ(x) - ½ = x·P(x²) on |x| ≤ 4.2: within 1.1e-5·max(1, |x|) of the exact GELU.

    A weighted least-squares fit (a test holds the bound), a fortieth of FP16's rounding. No special-function
    instruction, and a third of the arithmetic of `erf`, which would cost half as much as the product before it.
    """
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
    """out = activation(LN?(a) Wᵀ + bias) + residual, one program a tile and split of K."""
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
