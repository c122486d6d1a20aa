"""From a run's stored records to its result: reads, summarises, checks, compares, concludes; writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from loadgen.analysis.batching import executed_batches
from loadgen.analysis.checks.registry import Facts, make_checks, reason_against
from loadgen.analysis.noise_floor import apply_floor, floor_sentence, is_self_comparison
from loadgen.analysis.result import FILE_NAME, Result, read_result
from loadgen.analysis.stopping import describe_stopping
from loadgen.analysis.thresholds import judge_thresholds
from loadgen.analysis.verdict import reach_verdict
from loadgen.comparison.comparisons import compare_all, invalidate
from loadgen.comparison.pairs import latencies_of
from loadgen.comparison.stages import account_cell
from loadgen.comparison.summaries import summarise_blocks, summarise_cell
from loadgen.documents import one_line
from loadgen.storage.stored_run import StoredRun, StoredRunError, read_run
from loadgen.studies.causes.analyse import find_causes
from loadgen.studies.ceiling.analyse import divide_by_ceilings
from loadgen.studies.gpu_proof.signals import gpu_series
from loadgen.studies.rate_search.analyse import find_ramps, find_rates


def analyse(out_dir: Path) -> Result:
    """The result of the run in `out_dir`, also of one that was interrupted or killed.

    Raises `StoredRunError` where there is no run or a record is unreadable.
    """
    return analyse_run(read_run(out_dir))


def analyse_run(run: StoredRun) -> Result:
    """The same, of records already read."""
    labels, pairings = run.experiment.labels, run.experiment.pairings
    loads = [cell for cell in run.experiment.cells if cell.has_blocks]
    blocks = summarise_blocks(run.blocks)
    summaries = tuple(summarise_cell(cell.name, label, run.blocks, blocks) for cell in loads for label in labels)
    complete = [
        block for block, summary in zip(run.blocks, blocks, strict=True) if summary.complete
    ]  # one that was cut short explains nothing
    accounts = tuple(
        account
        for cell in loads
        for account in account_cell(cell.name, [one for one in complete if one.record.cell == cell.name], pairings)
    )
    rates, ramps = find_rates(run.experiment.cells, run.trials), find_ramps(run.experiment.cells, run.trials)
    drafts = compare_all(run.experiment, blocks, run.cold_starts, [*rates, *ramps], latencies_of(run.blocks))
    stopping = describe_stopping(run.experiment, run.state, drafts)
    if not is_self_comparison(run.experiment):
        drafts = apply_floor(drafts, run.noise_floors, run.experiment.equivalence_margin)
    ceilings, ceilings_missing = divide_by_ceilings(run.ceilings, loads, summaries)
    facts = Facts(run, blocks, summaries, accounts, rates, ramps, drafts, ceilings)
    checks = make_checks(facts)
    comparisons = invalidate(drafts, lambda scenario: reason_against(checks, scenario))
    facts = replace(facts, comparisons=comparisons)
    titles = {request.label: request.target for request in run.experiment.arms}
    titles |= {arm.label: arm.title for arm in run.arms}
    causes = find_causes(run, blocks, accounts)
    verdict = reach_verdict(facts, titles, checks, causes)
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
        thresholds=judge_thresholds(facts),
        ceilings=ceilings,
        ceilings_missing=ceilings_missing,
        gpu=gpu_series(
            run.readings, run.evidence, min((block.record.window_start_ns for block in run.blocks), default=0)
        ),
    )


def stored_result(directory: Path) -> Result:
    """What the records say today; of a folder with a result.json and without samples, as a published one, that file.

    Such a folder must not be analysed: a run without samples is an invalid one. Raises `StoredRunError` and
    `ResultError`.
    """
    if (directory / FILE_NAME).exists() and not _records_are_kept(directory):
        return read_result(directory / FILE_NAME)
    runs = sorted(path.parent.name for path in directory.glob("*/experiment.json"))
    if runs and not (directory / "experiment.json").exists():
        raise StoredRunError(f"{directory} holds several runs; give one of its folders: {', '.join(runs)}")
    return analyse(directory)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around everything that is done with stored records. They have the right types, but nobody can say what else was
    changed in them: what fails over that is told in one sentence. Raises `StoredRunError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as exc:
        raise StoredRunError(
            f"the records in {path} contradict each other ({type(exc).__name__}: {one_line(str(exc))}); "
            "run the comparison again, or report this if nobody has changed them"
        ) from exc


def _records_are_kept(directory: Path) -> bool:
    if not (directory / "run.json").exists():
        return False
    return any(directory.glob("samples/*")) or not any(directory.glob("blocks/*.json"))
