"""Decodes a request's images before it is queued, outside of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from servers.contract.codec import read_elements
from servers.contract.records import InputTensor
from servers.contract.tensors import Array
from servers.models.image_decoder import Decoding, DecodingSettings, ImageDecoder
from servers.models.specification import ModelSpecification
from servers.native.errors import EXPIRED, QueueFullError, RequestExpiredError

DECODING_S = 30.0


class RequestDecoder:
    """The decoder of one model that takes JPEG files. Belongs to one event loop.

    It decodes at most `queue_size` requests at a time, as many as may wait for the engine afterwards, each for at most
    `DECODING_S`.
    """

    def __init__(self, specification: ModelSpecification, settings: DecodingSettings, queue_size: int) -> None:
        self.settings = settings
        self.pending = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._queue_size = queue_size
        self._pixels = specification.executed.inputs[0].name
        self._decoder = ImageDecoder(specification.preprocessing, settings)

    async def decode(self, files: InputTensor, deadline_ns: int | None) -> Mapping[str, Array]:
        """The engine's inputs for a request's files; a thread reads those in shared memory.

        Raises `ImageError`, `QueueFullError` at once, `RequestExpiredError` at `deadline_ns` of `perf_counter_ns`.
        """
        if self.pending >= self._queue_size:
            raise QueueFullError(f"Exceeds maximum queue size of {self._queue_size} requests")
        self.pending += 1
        self._idle.clear()
        decoding: Decoding | None = None
        timeout_s = float("inf") if deadline_ns is None else max(0.0, (deadline_ns - time.perf_counter_ns()) / 1e9)
        try:
            async with asyncio.timeout(min(timeout_s, DECODING_S)):
                images = files.data if files.window is None else await asyncio.to_thread(read_elements, files)
                decoding = self._decoder.start(images)
                for image in decoding.images:
                    await asyncio.wrap_future(image)
        except TimeoutError:
            if timeout_s < DECODING_S:
                raise RequestExpiredError(EXPIRED) from None
            raise RequestExpiredError(f"the images were not decoded within {DECODING_S:g} s, send fewer") from None
        finally:
            self.pending -= 1
            if not self.pending:
                self._idle.set()
            if decoding is not None:
                decoding.cancel()  # only a failure leaves images to cancel
        return {self._pixels: decoding.pixels}

    async def idle(self, seconds: float) -> bool:
        """Wait until no request is being decoded; False if that took longer."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the threads."""
        self._decoder.close()
