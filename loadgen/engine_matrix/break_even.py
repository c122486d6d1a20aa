"""After how many items a conversion has paid for itself.

    start            = load + what the first calls of all shapes took beyond ordinary calls
    one-time seconds = conversions + start − start of the baseline
    gain per item    = seconds per item of the baseline − seconds per item after the conversion
    items            = one-time seconds ÷ gain per item

Conversions are the export, also quantised or packaged, and the build of a file, each with the seconds that it took when
it was made, also where this run found it. The start is that of a process which serves all shapes of the matrix: some
engines prepare them while they load, others in the first calls. The baseline starts in any case, so only the difference
counts; a path that starts sooner and runs faster pays from the first item. The baseline is in the precision of the
path where that was measured, or else the gain of the precision would count as one of the conversion.

The interval of the quotient is Fieller's (J. R. Statist. Soc. B 16, 1954) over rounds, in which start and latency are
measured together; a kept process starts once, so there it is of the latency alone. Where the interval of the gain
includes 0, the conversion may never pay, and the number has no upper bound. A path without a measured gain has no
number. Cells with wrong or too inaccurate answers have no break-even: they do not compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from loadgen.engine_matrix.cells import Cell, Shape, baseline_cell, worst
from loadgen.engine_matrix.records import (
    BreakEven,
    Configuration,
    ConfigurationResult,
    Estimate,
    Plan,
    Visit,
)
from loadgen.quantities import number
from loadgen.stats.ratios import SIGNIFICANCE, critical_t

PATHS: Mapping[str, str] = {
    "torch": "PyTorch",
    "torch/compile": "PyTorch → torch.compile",
    "torch/traced": "PyTorch → TorchScript",
    "torch/scripted": "PyTorch → TorchScript",
    "torch/graph": "PyTorch → CUDA graph",
    "aotinductor": "PyTorch → AOTInductor",
    "onnxruntime": "PyTorch → ONNX → ONNX Runtime",
    "tensorrt": "PyTorch → ONNX → TensorRT",
    "openvino": "PyTorch → ONNX → OpenVINO",
    "jax": "PyTorch → JAX",
    "onnxruntime-jax": "PyTorch → JAX → ONNX → ONNX Runtime",
    "tensorrt-jax": "PyTorch → JAX → ONNX → TensorRT",
}
"""By engine, or by engine and mode where the mode converts. A new engine is one line; without it its name is shown."""


def path_of(one: Configuration) -> str:
    """What the model goes through before this configuration executes it."""
    return PATHS.get(f"{one.engine}/{one.mode}") or PATHS.get(one.engine) or f"PyTorch → {one.engine}"


def break_even(
    plan: Plan,
    configurations: Sequence[ConfigurationResult],
    visits: Sequence[Visit],
    by_place: Mapping[tuple[int, Shape], Cell],
) -> tuple[BreakEven, ...]:
    """The break-even of every configuration that converts something, at every shape that its baseline has too."""
    starts = start_seconds(plan, visits)
    found = []
    for cell in by_place.values():
        asked = plan.configurations[cell.configuration]
        base = baseline_cell(plan, by_place, cell, (asked.precision, "fp32"))
        if base is None or cell.excluded:
            continue
        conversions = math.fsum(one.seconds for one in configurations[cell.configuration].conversions)
        if not conversions and path_of(asked) == path_of(plan.configurations[base.configuration]):
            continue
        costs, gains = _by_round(cell, base, conversions, starts)
        if gains:
            found.append(
                BreakEven(
                    configuration=cell.configuration,
                    baseline=base.configuration,
                    path=path_of(asked),
                    batch=cell.batch,
                    length=cell.length,
                    one_time_seconds=math.fsum(costs) / len(costs),
                    gain_seconds_per_item=mean_interval(gains),
                    items=items_until(costs, gains),
                    parity=parity(cell),
                )
            )
    return tuple(found)


def start_seconds(plan: Plan, visits: Sequence[Visit]) -> dict[int, dict[int, float]]:
    """By configuration and round: load, and what the first calls took beyond the median call of their shape. A kept
    process has started once, for all rounds."""
    found: dict[int, dict[int, float]] = {}
    for visit in sorted(visits, key=lambda one: one.round):
        if visit.load_seconds is not None:
            first = math.fsum(one.first_call_ns - median(one.calls_ns) for one in visit.cells if one.calls_ns)
            rounds = range(plan.rounds) if plan.processes == "kept" else (visit.round,)
            found.setdefault(visit.configuration, {}).update(dict.fromkeys(rounds, visit.load_seconds + first / 1e9))
    return found


def _by_round(
    cell: Cell, base: Cell, conversions: float, starts: Mapping[int, Mapping[int, float]]
) -> tuple[list[float], list[float]]:
    """One-time seconds and seconds gained per item of every round in which both cells have a start and a latency."""
    costs, gains = [], []
    of_cell, of_base = (starts.get(one.configuration, {}) for one in (cell, base))
    for number_, own_ns in cell.latencies_ns.items():
        if number_ in base.latencies_ns and number_ in of_cell and number_ in of_base:
            costs.append(conversions + of_cell[number_] - of_base[number_])
            gains.append(base.latencies_ns[number_] / base.batch / 1e9 - own_ns / cell.batch / 1e9)
    return costs, gains


def mean_interval(values: Sequence[float]) -> Estimate:
    """Arithmetic mean with its 95 % t interval; no interval with fewer than two values or without spread."""
    mean = math.fsum(values) / len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    if error <= abs(mean) * 1e-9:
        return Estimate(value=mean)
    half = critical_t(len(values) - 1.0, SIGNIFICANCE) * error
    return Estimate(value=mean, low=mean - half, high=mean + half)


def items_until(costs: Sequence[float], gains: Sequence[float]) -> Estimate | None:
    """Mean cost over mean gain with Fieller's 95 % interval; both by round. None: never.

    Only `high` None: the gain may be 0. Both None: too few rounds for an interval. Numbers of items are never below 0.
    """
    count = len(gains)
    cost, gain = math.fsum(costs) / count, math.fsum(gains) / count
    if gain <= 0.0:
        return None
    value = max(cost / gain, 0.0)
    if mean_interval(gains).low is None:
        return Estimate(value=value)
    t_squared = critical_t(count - 1.0, SIGNIFICANCE) ** 2
    ((cost_variance, covariance), (_, gain_variance)) = np.cov(costs, gains) / count * t_squared
    square = gain**2 - float(gain_variance)
    half = cost * gain - float(covariance)
    root = math.sqrt(max(half**2 - square * (cost**2 - float(cost_variance)), 0.0))
    if square > 0.0:
        return Estimate(value=value, low=max((half - root) / square, 0.0), high=max((half + root) / square, 0.0))
    unbounded = half**2 <= square * (cost**2 - float(cost_variance))
    low = 0.0 if unbounded or not square else min(max((half - root) / square, 0.0), value)
    return Estimate(value=value, low=low)


def parity(cell: Cell) -> str:
    """What proves that the cell computes what the model in FP32 does."""
    cosine = worst((one.cosine_min for one in cell.measured), min)
    top1 = worst((one.top1 for one in cell.measured), min)
    error = worst((one.relative_error for one in cell.measured), max)
    known = [
        *([] if cosine is None else [f"cosine at least {cosine:.6f}"]),
        *([] if top1 is None else [f"top-1 agreement {number(100.0 * top1)} %"]),
        *([] if error is None else [f"relative error at most {error:.2g}"]),
    ]
    return ", ".join(known) or "the answers were not compared"
