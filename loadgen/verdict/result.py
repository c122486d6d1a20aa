"""From a run's stored records to its result, and `result.json` (schema abserve.result/3; see docs/result-format.md).

`analyse` reads, summarises, compares, checks and concludes; it writes nothing. Reports are rendered from the result
alone. Fields are only ever added, each with a default, so that a later version reads an older file; any other change
raises the schema's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from loadgen.base.documents import (
    FINAL,
    DocumentError,
    indented,
    kind_of,
    one_line,
    read_record,
    read_stored,
    stored_path,
)
from loadgen.checks.noise_floor import apply_floor, floor_sentence, floors_by_arm, is_self_comparison
from loadgen.checks.registry import lost_where_rough, make_checks, reason_against, roughening
from loadgen.checks.run import COMPARISONS, VERDICT, analysed
from loadgen.findings.registry import finding_types, probes
from loadgen.metrics.barrier import attempt
from loadgen.metrics.breakdown import LatencyBreakdown, break_down
from loadgen.metrics.comparisons import Comparison, PooledRequests, compare_all, invalidate, roughen
from loadgen.metrics.facts import Facts
from loadgen.metrics.summaries import BlockSummary, WorkloadSummary, sound, summarise_blocks, summarise_workload
from loadgen.records.checks import Check
from loadgen.records.machine import NoiseFloor
from loadgen.records.names import names_of
from loadgen.records.run import ArmRecord, Environment, Experiment, Found, Label, ParityRecord, Record, RunState
from loadgen.records.store import StoredRun, StoredRunError, read_run
from loadgen.records.targets import Kind
from loadgen.stats.ratios import has_log
from loadgen.verdict.thresholds import ThresholdOutcome, judge_thresholds
from loadgen.verdict.verdict import Stopping, Verdict, describe_stopping, no_verdict, reach_verdict

FILE_NAME = "result.json"
F = TypeVar("F", bound=Found)
T = TypeVar("T")


class Result(Record, frozen=True, kw_only=True):
    """The whole result. None or empty: the run did not get that far."""

    schema: Literal["abserve.result/3"] = "abserve.result/3"
    valid: bool
    """Whether the verdict stands: no check that can remove it failed, and none that must be known is unknown. False
    where it is `rough`."""
    state: RunState | None
    verdict: Verdict
    environment: Environment | None
    experiment: Experiment
    arms: tuple[ArmRecord, ...]
    parity: ParityRecord | None
    checks: tuple[Check, ...]
    comparisons: tuple[Comparison, ...]
    summaries: tuple[WorkloadSummary, ...]
    stages: tuple[LatencyBreakdown, ...]
    """The latency breakdown of each workload and arm; none of streamed answers."""
    blocks: tuple[BlockSummary, ...]
    studies: dict[str, Any] = msgspec.field(default_factory=dict)
    """Each probe's finding by its name; a probe that found nothing is left out."""
    stopping: Stopping | None = None
    """None in results from before there were several stopping rules."""
    noise_floors: tuple[NoiseFloor, ...] = ()
    """The machine's noise floors, as known when the run began."""
    noise_floor_sentence: str = ""
    thresholds: tuple[ThresholdOutcome, ...] = ()
    rough: bool = False
    """Whether the verdict stands for a machine that others used: the intervals include what these may have taken, and
    the figures are not to be cited."""

    @property
    def titles(self) -> dict[Label, str]:
        """The arms' names for people: what the experiment calls them until their servers have been asked."""
        experiment = self.experiment
        names = {request.label: request.target for request in experiment.arms}
        names |= {arm.label: arm.title for arm in self.arms}
        if experiment.is_at_best:  # several arms are one server
            told = {arm.label: [f"{name}={value}" for name, value in arm.settings.items()] for arm in experiment.arms}
            names = {label: ", ".join([name, *told[label]]) for label, name in names.items()}
        return names

    @property
    def names(self) -> dict[Label, str]:
        """The arms as sentences call them."""
        return names_of(self.experiment.arms, self.arms)

    @property
    def headline(self) -> str:
        """The result in at most 32 words."""
        return self.verdict.headline

    def of(self, kind: type[F]) -> F:
        return kind.among(self.studies)


def encode_result(result: Result) -> bytes:
    """Indented JSON, the same bytes for the same result."""
    return indented(result)


def read_result(path: Path) -> Result:
    """Read a `result.json`, also compressed. Raises `StoredRunError` for a missing file, another schema, an unknown
    field or figures that contradict each other."""
    try:
        result = cast("Result", read_record(read_stored(path), Result))
        kinds = finding_types()
        findings = {name: msgspec.convert(value, kinds[name], str_keys=True) for name, value in result.studies.items()}
        if fault := _contradiction(result):
            raise StoredRunError(f"{path} holds figures that contradict each other: {fault}")
        return msgspec.structs.replace(result, studies=findings)
    except KeyError as exc:
        raise StoredRunError(f"{path} is not a result of this version of abserve: there is no study {exc}") from exc
    except (OSError, DocumentError, msgspec.ValidationError) as exc:
        raise StoredRunError(f"{path} is not a result of this version of abserve: {exc}") from exc


_ROUNDING = 1e-9


def _contradiction(result: Result) -> str | None:
    """The first figure that no measurement gives, in words; None if there is none."""
    for row in result.comparisons:
        where = f"{row.metric} in {row.workload}, {row.arm} over {row.baseline}"
        ratios = [value for value in (row.ratio, *(row.ci95 or ()), *row.ratios) if value is not None]
        if wrong := [value for value in ratios if not has_log(value)]:
            return f"a ratio of {wrong[0]:g} ({where})"
        if row.ci95 is not None and row.ratio is not None and not _holds(row.ci95, row.ratio):
            return f"a ratio of {row.ratio:g} outside its interval, {row.ci95[0]:g} to {row.ci95[1]:g} ({where})"
        shares = (row.p_value, row.p_adjusted, row.p_equivalence)
        if wrong := [value for value in shares if value is not None and not 0 <= value <= 1]:
            return f"a p value of {wrong[0]:g} ({where})"
        sizes = (row.error_log, row.restart_effect, row.minimal_detectable_effect, row.pairs, row.restarts)
        values = (row.baseline_value, row.arm_value)
        if wrong := [value for value in (*sizes, *values) if value is not None and value < 0]:
            return f"a negative figure, {wrong[0]:g} ({where})"
    for summary in result.summaries:
        where = f"{summary.label} in {summary.workload}"
        figures = (*summary.figures.values(), summary.requests)
        if wrong := [value for value in figures if value is not None and value < 0]:
            return f"a negative figure, {wrong[0]:g} ({where})"
        for interval in summary.intervals.values():
            if interval is not None and interval[0] > interval[1]:
                return f"an interval from {interval[0]:g} to {interval[1]:g} ({where})"
    return None


def _holds(interval: tuple[float, float], value: float) -> bool:
    low, high = interval
    return low - _ROUNDING * abs(low) <= value <= high + _ROUNDING * abs(high)


CONTRADICTIONS = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, StopIteration,
    TypeError, ValueError,
)  # fmt: skip
"""What records of the right types raise that were edited into contradictions."""


def analyse(out_dir: Path) -> Result:
    """The result of the run in `out_dir`, also if it was interrupted or killed. Raises `StoredRunError` if there is no
    experiment to read."""
    return analyse_run(read_run(out_dir))


def analyse_run(run: StoredRun) -> Result:
    """Analyse records that were already read. A step that fails costs itself, and a check says so."""
    run = replace(run, blocks=tuple(map(sound, run.blocks)))
    loads = [workload for workload in run.experiment.workloads if workload.has_blocks]
    names = names_of(run.experiment.arms, run.arms)
    failures: dict[str, str] = {}

    def step(name: str, compute: Callable[[], T], otherwise: T) -> T:
        def failed(why: str) -> T:
            failures[name] = why
            return otherwise

        return attempt(compute, failed)

    blocks = summarise_blocks(run.blocks)
    summaries = tuple(
        step(
            f"figures of {names[label]} in {workload.name}",
            partial(summarise_workload, workload.name, label, run.blocks, blocks),
            summarise_workload(workload.name, label, (), ()),
        )
        for workload in loads
        for label in run.experiment.loaded(workload)
    )
    complete = [block for block, summary in zip(run.blocks, blocks, strict=True) if summary.complete]
    # No stages of a streamed answer: the client reads it from its first token to its last.
    none: list[LatencyBreakdown] = []
    breakdowns = tuple(
        breakdown
        for workload in loads
        if workload.kind is Kind.TENSORS
        for breakdown in step(
            f"latency breakdown of {workload.name}",
            partial(
                break_down,
                workload.name,
                [block for block in complete if block.record.workload == workload.name],
                run.experiment.pairings_in(workload),
            ),
            none,
        )
    )
    facts = Facts(run, blocks, summaries, breakdowns, failures=failures)
    measured = {probe.finding.STUDY: probe for probe in probes() if probe.finding is not None}
    empty = {name: probe.finding() for name, probe in measured.items() if probe.finding is not None}
    findings = {
        name: step(name, partial(probe.analyse, facts), empty[name])
        for name, probe in measured.items()
        if probe.analyse is not None
    }
    facts = replace(facts, findings=findings)
    drafts: tuple[Comparison, ...] = step(
        COMPARISONS,
        lambda: compare_all(
            run.experiment, blocks, facts.figures, PooledRequests(run.blocks).by_block, facts.item, names
        ),
        (),
    )
    stopping = step(
        "account of when the run stopped", partial(describe_stopping, run.experiment, run.state, drafts), None
    )
    if not is_self_comparison(run.experiment):
        floors = floors_by_arm(run.experiment, run.arms, run.noise_floors)
        drafts = apply_floor(drafts, floors, run.experiment.equivalence_margin)
    facts = replace(facts, comparisons=drafts)
    checks, before = make_checks(facts), len(failures)
    comparisons = invalidate(drafts, lambda scenario: reason_against(checks, scenario))
    comparisons = roughen(comparisons, lost_where_rough(checks, facts), run.experiment.equivalence_margin)
    facts = replace(facts, comparisons=comparisons)
    concluded = {
        name: step(name, partial(probe.conclude, findings[name], facts), empty[name])
        for name, probe in measured.items()
        if probe.conclude is not None
    }
    facts = replace(facts, findings=findings | concluded)
    floor = partial(floor_sentence, run.noise_floors, comparisons, run.experiment, run.arms)
    noise_floor_sentence = step("sentence about the noise floor", floor, "")
    verdict = step(VERDICT, partial(reach_verdict, facts, checks), None)
    if len(failures) > before:
        checks = (*(check for check in checks if check.name != analysed.name), *analysed.checks(facts))
    verdict = no_verdict(checks) if verdict is None else verdict
    if run.experiment.until_decided and stopping is not None:
        verdict = msgspec.structs.replace(verdict, caveats=(*verdict.caveats, stopping.sentence))
    return Result(
        valid=verdict.valid,
        rough=bool(roughening(checks)),
        state=run.state,
        verdict=verdict,
        environment=run.environment,
        experiment=run.experiment,
        arms=run.arms,
        parity=run.parity,
        checks=checks,
        comparisons=comparisons,
        summaries=summaries,
        stages=breakdowns,
        blocks=blocks,
        studies={name: finding for name, finding in facts.findings.items() if finding != type(finding)()},
        stopping=stopping,
        noise_floors=run.noise_floors,
        noise_floor_sentence=noise_floor_sentence,
        thresholds=judge_thresholds(facts),
    )


def stored_result(directory: Path) -> Result:
    """The result of the stored records, or the stored result.json of a folder without samples, such as a published one.
    Without samples the records cannot be analysed again. The result of a tuning is that of its final. Raises
    `StoredRunError`."""
    if kind_of(directory) == "tuning":
        directory = directory / FINAL
        if kind_of(directory) is None:
            raise StoredRunError(f"{directory.parent} holds a tuning whose final comparison has not run")
    if stored_path(directory / FILE_NAME).exists() and not _records_are_kept(directory):
        return read_result(directory / FILE_NAME)
    runs = sorted(path.parent.name for path in directory.glob("*/experiment.json"))
    if runs and not (directory / "experiment.json").exists():
        raise StoredRunError(f"{directory} holds several runs; give one of its folders: {', '.join(runs)}")
    return analyse(directory)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Wrap all work on stored records: they have the right types, but may have been edited into contradictions. Raises
    `StoredRunError`."""
    try:
        yield
    except CONTRADICTIONS as exc:
        raise StoredRunError(
            f"the records in {path} contradict each other ({type(exc).__name__}: {one_line(str(exc))}); "
            "run the comparison again, or report a bug if the files were not edited"
        ) from exc


def _records_are_kept(directory: Path) -> bool:
    if not (directory / "run.json").exists():
        return False
    return any(directory.glob("samples/*")) or not any(directory.glob("blocks/*.json"))
