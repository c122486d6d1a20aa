"""Images are decoded within the request's limits: how many may wait, until when, and for whom."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest

from servers.models.images import Decoding, DecodingSettings, ImageError
from servers.models.items import jpeg_paths
from servers.models.registry import get_variant
from servers.native.front.inference import RequestDecoder
from servers.native.shared.errors import RefusedError
from servers.native.shared.interface import ModelState
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import RequestTimes, Statistics
from servers.protocol.records import InferRequest, InputTensor
from servers.protocol.tensors import Array
from tests.unit.native.conftest import served

JPEG = get_variant("openclip_vit_b32", "jpeg")


def request(*images: bytes) -> InputTensor:
    array = np.empty((len(images), 1), object)
    array[:, 0] = images
    return InputTensor("image", "BYTES", array.shape, array)


GOOD = request(jpeg_paths()[8].read_bytes())


@pytest.fixture
def decoder() -> Iterator[RequestDecoder]:
    settings = NativeSettings()
    decoder = RequestDecoder(JPEG, DecodingSettings(threads=1), 2, RequestMemory.alone(settings), Statistics(1))
    yield decoder
    decoder.close()


@pytest.fixture
def gate(decoder: RequestDecoder) -> Iterator[threading.Event]:
    """Keeps the only thread busy until it is set."""
    gate = threading.Event()
    decoder._decoder._threads.submit(gate.wait)
    yield gate
    gate.set()


def test_files_become_what_the_engine_takes(decoder: RequestDecoder) -> None:
    decoded = asyncio.run(decoder.decode(GOOD, None))
    assert list(decoded) == ["pixel_values"]
    assert (decoded["pixel_values"].shape, decoded["pixel_values"].dtype) == ((1, 224, 224, 3), np.dtype(np.uint8))
    assert decoder.pending == 0


def test_no_more_wait_than_the_queue_holds(decoder: RequestDecoder, gate: threading.Event) -> None:
    async def run() -> None:
        waiting = [asyncio.create_task(decoder.decode(GOOD, None)) for _ in range(2)]
        await asyncio.sleep(0)
        assert decoder.pending == 2
        with pytest.raises(RefusedError, match="maximum queue size of 2"):
            await decoder.decode(GOOD, None)
        gate.set()
        await asyncio.gather(*waiting)
        assert decoder.pending == 0
        await decoder.decode(GOOD, None)

    asyncio.run(run())


def test_unloading_finishes_requests_whose_images_are_still_decoded() -> None:
    async def run() -> None:
        settings = NativeSettings(allow_model_control=True)
        async with served(JPEG, settings) as server:
            models = server.server.models
            service = models.default
            assert service.decoding is not None
            assert service._decoder is not None
            gate = threading.Event()
            for _ in range(service.decoding.thread_count):
                service._decoder._decoder._threads.submit(gate.wait)
            accepted = asyncio.create_task(service.infer(InferRequest("", (GOOD,)), RequestTimes(0)))
            while not service.statistics.snapshot().decoding:
                await asyncio.sleep(0)
            unloading = asyncio.create_task(models.unload(JPEG.name))
            while service.state is not ModelState.UNLOADED:
                await asyncio.sleep(0)
            gate.set()
            answer = await accepted
            assert answer.outputs[0].data.shape == (1, 512)
            await unloading

    asyncio.run(run())


@pytest.mark.parametrize("own", [True, False], ids=["the request's", "the server's"])
def test_a_deadline_ends_the_wait(
    decoder: RequestDecoder, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    begun: list[Decoding] = []
    start = decoder._decoder.start

    def noted(images: Array, allocate: Callable[[int], Array]) -> Decoding:
        begun.append(start(images, allocate))
        return begun[-1]

    monkeypatch.setattr(decoder._decoder, "start", noted)
    if not own:
        monkeypatch.setattr("servers.native.front.inference.DECODING_S", 0.02)
    with pytest.raises(RefusedError, match="timeout expired" if own else "not decoded within 0.02 s"):
        asyncio.run(decoder.decode(GOOD, time.perf_counter_ns() + 20_000_000 if own else None))
    assert decoder.pending == 0
    assert all(image.cancelled() for image in begun[0].images)


def test_images_of_several_requests_take_turns(decoder: RequestDecoder, gate: threading.Event) -> None:
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    file: bytes = GOOD.data[0, 0]
    decodings = [decoder._decoder.start(request(*[file] * count).data) for count in (3, 1)]
    for name, decoding in zip("ab", decodings, strict=True):

        def noted(_: object, name: str = name) -> None:
            order.put(name)

        for image in decoding.images:
            image.add_done_callback(noted)
    gate.set()
    assert decodings[0].result().shape == (3, 224, 224, 3)
    assert "".join(order.get(timeout=60) for _ in range(4)) == "abaa"


def test_what_has_not_begun_when_the_threads_end_is_dropped(decoder: RequestDecoder, gate: threading.Event) -> None:
    decoding = decoder._decoder.start(request(*[b""] * 3).data)
    decoder.close()
    with pytest.raises(CancelledError):
        decoding.result()
    with pytest.raises(CancelledError):
        decoder._decoder.start(request(b"").data).result()


def test_a_client_that_leaves_frees_its_place(decoder: RequestDecoder, gate: threading.Event) -> None:
    async def run() -> None:
        task = asyncio.create_task(decoder.decode(request(*[b""] * 8), None))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert decoder.pending == 0


def test_a_bad_image_frees_its_place(decoder: RequestDecoder) -> None:
    with pytest.raises(ImageError, match="image 0"):
        asyncio.run(decoder.decode(request(b"", b"no"), None))
    assert decoder.pending == 0
