"""From the JPEG files of a request to its UINT8 pixels, on a few threads: the code that both servers run.

simplejpeg releases the interpreter's lock while it decodes and Pillow while it resizes, so threads are enough.
"""

from __future__ import annotations

import os
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from servers.contract.tensors import Array
from servers.models.preprocessing import MAX_PIXELS, ImageError, UInt8Array, decode_jpeg, resize_and_crop
from servers.models.specification import Preprocessing

MAX_DEFAULT_THREADS = 4
"""More threads than this are for whoever asks for them: each may hold a whole decoded image."""


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """`threads` 0: one a core, at most four."""

    threads: int = 0
    max_pixels: int = MAX_PIXELS

    @property
    def thread_count(self) -> int:
        """What `threads` comes to on this machine."""
        return self.threads or min(MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Decoding:
    """The images of one request while they are decoded: one future an image, each of which fills its row."""

    pixels: UInt8Array
    images: tuple[Future[None], ...]

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
        """Drop what has not begun; what has goes on, into memory that nobody reads."""
        for image in self.images:
            image.cancel()


class ImageDecoder:
    """A pool of threads. `start` may be called from any thread."""

    def __init__(self, preprocessing: Preprocessing, settings: DecodingSettings) -> None:
        self.settings = settings
        self._preprocessing = preprocessing
        self._threads = ThreadPoolExecutor(settings.thread_count, "decode")

    def start(self, images: Array) -> Decoding:
        """Begin to decode an object array of `bytes`, one JPEG a row; returns at once."""
        size = self._preprocessing.size
        files = images.reshape(-1).tolist()
        pixels = np.empty((len(files), size, size, 3), np.uint8)
        futures = tuple(
            self._threads.submit(self._decode, f"image {index}: " if len(files) > 1 else "", data, pixels[index])
            for index, data in enumerate(files)
        )
        return Decoding(pixels, futures)

    def close(self) -> None:
        """End the threads after what they are at; drop what has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, label: str, data: bytes, out: UInt8Array) -> None:
        max_pixels = self.settings.max_pixels
        try:
            resize_and_crop(decode_jpeg(data, max_pixels), self._preprocessing, max_pixels, out)
        except ImageError as exc:
            raise ImageError(f"{label}{exc}") from exc
