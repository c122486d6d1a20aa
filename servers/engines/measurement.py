"""An engine measured in process, without a server: the ceiling that served throughput is divided by.

Three times per batch size. *Execution* is between device events on a GPU, without copies to and from the host; a CPU
has no such difference. *Call* is `Engine.infer` by the host's clock, with every copy. *Alone* is a batch of requests of
one item in page-locked memory, from its start to its answers. All are medians over many runs on changing random inputs,
after warm-up. The answers are compared with the model's own at every batch size.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from servers.engines.agreement import LOSSY, Disagreement, disagreement
from servers.engines.batches import random_inputs
from servers.engines.flight_rate import flight_rate
from servers.engines.interface import Engine, EngineError
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.protocol.tensors import Array

ROTATION, DISTINCT_ROWS = 4, 8
"""Inputs that take turns, so that no run finds its own in a cache, and the rows in which they differ."""

ITEMS = 4
"""Random items of a reference."""

MIN_REPEATS, MAX_REPEATS = 7, 700
MAX_EXECUTIONS = 200
"""Most executions that a device times at once."""

P99_REPEATS = 662
"""With fewer calls the sample's 99th percentile may not reach the true one: docs/measurement.md has the bound."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Inputs of one size and the answers of the model's own module, from which batches are made by repeating rows."""

    inputs: Mapping[str, Array]
    answers: Mapping[str, Array] | None
    """None for an ONNX file that no ONNX Runtime here executes."""
    flops_per_item: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """By axis; others have their default."""


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """One batch size. Rates and shares come from `execution_ns`, or from `call_ns` where it is None."""

    batch: int
    repeats: int
    execution_ns: int | None
    call_ns: int
    call_p99_ns: int | None
    """None with fewer than `P99_REPEATS` calls."""
    items_per_second: float
    tflops: float | None
    """None where the floating-point operations are unknown."""
    share_of_matrix_product: float | None
    cosine_to_fp32: float | None
    """The lowest of a row with the model's own answer in FP32; None without floating-point outputs or a module."""
    relative_error_to_fp32: float | None = None
    """The largest of a row."""
    fault: str | None = None
    """Why the answers are not the model's; None if they are."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """By axis; others have their default."""
    tokens_per_second: float | None = None
    """Of sequences: items per second times their length."""
    start_ns: int | None = None
    """Until `Engine.start` has returned, in which the host is busy; None as below."""
    alone_ns: int | None = None
    """From the start of a batch in page-locked slots to its answers; None for an engine with one batch in flight."""
    flights_items_per_second: float | None = None
    """With all flights of the engine in use, see `servers.engines.flight_rate`; None as above."""


def measure_engine(
    engine: Engine,
    specification: ModelSpecification,
    batches: Sequence[int],
    references: Sequence[Reference],
    seconds_per_batch: float,
    matrix_tflops: float | None,
) -> list[BatchMeasurement]:
    """Measure a loaded engine at every size and batch size."""
    return [
        _measure(engine, specification, batch, reference, seconds_per_batch, matrix_tflops)
        for reference in references
        for batch in batches
    ]


def _measure(
    engine: Engine,
    specification: ModelSpecification,
    batch: int,
    reference: Reference,
    seconds: float,
    matrix_tflops: float | None,
) -> BatchMeasurement:
    found = compared(engine.infer, specification, batch, reference, engine.describe().precision)
    inputs = rotations(random_inputs(specification, rotation_rows(batch), 0, reference.sizes), batch)
    for given in inputs:
        engine.infer(given)
    calls_ns = call_times_ns(engine, inputs, seconds)
    flights = flight_rate(engine, specification, batch, reference.sizes, seconds)
    executions_ns = engine.execution_ns(batch, min(max(MIN_REPEATS, len(calls_ns)), MAX_EXECUTIONS))
    best_ns = median(executions_ns or calls_ns)
    flops, rate = reference.flops_per_item, batch / best_ns * 1e9
    tflops = None if flops is None else batch * flops / best_ns / 1e3
    axis = specification.padded_axis
    tokens = None if axis is None else rate * reference.sizes.get(axis.name, axis.default)
    return BatchMeasurement(
        batch=batch,
        repeats=len(calls_ns),
        execution_ns=round(best_ns) if executions_ns else None,
        call_ns=round(median(calls_ns)),
        call_p99_ns=p99_ns(calls_ns),
        items_per_second=rate,
        tflops=tflops,
        share_of_matrix_product=None if matrix_tflops is None or tflops is None else tflops / matrix_tflops,
        cosine_to_fp32=None if found is None else found.cosine_min,
        relative_error_to_fp32=None if found is None else found.relative_error,
        fault=None if found is None else found.fault,
        sizes=reference.sizes,
        tokens_per_second=tokens if specification.item == "sequence" else None,
        start_ns=None if flights is None else flights.start_ns,
        alone_ns=None if flights is None else flights.alone_ns,
        flights_items_per_second=None if flights is None else flights.items_per_second,
    )


def p99_ns(times_ns: Sequence[int]) -> int | None:
    """The 99th percentile; None with fewer than `P99_REPEATS` times."""
    if len(times_ns) < P99_REPEATS:
        return None
    return round(float(np.percentile(times_ns, 99, method="higher")))


def rotation_rows(batch: int) -> int:
    """The rows that `rotations` needs for batches up to this size."""
    return batch + (ROTATION - 1) * min(batch, DISTINCT_ROWS)


def rotations(pool: Mapping[str, Array], batch: int) -> list[Mapping[str, Array]]:
    """Batches of the pool's rows that take turns, without copies; large ones share most of their rows."""
    starts = range(0, ROTATION * min(batch, DISTINCT_ROWS), min(batch, DISTINCT_ROWS))
    return [{name: array[start : start + batch] for name, array in pool.items()} for start in starts]


def call_times_ns(
    engine: Engine, inputs: Sequence[Mapping[str, Array]], seconds: float, least: int = MIN_REPEATS
) -> list[int]:
    """Times of at least that many calls of `Engine.infer` on inputs that take turns, for that long; the engine is warm
    for them."""
    deadline_ns = time.perf_counter_ns() + int(seconds * 1e9)
    times: list[int] = []
    while len(times) < least or (len(times) < MAX_REPEATS and time.perf_counter_ns() < deadline_ns):
        given = inputs[len(times) % len(inputs)]
        started_ns = time.perf_counter_ns()
        engine.infer(given)
        times.append(time.perf_counter_ns() - started_ns)
    return times


def rows_of(reference: Reference) -> int:
    """The number of its items."""
    return len(next(iter(reference.inputs.values())))


def compared(
    infer: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    specification: ModelSpecification,
    batch: int,
    reference: Reference,
    precision: str,
    seconds: float = math.inf,
) -> Disagreement | None:
    """The answers to rows of the reference, in batches of this size, against its own; None without them.

    At least one batch is executed, then others until all rows were or the time is up. Rows are repeated to fill the
    last batch.
    """
    count = rows_of(reference)
    rows = (np.arange(-(-count // batch) * batch) % count).reshape(-1, batch)
    deadline = time.perf_counter() + seconds
    parts: list[Mapping[str, Array]] = []
    for chosen in rows:
        parts.append(infer({name: np.ascontiguousarray(array[chosen]) for name, array in reference.inputs.items()}))
        if reference.answers is None or time.perf_counter() >= deadline:
            break
    if reference.answers is None:
        return None
    answers = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    expected = {name: array[rows[: len(parts)].ravel()] for name, array in reference.answers.items()}
    return disagreement(specification, expected, answers, precision)


def references_of(
    specification: ModelSpecification,
    weights: WeightsSource,
    sizes: Sequence[Mapping[str, int]],
    photographs: Mapping[str, Array] | None = None,
    items: int = ITEMS,
) -> list[Reference]:
    """Items of each of the sizes, and the answers of the model's own module in FP32 on the CPU; those of a user's ONNX
    file are ONNX Runtime's on the CPU, in the file's own precision.

    The items are the photographs where there are some, else random. Raises `WeightsError` and `EngineError`.
    """
    if specification.file is not None:
        given = [random_inputs(specification, items, 0, along) for along in sizes]
        answers = _answers_of_file(specification, specification.file, weights, given)
        return [
            Reference(inputs, known, None, along) for inputs, known, along in zip(given, answers, sizes, strict=True)
        ]
    import torch

    from servers.engines.torch_towers import expected_answers
    from servers.models.modules import count_flops
    from servers.models.uint8_module import executed_module

    module = executed_module(specification, specification.load_module(weights))
    references = []
    for along in sizes:
        inputs = photographs or random_inputs(specification, items, 0, along)
        flops = specification.flops_per_item
        if flops is None or any(along.get(axis.name, axis.default) != axis.default for axis in specification.axes):
            one = random_inputs(specification, 1, 0, along)
            flops = count_flops(module, [torch.from_numpy(one[tensor.name]) for tensor in specification.inputs])
        references.append(Reference(inputs, expected_answers(specification, module, inputs), flops, along))
    return references


def _answers_of_file(
    specification: ModelSpecification, file: Path, weights: WeightsSource, batches: Sequence[Mapping[str, Array]]
) -> Sequence[Mapping[str, Array] | None]:
    """What a user's ONNX file answers as it is; None where no ONNX Runtime executes it."""
    from servers.engines.factory import build_engine
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
    try:
        return [dict(engine.infer(inputs)) for inputs in batches]
    finally:
        engine.close()


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
    from servers.engines.flight import event_pair
    from servers.engines.torch_device import set_fp32_products

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
