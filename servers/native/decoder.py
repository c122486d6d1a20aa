"""The decoding of a request's images before it is queued, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from servers.contract.tensors import Array
from servers.models.image_decoder import DecodingSettings, ImageDecoder
from servers.models.specification import ModelSpecification
from servers.native.errors import QueueFullError, RequestExpiredError


class RequestDecoder:
    """Of one model that takes JPEG files. Belongs to one event loop.

    At most `queue_size` requests are in here at a time, as many as may wait for the engine afterwards.
    """

    def __init__(self, specification: ModelSpecification, settings: DecodingSettings, queue_size: int) -> None:
        self.settings = settings
        self.pending = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._queue_size = queue_size
        self._files = specification.inputs[0].name
        self._pixels = specification.executed.inputs[0].name
        self._decoder = ImageDecoder(specification.preprocessing, settings)

    async def decode(self, inputs: Mapping[str, Array], deadline_ns: int | None) -> Mapping[str, Array]:
        """A request's files as what the engine takes.

        Raises `ImageError`, `QueueFullError` at once, `RequestExpiredError` at `deadline_ns` of `perf_counter_ns`.
        """
        if self.pending >= self._queue_size:
            raise QueueFullError(f"Exceeds maximum queue size of {self._queue_size} requests")
        self.pending += 1
        self._idle.clear()
        decoding = self._decoder.start(inputs[self._files])
        remaining_s = None if deadline_ns is None else max(0.0, (deadline_ns - time.perf_counter_ns()) / 1e9)
        try:
            async with asyncio.timeout(remaining_s):
                for image in decoding.images:
                    await asyncio.wrap_future(image)
        except TimeoutError:
            raise RequestExpiredError("Request timeout expired") from None
        finally:
            self.pending -= 1
            if not self.pending:
                self._idle.set()
            decoding.cancel()  # nothing is left to cancel unless this fails
        return {self._pixels: decoding.pixels}

    async def idle(self, seconds: float) -> bool:
        """Returns when no request is in here; False if that took longer."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the threads."""
        self._decoder.close()
