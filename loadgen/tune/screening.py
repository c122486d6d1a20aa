"""One run of a tuning: contenders beside the anchor, and what it shows of each of them.

The run is one of `abserve compare` with few rounds. It proves right answers as every run does: equal answers before the
load, a sample of the answers under load, and the GPU. A contender that fails is out, and the others lose nothing.

**Score.** The log of the goal's figure of each block, less its arm's and its round's mean, is noise that all arms of
the run share. Its variance s², with (arms − 1)(rounds − 1) degrees of freedom, makes the error of a contender's mean
difference to the anchor √(2s²/rounds) (two-way analysis of variance without interaction), widened by Student's t. What
another start of the servers would change is not in it; see `loadgen.tune.search`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from loadgen.base.child_process import ABSERVE
from loadgen.base.documents import one_line
from loadgen.base.quantities import sentence
from loadgen.checks.registry import fault_of, invalidating
from loadgen.checks.run import repeated_requests
from loadgen.checks.tokens import cached_prompts
from loadgen.experiment.tuning import TuneSettings
from loadgen.findings.gpu.analysis import GpuFound
from loadgen.measure.preparation import Prepared
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.metrics.facts import RUN
from loadgen.metrics.registry import METRICS, Metric, measured_answers
from loadgen.metrics.summaries import BlockSummary, figure_of
from loadgen.metrics.tokens import samples_of
from loadgen.records.run import Experiment, Label, RunState
from loadgen.records.store import StoredRun, read_run
from loadgen.records.tuning import ANCHOR, OverLimit, Score, TuningRun
from loadgen.stats.estimates import SIGNIFICANCE, critical_t
from loadgen.stats.tails import percentile_of_rounds
from loadgen.tune.outcome import goal_metrics
from loadgen.tune.search import Z95
from loadgen.verdict.result import Result, analyse_run, readable

LEAST_ERROR = 1e-4
"""Of a log ratio: servers of a test may be as regular as the clock."""
NOT_KNOWN = 1e6
"""The upper end of a limit's interval where the answers are too few for one."""
LEAST_FOR_P99 = 100
TOO_SLOW = "It is too slow: no block as long as the anchor needs has enough of its requests."
_MOST_WORDS = 600
"""Characters of why a contender is out: a check may name several."""
_TOLERATED = ("unfair configuration", "overloaded load generator")
"""Faults that keep a choice from nothing: contenders differ on purpose, and a busy generator limits the fast ones
alike. The final comparison has both checks again."""
_CACHES = (repeated_requests.name, cached_prompts.name)
"""Checks of the first of these faults that no contender may fail on purpose."""


def screen(
    experiment: Experiment, folder: Path, progress: RunProgress, settings: TuneSettings,
    prepared: Prepared, *, abserve: Sequence[str] = ABSERVE,
) -> tuple[TuningRun, RunState]:  # fmt: skip
    """Run an experiment whose baseline is the anchor and whose other arms are contenders, into the folder; what it
    shows and how it ended. Raises `StorageError`, `StoredRunError`."""
    state = run_experiment(experiment, folder, progress, abserve=abserve, prepared=prepared)
    with readable(folder):
        run = read_run(folder)
        return judge(run, analyse_run(run), settings), state


def judge(run: StoredRun, result: Result, settings: TuneSettings) -> TuningRun:
    """Who is out, why the run counts for nothing, or else the scores: of an interrupted run by its whole rounds."""
    out, problems = faults_of(run, result)
    name = run.directory.name
    if problems:
        return TuningRun(folder=name, stage="screening", out=out, problem=next(iter(problems.values())))
    scores = score_run(run, result, settings)
    if scores and _is_whole(run):  # so the anchor was measured, and these were not
        known = {score.contender for score in scores} | {*out}
        out |= {label: TOO_SLOW for label in run.experiment.labels if label not in known}
    anchor = next((score for score in scores if score.contender == ANCHOR), None)
    left = tuple(score for score in scores if score.contender not in (ANCHOR, *out))
    return TuningRun(
        folder=name, stage="screening", scores=left, out=out, problem=None if left or out else "No round is complete.",
        anchor=anchor, load_seconds=load_seconds(run),
    )  # fmt: skip


def _is_whole(run: StoredRun) -> bool:
    return run.state is not None and run.state.state == "finished"


def faults_of(run: StoredRun, result: Result) -> tuple[dict[Label, str], dict[str, str]]:
    """The arms of a screening that are out, and what counts for nothing, by the scope of the check that says so: the
    run or one of its workloads. Why, in a sentence each."""
    anchor, state = run.experiment.baseline.label, run.state
    out = {label: sentence(one_line(why, _MOST_WORDS)) for label, why in run.experiment.failed_arms.items()}
    problems: dict[str, str] = {}
    if state is None or state.state not in ("finished", "interrupted"):
        why = "the run did not finish" if state is None or state.error is None else state.error
        failed = None if state is None else state.failed_arm
        if failed is not None and failed != anchor:
            out[failed] = sentence(one_line(why, _MOST_WORDS))
        return out, {RUN: sentence(one_line(why, _MOST_WORDS))}
    for check in invalidating(result.checks):
        fault, contenders = fault_of(check), set(check.arms) - {anchor}
        if fault in _TOLERATED and check.name not in _CACHES:
            continue
        if not _is_whole(run) and (fault == "incomplete run" or check.ok is None):
            continue  # what it did not get to, the finalists' runs and the final judge
        if contenders and anchor not in check.arms:
            out |= {label: sentence(one_line(check.detail, _MOST_WORDS)) for label in contenders if label not in out}
        else:
            problems.setdefault(check.scope, sentence(one_line(check.detail, _MOST_WORDS)))
    return out, problems


def load_seconds(run: StoredRun) -> float:
    """From the first block to the last."""
    blocks = [block.record for block in run.blocks]
    if not blocks:
        return 0.0
    return (max(block.window_end_ns for block in blocks) - min(block.window_start_ns for block in blocks)) / 1e9


def score_run(run: StoredRun, result: Result, settings: TuneSettings) -> tuple[Score, ...]:
    """The score of the anchor and of every contender that has been measured in every round, by the goal. None of them
    without two rounds of anchor and contender."""
    blocks = result.blocks
    if run.state is not None and run.state.state == "interrupted":  # perhaps in the midst of a round
        count = Counter(block.round for block in blocks if block.complete)
        blocks = tuple(block for block in blocks if count[block.round] == max(count.values()))
    scores = next((found for metric in goal_metrics(settings) if (found := scores_of(blocks, metric, ANCHOR))), {})
    workload = next((workload.name for workload in run.experiment.workloads), "")
    if settings.aim == "energy":
        scores = _by_energy(scores, result.of(GpuFound), workload)
    p99 = METRICS["latency_p99"]
    told = []
    for label, (log_ratio, error, value) in scores.items():
        latencies = _values_of(run, label, p99)
        enough = sum(map(len, latencies)) >= LEAST_FOR_P99
        told.append(
            Score(
                contender=label,
                log_ratio=log_ratio,
                error=error,
                value=value,
                p99_ms=percentile_of_rounds(latencies, 0.99)[0] if enough else None,
                limits=_limits_of(run, label, settings.limits),
            )
        )
    return tuple(told)


def scores_of(blocks: Sequence[BlockSummary], metric: Metric, anchor: Label) -> dict[Label, tuple[float, float, float]]:
    """Of each arm that was measured in every round, the log of how many times better it is than the anchor, the error
    of that and its figure; empty without two rounds of the anchor and another one."""
    figures = {
        (block.round, block.label): figure
        for block in blocks
        if block.complete and (figure := figure_of(block, metric))
    }
    rounds = sorted({number for number, _ in figures})
    labels = [
        label
        for label in dict.fromkeys(block.label for block in blocks)
        if all((number, label) in figures for number in rounds)
    ]
    if anchor not in labels or len(labels) < 2 or len(rounds) < 2:
        return {}
    logs = np.log([[figures[number, label] for label in labels] for number in rounds])
    logs = logs if metric.higher_is_better else -logs
    rest = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    degrees = (len(labels) - 1) * (len(rounds) - 1)
    spread = math.sqrt(float(np.sum(rest**2)) / degrees)
    error = spread * math.sqrt(2.0 / len(rounds)) * critical_t(degrees, SIGNIFICANCE) / Z95
    means = dict(zip(labels, logs.mean(axis=0).tolist(), strict=True))
    return {
        label: (
            mean - means[anchor],
            max(error if label != anchor else 0.0, LEAST_ERROR),
            math.exp(mean if metric.higher_is_better else -mean),
        )
        for label, mean in means.items()
    }


def _by_energy(
    scores: Mapping[Label, tuple[float, float, float]], found: GpuFound, workload: str
) -> dict[Label, tuple[float, float, float]]:
    """The same by the GPU's energy per item, which is measured over all rounds. Its error is that of the throughput: at
    a nearly constant power the energy per item varies as the time per item does."""
    anchor = found.joules_per_item(ANCHOR, workload)
    by_energy = {}
    for label, (_, error, _) in scores.items():
        joules = found.joules_per_item(label, workload)
        if anchor and joules:
            by_energy[label] = math.log(anchor / joules), error, joules
    return by_energy


def _values_of(run: StoredRun, label: Label, metric: Metric) -> list[np.ndarray]:
    """The values of the requests of a contender, of each complete block."""
    values = []
    for block in run.blocks:
        if block.record.label != label or not block.record.complete or metric.of_requests is None:
            continue
        samples = samples_of(block)
        if samples is not None:
            values.append(metric.of_requests(measured_answers(samples, is_open=block.workload.is_open)))
    return [part for part in values if len(part)]


def _limits_of(run: StoredRun, label: Label, limits: Mapping[str, float]) -> dict[str, OverLimit]:
    """Each limited metric over its limit, with the interval of that."""
    kept = {}
    for name, limit_ms in limits.items():
        metric = METRICS[name]
        values = _values_of(run, label, metric)
        if not values or metric.quantile is None:
            kept[name] = NOT_KNOWN, 0.0, NOT_KNOWN
            continue
        value, (low, high) = percentile_of_rounds(values, metric.quantile)
        kept[name] = value / limit_ms, low / limit_ms, min(high / limit_ms, NOT_KNOWN)
    return kept
