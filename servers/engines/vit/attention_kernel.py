"""Attention over short sequences, read straight from the packed QKV product and written as the next product wants it.

A whole head fits in one tile (50 tokens padded to 64, 64 elements a head), so there is no running softmax and no
transposed copy: one program loads Q, K and V of one image and head, once, and writes its columns of the result.
"""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def"
# ruff: noqa: N803 - compile-time constants are upper case in Triton

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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
    packed,  # as above
    out,  # [images, HEADS·WIDTH]
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The same for the class token's query alone; one row an image out."""
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
