"""Two batches in flight: each request gets the answer that it gets alone, wherever its tensors lie."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from servers.engines import interface
from servers.engines.batches import Bucket
from servers.engines.interface import DeviceMemory, EngineDescription, EngineError, Finish, HostMemory
from servers.engines.padding import Padding
from servers.engines.settings import EngineSettings
from servers.engines.torch.copies import CudaCopies, page_locked
from servers.engines.torch.runner import COPIED_BYTES, RunnerEngine
from servers.gpu import cuda_library
from servers.gpu.cuda_library import CudaError
from servers.measuring.measurement import SLOT_BYTES, flight_rate
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Axis, TensorSpec
from tests.host_copies import HostCopies
from tests.unit.engines.fake_driver import DriverCopies, compiled_driver

CPU = torch.device("cpu")
MAX_ROWS = 8
WIDE = COPIED_BYTES // 4 // 2
"""Two rows of the output are copied; three are fetched into memory of their own."""
AXIS = Axis("length", 4, 16, {"ids": 1, "mask": 2, "hidden": 1}, {"ids": 9, "mask": 0})

Tensors = dict[str, Any]


def fixed(x: Any, pixels: Any) -> tuple[Any, Any]:
    total = x[:, 0] + pixels.reshape(len(pixels), -1).sum(1)
    return (total[:, None] + x, x[:, :1].repeat(WIDE, 1) if isinstance(x, np.ndarray) else x[:, :1].repeat(1, WIDE))


def padded(ids: Any, mask: Any, scale: Any) -> tuple[Any, Any]:
    kept = ids * mask[:, 0]
    hidden = kept[:, :, None] + scale[:, None, :2]
    return hidden, scale + kept.sum(1)[:, None]


def specification_of(**fields: Any) -> ModelSpecification:
    return ModelSpecification("m", "m", "1", max_batch_size=MAX_ROWS, load_module=lambda _source: None, **fields)  # type: ignore[arg-type,return-value]


FIXED = specification_of(
    inputs=(TensorSpec("x", "FP32", (-1, 3)), TensorSpec("pixels", "UINT8", (-1, 2, 5))),
    outputs=(TensorSpec("y", "FP32", (-1, 3)), TensorSpec("wide", "FP32", (-1, WIDE))),
)
PADDED = specification_of(
    inputs=(
        TensorSpec("ids", "INT64", (-1, -1)),
        TensorSpec("mask", "INT32", (-1, 2, -1)),
        TensorSpec("scale", "FP32", (-1, 3)),
    ),
    outputs=(TensorSpec("hidden", "FP32", (-1, -1, 2)), TensorSpec("pooled", "FP32", (-1, 3))),
    axes=(AXIS,),
)
COMPUTE: dict[int, Callable[..., tuple[Any, Any]]] = {id(FIXED): fixed, id(PADDED): padded}


class SmallEngine(RunnerEngine):
    """Executes by graphs or by calls on the CPU, where the runner makes the same copies as on a GPU."""

    def __init__(
        self, specification: ModelSpecification, *, graphs: bool = True, copies: CudaCopies | None = None
    ) -> None:
        super().__init__(specification, EngineSettings("torch", max_batch_size=MAX_ROWS))
        self.copies = copies or HostCopies()
        self.fails = False
        self.graphs = graphs
        self.executed: list[tuple[int, ...]] = []
        self.load()

    def load(self) -> None:
        sizes = (4, 8, 16) if self._specification.axes else ()
        build, call = (self._build, None) if self.graphs else (None, self._compute)
        self._start(build, (1, 2, 4, MAX_ROWS), CPU, call=call, sizes=sizes, copies=self.copies)

    def _compute(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.fails:
            raise RuntimeError("planted")
        if not self.graphs and self._runner is not None:
            self._runner.copies.synchronise()  # torch on the CPU heeds no streams
        self.executed.append(tuple(inputs[0].shape))
        return COMPUTE[id(self._specification)](*inputs)

    def _build(self, _bucket: Bucket) -> Callable[..., None]:
        def enqueue(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
            for output, value in zip(outputs, self._compute(inputs), strict=True):
                output.copy_(value)

        return enqueue

    def describe(self) -> EngineDescription:
        raise NotImplementedError


def alone(specification: ModelSpecification, request: Mapping[str, Any]) -> Tensors:
    outputs = COMPUTE[id(specification)](*(request[tensor.name] for tensor in specification.inputs))
    return {
        tensor.name: value.astype(tensor.dtype) for tensor, value in zip(specification.outputs, outputs, strict=True)
    }


def random_request(generator: np.random.Generator, specification: ModelSpecification, rows: int, size: int) -> Tensors:
    sizes = specification.along(size if specification.axes else None)
    return {
        tensor.name: generator.integers(0, 3 if tensor.name == "mask" else 100, (rows, *shape)).astype(tensor.dtype)
        for tensor in specification.inputs
        for shape in (specification.item_shape(tensor, sizes),)
    }


class Slots:
    """Memory of a caller, half of it page-locked: requests lie in it side by side, in slots, strided or unaligned."""

    def __init__(self, engine: SmallEngine) -> None:
        self.memory = np.zeros(2**16, np.uint8)
        self._used = 0
        self._address = self.memory.ctypes.data
        assert engine.pin(self._address, 2**14)
        assert engine.pin(self._address + 2**14, 2**14)

    def placed(self, array: Any, generator: np.random.Generator) -> Any:
        """A view with the array's values somewhere in the memory."""
        gap = int(generator.choice([0, 0, 1, 64]))
        start = self._used + gap
        for edge in (2**14, 2**15):  # a request does not cross a boundary
            if start < edge < start + 2 * array.nbytes:
                start = edge
        if start + 2 * array.nbytes > len(self.memory):
            start = 0
        if generator.random() < 0.2:  # every other element
            size = 2 * array.nbytes
            view = self.memory[start : start + size].view(array.dtype).reshape(*array.shape[:-1], -1)[..., ::2]
        else:
            size = array.nbytes
            view = self.memory[start : start + size].view(array.dtype).reshape(array.shape)
        self._used = start + size
        view[...] = array
        return view


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(params=["host", "driver", "late", "old"])
def start_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Engines whose runners copy by themselves, or through a driver, which may do everything late, or be an old one."""
    if request.param != "host":
        library = request.getfixturevalue("driver")
        ctypes.c_int.in_dll(ctypes.CDLL(library), "defer").value = 4 if request.param == "late" else 0
        monkeypatch.setattr(cuda_library, "LIBRARY", library)
    engines = []

    def start(specification: ModelSpecification, **options: Any) -> SmallEngine:
        copies = None if request.param == "host" else DriverCopies(request.param)
        engines.append(SmallEngine(specification, copies=copies, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
        engine.close()


def assert_alone(specification: ModelSpecification, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    expected = alone(specification, request)
    assert answer.keys() == expected.keys()
    for name, array in answer.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("specification", [FIXED, PADDED], ids=["fixed", "padded"])
def test_every_request_gets_its_answer(
    start_engine: Callable[..., SmallEngine], specification: ModelSpecification, graphs: bool
) -> None:
    engine = start_engine(specification, graphs=graphs)
    assert engine.flights == 2
    slots, generator = Slots(engine), np.random.default_rng(1)
    padding = Padding(AXIS, (4, 8, 16)) if specification.axes else None
    unfinished: deque[tuple[Finish, list[Tensors], list[Tensors]]] = deque()
    answered: list[tuple[Tensors, Mapping[str, Any]]] = []

    def finish() -> None:
        end, originals, requests = unfinished.popleft()
        answered.extend(zip(originals, end(), strict=True))
        for request in requests:
            for array in request.values():
                array[...] = 77  # a copy that is made too late reads this

    for _ in range(150):
        rows = generator.multinomial(int(generator.integers(1, MAX_ROWS + 1)), [0.25] * 4)
        originals = [
            random_request(generator, specification, int(count), int(generator.integers(1, 17)))
            for count in rows[rows > 0]
        ]
        requests = [
            {
                name: slots.placed(array, generator) if generator.random() < 0.8 else array.copy()
                for name, array in one.items()
            }
            for one in originals
        ]
        unfinished.append((engine.start(requests, padding), originals, requests))
        while len(unfinished) > generator.integers(0, 2):
            finish()
    while unfinished:
        finish()
    for original, answer in answered:
        assert_alone(specification, original, answer)
    if graphs:
        assert {rows for rows, *_ in engine.executed} == {1, 2, 4, MAX_ROWS}


def test_requests_of_one_size_need_no_padding(start_engine: Callable[..., SmallEngine]) -> None:
    generator = np.random.default_rng(0)
    for graphs in (True, False):
        engine = start_engine(PADDED, graphs=graphs)
        requests = [random_request(generator, PADDED, rows, 5) for rows in (1, 2)]
        for one, answer in zip(requests, engine.start(requests)(), strict=True):
            assert_alone(PADDED, one, answer)
        assert engine.executed[-1] == ((4, 8) if graphs else (3, 5))


def on_device(array: Any) -> DeviceMemory:
    """The memory of an array; the device of these tests is the host."""
    return DeviceMemory(array.ctypes.data, 0, array.shape, array.dtype)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("specification", [FIXED, PADDED], ids=["fixed", "padded"])
def test_tensors_lie_in_device_memory(
    start_engine: Callable[..., SmallEngine], specification: ModelSpecification, graphs: bool
) -> None:
    engine, generator = start_engine(specification, graphs=graphs), np.random.default_rng(3)
    padding = Padding(AXIS, (4, 8, 16)) if specification.axes else None
    originals = [random_request(generator, specification, rows, size) for rows, size in ((1, 3), (2, 7), (2, 5))]
    requests = [
        {name: on_device(array) if (number + place) % 2 else array for place, (name, array) in enumerate(one.items())}
        for number, one in enumerate(originals)
    ]
    first, second = (tensor.name for tensor in specification.outputs)
    expected = [alone(specification, one) for one in originals]
    given = [
        {second: np.zeros_like(expected[0][second])},
        {name: np.zeros_like(array) for name, array in expected[1].items()},
        {second: np.full(expected[2][second].nbytes + 8, 7, np.uint8)},
    ]
    outputs = [{name: on_device(array) for name, array in one.items()} for one in given]
    answers = engine.start(requests, padding, outputs)()
    assert [list(answer) for answer in answers] == [[first], [], [first]]
    np.testing.assert_array_equal(answers[0][first], expected[0][first])
    np.testing.assert_array_equal(answers[2][first], expected[2][first])
    np.testing.assert_array_equal(given[0][second], expected[0][second])
    for name, array in given[1].items():
        np.testing.assert_array_equal(array, expected[1][name])
    assert given[2][second].tobytes() == expected[2][second].tobytes() + b"\7" * 8


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("start_engine", ["host", "driver"], indirect=True)
def test_the_engine_is_whole_after_a_failure(start_engine: Callable[..., SmallEngine], graphs: bool) -> None:
    engine, generator = start_engine(FIXED, graphs=graphs), np.random.default_rng(0)
    request = random_request(generator, FIXED, 2, 0)
    for _ in range(3):
        unfinished = engine.start([request])
        engine.fails = True
        for _ in range(3):
            with pytest.raises(EngineError, match="failed to execute the batch: planted"):
                engine.start([request, request])
        engine.fails = False
        other = engine.start([request])
        with pytest.raises(EngineError, match="2 batches are unfinished"):
            engine.start([request])
        assert_alone(FIXED, request, unfinished()[0])
        assert_alone(FIXED, request, other()[0])


@pytest.mark.parametrize("start_engine", ["host", "driver"], indirect=True)
def test_a_failure_on_the_device_shows_when_the_batch_is_finished(
    start_engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = start_engine(FIXED), random_request(np.random.default_rng(0), FIXED, 2, 0)
    runner: Any = engine._runner
    wait, failing = runner.copies.wait, [True, True, True, False]

    def planted(event: int) -> None:
        if failing.pop(0):
            raise CudaError("CUDA_ERROR_LAUNCH_FAILED from cuEventSynchronize: unspecified launch failure")
        wait(event)

    monkeypatch.setattr(runner.copies, "wait", planted)
    for _ in range(3):
        finish = engine.start([request])
        with pytest.raises(EngineError, match="CUDA_ERROR_LAUNCH_FAILED"):
            finish()
    assert_alone(FIXED, request, engine.start([request])()[0])


def test_what_is_not_the_models_is_refused(start_engine: Callable[..., SmallEngine]) -> None:
    engine, generator = start_engine(FIXED), np.random.default_rng(0)
    good = random_request(generator, FIXED, 2, 0)
    for bad, message in (
        ({"x": good["x"][:, :2]}, r"x is float32 \[2, 2\], not float32 \[2, 3\]"),
        ({"x": good["x"].astype(np.float64)}, r"x is float64 \[2, 3\], not float32 \[2, 3\]"),
        ({"pixels": good["pixels"][:1]}, r"pixels is uint8 \[1, 2, 5\], not uint8 \[2, 2, 5\]"),
        ({"x": DeviceMemory(0, 1, (2, 3), np.dtype(np.float32))}, "x lies on device 1"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.start([good, {**good, **bad}])
    with pytest.raises(ValueError, match="largest bucket, 8"):
        engine.start([good] * 5)
    short = [{"y": on_device(np.zeros(5, np.float32))}]
    with pytest.raises(ValueError, match="y does not fit into the 20 bytes"):
        engine.start([good], None, short)
    padded_engine = start_engine(PADDED)
    with pytest.raises(ValueError, match="ids has length 17, more than the largest, 16"):
        padded_engine.start([random_request(generator, PADDED, 1, 17)])
    for one, specification, request in (
        (engine, FIXED, good),
        (padded_engine, PADDED, random_request(generator, PADDED, 1, 3)),
    ):
        finishes = [one.start([request]) for _ in range(2)]
        for finish in finishes:
            assert_alone(specification, request, finish()[0])


def test_memory_is_pinned_until_it_is_given_back(start_engine: Callable[..., SmallEngine]) -> None:
    engine = start_engine(FIXED)
    memory = np.zeros((4, 3), np.float32)
    copies: Any = engine._runner.copies  # type: ignore[union-attr]
    assert engine.pin(memory.ctypes.data, memory.nbytes)
    assert copies.pinned == ((memory.ctypes.data, memory.ctypes.data + memory.nbytes),)
    engine.unpin(memory.ctypes.data)
    engine.unpin(memory.ctypes.data)
    assert copies.pinned == ()


def test_the_driver_refuses_to_pin_what_is_pinned(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_library, "LIBRARY", driver)
    copies, memory = CudaCopies(0, 1, 2, 3), np.zeros(100, np.uint8)
    assert copies.pin(memory.ctypes.data, 100)
    assert not copies.pin(memory.ctypes.data, 50)
    start, stream = memory.ctypes.data, copies.incoming
    with copies.current(), pytest.raises(CudaError, match="error 1 from cuMemcpyHtoDAsync_v2"):
        copies.to_device([start], [start + 90], [20], stream)
    with copies.current(), pytest.raises(CudaError, match="error 1 from cuMemcpyBatchAsync"):
        copies.to_device([start, start], [start, start + 90], [20, 20], stream, locked=True)
    with ThreadPoolExecutor(1) as other:  # a thread that nobody entered
        assert "error 201" in str(other.submit(copies.record, 1, copies.compute).exception())
        other.submit(copies.enter).result()
        other.submit(copies.record, 1, copies.compute).result()
    copies.close()
    assert copies.pin(memory.ctypes.data, 50)
    copies.close()


def test_models_that_share_memory_all_copy_from_it_without_waiting(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver locks memory once; it stays locked until the last of them has ended."""
    monkeypatch.setattr(cuda_library, "LIBRARY", driver)
    first, second, third = (CudaCopies(0, 1, 2, 3) for _ in range(3))
    memory, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    place, size = memory.ctypes.data, memory.nbytes

    def copied(copies: CudaCopies) -> bool:
        """Whether it is taken for page-locked, and is: the driver refuses to copy it in a batch otherwise."""
        with copies.current():
            copies.to_device([target.ctypes.data] * 2, [place, place], [50, 50], copies.incoming)
        return copies._page_locked([(place, size)])

    for copies in (first, second, third):
        assert copies.pin(place, size)
        assert copied(copies)
    first.close()
    assert copied(second)
    second.unpin(place)
    assert not copied(second)
    assert copied(third)
    third.close()
    assert first.pin(place, 50)  # so nobody has it locked any more
    first.close()


def test_an_engine_without_flights_executes_at_once() -> None:
    """The default of `Engine.start`."""

    class Plain(SmallEngine):
        def load(self) -> None:
            return

        def infer(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
            return alone(self._specification, inputs)

    for specification, padding in ((FIXED, None), (PADDED, Padding(AXIS, (4, 8, 16)))):
        engine: interface.Engine = Plain(specification)
        assert (engine.flights, engine.device_index, engine.pin(0, 1), engine.executed_rows(3)) == (1, None, False, 3)
        generator = np.random.default_rng(0)
        for _ in range(10):
            requests = [random_request(generator, specification, rows, 3 * rows) for rows in (1, 3, 2)]
            for one, answer in zip(requests, engine.start(requests, padding)(), strict=True):
                assert_alone(specification, one, answer)


def test_a_batch_is_executed_in_its_bucket(start_engine: Callable[..., SmallEngine]) -> None:
    graphs, calls = start_engine(FIXED), start_engine(FIXED, graphs=False)
    assert [graphs.executed_rows(rows) for rows in (1, 3, 5)] == [1, 4, 8]
    assert [calls.executed_rows(rows) for rows in (1, 3, 5)] == [1, 3, 5]


def test_a_batch_is_ready_when_it_is_executed(start_engine: Callable[..., SmallEngine]) -> None:
    """Asked in the thread of a server's loop, which has no context of its own."""
    engine, generator = start_engine(FIXED), np.random.default_rng(3)
    assert engine.ready()
    asked = 0
    for _ in range(20):
        requests = [random_request(generator, FIXED, rows, 4) for rows in (2, 1)]
        finishes = [engine.start([request]) for request in requests]
        for request, finish in zip(requests, finishes, strict=True):
            while not engine.ready():
                asked += 1
            assert_alone(FIXED, request, finish()[0])
        assert engine.ready()
    late = getattr(engine._runner.copies, "_late", False)  # type: ignore[union-attr]
    assert (asked > 0) == late


def test_rows_without_elements_are_not_copied(start_engine: Callable[..., SmallEngine]) -> None:
    """The driver refuses a batch of copies with an empty one."""
    specification = specification_of(
        inputs=(TensorSpec("x", "FP32", (-1, 3)), TensorSpec("extra", "FP32", (-1, -1))),
        outputs=(TensorSpec("y", "FP32", (-1, 3)),),
    )
    COMPUTE[id(specification)] = lambda x, extra: (x + extra.sum(1)[:, None],)  # type: ignore[assignment,return-value]
    engine = start_engine(specification, graphs=False)
    x, extra = np.ones((2, 3), np.float32), np.empty((2, 0), np.float32)
    slots = np.zeros(64, np.float32)
    assert engine.pin(slots.ctypes.data, slots.nbytes)
    address = HostMemory([slots.ctypes.data] * 2, (2, 0), extra.dtype, 0)
    batches: list[list[Tensors]] = [[{"x": x, "extra": extra}] * 2, [{"x": x, "extra": address}] * 2]
    for batch in batches:
        for answer in engine.start(batch)():
            np.testing.assert_array_equal(answer["y"], x)


def test_an_address_stands_for_an_array(start_engine: Callable[..., SmallEngine]) -> None:
    engine, generator = start_engine(FIXED), np.random.default_rng(4)
    assert engine.takes_addresses
    assert not start_engine(PADDED).takes_addresses
    requests = [random_request(generator, FIXED, rows, 4) for rows in (2, 1, 3)]
    addresses = [
        {name: HostMemory([one.ctypes.data], one.shape, one.dtype, one.nbytes) for name, one in request.items()}
        for request in requests
    ]
    for request, answer in zip(requests, engine.start(addresses)(), strict=True):
        assert_alone(FIXED, request, answer)


@pytest.mark.parametrize("start_engine", ["host", "driver"], indirect=True)
def test_the_rate_is_that_of_all_flights(start_engine: Callable[..., SmallEngine]) -> None:
    engine, copies = start_engine(FIXED), []
    runner: Any = engine._runner
    to_device = runner.copies.to_device

    def watched(targets: list[int], sources: list[int], sizes: list[int], stream: int) -> None:
        copies.append((len(sources), {right - left for left, right in pairwise(sources)}))
        assert all(map(partial(page_locked, runner.copies.pinned), sources, sizes))
        to_device(targets, sources, sizes, stream)

    runner.copies.to_device = watched
    found = flight_rate(engine, FIXED, 3, {}, 0.01)
    assert found is not None
    assert 0 < found.start_ns < found.alone_ns
    assert found.items_per_second > 0
    assert all(copy == (3, {SLOT_BYTES}) for copy in copies)
    assert copies
    assert runner.copies.pinned == ()
    engine.flights = 1
    assert flight_rate(engine, FIXED, 3, {}, 0.01) is None


@pytest.mark.parametrize("start_engine", ["host", "driver"], indirect=True)
def test_a_failure_ends_the_measurement(start_engine: Callable[..., SmallEngine]) -> None:
    engine = start_engine(FIXED)
    runner: Any = engine._runner
    waits, wait = [], runner.copies.wait

    def planted(event: int) -> None:
        waits.append(event)
        if len(waits) == 40:
            raise CudaError("CUDA_ERROR_LAUNCH_FAILED from cuEventSynchronize: unspecified launch failure")
        wait(event)

    runner.copies.wait = planted
    with pytest.raises(EngineError, match="CUDA_ERROR_LAUNCH_FAILED"):
        flight_rate(engine, FIXED, 2, {}, 0.001)
    assert runner.copies.pinned == ()
