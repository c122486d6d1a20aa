"""A merged batch is one execution, and each request gets its own rows back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from servers.engines.interface import EngineError
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.images import DecodingSettings, ImageDecoder, ImageError, decode_jpeg, resize_and_crop
from servers.models.items import jpeg_paths
from servers.models.registry import get_variant
from servers.models.specification import ModelSpecification
from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import Array
from servers.triton.batch_executor import BatchExecutor


class Recorder(NullEngine):
    """An engine that answers twice each row's first 512 values, and keeps what it was given."""

    def __init__(self, specification: ModelSpecification) -> None:
        super().__init__(specification, EngineSettings("null"))
        self.given: list[Array] = []

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        array: np.ndarray = inputs["pixel_values"]
        self.given.append(array)
        if len(array) == 7:
            raise EngineError("seven")
        return {"embedding": array.reshape(len(array), -1)[:, :512] * np.float32(2)}


@pytest.fixture
def engine(specification: ModelSpecification) -> Recorder:
    return Recorder(specification)


@pytest.fixture
def executor(engine: Recorder, specification: ModelSpecification) -> Any:
    return BatchExecutor(engine, specification, 16)


def pixels(rows: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, 3, 224, 224), np.float32)


def alone(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1)[:, :512] * np.float32(2)


def test_each_request_gets_its_rows(executor: Any, engine: Recorder) -> None:
    requests = [pixels(rows, seed) for seed, rows in enumerate((1, 4, 2, 1))]
    answers = executor.execute([{"pixel_values": array} for array in requests])
    assert [len(given) for given in engine.given] == [8]
    assert engine.given[0].flags.c_contiguous
    for array, answer in zip(requests, answers, strict=True):
        assert list(answer) == ["embedding"]
        np.testing.assert_array_equal(answer["embedding"], alone(array))
        assert answer["embedding"].flags.c_contiguous


def test_a_batch_of_one_request_is_not_copied(executor: Any, engine: Recorder) -> None:
    array = pixels(3, 0)
    (answer,) = executor.execute([{"pixel_values": array}])
    assert engine.given[0] is array
    np.testing.assert_array_equal(answer["embedding"], alone(array))


def test_one_nan_request_leaves_the_others_alone(executor: Any) -> None:
    requests = [pixels(1, 1), np.full((1, 3, 224, 224), np.nan, np.float32), pixels(2, 2)]
    first, bad, last = executor.execute([{"pixel_values": array} for array in requests])
    np.testing.assert_array_equal(first["embedding"], alone(requests[0]))
    assert np.isnan(bad["embedding"]).all()
    np.testing.assert_array_equal(last["embedding"], alone(requests[2]))


def test_values_that_the_engine_refuses_are_the_fault_of_their_request(
    executor: Any, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(inputs: Mapping[str, Array]) -> None:
        if inputs["pixel_values"].min() < -9:
            raise InvalidRequestError("below -9")

    monkeypatch.setattr(engine, "check_values", check)
    requests = [pixels(1, 1), np.full((1, 3, 224, 224), -10, np.float32), pixels(2, 2)]
    executor.execute([{"pixel_values": array} for array in requests])
    assert [len(given) for given in engine.given] == [4], "an engine that takes any values is not asked"
    monkeypatch.setattr(engine, "checks_values", True)
    first, bad, last = executor.execute([{"pixel_values": array} for array in requests])
    assert isinstance(bad, InvalidRequestError)
    assert [len(given) for given in engine.given] == [4, 3], "the others are executed once, together"
    np.testing.assert_array_equal(first["embedding"], alone(requests[0]))
    np.testing.assert_array_equal(last["embedding"], alone(requests[2]))


def test_a_later_batch_does_not_change_earlier_answers(executor: Any) -> None:
    answers = executor.execute([{"pixel_values": pixels(1, 1)}, {"pixel_values": pixels(1, 2)}])
    kept = [answer["embedding"].copy() for answer in answers]
    executor.execute([{"pixel_values": pixels(1, 3)}, {"pixel_values": pixels(1, 4)}])
    for answer, before in zip(answers, kept, strict=True):
        np.testing.assert_array_equal(answer["embedding"], before)


def test_the_full_batch_fits_and_the_next_one_does_not_see_it(executor: Any, engine: Recorder) -> None:
    executor.execute([{"pixel_values": pixels(8, 1)}, {"pixel_values": pixels(8, 2)}])
    executor.execute([{"pixel_values": pixels(1, 3)}, {"pixel_values": pixels(1, 4)}])
    assert [len(given) for given in engine.given] == [16, 2]
    assert np.shares_memory(engine.given[0], engine.given[1]), "the staging array is used again"


def test_a_request_that_makes_its_batch_fail_fails_alone(executor: Any, engine: Recorder) -> None:
    requests = [pixels(rows, seed) for seed, rows in enumerate((3, 4))]
    answers = executor.execute([{"pixel_values": array} for array in requests])
    assert [len(given) for given in engine.given] == [7, 3, 4]
    for array, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["embedding"], alone(array))
    (failed,) = executor.execute([{"pixel_values": pixels(7, 2)}])
    assert isinstance(failed, EngineError)


def test_a_bad_image_leaves_the_batch(engine: Recorder, specification: ModelSpecification) -> None:
    jpeg = get_variant(specification.name, "jpeg")
    decoder = ImageDecoder(jpeg.preprocessing, DecodingSettings(threads=2))
    executor = BatchExecutor(engine, jpeg, 16, decoder)
    photographs = [path.read_bytes() for path in jpeg_paths()[:3]]

    def request(*images: bytes) -> dict[str, Array]:
        array = np.empty((len(images), 1), object)
        array[:, 0] = images
        return {"image": array}

    answers: Any = executor.execute([request(photographs[0]), request(b"broken"), request(*photographs[1:])])
    assert isinstance(answers[1], ImageError)
    assert [array.shape for array in engine.given] == [(3, 224, 224, 3)]
    for index, row in enumerate([answers[0]["embedding"][0], *answers[2]["embedding"]]):
        pixels = resize_and_crop(decode_jpeg(photographs[index]), jpeg.preprocessing)
        np.testing.assert_array_equal(row, pixels.reshape(-1)[:512] * np.float32(2))
    assert all(isinstance(answer, ImageError) for answer in executor.execute([request(b""), request(b"")]))
    assert len(engine.given) == 1, "nothing was left to execute"
    decoder.close()
