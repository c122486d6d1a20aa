"""From a run's stored records to its result: reads, summarises, compares, checks and concludes; writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from loadgen.comparison.comparisons import compare_all, invalidate
from loadgen.comparison.facts import Facts
from loadgen.comparison.pairs import latencies_of
from loadgen.comparison.stages import break_down
from loadgen.comparison.summaries import summarise_blocks, summarise_workload
from loadgen.documents import one_line, stored_path
from loadgen.probes.registry import probes
from loadgen.run.storage import StoredRun, StoredRunError, read_run
from loadgen.verdict.checks.registry import make_checks, reason_against
from loadgen.verdict.noise_floor import apply_floor, floor_sentence, floors_by_arm, is_self_comparison
from loadgen.verdict.result_file import FILE_NAME, Result, read_result
from loadgen.verdict.stopping import describe_stopping
from loadgen.verdict.thresholds import judge_thresholds
from loadgen.verdict.verdict import reach_verdict

CONTRADICTIONS = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, StopIteration,
    TypeError, ValueError,
)  # fmt: skip
"""What records of the right types raise that were edited into contradictions."""


def analyse(out_dir: Path) -> Result:
    """The result of the run in `out_dir`, also if it was interrupted or killed.

    Raises `StoredRunError` if there is no run or a record is unreadable.
    """
    return analyse_run(read_run(out_dir))


def analyse_run(run: StoredRun) -> Result:
    """Analyse records that were already read."""
    labels, pairings = run.experiment.labels, run.experiment.pairings
    loads = [workload for workload in run.experiment.workloads if workload.has_blocks]
    blocks = summarise_blocks(run.blocks)
    summaries = tuple(
        summarise_workload(workload.name, label, run.blocks, blocks) for workload in loads for label in labels
    )
    complete = [block for block, summary in zip(run.blocks, blocks, strict=True) if summary.complete]
    breakdowns = tuple(
        breakdown
        for workload in loads
        for breakdown in break_down(
            workload.name, [one for one in complete if one.record.workload == workload.name], pairings
        )
    )
    facts = Facts(run, blocks, summaries, breakdowns)
    analyses = {probe.finding.STUDY: probe for probe in probes() if probe.finding is not None}
    findings = {name: probe.analyse(facts) for name, probe in analyses.items()}
    facts = replace(facts, findings=findings)
    figures = [figure for finding in findings.values() for figure in finding.figures()]
    drafts = compare_all(run.experiment, blocks, figures, latencies_of(run.blocks), facts.item)
    stopping = describe_stopping(run.experiment, run.state, drafts)
    if not is_self_comparison(run.experiment):
        floors = floors_by_arm(run.experiment, run.arms, run.noise_floors)
        drafts = apply_floor(drafts, floors, run.experiment.equivalence_margin)
    facts = replace(facts, comparisons=drafts)
    checks = make_checks(facts)
    comparisons = invalidate(drafts, lambda scenario: reason_against(checks, scenario))
    facts = replace(facts, comparisons=comparisons)
    findings = {name: probe.conclude(findings[name], facts) for name, probe in analyses.items()}
    facts = replace(facts, findings=findings)
    titles = {request.label: request.target for request in run.experiment.arms}
    titles |= {arm.label: arm.title for arm in run.arms}
    verdict = reach_verdict(facts, titles, checks)
    if run.experiment.until_decided:
        verdict = msgspec.structs.replace(verdict, caveats=(*verdict.caveats, stopping.sentence))
    return Result(
        valid=verdict.valid,
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
        noise_floor_sentence=floor_sentence(run.noise_floors, comparisons, run.experiment, run.arms),
        thresholds=judge_thresholds(facts),
    )


def stored_result(directory: Path) -> Result:
    """The result of the stored records, or the stored result.json of a folder without samples, such as a published one.

    Without samples the records cannot be analysed again. Raises `StoredRunError` and `ResultError`.
    """
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
