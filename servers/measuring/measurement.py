"""An engine measured in process, without a server: the ceiling that served throughput is divided by.

There are three times per batch size. *Execution* is between device events on a GPU, without copies to and from the
host; a CPU has no such difference. *Call* is `Engine.infer` by the host's clock, with every copy. *Alone* is a batch of
requests of one item in page-locked memory, from its start to its answers. All are medians over many runs on changing
random inputs, after warm-up. The answers are compared with the model's own at every batch size.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from servers.engines.agreement import LOSSY, Disagreement, disagreement
from servers.engines.batches import random_inputs
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError, Finish
from servers.engines.settings import EngineSettings, engine_kind
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.protocol.tensors import Array

if TYPE_CHECKING:
    from servers.export.manifest import Manifest

ROTATION, DISTINCT_ROWS = 4, 8
"""Inputs that take turns, so that no run finds its own in a cache, and the rows in which they differ."""

ITEMS, STORED_ITEMS, PICTURES = 4, 16, 16
"""Random items of a reference, of one in a file (one item is 6 % of its top-1 agreement), and photographs."""

MIN_REPEATS, MAX_REPEATS = 7, 700
MIN_REPEATS_PER_ROUND = 3
MAX_EXECUTIONS = 200
"""Most executions that a device times at once."""
WARM_UP_SHARE = 0.25
"""Of the seconds of a measurement: a GPU needs a while to raise its clocks."""
SLOW_SECONDS = 1.0
"""A batch that takes longer than this gets one timed call per round: the rounds repeat it."""

P99_REPEATS = 662
"""With fewer calls the sample's 99th percentile may not reach the true one: docs/measurement.md has the bound."""

SLOT_BYTES = 2**18
"""Slots are as far apart as the smallest multiple of this that holds an item."""
MIN_BATCHES = 20
_ABOUT = "about"


@dataclass(frozen=True, slots=True)
class Reference:
    """Inputs of one size and the answers of the model's own module, from which batches are made by repeating rows."""

    inputs: Mapping[str, Array]
    answers: Mapping[str, Array] | None
    """None for an ONNX file that no ONNX Runtime here executes."""
    flops_per_item: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """By axis; others have their default."""

    @property
    def rows(self) -> int:
        """The number of items."""
        return len(next(iter(self.inputs.values())))


class FlightRate(NamedTuple):
    """The rate with all batches in flight; with one in flight, the median time of `start`, and until the answers."""

    start_ns: int
    alone_ns: int
    items_per_second: float


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The times of one batch size and the comparison of its answers with the reference's."""

    batch: int
    reference: Reference
    comparison: Disagreement
    """Without figures where there are no answers to compare with."""
    first_call_ns: int
    """The first call may compile."""
    calls_ns: list[int]
    executions_ns: list[int] | None
    flights: FlightRate | None = None
    """None for an engine with one batch in flight."""

    @property
    def best_ns(self) -> float:
        """The median execution, or the median call of an engine that does not time executions."""
        return median(self.executions_ns or self.calls_ns)


def batch_row(times: EngineTimes, specification: ModelSpecification, matrix_tflops: float | None) -> dict[str, Any]:
    """The row of a batch size in the document of `abserve engine`. Rates and shares come from the executions, or from
    the calls of an engine that does not time executions. None: what is not known, such as the operations of a model,
    the cosine without floating-point outputs, and the flights of an engine with one. `matrix_tflops` is the rate of a
    matrix product on the same device."""
    reference, comparison, flights = times.reference, times.comparison, times.flights
    best_ns, flops = times.best_ns, reference.flops_per_item
    rate = times.batch / best_ns * 1e9
    tflops = None if flops is None else times.batch * flops / best_ns / 1e3
    axis = specification.padded_axis
    tokens = None if axis is None else rate * reference.sizes.get(axis.name, axis.default)
    return {
        "batch": times.batch,
        "repeats": len(times.calls_ns),
        "execution_ns": round(best_ns) if times.executions_ns else None,
        "call_ns": round(median(times.calls_ns)),
        "call_p99_ns": p99_ns(times.calls_ns),
        "items_per_second": rate,
        "tflops": tflops,
        "share_of_matrix_product": None if matrix_tflops is None or tflops is None else tflops / matrix_tflops,
        "cosine_to_fp32": comparison.cosine_min,  # the lowest of a row
        "relative_error_to_fp32": comparison.relative_error,  # the largest of a row
        "fault": comparison.fault,
        "sizes": reference.sizes,
        "tokens_per_second": tokens if specification.item == "sequence" else None,
        "start_ns": None if flights is None else flights.start_ns,
        "alone_ns": None if flights is None else flights.alone_ns,
        "flights_items_per_second": None if flights is None else flights.items_per_second,
    }


def p99_ns(times_ns: Sequence[int]) -> int | None:
    """The 99th percentile; None with fewer than `P99_REPEATS` times."""
    if len(times_ns) < P99_REPEATS:
        return None
    return round(float(np.percentile(times_ns, 99, method="higher")))


class MeasuredEngine:
    """A loaded engine that `abserve engine` or the worker measures, and the inputs that it executes."""

    def __init__(self, engine: Engine, specification: ModelSpecification, batches: Sequence[int]) -> None:
        """`batches` are the sizes that will be measured."""
        self.engine, self._specification, self._largest = engine, specification, max(batches)
        self._pools: dict[tuple[tuple[str, int], ...], Mapping[str, Array]] = {}  # by sizes along the axes

    def first_call_ns(self, batch: int, reference: Reference) -> int:
        """The time of one call on rows of the reference."""
        rows = np.arange(batch) % reference.rows
        inputs = {name: array[rows] for name, array in reference.inputs.items()}
        return _elapsed_ns(lambda: self.engine.infer(inputs))

    def measure(self, batch: int, reference: Reference, seconds: float, *, in_rounds: bool = False) -> EngineTimes:
        """Measure a batch size for about that many seconds. `in_rounds`: other rounds measure it again, so that rows of
        the reference are compared for `seconds` at most, a slow batch gets one timed call, and there are no batches in
        flight."""
        engine, specification = self.engine, self._specification
        precision = engine.describe().precision
        first_ns: list[int] = []

        def infer(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            started_ns = time.perf_counter_ns()
            answers = engine.infer(inputs)
            first_ns.append(time.perf_counter_ns() - started_ns)
            return answers

        limit = seconds if in_rounds else math.inf
        comparison = compared(infer, specification, batch, reference, precision, limit)
        inputs = self._inputs(batch, reference)
        flights = None
        if in_rounds:
            calls_ns = call_times_ns(engine, inputs, 0.0, 1)  # the first call may have compiled
            if calls_ns[0] <= SLOW_SECONDS * 1e9:
                if len(first_ns) == 1 and batch < reference.rows:  # compiling took the time for the other rows
                    comparison = compared(engine.infer, specification, batch, reference, precision, limit)
                _warm_up(engine, inputs, WARM_UP_SHARE * seconds)
                calls_ns = call_times_ns(engine, inputs, seconds, MIN_REPEATS_PER_ROUND)
        else:
            for arrays in inputs:
                engine.infer(arrays)
            calls_ns = call_times_ns(engine, inputs, seconds)
            flights = flight_rate(engine, specification, batch, reference.sizes, seconds)
        repeats = min(max(MIN_REPEATS, len(calls_ns)), MAX_EXECUTIONS)
        executions_ns = engine.execution_ns(batch, repeats) or None
        return EngineTimes(batch, reference, comparison, first_ns[0], calls_ns, executions_ns, flights)

    def run(self, batch: int, reference: Reference) -> Callable[[], object]:
        """A function that executes a measured batch, without copies where the engine can do that."""
        engine, inputs = self.engine, self._inputs(batch, reference)[0]
        return lambda: engine.run_only(batch) or engine.infer(inputs)

    def _inputs(self, batch: int, reference: Reference) -> list[Mapping[str, Array]]:
        key = tuple(reference.sizes.items())
        if key not in self._pools:
            rows = self._largest + (ROTATION - 1) * min(self._largest, DISTINCT_ROWS)
            self._pools[key] = random_inputs(self._specification, rows, 0, reference.sizes)
        return rotations(self._pools[key], batch)


@contextmanager
def loaded_engine(
    specification: ModelSpecification,
    weights: WeightsSource,
    settings: EngineSettings,
    path: Path | None,
    batches: Sequence[int],
) -> Iterator[tuple[MeasuredEngine, float]]:
    """A loaded engine for measurements, and the seconds that loading took; closes it at the end."""
    with closing(build_engine(specification, weights, settings, path)) as engine:
        load_ns = _elapsed_ns(engine.load)
        yield MeasuredEngine(engine, specification, batches), load_ns / 1e9


def rotations(pool: Mapping[str, Array], batch: int) -> list[Mapping[str, Array]]:
    """Batches of the pool's rows that take turns, without copies; large ones share most of their rows."""
    starts = range(0, ROTATION * min(batch, DISTINCT_ROWS), min(batch, DISTINCT_ROWS))
    return [{name: array[start : start + batch] for name, array in pool.items()} for start in starts]


def call_times_ns(
    engine: Engine, inputs: Sequence[Mapping[str, Array]], seconds: float, least: int = MIN_REPEATS
) -> list[int]:
    """Times of calls of `Engine.infer` on inputs that take turns: at least `least` calls, for that many seconds."""
    deadline_ns = time.perf_counter_ns() + int(seconds * 1e9)
    times: list[int] = []
    while len(times) < least or (len(times) < MAX_REPEATS and time.perf_counter_ns() < deadline_ns):
        arrays = inputs[len(times) % len(inputs)]
        started_ns = time.perf_counter_ns()
        engine.infer(arrays)
        times.append(time.perf_counter_ns() - started_ns)
    return times


def _warm_up(engine: Engine, inputs: Sequence[Mapping[str, Array]], seconds: float) -> None:
    """Execute the inputs in turn until the time is up; the engine has answered at least one batch of this shape."""
    deadline = time.perf_counter() + seconds
    for arrays in cycle(inputs):
        engine.infer(arrays)
        if time.perf_counter() >= deadline:
            return


def compared(
    infer: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    specification: ModelSpecification,
    batch: int,
    reference: Reference,
    precision: str,
    seconds: float = math.inf,
) -> Disagreement:
    """The answers to rows of the reference, in batches of this size, against its own, if it has some. At least one
    batch is executed, then others until all rows were or the time is up. Rows are repeated to fill the last batch."""
    count = reference.rows
    rows = (np.arange(-(-count // batch) * batch) % count).reshape(-1, batch)
    deadline = time.perf_counter() + seconds
    parts: list[Mapping[str, Array]] = []
    for chosen in rows:
        parts.append(infer({name: np.ascontiguousarray(array[chosen]) for name, array in reference.inputs.items()}))
        if reference.answers is None or time.perf_counter() >= deadline:
            break
    if reference.answers is None:
        return Disagreement({})
    answers = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    expected = {name: array[rows[: len(parts)].ravel()] for name, array in reference.answers.items()}
    return disagreement(specification, expected, answers, precision)


# The engine fed as a server feeds it: requests of one item in page-locked slots, as many batches in flight as it takes


def flight_rate(
    engine: Engine, specification: ModelSpecification, batch: int, sizes: Mapping[str, int], seconds: float
) -> FlightRate | None:
    """Measure batches of that many requests; None for an engine that takes one batch at a time. One thread starts
    batches and another one finishes them, as in the native server. No server is faster with this engine."""
    if engine.flights == 1:
        return None
    with _requests_in_slots(engine, specification, batch * (engine.flights + 1), sizes) as slots:
        batches = [slots[first : first + batch] for first in range(0, len(slots), batch)]
        for requests in batches:
            engine.start(requests)()
        deadline_ns, starts, times = time.perf_counter_ns() + int(seconds * 5e8), list[int](), list[int]()
        while len(times) < MIN_BATCHES or time.perf_counter_ns() < deadline_ns:
            started_ns = time.perf_counter_ns()
            finish = engine.start(batches[len(times) % len(batches)])
            starts.append(time.perf_counter_ns() - started_ns)
            finish()
            times.append(time.perf_counter_ns() - started_ns)
        return FlightRate(round(median(starts)), round(median(times)), _items_per_second(engine, batches, seconds / 2))


@contextmanager
def _requests_in_slots(
    engine: Engine, specification: ModelSpecification, count: int, sizes: Mapping[str, int]
) -> Iterator[list[dict[str, Array]]]:
    """Requests of one random item each, every tensor in a slot of page-locked memory."""
    requests: list[dict[str, Array]] = [{} for _ in range(count)]
    pinned = []
    for name, array in random_inputs(specification, count, 0, sizes).items():
        stride = max(1, -(-array[0].nbytes // SLOT_BYTES)) * SLOT_BYTES
        memory = np.frombuffer(mmap(-1, stride * count), np.uint8)
        for number, request in enumerate(requests):
            slot = memory[number * stride :][: array[0].nbytes].view(array.dtype).reshape(1, *array.shape[1:])
            slot[...] = array[number]
            request[name] = slot
        if engine.pin(memory.ctypes.data, memory.nbytes):
            pinned.append(memory.ctypes.data)
    try:
        yield requests
    finally:
        for address in pinned:
            engine.unpin(address)


def _items_per_second(engine: Engine, batches: Sequence[Sequence[dict[str, Array]]], seconds: float) -> float:
    free, unfinished = threading.Semaphore(engine.flights), queue.SimpleQueue[Finish | None]()
    failures: list[BaseException] = []

    def finish_batches() -> None:
        while (finish := unfinished.get()) is not None:
            try:
                finish()
            except Exception as exc:  # noqa: BLE001  raised again below
                failures.append(exc)
            free.release()

    thread = threading.Thread(target=finish_batches, name="finish")
    thread.start()
    started, started_ns = 0, time.perf_counter_ns()
    try:
        while not failures and (started < MIN_BATCHES or time.perf_counter_ns() - started_ns < seconds * 1e9):
            free.acquire()
            unfinished.put(engine.start(batches[started % len(batches)]))
            started += 1
    finally:
        unfinished.put(None)
        thread.join()
    if failures:
        raise failures[0]
    return started * len(batches[0]) / (time.perf_counter_ns() - started_ns) * 1e9


# The model's own answers, and the file that the engine executes


def references_of(
    specification: ModelSpecification,
    weights: WeightsSource,
    sizes: Sequence[Mapping[str, int]],
    items: int = ITEMS,
) -> list[Reference]:
    """Items of each of the sizes, and the answers of the model's own module in FP32 on the CPU; those of a user's ONNX
    file are ONNX Runtime's on the CPU, in the file's own precision. The items are photographs for a model of images,
    else random. Raises `WeightsError` and `EngineError`."""
    if specification.file is not None:
        batches = [random_inputs(specification, items, 0, along) for along in sizes]
        answers = _answers_of_file(specification, specification.file, weights, batches)
        return [
            Reference(inputs, outputs, None, along)
            for inputs, outputs, along in zip(batches, answers, sizes, strict=True)
        ]
    import torch

    from servers.engines.torch.forms import expected_answers
    from servers.models.modules import count_flops
    from servers.models.samples import photographs
    from servers.models.uint8_module import executed_module

    module = executed_module(specification, specification.load_module(weights))
    pictures = None if specification.image is None else photographs(specification, PICTURES)
    references = []
    for along in sizes:
        inputs = pictures or random_inputs(specification, items, 0, along)
        flops = specification.flops_per_item
        if flops is None or any(along.get(axis.name, axis.default) != axis.default for axis in specification.axes):
            item = random_inputs(specification, 1, 0, along)
            flops = count_flops(module, [torch.from_numpy(item[tensor.name]) for tensor in specification.inputs])
        references.append(Reference(inputs, expected_answers(specification, module, inputs), flops, along))
    return references


def _answers_of_file(
    specification: ModelSpecification, file: Path, weights: WeightsSource, batches: Sequence[Mapping[str, Array]]
) -> Sequence[Mapping[str, Array] | None]:
    """The answers of a user's ONNX file, unchanged; None where no ONNX Runtime executes it."""
    from servers.engines.onnxruntime import installed_packages, precision_of_file

    if not installed_packages():
        return [None] * len(batches)
    try:
        settings = EngineSettings(kind="onnxruntime", device="cpu", precision=precision_of_file(file))
        engine = build_engine(specification, weights, settings, file)
        engine.load()
    except EngineError as exc:  # another engine may execute it all the same
        print(f"no answers to compare with: {exc}", file=sys.stderr)  # noqa: T201  the log of this process
        return [None] * len(batches)
    with closing(engine):
        return [dict(engine.infer(inputs)) for inputs in batches]


def stored_references(
    specification: ModelSpecification, weights: WeightsSource, sizes: Sequence[Mapping[str, int]], path: Path | None
) -> list[Reference]:
    """A reference per size, from the file if it holds those of this model, else computed and written there. Every
    engine process of a matrix reads the file: the module would cost it time and memory that are not the engine's.
    Raises `WeightsError`, `EngineError` and `OSError`."""
    about = {
        "model": specification.name,
        "model_sha256": specification.definition_sha256,
        "weights": weights.label,
        "sizes": [dict(along) for along in sizes],
    }
    if path is not None and (stored := _read(path, about)) is not None:
        return stored
    references = references_of(specification, weights, sizes, STORED_ITEMS)
    if path is not None:
        _write(path, about, references)
    return references


def _read(path: Path, about: Mapping[str, object]) -> list[Reference] | None:
    """The references in a file; None if it is missing, unreadable or another model's."""
    try:
        with np.load(path, allow_pickle=False) as content:
            stored = json.loads(str(content[_ABOUT]))
            if {name: stored[name] for name in about} != about:
                return None
            arrays = {name: content[name] for name in content.files}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None

    def side(number: int, which: str) -> dict[str, Array]:
        start = f"{number}/{which}/"
        return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}

    return [
        Reference(
            side(number, "inputs"),
            side(number, "answers") if stored["answered"] else None,
            stored["flops"][number],
            sizes,
        )
        for number, sizes in enumerate(stored["sizes"])
    ]


def _write(path: Path, about: Mapping[str, object], references: Sequence[Reference]) -> None:
    """Write the file whole or not at all; arrays of Python objects are not stored, but made again."""
    arrays = {
        f"{number}/{which}/{name}": array
        for number, reference in enumerate(references)
        for which, side in (("inputs", reference.inputs), ("answers", reference.answers or {}))
        for name, array in side.items()
    }
    if any(array.dtype.hasobject for array in arrays.values()):
        return
    flops = [reference.flops_per_item for reference in references]
    about = {**about, "flops": flops, "answered": references[0].answers is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays, **{_ABOUT: np.array(json.dumps(about))})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def quiet_profiler() -> None:
    """Call it before torch is imported: its profiler would report a missing GPU as an error."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def artefact(
    specification: ModelSpecification, weights: WeightsSource, settings: EngineSettings, root: Path
) -> tuple[Path | None, Manifest | None]:
    """The file that the engine executes, made first when it is missing, and its manifest, if they have any."""
    if engine_kind(settings.kind).executes is None:
        return None, None
    from servers.export.artefacts import executed_file
    from servers.export.manifest import ExportError
    from servers.models.files import FolderError

    try:
        return executed_file(
            settings.kind, settings.precision, specification, weights, root, max_batch_size=settings.max_batch_size
        )
    except (ExportError, FolderError) as exc:
        raise EngineError(str(exc)) from exc


# The matrix product that shares of a device are taken of


def matrix_tflops(device: str, precision: str) -> float | None:
    """The rate of one large matrix product in that precision on that device, TFLOP/s; None without torch and for INT8
    and FP8, in which torch.mm does not multiply.

    8192³ on a GPU, 1024³ in FP32 on a CPU, on random data (zeros draw less power and run faster). The median of several
    on a GPU; the best on a CPU, where other processes take cores away. Sets how torch multiplies FP32 on CUDA.
    """
    if precision in LOSSY:
        return None
    try:
        import torch
    except ImportError:
        return None
    from servers.engines.torch.device import set_fp32_products
    from servers.gpu.kernel_probe import event_pair

    generator = torch.Generator(device).manual_seed(0)

    def operands(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
        return a, b, torch.empty(size, size, device=device, dtype=dtype)

    if device == "cpu":
        size = 1024
        a, b, out = operands(size, torch.float32)
        best_ns = float(min(_elapsed_ns(lambda: torch.mm(a, b, out=out)) for _ in range(12)))
    else:
        set_fp32_products(tf32=precision == "tf32")
        size = 8192
        a, b, out = operands(size, {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32))
        times_ns = []
        for _ in range(12):
            begin, end = event_pair()
            begin.record()
            torch.mm(a, b, out=out)
            end.record()
            end.synchronize()
            times_ns.append(begin.elapsed_time(end) * 1e6)
        best_ns = median(times_ns[2:])
    return 2 * size**3 / best_ns / 1e3


def _elapsed_ns(call: Callable[[], object]) -> int:
    started_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - started_ns
