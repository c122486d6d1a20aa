"""An engine measured in process, without a server: the ceiling that served throughput is divided by.

Two times per batch size. *Execution* is between device events on a GPU, without copies to and from the host; a CPU has
no such difference. *Call* is `Engine.infer` by the host's clock, with every copy. Both are medians over many runs on
changing random inputs, after warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from servers.contract.tensors import Array
from servers.engines.batches import random_inputs, row_cosines
from servers.engines.interface import Engine
from servers.models.specification import ModelSpecification

ROTATION = 4
"""Inputs that take turns, so that no run finds its own in a cache."""

MIN_REPEATS, MAX_REPEATS = 7, 700
MAX_EXECUTIONS = 200
"""Most executions that a device times; no percentile is computed from them."""

P99_REPEATS = 662
"""With fewer calls the sample's 99th percentile may not reach the true one: docs/measurement.md has the bound."""


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """One batch size. Rates and shares come from `execution_ns`, or from `call_ns` where it is None."""

    batch: int
    repeats: int
    execution_ns: int | None
    call_ns: int
    call_p99_ns: int | None
    """None with fewer than `P99_REPEATS` calls."""
    images_per_second: float
    tflops: float
    share_of_matrix_product: float | None
    cosine_to_fp32: float


def measure_engine(
    engine: Engine,
    specification: ModelSpecification,
    batches: Sequence[int],
    reference: npt.NDArray[np.float32],
    pictures: Array,
    seconds_per_batch: float,
    matrix_tflops: float | None,
) -> list[BatchMeasurement]:
    """Measure a loaded engine. `reference` holds the FP32 answers to `pictures`, row by row; both are repeated."""
    results = []
    for batch in batches:
        engine.warm_up([batch])
        cosine = _cosine(engine, specification, batch, reference, pictures)
        calls_ns = _call_times_ns(engine, specification, batch, seconds_per_batch)
        executions_ns = engine.execution_ns(batch, min(max(MIN_REPEATS, len(calls_ns)), MAX_EXECUTIONS))
        best_ns = median(executions_ns or calls_ns)
        tflops = batch * (specification.flops_per_item or 0) / best_ns / 1e3
        results.append(
            BatchMeasurement(
                batch=batch,
                repeats=len(calls_ns),
                execution_ns=round(best_ns) if executions_ns else None,
                call_ns=round(median(calls_ns)),
                call_p99_ns=p99_ns(calls_ns),
                images_per_second=batch / best_ns * 1e9,
                tflops=tflops,
                share_of_matrix_product=None if matrix_tflops is None else tflops / matrix_tflops,
                cosine_to_fp32=cosine,
            )
        )
    return results


def p99_ns(times_ns: Sequence[int]) -> int | None:
    """The 99th percentile; None with fewer than `P99_REPEATS` times."""
    if len(times_ns) < P99_REPEATS:
        return None
    return round(float(np.percentile(times_ns, 99, method="higher")))


def _call_times_ns(engine: Engine, specification: ModelSpecification, batch: int, seconds: float) -> list[int]:
    inputs = [random_inputs(specification, batch, seed) for seed in range(ROTATION)]
    for given in inputs:
        engine.infer(given)
    deadline_ns = time.perf_counter_ns() + int(seconds * 1e9)
    times: list[int] = []
    while len(times) < MIN_REPEATS or (len(times) < MAX_REPEATS and time.perf_counter_ns() < deadline_ns):
        given = inputs[len(times) % ROTATION]
        started_ns = time.perf_counter_ns()
        engine.infer(given)
        times.append(time.perf_counter_ns() - started_ns)
    return times


def _cosine(
    engine: Engine, specification: ModelSpecification, batch: int, reference: npt.NDArray[np.float32], pictures: Array
) -> float:
    rows = np.arange(batch) % len(pictures)
    answer = engine.infer({specification.inputs[0].name: np.ascontiguousarray(pictures[rows])})
    got, want = answer[specification.outputs[0].name].reshape(batch, -1), reference[rows].reshape(batch, -1)
    return float(row_cosines(got, want).min())


def matrix_tflops(device: str, precision: str) -> float | None:
    """The rate of one large matrix product in that precision on that device, TFLOP/s; None without torch.

    8192³ on a GPU, 1024³ in FP32 on a CPU, on random data (zeros draw less power and run faster). The median of several
    on a GPU; the best on a CPU, where other processes take cores away. Sets how torch multiplies FP32 on CUDA.
    """
    try:
        import torch
    except ImportError:
        return None
    from servers.engines.graph_runner import event_pair
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
