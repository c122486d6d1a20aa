"""From a run's stored records to its result: reads, summarises, checks, compares, concludes; writes nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.analysis.batching import executed_batches
from loadgen.analysis.causes.analysis import find_causes
from loadgen.analysis.ceilings import divide_by_ceilings
from loadgen.analysis.checks.ceilings import check_ceilings
from loadgen.analysis.checks.clock import check_clock
from loadgen.analysis.checks.evidence import check_evidence
from loadgen.analysis.checks.fairness.arms import check_fairness
from loadgen.analysis.checks.load import check_load
from loadgen.analysis.checks.machine import check_machine
from loadgen.analysis.checks.outcome import in_order, reason_against
from loadgen.analysis.checks.probes import check_probes
from loadgen.analysis.checks.repetition import check_repetition
from loadgen.analysis.checks.run import check_comparisons, check_run
from loadgen.analysis.checks.searches import check_searches
from loadgen.analysis.comparisons import compare_all, invalidate
from loadgen.analysis.gpu_series import gpu_series
from loadgen.analysis.noise_floor import apply_floor, floor_sentence, is_self_comparison
from loadgen.analysis.result import Result
from loadgen.analysis.searches import find_ramps, find_rates
from loadgen.analysis.stages import account_cell
from loadgen.analysis.stopping import describe_stopping
from loadgen.analysis.summaries import summarise_blocks, summarise_cell
from loadgen.analysis.thresholds import Measured, judge_thresholds
from loadgen.analysis.verdict import reach_verdict
from loadgen.records.run import Label
from loadgen.storage.stored_run import StoredRun, read_run

LABELS: tuple[Label, Label] = ("a", "b")


def analyse(out_dir: Path) -> Result:
    """The result of the run in `out_dir`, also of one that was interrupted or killed.

    Raises `StoredRunError` where there is no run or a record is unreadable.
    """
    return analyse_run(read_run(out_dir))


def analyse_run(run: StoredRun) -> Result:
    """The same, of records already read."""
    loads = [cell for cell in run.experiment.cells if cell.has_blocks]
    blocks = summarise_blocks(run.blocks)
    summaries = tuple(summarise_cell(cell.name, label, run.blocks, blocks) for cell in loads for label in LABELS)
    complete = [
        block for block, summary in zip(run.blocks, blocks, strict=True) if summary.complete
    ]  # one that was cut short explains nothing
    accounts = tuple(
        account_cell(cell.name, [block for block in complete if block.record.cell == cell.name]) for cell in loads
    )
    rates, ramps = find_rates(run.experiment.cells, run.trials), find_ramps(run.experiment.cells, run.trials)
    drafts = compare_all(run.experiment, blocks, run.cold_starts, [*rates, *ramps])
    stopping = describe_stopping(run.experiment, run.state, drafts)
    if not is_self_comparison(run.experiment):
        drafts = apply_floor(drafts, run.noise_floors, run.experiment.equivalence_margin)
    ceilings, ceilings_missing = divide_by_ceilings(run.ceilings, loads, summaries)
    checks = in_order(
        [
            *check_run(run),
            *check_evidence(run),
            *check_fairness(run),
            *check_load(run, blocks, summaries, accounts),
            *check_searches(run, rates, ramps),
            *check_machine(run, blocks),
            *check_clock(run.blocks),
            *check_comparisons(drafts, run.experiment.equivalence_margin),
            *check_repetition(run, drafts),
            *check_probes(run.cache_probes),
            *check_ceilings(ceilings),
        ]
    )
    comparisons = invalidate(drafts, lambda scenario: reason_against(checks, scenario))
    titles = {label: request.target for label, request in (("a", run.experiment.a), ("b", run.experiment.b))}
    titles |= {arm.label: arm.title for arm in run.arms}
    causes = find_causes(run, blocks, accounts)
    verdict = reach_verdict(run.experiment, titles, comparisons, checks, accounts, summaries, causes)
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
        stages=accounts,
        cold_starts=run.cold_starts,
        blocks=blocks,
        evidence=run.evidence,
        container_cold_starts=run.container_cold_starts,
        trials=run.trials,
        rates=rates,
        ramps=ramps,
        causes=causes,
        explained_cells=run.explanation.cells if run.explanation else None,
        causes_left_out=run.explanation.left_out if run.explanation else (),
        batching=executed_batches(loads, summaries),
        stopping=stopping,
        noise_floors=run.noise_floors,
        noise_floor_sentence=floor_sentence(run.noise_floors, comparisons, run.experiment),
        thresholds=judge_thresholds(run.experiment, Measured(comparisons, summaries, blocks, run.cold_starts)),
        ceilings=ceilings,
        ceilings_missing=ceilings_missing,
        gpu=gpu_series(
            run.readings, run.evidence, min((block.record.window_start_ns for block in run.blocks), default=0)
        ),
    )
