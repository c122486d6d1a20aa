"""From JPEG bytes to a model's input in three steps: decode, resize and crop, normalise; for requests, on threads.

The result is that of `open_clip.image_transform(size, is_train=False)` on the same bytes, bit for bit (a test compares
them); nothing here needs torch. The steps are separate because a payload may start at any of them.

The rule for images: a whole JPEG in grey, YCbCr or RGB, of at most `max_pixels`, is accepted. Anything else is an
`ImageError`: another format whatever its name, CMYK, truncated data, damage that the decoder notices, too many pixels
before or after resizing, too many scans. Damage that the decoder does not notice is accepted.

simplejpeg releases the interpreter's lock while it decodes and Pillow while it resizes, so threads are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

import numpy as np
import numpy.typing as npt

from servers.models.specification import Preprocessing
from servers.options.defaults import usable_cores
from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import Array

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

MAX_PIXELS = 40_000_000
"""An image of this size takes 120 MB once decoded, and 160 MB more while it is resized."""

MAX_SCANS = 100
MAX_PASSES = 12
"""The most scans of an image with `max_pixels`; a smaller one may have more. Each scan is a pass over all pixels,
however few bytes it has. Progressive encoders write about ten, and the thumbnail inside a file counts as one."""

_SCAN_BEGINS = b"\xff\xda"


class ImageError(InvalidRequestError):
    """The bytes cannot be decoded as an image, or the image is larger than allowed."""


def decode_jpeg(data: bytes | memoryview, max_pixels: int = MAX_PIXELS) -> UInt8Array:
    """RGB pixels, uint8 (height, width, 3); greyscale comes out with three equal channels. The size is read from the
    header first, so a false claim of 65,500 × 65,500 pixels costs no memory. Raises `ImageError`; see the module for
    the rule."""
    import simplejpeg  # not above: the machine of a load generator has the command line but no image libraries

    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as exc:
        raise ImageError("the image is not a JPEG that can be decoded") from exc
    if height * width > max_pixels:
        raise ImageError(f"the image has {width} x {height} pixels, at most {max_pixels} are taken")
    if colorspace in ("CMYK", "YCCK"):
        raise ImageError("the image is a CMYK JPEG; send it as RGB or greyscale")
    scans = bytes(data).count(_SCAN_BEGINS)
    if scans > MAX_SCANS:
        raise ImageError(f"the image is a JPEG of more than {MAX_SCANS} scans")
    if scans * height * width > MAX_PASSES * max_pixels:
        raise ImageError(
            f"the image has {scans} scans of {width} x {height} pixels, at most {MAX_PASSES * max_pixels} pixels are "
            "taken over all scans"
        )
    try:
        pixels: UInt8Array = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError as exc:
        raise ImageError("the image is a truncated or corrupt JPEG") from exc
    return pixels


def resize_and_crop(
    pixels: UInt8Array, preprocessing: Preprocessing, max_pixels: int = MAX_PIXELS, out: UInt8Array | None = None
) -> UInt8Array:
    """Scale the shorter side, or both, to `resize` and cut the centre: uint8 (h, w, 3) → (size, size, 3), contiguous.

    Pillow's antialiased filter on the whole picture, then the crop, rounding as torchvision's `Resize` and
    `CenterCrop` do; cropping first would be faster and would change the border. Written into `out` where that is
    given. Raises `ImageError` for an image so narrow that it would be resized to more than `max_pixels`.
    """
    size = preprocessing.size
    shorter = preprocessing.resize or size
    height, width = pixels.shape[:2]
    short = min(height, width)
    if preprocessing.squash:
        scaled_width = scaled_height = shorter
    else:
        scaled_width, scaled_height = shorter * width // short, shorter * height // short
    if scaled_width * scaled_height > max_pixels:
        raise ImageError(f"the image is too narrow: {width} x {height} pixels")
    if (scaled_width, scaled_height) != (width, height):
        from PIL import Image  # not above, for the same reason

        resampling = Image.Resampling[preprocessing.interpolation.upper()]
        image = Image.fromarray(pixels).resize((scaled_width, scaled_height), resampling)
        pixels = np.asarray(image)
    top, left = round((scaled_height - size) / 2), round((scaled_width - size) / 2)
    cropped = pixels[top : top + size, left : left + size]
    if out is None:
        return np.ascontiguousarray(cropped)
    out[...] = cropped
    return out


def normalise(images: UInt8Array, preprocessing: Preprocessing) -> Float32Array:
    """Scale to 0–1, subtract the mean, divide by the deviation: uint8 (n, h, w, 3) → float32 (n, 3, h, w), contiguous.
    A byte has 256 values, so this is a look-up; the table is filled with torchvision's operations in its order."""
    table = _table(preprocessing.mean, preprocessing.std)
    count, height, width, channels = images.shape
    out = np.empty((count, channels, height, width), np.float32)
    for channel in range(channels):
        np.take(table[channel], images[..., channel], out=out[:, channel], mode="clip")
    return out


@lru_cache(maxsize=8)
def _table(mean: tuple[float, ...], std: tuple[float, ...]) -> Float32Array:
    scaled = np.arange(256, dtype=np.float32) / np.float32(255)
    rows = [(scaled - np.float32(m)) / np.float32(s) for m, s in zip(mean, std, strict=True)]
    table: Float32Array = np.stack(rows)
    return table


MAX_DEFAULT_THREADS = 4
"""The default stays small because each thread may hold a whole decoded image."""


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """`threads` 0: one per core, at most four."""

    threads: int = 0
    max_pixels: int = MAX_PIXELS

    @property
    def thread_count(self) -> int:
        """The number of threads on this machine."""
        return self.threads or min(MAX_DEFAULT_THREADS, usable_cores())


class Decoding:
    """The images of one request while they are decoded: one future per image, each of which fills its row. A request
    has at most `lanes` images on the threads at a time, so that other requests get their turn."""

    def __init__(
        self, threads: ThreadPoolExecutor, lanes: int, pixels: UInt8Array, work: Sequence[Callable[[], None]]
    ) -> None:
        self.pixels = pixels
        self.images: tuple[Future[None], ...] = tuple(Future() for _ in work)
        self._threads = threads
        self._waiting = deque(zip(self.images, work, strict=True))
        for _ in range(lanes):
            self._next()

    def result(self) -> UInt8Array:
        """Waits for all: uint8 (n, size, size, 3). Raises the `ImageError` of the first bad one and drops the rest."""
        try:
            for image in self.images:
                image.result()
        except (ImageError, CancelledError):
            self.cancel()
            raise
        return self.pixels

    def cancel(self) -> None:
        """Drop the images that have not begun; the others still fill their rows, which are not read."""
        self._waiting.clear()
        for image in self.images:
            image.cancel()

    def _next(self, last: Future[None] | None = None) -> None:
        """Put the next image on the threads; called again when an image, `last`, is done or dropped."""
        try:
            if last is not None and last.cancelled():
                self.cancel()
            image, work = self._waiting.popleft()
            self._threads.submit(_complete, image, work).add_done_callback(self._next)
        except IndexError:  # no image is left
            return
        except RuntimeError:  # the threads have ended
            self.cancel()


class ImageDecoder:
    """A pool of decoding threads. `start` may be called from any thread."""

    def __init__(self, preprocessing: Preprocessing, settings: DecodingSettings) -> None:
        self.settings = settings
        self._preprocessing = preprocessing
        self._threads = ThreadPoolExecutor(settings.thread_count, "decode")

    def start(self, images: Array, allocate: Callable[[int], Array] | None = None) -> Decoding:
        """Begin to decode an object array of `bytes`, one JPEG per row; returns at once. `allocate` gives the memory
        for the pixels: that many bytes, or what it raises."""
        size = self._preprocessing.size
        files = images.reshape(-1).tolist()
        shape = (len(files), size, size, 3)
        pixels = np.empty(shape, np.uint8) if allocate is None else allocate(prod(shape)).view(np.uint8).reshape(shape)
        work = [
            partial(self._decode, f"image {index}: " if len(files) > 1 else "", data, pixels[index])
            for index, data in enumerate(files)
        ]
        return Decoding(self._threads, self.settings.thread_count, pixels, work)

    def close(self) -> None:
        """End the threads after their current image; drop the others."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, label: str, data: bytes, out: UInt8Array) -> None:
        max_pixels = self.settings.max_pixels
        try:
            resize_and_crop(decode_jpeg(data, max_pixels), self._preprocessing, max_pixels, out)
        except ImageError as exc:
            raise ImageError(f"{label}{exc}") from exc


def _complete(image: Future[None], work: Callable[[], None]) -> None:
    """Complete the future as an executor does."""
    if not image.set_running_or_notify_cancel():
        return
    try:
        work()
    except BaseException as error:  # noqa: BLE001  `result` raises it
        image.set_exception(error)
    else:
        image.set_result(None)
