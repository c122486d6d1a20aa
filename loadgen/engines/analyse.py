"""From the visits of an engine matrix to its results: cells, winners and break-evens. Pure, also for interrupted runs.

The value of a cell in a round is the median of its samples; see `samples_ns`. Its latency is the geometric mean of
these values with a 95 % t interval on logs. The round is the unit of replication (`loadgen.stats.ratios`): speed-ups
and ratios are paired by round, and a round that only one of two cells has is left out. A cell whose answers are wrong,
or whose cosine or top-1 agreement is below the plan's limits, is shown and never wins.

The break-even says after how many items a conversion has paid for itself: docs/engine-matrix.md defines it. The
interval of the quotient is Fieller's (J. R. Statist. Soc. B 16, 1954) over rounds, in which start and latency are
measured together; a kept process starts once, so there it is of the latency alone. Where the interval of the gain
includes 0, the conversion may never pay, and the number has no upper bound. A path without a measured gain has no
number. Cells with wrong or too inaccurate answers have no break-even: they do not compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from loadgen.base.quantities import number
from loadgen.checks.machine import cpu_steal, judge_taken, other_processes
from loadgen.checks.registry import gravest
from loadgen.findings.tokens import fault_text, proves_nothing, wrong_answers
from loadgen.records.checks import Check
from loadgen.records.matrix import (
    BreakEven,
    CellResult,
    Configuration,
    ConfigurationResult,
    Conversion,
    GenerationResult,
    JudgedCell,
    JudgedMatrix,
    Matrix,
    MatrixPlan,
    Measured,
    Scope,
    Shape,
    Visit,
    Winner,
    described,
    shape_text,
)
from loadgen.records.run import Environment, Label, MachineLoad, RunState
from loadgen.records.targets import Kind
from loadgen.stats.estimates import SIGNIFICANCE, Estimate, critical_t, t_estimate
from loadgen.stats.percentiles import percentile
from loadgen.stats.ratios import (
    RatioEstimate,
    adjust_holm,
    error_of_mean,
    estimate_ratio,
    geometric_mean,
    interval_of_mean,
    lone_correlation,
)

MOST_WAITING = 2.0
"""Times its latency that a batch may take while its energy is measured."""
N = TypeVar("N", int, float)
MARGIN = 0.05
"""Difference in the share of the CPU that others took from two engines that makes them incomparable, δ of a comparison
by default."""
NO_MARGIN = 1.0
"""`estimate_ratio` also tests for equivalence, which is not used here."""
PATHS: Mapping[str, str] = {
    "torch": "PyTorch",
    "slots": "PyTorch",
    "continuous": "PyTorch",
    "torch/compile": "PyTorch → torch.compile",
    "torch/traced": "PyTorch → TorchScript",
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


@dataclass(frozen=True, slots=True)
class CellRounds:
    """One configuration at one batch size and length, with its measurement in every round that has timed calls, in
    their order."""

    configuration: int
    batch: int
    length: int | None
    rounds: Mapping[int, Measured]
    latencies_ns: Mapping[int, float]
    """Median sample by round."""
    excluded: str | None
    """Why it is not ranked."""

    @property
    def shape(self) -> Shape:
        return self.batch, self.length


Cells = Mapping[tuple[int, Shape], CellRounds]
"""Cells by configuration and shape."""


def analyse(
    plan: MatrixPlan,
    environment: Environment,
    visits: Sequence[Visit],
    state: RunState | None,
    judged: JudgedMatrix | None = None,
) -> Matrix:
    """Analyse the visits so far. `state` is None if the run was killed before it could write one; `judged` are the
    answers of language models beside the reference."""
    verdicts = {(cell.configuration, cell.shape): cell for cell in (judged.cells if judged else ())}
    cells = cells_of(plan, visits, verdicts)
    configurations = tuple(_configuration(plan, place, visits) for place in range(len(plan.configurations)))
    checks = machine_checks(plan, visits)
    found = winners(plan, tuple(cells.values()))
    return Matrix(
        state=state,
        environment=environment,
        plan=plan,
        configurations=configurations,
        cells=tuple(
            _cell_result(
                plan,
                cell,
                baseline_cell(plan, cells, cell, (plan.baseline_precision(cell.configuration),)),
                verdicts.get(key),
            )
            for key, cell in cells.items()
        ),
        winners=tuple(replace(winner, certain=False) for winner in found) if gravest(checks) else found,
        break_even=break_even(plan, configurations, visits, cells),
        checks=checks,
    )


def machine_checks(plan: MatrixPlan, visits: Sequence[Visit]) -> tuple[Check, ...]:
    """The checks of a comparison that say whether the engines had the machine, and the same share of it; none for
    visits that did not record it."""
    readings: dict[Label, list[MachineLoad]] = {}
    scopes: dict[Label, Scope] = {}
    is_one = len({configuration.scope for configuration in plan.configurations}) == 1
    for visit in visits:
        if visit.cells and visit.machine is not None and visit.machine.total_ns > 0:
            configuration = plan.configurations[visit.configuration]
            label = configuration.title if is_one else described(configuration)
            readings.setdefault(label, []).append(visit.machine)
            scopes[label] = configuration.scope
    if not readings:
        return ()
    pairings = [(one, other) for one, other in combinations(readings, 2) if scopes[one] == scopes[other]]
    strict, names = bool(plan.settings.get("strict")), {label: label for label in readings}
    return (
        cpu_steal.stated(judge_taken(readings, pairings, MARGIN, names, by_programs=False), strict=strict),
        other_processes.stated(judge_taken(readings, pairings, MARGIN, names, by_programs=True), strict=strict),
    )


def cells_of(
    plan: MatrixPlan, visits: Sequence[Visit], verdicts: Mapping[tuple[int, Shape], JudgedCell] = MappingProxyType({})
) -> Cells:
    """All cells with at least one timed call, and none of them in no time, by configuration, length and batch size."""
    measured: dict[tuple[int, Shape], dict[int, Measured]] = {}
    for visit in sorted(visits, key=lambda visit: visit.round):
        for cell in visit.cells:
            if min(samples_ns(cell, plan.configurations[visit.configuration].device), default=0) > 0:
                measured.setdefault((visit.configuration, cell.shape), {})[visit.round] = cell
    order = sorted(measured, key=lambda key: (key[0], key[1][1] or 0, key[1][0]))
    return {
        (place, (batch, length)): CellRounds(
            configuration=place,
            batch=batch,
            length=length,
            rounds=(rounds := measured[place, (batch, length)]),
            latencies_ns={
                round_: float(median(samples_ns(cell, plan.configurations[place].device)))
                for round_, cell in rounds.items()
            },
            excluded=reason_against_tokens(verdicts.get((place, (batch, length))))
            if plan.kind is Kind.TOKENS
            else reason_against(plan, tuple(rounds.values())),
        )
        for place, (batch, length) in order
    }


def samples_ns(measured: Measured, device: str) -> tuple[int, ...]:
    """The times of one batch that count. On a GPU those between device events: a call also waits for copies of pageable
    memory, which take longer than many models and vary more, and which a server hides behind the next batch. On a CPU,
    and for an engine without such times, those of whole calls."""
    return measured.calls_ns if device == "cpu" else measured.executions_ns or measured.calls_ns


def has_copies(cell: CellResult, device: str) -> bool:
    """Whether a cell on a GPU could only be timed with copies to and from the host."""
    return device != "cpu" and cell.generation is None and cell.latency_ns == cell.call_ns


def reason_against(plan: MatrixPlan, measured: Sequence[Measured]) -> str | None:
    """Why a cell with these measurements is not ranked: one wrong or too inaccurate answer in any round suffices."""
    fault = next((cell.fault for cell in measured if cell.fault is not None), None)
    if fault is not None:
        return f"wrong answers: {fault}"
    for name, value, limit in (
        ("cosine to FP32", worst((cell.cosine_min for cell in measured), min), plan.min_cosine),
        ("top-1 agreement with FP32", worst((cell.top1 for cell in measured), min), plan.min_top1),
    ):
        if value is not None and value < limit:
            return f"the lowest {name} is {value:.6g}, below the limit of {limit:g}"
    return None


def reason_against_tokens(judged: JudgedCell | None) -> str | None:
    """Why a language model's cell is not ranked: its answers are not the model's, or nobody knows."""
    if judged is None:
        return "its answers were not judged, because the run did not finish"
    if judged.error is not None:
        return f"its answers were not judged: {judged.error}"
    if wrong := wrong_answers(judged):
        return f"wrong answers: {len(wrong)} of {len(judged.answers)}; of one {fault_text(judged, wrong[0])}"
    if proves_nothing(judged):
        return (
            f"rounding in {judged.precision} alone brings the model's answers near random ones: no fault could be seen"
        )
    return None


def worst(values: Iterable[N | None], choose: Callable[[Iterable[N]], N]) -> N | None:
    """The lowest or highest of the values that were measured; None without any."""
    measured = [value for value in values if value is not None]
    return choose(measured) if measured else None


def estimate(values: Sequence[float], *, kept: bool) -> Estimate | None:
    """Geometric mean of positive values over rounds with its interval, by `interval_of_mean`: each round is a start of
    its own, unless the processes were `kept`. None without values."""
    if not values:
        return None
    return Estimate.of(geometric_mean(values), interval_of_mean([values] if kept else [[value] for value in values]))


def ratios(over: CellRounds, under: CellRounds) -> list[float]:
    """Throughput of `over` divided by that of `under`, per item, in every round that has both."""
    return [
        (over.batch / latency_ns) / (under.batch / under.latencies_ns[round_])
        for round_, latency_ns in over.latencies_ns.items()
        if round_ in under.latencies_ns
    ]


def baseline_cell(
    plan: MatrixPlan, cells: Cells, cell: CellRounds, precisions: Sequence[str] = ("fp32",)
) -> CellRounds | None:
    """The baseline's cell of the same scope and shape, in the first of these precisions in which it is ranked; None for
    that cell itself."""
    scope = plan.configurations[cell.configuration].scope
    places = {(each.engine_mode, each.precision, each.scope): place for place, each in enumerate(plan.configurations)}
    for precision in precisions:
        base = cells.get((places.get((plan.baseline, precision, scope), -1), cell.shape))
        if base is not None and not base.excluded:
            return None if base is cell else base
    return None


def _generation(cell: CellRounds, judged: JudgedCell | None, *, kept: bool) -> GenerationResult | None:
    generated = [(measured.generated, round_) for round_, measured in cell.rounds.items() if measured.generated]
    firsts = estimate([float(median(part.prompts_ns)) for part, _ in generated], kept=kept)
    shares = estimate(
        [part.step_bytes / cell.latencies_ns[round_] * 1e9 / part.copy_bytes_per_s for part, round_ in generated],
        kept=kept,
    )
    if firsts is None or shares is None:
        return None
    answers = [] if judged is None else [answer for answer in judged.answers if answer.mean is not None]
    tokens = sum(answer.tokens for answer in answers)
    return GenerationResult(
        prompt_tokens_per_second=firsts.inverted(cell.batch * (cell.length or 0) * 1e9),
        first_token_ns=firsts,
        context=sum(part.context for part, _ in generated) / len(generated),
        bandwidth_share=shares,
        answers=len(answers),
        mean_deficit=sum((answer.mean or 0.0) * answer.tokens for answer in answers) / tokens if tokens else None,
        largest_deficit=worst((answer.deficit for answer in answers), max),
        best_share=1.0 - sum(answer.other for answer in answers) / tokens if tokens else None,
    )


def _cell_result(
    plan: MatrixPlan, cell: CellRounds, baseline: CellRounds | None, judged: JudgedCell | None
) -> CellResult:
    measured, kept = tuple(cell.rounds.values()), plan.processes == "kept"
    latency = estimate(list(cell.latencies_ns.values()), kept=kept)
    call = estimate([float(median(m.calls_ns)) for m in measured], kept=kept)
    assert latency is not None  # a cell has at least one round with calls
    assert call is not None
    device = plan.configurations[cell.configuration].device
    energies = [m for m in measured if m.energy_joules and m.energy_items]
    energy = estimate([m.energy_joules / m.energy_items for m in energies if m.energy_joules], kept=kept)
    sustained = estimate([float(m.sustained_ns) for m in energies if m.sustained_ns], kept=kept)
    waited = sustained is not None and sustained.value > MOST_WAITING * latency.value
    flops = next((m.flops_per_item for m in measured if m.flops_per_item is not None), None)
    judged_fault = {Kind.TENSORS: None, Kind.TOKENS: cell.excluded}[plan.kind]
    fault = next((m.fault for m in measured if m.fault is not None), judged_fault)
    p99_ns = percentile([sample for m in measured for sample in samples_ns(m, device)], 0.99)
    first_calls = [m.first_call_ns for m in measured]
    # A kept process has a first call in its first round only.
    first_call_ns = float(first_calls[0] if kept else median(first_calls))
    return CellResult(
        configuration=cell.configuration,
        batch=cell.batch,
        length=cell.length,
        rounds=len(measured),
        latency_ns=latency,
        call_ns=call,
        p99_ns=None if p99_ns is None else round(p99_ns),
        items_per_second=latency.inverted(cell.batch * 1e9),
        speedup=None if baseline is None or fault else estimate(ratios(cell, baseline), kept=kept),
        tflops=None if flops is None else cell.batch * flops / latency.value / 1e3,
        first_call_seconds=first_call_ns / 1e9,
        cosine_min=worst((m.cosine_min for m in measured), min),
        top1=worst((m.top1 for m in measured), min),
        relative_error=worst((m.relative_error for m in measured), max),
        fault=fault,
        excluded=cell.excluded,
        allocated_bytes=worst((m.allocated_bytes for m in measured), max),
        reserved_bytes=worst((m.reserved_bytes for m in measured), max),
        process_device_bytes=worst((m.process_device_bytes for m in measured), max),
        rss_bytes=worst((m.rss_bytes for m in measured), max),
        joules_per_item=None if waited else energy,
        sustained_ns=sustained,
        kernels=next((m.kernels for m in measured if m.kernels), ()),
        generation=_generation(cell, judged, kept=kept),
    )


def _configuration(plan: MatrixPlan, place: int, visits: Sequence[Visit]) -> ConfigurationResult:
    visits = sorted((visit for visit in visits if visit.configuration == place), key=lambda visit: visit.round)
    started = [visit for visit in visits if visit.description]  # also those of which one cell failed
    described = next(iter(started), None)
    timed = {cell.shape for visit in visits for cell in visit.cells if cell.calls_ns}
    untimed = dict.fromkeys(
        f"{shape_text(cell.shape)}: {cell.fault or 'no timed call'}"
        for visit in visits
        for cell in visit.cells
        if cell.shape not in timed
    )
    conversions: list[Conversion] = []
    for visit in started:
        steps = {conversion.step for conversion in conversions}
        conversions += [conversion for conversion in visit.conversions if conversion.step not in steps]
    return ConfigurationResult(
        configuration=plan.configurations[place],
        item=described.item if described else "item",
        description=described.description if described else {},
        load_seconds=estimate([visit.load_seconds for visit in started if visit.load_seconds], kept=False),
        conversions=tuple(conversions),
        errors=(*(f"round {visit.round}: {visit.error}" for visit in visits if visit.error is not None), *untimed),
    )


def winners(plan: MatrixPlan, cells: Sequence[CellRounds]) -> tuple[Winner, ...]:
    """The fastest ranked configuration of every scope and shape.

    It is certain if it is faster than *every* other ranked configuration there: its p is the largest of the paired
    tests against them (an intersection-union test; Berger, Technometrics 24, 1982), adjusted by Holm's method over all
    winners of the matrix. Of two equal configurations only one can beat the other, so choosing the fastest first does
    not raise the chance of a false certain winner.
    """
    groups: dict[tuple[Scope, Shape], list[CellRounds]] = {}
    for cell in cells:
        if cell.excluded is None:
            groups.setdefault((plan.configurations[cell.configuration].scope, cell.shape), []).append(cell)
    drafts = [_winner(plan, group) for group in groups.values()]
    adjusted = adjust_holm([p_value for _, p_value in drafts])
    return tuple(
        replace(winner, certain=True, unbeaten=None) if p_value is not None and p_value < SIGNIFICANCE else winner
        for (winner, _), p_value in zip(drafts, adjusted, strict=True)
    )


def _winner(plan: MatrixPlan, cells: Sequence[CellRounds]) -> tuple[Winner, float | None]:
    """The winner among cells of one shape, and the p of "it is not faster than every other"; None without a test."""
    best = min(cells, key=lambda cell: geometric_mean(list(cell.latencies_ns.values())))
    # Of an interrupted run some cells have fewer rounds; the rounds that two cells share decide between them.
    best = next((cell for cell in cells if all(_over(cell, other) > 1.0 for other in cells if other is not cell)), best)
    tests = {other.configuration: _test(plan, ratios(best, other)) for other in cells if other is not best}
    tested = {place: test for place, test in tests.items() if test.ratio is not None}
    runner_up = min(tested, key=lambda place: tested[place].ratio or 0.0, default=None)
    p_values = {place: _p_value(test) for place, test in tests.items()}
    unbeaten = max(p_values, key=lambda place: p_values[place], default=None)
    scope = plan.configurations[best.configuration].scope
    winner = Winner(
        model=scope.model,
        device=scope.device,
        threads=scope.threads,
        batch=best.batch,
        length=best.length,
        configuration=best.configuration,
        runner_up=runner_up,
        ratio=None if runner_up is None else Estimate.of(tested[runner_up].ratio or 0.0, tested[runner_up].ci95),
        certain=False,
        unbeaten=unbeaten,
    )
    return winner, None if unbeaten is None or p_values[unbeaten] == math.inf else p_values[unbeaten]


def _test(plan: MatrixPlan, over: Sequence[float]) -> RatioEstimate:
    """Of ratios of rounds, which may resemble each other if the processes were kept."""
    return estimate_ratio(over, NO_MARGIN, lone_correlation(over) if plan.processes == "kept" else 0.0)


def _p_value(test: RatioEstimate) -> float:
    """The p of "it is not faster", two-sided because the winner comes from the same data; infinite without a test."""
    if (test.ratio or 0.0) <= 1.0:
        return 1.0
    return math.inf if test.p_value is None else test.p_value


def _over(cell: CellRounds, other: CellRounds) -> float:
    """How much faster one cell is in the rounds that both have; 0 without such a round."""
    shared = ratios(cell, other)
    return geometric_mean(shared) if shared else 0.0


def path_of(configuration: Configuration) -> str:
    """The conversions before this configuration executes the model: PyTorch → ONNX → TensorRT."""
    return (
        PATHS.get(configuration.engine_mode) or PATHS.get(configuration.engine) or f"PyTorch → {configuration.engine}"
    )


def break_even(
    plan: MatrixPlan, configurations: Sequence[ConfigurationResult], visits: Sequence[Visit], cells: Cells
) -> tuple[BreakEven, ...]:
    """The break-even of every configuration that converts something, at every shape that its baseline has too."""
    starts = start_seconds(plan, visits)
    results = []
    for cell in cells.values():
        asked = plan.configurations[cell.configuration]
        base = baseline_cell(plan, cells, cell, (asked.precision, "fp32"))
        if base is None or cell.excluded:
            continue
        conversions = math.fsum(conversion.seconds for conversion in configurations[cell.configuration].conversions)
        if not conversions and path_of(asked) == path_of(plan.configurations[base.configuration]):
            continue
        costs, gains = _by_round(cell, base, conversions, starts)
        if gains:
            results.append(
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
    return tuple(results)


def start_seconds(plan: MatrixPlan, visits: Sequence[Visit]) -> dict[int, dict[int, float]]:
    """By configuration and round: load, and what the first calls took beyond the median call of their shape. A kept
    process has started once, for all rounds."""
    starts: dict[int, dict[int, float]] = {}
    for visit in sorted(visits, key=lambda visit: visit.round):
        if visit.load_seconds is not None:
            first = math.fsum(cell.first_call_ns - median(cell.calls_ns) for cell in visit.cells if cell.calls_ns)
            rounds = range(plan.rounds) if plan.processes == "kept" else (visit.round,)
            starts.setdefault(visit.configuration, {}).update(dict.fromkeys(rounds, visit.load_seconds + first / 1e9))
    return starts


def _by_round(
    cell: CellRounds, base: CellRounds, conversions: float, starts: Mapping[int, Mapping[int, float]]
) -> tuple[list[float], list[float]]:
    """One-time seconds and seconds gained per item of every round in which both cells have a start and a latency."""
    costs, gains = [], []
    of_cell, of_base = (starts.get(each.configuration, {}) for each in (cell, base))
    for round_, latency_ns in cell.latencies_ns.items():
        if round_ in base.latencies_ns and round_ in of_cell and round_ in of_base:
            costs.append(conversions + of_cell[round_] - of_base[round_])
            gains.append(base.latencies_ns[round_] / base.batch / 1e9 - latency_ns / cell.batch / 1e9)
    return costs, gains


def mean_interval(values: Sequence[float]) -> Estimate:
    """Arithmetic mean with its 95 % t interval; no interval with fewer than two values or without spread."""
    mean = math.fsum(values) / len(values)
    error = error_of_mean(values)[0] if len(values) > 1 else 0.0
    return Estimate(mean) if error <= abs(mean) * 1e-9 else t_estimate(mean, error, len(values) - 1.0)


def items_until(costs: Sequence[float], gains: Sequence[float]) -> Estimate | None:
    """Mean cost over mean gain with Fieller's 95 % interval; both by round. None: never. Only `high` None: the gain may
    be 0. Both None: too few rounds for an interval. Numbers of items are never below 0."""
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


def parity(cell: CellRounds) -> str:
    """The evidence that the cell computes what the model computes in FP32."""
    rounds = cell.rounds.values()
    cosine, top1 = worst((each.cosine_min for each in rounds), min), worst((each.top1 for each in rounds), min)
    error = worst((each.relative_error for each in rounds), max)
    proofs = [
        *([] if cosine is None else [f"cosine at least {cosine:.6f}"]),
        *([] if top1 is None else [f"top-1 agreement {number(100.0 * top1)} %"]),
        *([] if error is None else [f"relative error at most {error:.2g}"]),
    ]
    return ", ".join(proofs) or "the answers were not compared"
