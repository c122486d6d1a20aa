"""From the JPEG files of a request to its UINT8 pixels, on a few threads; both servers run this code.

simplejpeg releases the interpreter's lock while it decodes and Pillow while it resizes, so threads are enough.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from servers.models.preprocessing import MAX_PIXELS, ImageError, UInt8Array, decode_jpeg, resize_and_crop
from servers.models.specification import Preprocessing
from servers.protocol.tensors import Array

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
        return self.threads or min(MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


class Decoding:
    """The images of one request while they are decoded: one future per image, each of which fills its row.

    A request has at most `lanes` images on the threads at a time, so that other requests get their turn.
    """

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
        """Begin to decode an object array of `bytes`, one JPEG per row; returns at once.

        `allocate` gives the memory for the pixels: that many bytes, or what it raises.
        """
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
