"""Two batches in flight on a real GPU, from page-locked and other memory, and from and to device memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from mmap import mmap
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from servers.engines.factory import build_engine
from servers.engines.interface import DeviceMemory, Engine, Finish
from servers.engines.padding import padding_of
from servers.engines.settings import EngineSettings
from servers.measuring.measurement import SLOT_BYTES, flight_rate
from servers.models.registry import get_specification, get_variant
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MAX_BATCH = 16
SLOTS = 48
LENGTHS = (16, 64)
BERT = "transformers:distilbert-base-uncased"


def loaded(specification: ModelSpecification, precision: str, mode: str, **options: Any) -> Engine:
    settings = EngineSettings("torch", precision, mode, "cuda:0", 0, MAX_BATCH, **options)
    engine = build_engine(specification, RandomWeights(0), settings, None)
    engine.load()
    return engine


@pytest.fixture(scope="module", params=["graph-uint8", "graph-fp32", "eager-uint8"])
def image_engine(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, ModelSpecification]]:
    mode, payload = request.param.split("-")
    specification = get_variant("openclip_vit_b32", payload)
    engine = loaded(specification, "fp16", mode)
    yield engine, specification
    engine.close()


@pytest.fixture(scope="module", params=["graph", "eager"])
def text_engine(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, ModelSpecification]]:
    specification = get_specification(BERT)
    engine = loaded(specification, "fp32", request.param, pad_to=LENGTHS)
    yield engine, specification
    engine.close()


def slots_of(specification: ModelSpecification) -> tuple[np.ndarray, list[np.ndarray]]:
    """Memory of the host on its own pages, and images in slots at one distance in it."""
    tensor = specification.inputs[0]
    size = int(np.prod(tensor.item_shape)) * tensor.dtype.itemsize
    stride = -(-size // SLOT_BYTES) * SLOT_BYTES
    memory = np.frombuffer(mmap(-1, stride * SLOTS), np.uint8)
    generator = np.random.default_rng(0)
    images = []
    for slot in range(SLOTS):
        image: Any = memory[slot * stride :][:size].view(tensor.dtype).reshape(1, *tensor.item_shape)
        image[...] = generator.integers(0, 256, image.shape)
        images.append(image)
    return memory, images


def test_each_image_gets_its_answer_under_load(image_engine: tuple[Engine, ModelSpecification]) -> None:
    """Half of the slots are page-locked. The memory is overwritten as soon as a batch is finished."""
    engine, specification = image_engine
    memory, images = slots_of(specification)
    generator = np.random.default_rng(1)
    half = memory.nbytes // 2
    plans = [generator.permutation(SLOTS)[: generator.integers(1, MAX_BATCH + 1)] for _ in range(12)]
    plans += [np.arange(first, first + MAX_BATCH) for first in range(0, SLOTS - MAX_BATCH + 1, 8)]  # in order
    expected: list[Any] = [
        engine.infer({"pixel_values": np.concatenate([images[slot] for slot in plan])})["embedding"] for plan in plans
    ]
    originals = [image.copy() for image in images]
    assert engine.pin(memory.ctypes.data, half)
    unfinished: SimpleQueue[tuple[int, Finish] | None] = SimpleQueue()
    free = threading.Semaphore(engine.flights)
    busy: deque[int] = deque()
    found: list[tuple[int, list[dict[str, Any]]]] = []

    def finish() -> None:
        while (one := unfinished.get()) is not None:
            found.append((one[0], one[1]()))
            busy.popleft()
            free.release()

    thread = threading.Thread(target=finish)
    thread.start()
    try:
        for turn in range(40 * len(plans)):
            number = turn % len(plans)
            free.acquire()
            in_use = {int(slot) for other in list(busy) for slot in plans[other]}
            for slot in range(SLOTS):  # what no unfinished batch reads, holds what no request sent
                if slot not in in_use:
                    images[slot][...] = originals[slot] if slot in plans[number] else 3
            busy.append(number)
            unfinished.put((number, engine.start([{"pixel_values": images[slot]} for slot in plans[number]])))
    finally:
        unfinished.put(None)
        thread.join()
        engine.unpin(memory.ctypes.data)
    assert len(found) == 40 * len(plans)
    for number, answers in found:
        together = np.concatenate([answer["embedding"] for answer in answers])
        np.testing.assert_allclose(together, expected[number], rtol=1e-3, atol=1e-5)


def test_images_and_embeddings_lie_on_the_device(image_engine: tuple[Engine, ModelSpecification]) -> None:
    engine, specification = image_engine
    assert engine.device_index == 0
    tensor = specification.inputs[0]
    pixels: Any = np.random.default_rng(2).integers(0, 256, (7, *tensor.item_shape)).astype(tensor.dtype)
    expected: Any = engine.infer({"pixel_values": pixels})["embedding"]
    on_device = torch.from_numpy(pixels[2:5]).cuda()
    target = torch.zeros(3 * 512 + 1, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    given = DeviceMemory(on_device.data_ptr(), 0, tuple(on_device.shape), tensor.dtype)
    output = DeviceMemory(target.data_ptr(), 0, (3, 512), np.dtype(np.float32))
    requests: list[Any] = [{"pixel_values": pixels[:2]}, {"pixel_values": given}, {"pixel_values": pixels[5:]}]
    for _ in range(5):
        finishes = [engine.start(requests, None, [{}, {"embedding": output}, {}]) for _ in range(2)]
        for end in finishes:
            answers: list[Any] = end()
            assert [list(answer) for answer in answers] == [["embedding"], [], ["embedding"]]
            np.testing.assert_allclose(answers[0]["embedding"], expected[:2], rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(answers[2]["embedding"], expected[5:], rtol=1e-3, atol=1e-5)
        written = target.cpu().numpy()
        np.testing.assert_allclose(written[:-1].reshape(3, 512), expected[2:5], rtol=1e-3, atol=1e-5)
        assert written[-1] == 0
        target.zero_()
        torch.cuda.synchronize()


def test_texts_of_several_lengths_share_a_batch(text_engine: tuple[Engine, ModelSpecification]) -> None:
    engine, specification = text_engine
    assert specification.make_items is not None
    padding = padding_of(specification, LENGTHS)
    generator = np.random.default_rng(0)
    name, (output,) = specification.inputs[0].name, specification.outputs
    originals: list[Any] = [
        specification.make_items(seed, [int(length)] * int(rows))
        for seed, (length, rows) in enumerate(
            zip(generator.integers(1, 65, 8), generator.integers(1, 4, 8), strict=True)
        )
    ]
    alone: list[Any] = [engine.infer(one)[output.name] for one in originals]
    kept = [torch.from_numpy(one[name]).cuda() for one in originals]
    target = torch.zeros(alone[1].size, device="cuda")
    torch.cuda.synchronize()
    requests = [
        {**one, name: DeviceMemory(ids.data_ptr(), 0, tuple(ids.shape), one[name].dtype)} if number % 2 else one
        for number, (one, ids) in enumerate(zip(originals, kept, strict=True))
    ]
    memory = DeviceMemory(target.data_ptr(), 0, alone[1].shape, np.dtype(np.float32))
    for _ in range(10):
        finishes = [
            engine.start(requests[:4], padding, [{}, {output.name: memory}, {}, {}]),
            engine.start(requests[4:], padding),
        ]
        answers: list[Any] = [answer for end in finishes for answer in end()]
        for number, answer in enumerate(answers):
            if number == 1:
                assert answer == {}
                found = target.cpu().numpy().reshape(alone[1].shape)
            else:
                found = answer[output.name]
            np.testing.assert_allclose(found, alone[number], atol=2e-4)


def test_two_batches_in_flight_hide_the_copies() -> None:
    specification = get_variant("openclip_vit_b32", "uint8")
    settings = EngineSettings("torch", "fp16", "graph", "cuda:0", 0, 64)
    engine = build_engine(specification, RandomWeights(0), settings, None)
    engine.load()
    try:
        found = flight_rate(engine, specification, 64, {}, 2)
        assert found is not None
        times_ns = engine.execution_ns(64, 100)
        assert times_ns is not None
        assert found.items_per_second > 0.8 * 64e9 / sorted(times_ns)[50]
    finally:
        engine.close()
