"""Triton kernels for one step of a decoder: few rows against large matrices, and attention over static slots.

**Products of few rows.** Reading the matrix takes all the time, so what stands around a product is part of its kernel:
the RMSNorm before it (with r the reciprocal root mean square of a row, norm(x) Wᵀ = r · ((x∘gain) Wᵀ), and a program
sees the whole row anyway), RoPE and the write to the cache after Q, K and V, silu(gate)·up, the residual sum. A layer
is five kernels.

**Attention of decoding rows.** The live tokens of a slot are divided among programs, as many as the device can execute
at once; the last one to arrive combines their parts. The lengths are read on the device, so one CUDA graph is right for
every length.

**Experts.** The pairs of a token and one of its experts are gathered by expert on the device; the programs of an expert
that nobody has chosen end at once, so that a step reads only the weights that it needs, also in a CUDA graph.

Tokens are flat: first the rows that decode, then the tokens of prompts. `positions` is negative for a token that only
fills the graph's size: it writes nothing. The cache of a layer is [slots, length, 2, kv_heads, head_size]; RoPE turns
neighbours (see `decoder`).
"""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def, attr-defined"
# ruff: noqa: N803 - compile-time constants are upper case in Triton

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["rows"])
def embed_kernel(
    tokens,  # [slots] int64: the token that each row takes
    ids,  # [chunk] int32: the tokens of prompts
    positions,  # [rows + chunk] int32
    embedding,  # [vocabulary, HIDDEN]
    places,  # [positions, HIDDEN], added if PLACED
    out,  # [rows + chunk, HIDDEN]
    rows,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,  # HIDDEN rounded up to a power of two
    PLACED: tl.constexpr,
):
    """The first residual of each token; grid (tokens,)."""
    token = tl.program_id(0)
    position = tl.load(positions + token)
    if position >= 0:
        if token < rows:  # noqa: SIM108 - no expression: either place may be invalid
            name = tl.load(tokens + token).to(tl.int64)
        else:
            name = tl.load(ids + token - rows).to(tl.int64)
        column = tl.arange(0, PADDED)
        inside = column < HIDDEN
        value = tl.load(embedding + name * HIDDEN + column, mask=inside)
        if PLACED:
            value += tl.load(places + position.to(tl.int64) * HIDDEN + column, mask=inside)
        tl.store(out + token * HIDDEN + column, value, mask=inside)


@triton.jit
def norm_kernel(
    x, picks, gain, out, EPSILON: tl.constexpr, HIDDEN: tl.constexpr, PADDED: tl.constexpr, PICKED: tl.constexpr
):
    """RMSNorm of each row of x, or of the rows whose numbers are in `picks` if PICKED; grid (rows of out,)."""
    row = tl.program_id(0)
    source = row
    if PICKED:
        source = tl.load(picks + row)
    column = tl.arange(0, PADDED)
    inside = column < HIDDEN
    value = tl.load(x + source * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + EPSILON)
    result = value * scale * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_product_kernel(inner, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, INNER] = silu(gate)·up of [rows, 2·INNER]; grid (rows, INNER/BLOCK rounded up)."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(inner + row * (2 * INNER) + column, mask=inside).to(tl.float32)
    up = tl.load(inner + row * (2 * INNER) + INNER + column, mask=inside).to(tl.float32)
    result = gate / (1.0 + tl.exp2(-gate * LOG2_E)) * up
    tl.store(out + row * INNER + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    qkv,  # [tokens, (HEADS + 2·KV_HEADS)·WIDTH]; the queries are turned in place
    turns,  # [length, WIDTH/2, 2] FP32: cosine and sine; unread unless TURNED
    positions,
    slots,  # [tokens] int32
    cache,  # of this layer
    length,  # tokens per slot of the cache
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,  # heads per program, a power of two
    HALF: tl.constexpr,  # WIDTH/2 rounded up to a power of two
):
    """RoPE of queries and keys, and keys and values into the cache; grid (tokens, all heads/BLOCK rounded up)."""
    token = tl.program_id(0)
    position = tl.load(positions + token)
    if position >= 0:
        slot = tl.load(slots + token)
        head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        pair = tl.arange(0, HALF)
        inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (pair < WIDTH // 2)[None, :]
        place = qkv + token * ((HEADS + 2 * KV_HEADS) * WIDTH) + head[:, None] * WIDTH + 2 * pair[None, :]
        first = tl.load(place, mask=inside)
        second = tl.load(place + 1, mask=inside)
        if TURNED:
            turn = turns + position * WIDTH + 2 * pair
            cosine = tl.load(turn, mask=pair < WIDTH // 2, other=1.0)[None, :]
            sine = tl.load(turn + 1, mask=pair < WIDTH // 2, other=0.0)[None, :]
            x, y = first.to(tl.float32), second.to(tl.float32)
            turned = (head < HEADS + KV_HEADS)[:, None]
            first = tl.where(turned, x * cosine - y * sine, x).to(first.dtype)
            second = tl.where(turned, y * cosine + x * sine, y).to(second.dtype)
            query = inside & (head < HEADS)[:, None]
            tl.store(place, first, mask=query)
            tl.store(place + 1, second, mask=query)
        kept = inside & (head >= HEADS)[:, None]
        line = (slot.to(tl.int64) * length + position) * (2 * KV_HEADS * WIDTH)
        target = cache + line + (head - HEADS)[:, None] * WIDTH + 2 * pair[None, :]
        tl.store(target, first, mask=kept)
        tl.store(target + 1, second, mask=kept)


@triton.jit
def product_of_rows(
    x,  # [rows, K]
    gain,  # [K]; unread unless NORM
    weight,  # [N, K]
    n,  # [BN] outputs to compute
    rows,
    EPSILON: tl.constexpr,
    NORM: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[BM, BN] FP32: norm(x) Wᵀ at the outputs `n`. One row is multiplied and summed, several go to tensor cores."""
    k = tl.arange(0, BK)
    if BM == 1:
        sums = tl.zeros((BN, BK), dtype=tl.float32)
        squares = tl.zeros((BK,), dtype=tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            w = tl.load(weight + n.to(tl.int64)[:, None] * K + (start + k)[None, :]).to(tl.float32)
            value = tl.load(x + start + k).to(tl.float32)
            if NORM:
                squares += value * value
                value *= tl.load(gain + start + k).to(tl.float32)
            sums += w * value[None, :]
        accumulator = tl.sum(sums, 1)[None, :]
        if NORM:
            accumulator *= tl.rsqrt(tl.sum(squares, 0) / K + EPSILON)
    else:
        m = tl.arange(0, BM)
        accumulator = tl.zeros((BM, BN), dtype=tl.float32)
        squares = tl.zeros((BM,), dtype=tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            w = tl.load(weight + n.to(tl.int64)[None, :] * K + (start + k)[:, None])
            value = tl.load(x + m[:, None] * K + (start + k)[None, :], mask=(m < rows)[:, None], other=0.0)
            if NORM:
                exact = value.to(tl.float32)
                squares += tl.sum(exact * exact, 1)
                value = (exact * tl.load(gain + start + k).to(tl.float32)[None, :]).to(value.dtype)
            accumulator = tl.dot(value, w, accumulator, input_precision=PRECISION)
        if NORM:
            accumulator *= tl.rsqrt(squares / K + EPSILON)[:, None]
    return accumulator


@triton.jit(do_not_specialize=["rows"])
def qkv_kernel(
    x,  # [rows, HIDDEN]
    gain,
    weight,  # [(HEADS + 2·KV_HEADS)·WIDTH, HIDDEN]
    bias,  # unread unless BIAS
    turns,
    positions,
    query,  # [rows, (HEADS + 2·KV_HEADS)·WIDTH]: the queries, in the columns that the product of all would have
    cache,
    rows,
    length,
    EPSILON: tl.constexpr,
    BIAS: tl.constexpr,
    HIDDEN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Norm, Q, K and V, RoPE, the write to the cache, for rows whose slot is their number; grid (outputs/BN,)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    accumulator = product_of_rows(x, gain, weight, n, rows, EPSILON, True, HIDDEN, BM, BN, BK, STAGES, PRECISION)
    if BIAS:
        accumulator += tl.load(bias + n).to(tl.float32)[None, :]
    m = tl.arange(0, BM)
    position = tl.load(positions + m, mask=m < rows, other=-1)
    live = (position >= 0)[:, None]
    pair = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    turn = turns + position[:, None] * WIDTH + 2 * (pair % (WIDTH // 2))[None, :]
    turned = live & (pair < (HEADS + KV_HEADS) * (WIDTH // 2))[None, :]
    cosine = tl.load(turn, mask=turned, other=1.0)
    sine = tl.load(turn + 1, mask=turned, other=0.0)
    first, second = tl.split(tl.reshape(accumulator, (BM, BN // 2, 2)))
    result = tl.reshape(tl.join(first * cosine - second * sine, second * cosine + first * sine), (BM, BN))
    rounded = result.to(query.dtype.element_ty)
    outputs: tl.constexpr = (HEADS + 2 * KV_HEADS) * WIDTH
    asked = live & (n < HEADS * WIDTH)[None, :]
    tl.store(query + m[:, None] * outputs + n[None, :], rounded, mask=asked)
    line = (m.to(tl.int64) * length + position) * (2 * KV_HEADS * WIDTH)
    kept = live & (n >= HEADS * WIDTH)[None, :]
    tl.store(cache + line[:, None] + (n - HEADS * WIDTH)[None, :], rounded, mask=kept)


@triton.jit(do_not_specialize=["rows"])
def add_product_kernel(
    x,  # [rows, K]
    weight,  # [N, K]
    bias,  # unread unless BIAS
    out,  # [rows, N], added to
    rows,
    BIAS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out += x Wᵀ + bias; grid (N/BN,)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    safe = tl.minimum(n, N - 1)
    accumulator = product_of_rows(x, x, weight, safe, rows, 0.0, False, K, BM, BN, BK, STAGES, PRECISION)
    if BIAS:
        accumulator += tl.load(bias + safe).to(tl.float32)[None, :]
    m = tl.arange(0, BM)
    place = out + m[:, None] * N + n[None, :]
    inside = (m < rows)[:, None] & (n < N)[None, :]
    accumulator += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, accumulator.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gated_product_kernel(
    x,  # [rows, K]
    gain,
    weight,  # [2·N, K]: the gate's rows, then the others
    out,  # [rows, N]
    rows,
    EPSILON: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = silu(norm(x) Gᵀ)·(norm(x) Uᵀ); grid (N/BN,)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    safe = tl.minimum(n, N - 1)
    gate = product_of_rows(x, gain, weight, safe, rows, EPSILON, True, K, BM, BN, BK, STAGES, PRECISION)
    up = product_of_rows(x, gain, weight, safe + N, rows, EPSILON, True, K, BM, BN, BK, STAGES, PRECISION)
    result = gate / (1.0 + tl.exp2(-gate * LOG2_E)) * up
    m = tl.arange(0, BM)
    inside = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def head_kernel(
    x,  # [rows, K]
    gain,
    weight,  # [N, K]
    values,  # [rows, N/BN rounded up] FP32: the largest logit of each block
    names,  # as values, int32: its token
    rows,
    EPSILON: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The greedy token within each block of BN; grid (N/BN rounded up,)."""
    block = tl.program_id(0)
    n = block * BN + tl.arange(0, BN)
    safe = tl.minimum(n, N - 1)
    logits = product_of_rows(x, gain, weight, safe, rows, EPSILON, True, K, BM, BN, BK, STAGES, PRECISION)
    logits = tl.where((n < N)[None, :], logits, float("-inf"))
    m = tl.arange(0, BM)
    place = m * tl.num_programs(0) + block
    tl.store(values + place, tl.max(logits, 1), mask=m < rows)
    tl.store(names + place, block * BN + tl.argmax(logits, 1), mask=m < rows)


@triton.jit
def choose_kernel(
    values,  # [rows, entries]: logits, or the largest of each block
    names,  # [rows, entries] int32: their tokens; unread unless NAMED
    targets,  # [rows] int32: the slot whose next token it is; negative: nobody's
    tokens,  # [slots] int64
    chosen,  # [rows] int64
    entries,
    NAMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greedy token of each row, the first of several with the largest logit; grid (rows,)."""
    row = tl.program_id(0)
    best = float("-inf")
    place = 0
    for start in range(0, entries, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(values + row.to(tl.int64) * entries + column, mask=column < entries, other=float("-inf"))
        value = value.to(tl.float32)
        largest = tl.max(value, 0)
        where = start + tl.argmax(value, 0)
        place = tl.where(largest > best, where, place)
        best = tl.maximum(largest, best)
    if NAMED:
        place = tl.load(names + row * entries + place)
    target = tl.load(targets + row)
    tl.store(chosen + row, place.to(tl.int64))
    if target >= 0:
        tl.store(tokens + target, place.to(tl.int64))


@triton.jit
def row_attention_kernel(  # noqa: PLR0915
    query,  # [rows, query_stride]
    cache,  # of this layer
    sinks,  # [heads]; unread unless SINKS
    positions,  # [rows]
    out,  # [rows, heads·WIDTH]
    partial,  # [rows, kv_heads, SPLITS, GROUPED, WIDTH] FP32 scratch
    sums,  # [rows, kv_heads, SPLITS, 2, GROUPED] FP32 scratch: the largest logit and the sum of each part
    arrivals,  # [rows·kv_heads] int32 zeros, zero again afterwards
    query_stride,
    length,
    scale,  # times log2(e)
    GROUP: tl.constexpr,  # query heads per head of keys
    GROUPED: tl.constexpr,  # GROUP rounded up to a power of two, at least 16
    WIDTH: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one token per row to the live tokens of slot = row; grid (rows, kv_heads, SPLITS)."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    position = tl.load(positions + row)
    live = position + 1
    begin = 0
    if WINDOW:
        begin = tl.maximum(live - WINDOW, 0)
    each = tl.cdiv(tl.cdiv(live - begin, SPLITS), BLOCK) * BLOCK
    parts = tl.cdiv(live - begin, tl.maximum(each, 1))
    if (position >= 0) & (split < parts):
        group = tl.arange(0, GROUPED)
        column = tl.arange(0, WIDTH)
        asked = (group < GROUP)[:, None]
        head = kv_head * GROUP + group
        q = tl.load(query + row * query_stride + head[:, None] * WIDTH + column[None, :], mask=asked, other=0.0)
        largest = tl.full((GROUPED,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((GROUPED,), dtype=tl.float32)
        if SINKS:  # noqa: SIM102 - the outer condition is the compiler's
            if split == 0:
                largest = tl.load(sinks + head, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2_E
                total += 1.0
        mixed = tl.zeros((GROUPED, WIDTH), dtype=tl.float32)
        first = begin + split * each
        end = tl.minimum(first + each, live)
        line = 2 * kv_heads * WIDTH
        keys = cache + row.to(tl.int64) * length * line + kv_head * WIDTH
        for start in range(first, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < end
            places = keys + token[:, None] * line + column[None, :]
            key = tl.load(places, mask=inside[:, None], other=0.0)
            value = tl.load(places + kv_heads * WIDTH, mask=inside[:, None], other=0.0)
            logits = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
            logits = tl.where(inside[None, :], logits, float("-inf"))
            now = tl.maximum(largest, tl.max(logits, 1))
            shares = tl.exp2(logits - now[:, None])
            shrink = tl.exp2(largest - now)
            total = total * shrink + tl.sum(shares, 1)
            mixed = mixed * shrink[:, None]
            mixed = tl.dot(shares.to(value.dtype), value, mixed, input_precision=PRECISION)
            largest = now
        last = True
        if parts > 1:
            # The parts meet in memory, and the last program to arrive combines them, always in the same order.
            place = (row * kv_heads + kv_head) * SPLITS
            inside_part = group[:, None] * WIDTH + column[None, :]
            tl.store(partial + (place + split) * (GROUPED * WIDTH) + inside_part, mixed, cache_modifier=".cg")
            tl.store(sums + (place + split) * (2 * GROUPED) + group, largest, cache_modifier=".cg")
            tl.store(sums + (place + split) * (2 * GROUPED) + GROUPED + group, total, cache_modifier=".cg")
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + row * kv_heads + kv_head, 1, sem="acq_rel")
            last = arrived == parts - 1
            if last:
                largest = tl.full((GROUPED,), float("-inf"), dtype=tl.float32)
                total = tl.zeros((GROUPED,), dtype=tl.float32)
                mixed = tl.zeros((GROUPED, WIDTH), dtype=tl.float32)
                for other in range(parts):
                    theirs = sums + (place + other) * (2 * GROUPED)
                    peak = tl.load(theirs + group, cache_modifier=".cg")
                    now = tl.maximum(largest, peak)
                    shrink, grow = tl.exp2(largest - now), tl.exp2(peak - now)
                    total = total * shrink + tl.load(theirs + GROUPED + group, cache_modifier=".cg") * grow
                    part = tl.load(partial + (place + other) * (GROUPED * WIDTH) + inside_part, cache_modifier=".cg")
                    mixed = mixed * shrink[:, None] + part * grow[:, None]
                    largest = now
                tl.atomic_xchg(arrivals + row * kv_heads + kv_head, 0)
        if last:
            target = out + row * (kv_heads * GROUP * WIDTH) + head[:, None] * WIDTH + column[None, :]
            tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=asked)


@triton.jit
def prompt_attention_kernel(
    query,  # [tokens, query_stride]
    cache,  # of this layer
    sinks,
    positions,  # [tokens]
    slots,  # [tokens] int32
    out,  # [tokens, heads·WIDTH]
    first_token,  # the flat number of the first token of prompts
    query_stride,
    length,
    scale,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,  # GROUP rounded up to a power of two
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,  # tokens per program; all are of one slot, at consecutive positions, then padding
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of QUERIES tokens of a prompt to their slot's up to their own; grid (chunk/QUERIES, kv_heads)."""
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    begin_token = first_token + tl.program_id(0) * QUERIES
    start_position = tl.load(positions + begin_token)
    if start_position >= 0:
        slot = tl.load(slots + begin_token)
        line_of = tl.arange(0, QUERIES * GROUPED)
        token = begin_token + line_of // GROUPED
        group = line_of % GROUPED
        position = tl.load(positions + token)
        asked = (position >= 0) & (group < GROUP)
        head = kv_head * GROUP + group
        column = tl.arange(0, WIDTH)
        places = query + token[:, None] * query_stride + head[:, None] * WIDTH + column[None, :]
        q = tl.load(places, mask=asked[:, None], other=0.0)
        largest = tl.full((QUERIES * GROUPED,), -1e30, dtype=tl.float32)
        total = tl.zeros((QUERIES * GROUPED,), dtype=tl.float32)
        if SINKS:
            largest = tl.load(sinks + head, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        mixed = tl.zeros((QUERIES * GROUPED, WIDTH), dtype=tl.float32)
        begin = 0
        if WINDOW:
            begin = tl.maximum(start_position + 1 - WINDOW, 0)
        end = tl.minimum(start_position + QUERIES, length)
        line = 2 * kv_heads * WIDTH
        keys = cache + slot.to(tl.int64) * length * line + kv_head * WIDTH
        for start in range(begin, end, BLOCK):
            other = start + tl.arange(0, BLOCK)
            inside = other < end
            key_places = keys + other[:, None] * line + column[None, :]
            key = tl.load(key_places, mask=inside[:, None], other=0.0)
            value = tl.load(key_places + kv_heads * WIDTH, mask=inside[:, None], other=0.0)
            logits = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
            seen = other[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (other[None, :] > position[:, None] - WINDOW)
            logits = tl.where(seen, logits, float("-inf"))
            now = tl.maximum(largest, tl.max(logits, 1))
            shares = tl.exp2(logits - now[:, None])
            shrink = tl.exp2(largest - now)
            total = total * shrink + tl.sum(shares, 1)
            mixed = mixed * shrink[:, None]
            mixed = tl.dot(shares.to(value.dtype), value, mixed, input_precision=PRECISION)
            largest = now
        target = out + token[:, None] * (kv_heads * GROUP * WIDTH) + head[:, None] * WIDTH + column[None, :]
        result = mixed / tl.maximum(total, 1e-30)[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=asked[:, None])


@triton.jit
def route_kernel(
    logits,  # [tokens, EXPERTS]
    positions,  # [tokens]
    chosen,  # [tokens, CHOSEN] int32: the experts, negative for a token that only fills the graph's size
    shares,  # [tokens, CHOSEN] FP32
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # EXPERTS rounded up to a power of two
    CHOSEN: tl.constexpr,
    PLACES: tl.constexpr,  # CHOSEN rounded up to a power of two
):
    """The experts with the largest logits, and the softmax of these as their shares; grid (tokens,)."""
    token = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    place = tl.arange(0, PLACES)
    left = tl.load(logits + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    largest = tl.max(left, 0)
    names = tl.full((PLACES,), -1, dtype=tl.int32)
    values = tl.zeros((PLACES,), dtype=tl.float32)
    for taken in tl.static_range(CHOSEN):
        name = tl.argmax(left, 0)
        names = tl.where(place == taken, name, names)
        values = tl.where(place == taken, tl.exp2((tl.max(left, 0) - largest) * LOG2_E), values)
        left = tl.where(expert == name, float("-inf"), left)
    names = tl.where(tl.load(positions + token) >= 0, names, -1)
    tl.store(chosen + token * CHOSEN + place, names, mask=place < CHOSEN)
    tl.store(shares + token * CHOSEN + place, values / tl.sum(values, 0), mask=place < CHOSEN)


@triton.jit(do_not_specialize=["pairs"])
def gather_kernel(
    chosen,  # [pairs] int32
    lines,  # [experts, most] int32: the pairs that chose the expert, in their order
    counts,  # [experts] int32: how many
    pairs,
    most,  # pairs of one expert at most
    BLOCK: tl.constexpr,
):
    """The pairs of a token and one of its experts, by expert; grid (experts,)."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(lines + expert * most + count + tl.cumsum(mine, 0) - 1, pair, mask=mine > 0)
        count += tl.sum(mine, 0)
    tl.store(counts + expert, count)


@triton.jit
def product_of_expert(
    x,  # [lines, K]
    weight,  # [experts, K, N]
    bias,  # [experts, N]
    lines,
    counts,
    most,
    LINES_PER_PAIR: tl.constexpr,  # pairs that share a line of x
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[BM, BN] FP32: x W + bias of one expert, and whose lines these are: pairs, and whether they exist."""
    expert = tl.program_id(2).to(tl.int64)
    line = tl.program_id(1) * BM + tl.arange(0, BM)
    asked = line < tl.load(counts + expert)
    pair = tl.load(lines + expert * most + line, mask=asked, other=0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    source = x + (pair // LINES_PER_PAIR).to(tl.int64)[:, None] * K
    columns = weight + expert * (K * N) + n[None, :]
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        value = tl.load(source + k[None, :], mask=asked[:, None] & (k < K)[None, :], other=0.0)
        part = tl.load(columns + k[:, None] * N, mask=(k < K)[:, None] & inside[None, :], other=0.0)
        accumulator = tl.dot(value, part, accumulator, input_precision=PRECISION)
    accumulator += tl.load(bias + expert * N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return accumulator, pair, asked


@triton.jit(do_not_specialize=["most"])
def expert_up_kernel(
    x,  # [tokens, K]
    weight,  # [experts, K, N]: the gate's columns and the others in turns
    bias,
    lines,
    counts,
    out,  # [pairs, N/2]
    most,
    limit,
    alpha,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The first product of each chosen expert, gated and clamped as gpt-oss does; grid (N/BN, most/BM, experts).
    Programs of experts that nobody has chosen end at once, so their weights are not read."""
    if tl.program_id(1) * BM < tl.load(counts + tl.program_id(2)):
        accumulator, pair, asked = product_of_expert(
            x, weight, bias, lines, counts, most, CHOSEN, N, K, BM, BN, BK, STAGES, PRECISION
        )
        gate, up = tl.split(tl.reshape(accumulator, (BM, BN // 2, 2)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1.0) * gate / (1.0 + tl.exp2(-gate * alpha * LOG2_E))
        column = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        place = out + pair.to(tl.int64)[:, None] * (N // 2) + column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=asked[:, None] & (column < N // 2)[None, :])


@triton.jit(do_not_specialize=["most"])
def expert_down_kernel(
    x,  # [pairs, K]
    weight,  # [experts, K, N]
    bias,
    shares,  # [pairs] FP32
    lines,
    counts,
    out,  # [pairs, N] FP32
    most,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The second product of each chosen expert, times its share; grid (N/BN, most/BM, experts)."""
    if tl.program_id(1) * BM < tl.load(counts + tl.program_id(2)):
        accumulator, pair, asked = product_of_expert(
            x, weight, bias, lines, counts, most, 1, N, K, BM, BN, BK, STAGES, PRECISION
        )
        accumulator *= tl.load(shares + pair, mask=asked, other=0.0)[:, None]
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        place = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(place, accumulator, mask=asked[:, None] & (n < N)[None, :])


@triton.jit
def add_experts_kernel(
    answers,  # [tokens·CHOSEN, HIDDEN] FP32
    positions,
    out,  # [tokens, HIDDEN], added to
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out += the answers of each token's experts; grid (tokens, HIDDEN/BLOCK rounded up)."""
    token = tl.program_id(0)
    if tl.load(positions + token) >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        total = tl.load(out + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        for place in tl.static_range(CHOSEN):
            total += tl.load(answers + (token * CHOSEN + place) * HIDDEN + column, mask=inside, other=0.0)
        tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)
