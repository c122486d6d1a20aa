"""Triton kernels around and for convolutions, channels-last: each reads its input and writes its output once.

**Behind** a convolution of cuDNN: bias, residual and activation in one pass over its output.

**Depthwise**, where each channel is a group: no matrix product, but a sum over a window for each value. A thread has 8
channels, the 16 bytes that are read at once, of several pixels side by side, which share what they read.

**Pointwise**, where the window is one pixel: a matrix product. The gates of a squeeze-and-excitation block multiply
what is read.

**Means** of all pixels of a channel.

A kernel is compiled for each combination of its constants, a quarter of a second to a second each, so sizes are no
constants. Channels are counted in units, from which the compiler sees that it may read 16 bytes at once.
"""

# mypy: allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-untyped-def"
# ruff: noqa: N803 - compile-time constants are upper case in Triton

from __future__ import annotations

import math

import triton
import triton.language as tl

NONE, RELU, RELU6, SILU, HARDSWISH, SIGMOID, HARDSIGMOID = (tl.constexpr(place) for place in range(7))
"""Places in `servers.engines.torch.convolutions.ACTIVATIONS`."""
UNIT = 8
"""Channels that are read at once, which are 16 bytes of halves. If their number is not a multiple of it, fewer are."""
BLOCK = 2048
"""Values per program behind a convolution."""
MULTIPROCESSORS = 132
"""Of an H100. On another GPU the blocks may be somewhat too large or too small."""
THREADS = 128
"""Per program of a depthwise convolution."""
MANY_THREADS = 2048 * MULTIPROCESSORS
"""As many as are resident: with more, each does more pixels."""


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    """FP32 values behind an activation."""
    if ACTIVATION == RELU:
        value = tl.where(value < 0.0, 0.0, value)  # tl.maximum would make a number of NaN
    elif ACTIVATION == RELU6:
        value = tl.where(value < 0.0, 0.0, tl.where(value > 6.0, 6.0, value))
    elif ACTIVATION == SILU:
        value = value * tl.sigmoid(value)
    elif ACTIVATION == HARDSWISH:
        value = value * hard_gate(value)
    elif ACTIVATION == SIGMOID:
        value = tl.sigmoid(value)
    elif ACTIVATION == HARDSIGMOID:
        value = hard_gate(value)
    return value


@triton.jit
def hard_gate(value):
    gate = value + 3.0
    return tl.where(gate < 0.0, 0.0, tl.where(gate > 6.0, 6.0, gate)) / 6.0


@triton.jit
def epilogue_kernel(
    values, bias, residual, count, channels, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + places % channels, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(values + places, activated(value, ACTIVATION).to(values.dtype.element_ty), mask=inside)


@triton.jit
def pixels_of(images, line, column, on_row, width, channels, channel, lane):
    """[BLOCK, UNIT] in FP32: channels of the pixels in `column` of a line, zeros beside the image."""
    inside = on_row & (column >= 0) & (column < width)
    place = (line + column) * channels + channel
    return tl.load(images + place[:, None] + lane[None, :], mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_finished(value, residual, outputs, place, inside, lane, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr):
    places = place[:, None] + lane[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + places, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(outputs + places, activated(value, ACTIVATION).to(outputs.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=("count", "units", "height", "width", "out_height", "out_width"))
def depthwise_kernel(
    images, taps, bias, residual, outputs, count, units, height, width, out_height, out_width,
    UNIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each thread has one unit of channels of `COLUMNS` (2 or 4) pixels side by side, for which it reads a tap
    once."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = place < count
    channels = units * UNIT
    channel = (place % units) * UNIT
    lane = tl.arange(0, UNIT)
    of_row = tl.cdiv(out_width, COLUMNS)
    column = (place // units) % of_row * COLUMNS
    row = place // (units * of_row) % out_height
    image = place // (units * of_row * out_height)
    first = column * STRIDE
    value = tl.zeros((BLOCK, UNIT), tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + channel[:, None] + lane[None, :], mask=known[:, None], other=0.0).to(tl.float32)
    value_1, value_2, value_3 = value, value, value
    for down in tl.static_range(HEIGHT):
        y = row * STRIDE - PADDING + down * DILATION
        on_row = known & (y >= 0) & (y < height)
        line = (image * height + y) * width
        for right in tl.static_range(WIDTH):
            tap = taps + (down * WIDTH + right) * channels + channel
            tap = tl.load(tap[:, None] + lane[None, :], mask=known[:, None], other=0.0).to(tl.float32)
            # Sums of constants, so that a pixel that several columns read is loaded once.
            x = right * DILATION - PADDING
            value += tap * pixels_of(images, line, first + x, on_row, width, channels, channel, lane)
            value_1 += tap * pixels_of(images, line, first + (x + STRIDE), on_row, width, channels, channel, lane)
            if COLUMNS > 2:
                value_2 += tap * pixels_of(
                    images, line, first + (x + 2 * STRIDE), on_row, width, channels, channel, lane
                )
                value_3 += tap * pixels_of(
                    images, line, first + (x + 3 * STRIDE), on_row, width, channels, channel, lane
                )
    place = ((image * out_height + row) * out_width + column) * channels + channel
    store_finished(value, residual, outputs, place, known, lane, HAS_RESIDUAL, ACTIVATION)
    inside = known & (column + 1 < out_width)
    store_finished(value_1, residual, outputs, place + channels, inside, lane, HAS_RESIDUAL, ACTIVATION)
    if COLUMNS > 2:
        inside = known & (column + 2 < out_width)
        store_finished(value_2, residual, outputs, place + 2 * channels, inside, lane, HAS_RESIDUAL, ACTIVATION)
        inside = known & (column + 3 < out_width)
        store_finished(value_3, residual, outputs, place + 3 * channels, inside, lane, HAS_RESIDUAL, ACTIVATION)


@triton.jit(do_not_specialize=("units",))
def mean_kernel(
    images, outputs, units, UNIT: tl.constexpr, PIXELS: tl.constexpr, BLOCK_PIXELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    channels = units * UNIT
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    total = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    for first in range(0, PIXELS, BLOCK_PIXELS):
        pixel = first + tl.arange(0, BLOCK_PIXELS)
        place = (tl.program_id(0) * PIXELS + pixel) * channels
        inside = (pixel < PIXELS)[:, None] & (channel < channels)[None, :]
        total += tl.load(images + place[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / PIXELS
    place = tl.program_id(0) * channels + channel
    tl.store(outputs + place, mean.to(outputs.dtype.element_ty), mask=channel < channels)


@triton.jit(do_not_specialize=("pixels", "image_pixels", "in_units", "out_units"))
def pointwise_kernel(
    images, weights, bias, residual, gates, outputs, pixels, image_pixels, in_units, out_units,
    IN_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GATES: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    ins, outs = in_units * IN_UNIT, out_units * OUT_UNIT
    out_blocks = tl.cdiv(outs, BLOCK_OUT)
    pixel = (tl.program_id(0) // out_blocks) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    out = (tl.program_id(0) % out_blocks) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    value = tl.zeros((BLOCK_PIXELS, BLOCK_OUT), tl.float32)
    for first in range(0, ins, BLOCK_IN):
        channel = first + tl.arange(0, BLOCK_IN)
        inside = (pixel < pixels)[:, None] & (channel < ins)[None, :]
        read = tl.load(images + pixel[:, None] * ins + channel[None, :], mask=inside, other=0.0)
        if HAS_GATES:
            image = (pixel // image_pixels)[:, None]
            read = read * tl.load(gates + image * ins + channel[None, :], mask=inside, other=0.0)
        weight = tl.load(
            weights + out[None, :] * ins + channel[:, None], mask=(out < outs)[None, :] & (channel < ins)[:, None],
            other=0.0,
        )  # fmt: skip
        value = tl.dot(read, weight, value)
    if HAS_BIAS:
        value += tl.load(bias + out, mask=out < outs, other=0.0).to(tl.float32)[None, :]
    place = pixel[:, None] * outs + out[None, :]
    mask = (pixel < pixels)[:, None] & (out < outs)[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(outputs + place, activated(value, ACTIVATION).to(outputs.dtype.element_ty), mask=mask)


def epilogue_in_place(values, bias, residual, activation: int) -> None:
    """`values`, `residual` [n, channels, h, w], channels-last, below `convolutions.MOST_VALUES`; `bias` [channels]."""
    count = values.numel()
    epilogue_kernel[(triton.cdiv(count, BLOCK),)](
        values, values if bias is None else bias, values if residual is None else residual, count, values.shape[1],
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ACTIVATION=activation,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def depthwise(images, taps, bias, residual, outputs, geometry, activation: int, columns=None) -> None:
    """A convolution in which each channel is a group. All tensors are channels-last, `taps` [height, width, channels].
    `geometry`: stride, padding and dilation, each the same for both axes."""
    (height, width, channels), (stride, padding, dilation) = taps.shape, geometry
    rows, _, out_height, out_width = outputs.shape
    unit = math.gcd(channels, UNIT)
    lines = rows * out_height * (channels // unit)
    columns = columns or (4 if lines * out_width >= MANY_THREADS else 2)
    count = lines * triton.cdiv(out_width, columns)
    depthwise_kernel[(triton.cdiv(count, THREADS),)](
        images, taps, taps if bias is None else bias, images if residual is None else residual, outputs,
        count, channels // unit, *images.shape[2:], out_height, out_width, UNIT=unit, HEIGHT=height, WIDTH=width,
        STRIDE=stride, PADDING=padding, DILATION=dilation, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, ACTIVATION=activation, COLUMNS=columns, BLOCK=THREADS,
        num_warps=THREADS // 32,
    )  # fmt: skip


def pointwise(images, weight, bias, residual, gates, outputs, activation: int, blocks=None) -> None:
    """A convolution of single pixels, in halves, channels-last; `weight` [outs, ins, 1, 1], `gates` [n, ins, 1, 1] or
    None multiply the images."""
    outs, ins = weight.shape[:2]
    rows, _, height, width = images.shape
    pixels = rows * height * width
    block_pixels, block_out, block_in = blocks or pointwise_blocks(pixels, outs, gates is not None)
    in_unit, out_unit = math.gcd(ins, UNIT), math.gcd(outs, UNIT)
    pointwise_kernel[(triton.cdiv(pixels, block_pixels) * triton.cdiv(outs, block_out),)](
        images, weight, weight if bias is None else bias, images if residual is None else residual,
        images if gates is None else gates, outputs, pixels, height * width, ins // in_unit, outs // out_unit,
        IN_UNIT=in_unit, OUT_UNIT=out_unit, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        HAS_GATES=gates is not None, ACTIVATION=activation, BLOCK_PIXELS=block_pixels, BLOCK_OUT=block_out,
        BLOCK_IN=block_in, num_warps=4, num_stages=3,
    )  # fmt: skip


def pointwise_blocks(pixels: int, outs: int, gated: bool) -> tuple[int, int, int]:
    """Pixels, outputs and inputs of a block; few kinds, because each is compiled."""
    if pixels <= 512:
        return 16, 32, 64
    if triton.cdiv(pixels, 128) * triton.cdiv(outs, 64) >= 2 * MULTIPROCESSORS:
        return 128, 64, 32
    if triton.cdiv(pixels, 64) * triton.cdiv(outs, 64) >= MULTIPROCESSORS or (gated and pixels >= 4096):
        return 64, 64, 64
    return 16, 64, 64


def mean_of_pixels(images, outputs) -> None:
    """`images` [n, channels, h, w], channels-last; `outputs` [n, channels, 1, 1], contiguous."""
    rows, channels, height, width = images.shape
    unit = math.gcd(channels, UNIT)
    block_pixels, block_channels = min(triton.next_power_of_2(height * width), 256), 16
    mean_kernel[(rows, triton.cdiv(channels, block_channels))](
        images, outputs, channels // unit, UNIT=unit, PIXELS=height * width, BLOCK_PIXELS=block_pixels,
        BLOCK_CHANNELS=block_channels, num_warps=4,
    )  # fmt: skip
