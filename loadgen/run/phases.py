"""The phases of a run that need all servers up and warmed, in their order.

A new one is a function of the bench and a line in `PHASES`. The bodies and the warm-up are of the experiment's load
cells; a phase with other load shapes asks the bench for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadgen.experiment.schedule import load_cells, schedule
from loadgen.records.probes import CacheProbe
from loadgen.records.run import Experiment
from loadgen.run.bench import Bench
from loadgen.run.cache_probe import probe_cache
from loadgen.run.explanation_phase import explain
from loadgen.run.fairness_phase import check_fairness
from loadgen.run.rounds import Rounds
from loadgen.run.search_phase import has_searches, run_searches


@dataclass(frozen=True, slots=True)
class Phase:
    """Something measured under load. `run` is called in every restart for which `wanted` holds for the experiment."""

    wanted: Callable[[Experiment], bool]
    run: Callable[[Bench], None]


def _load(bench: Bench) -> None:
    """This restart's share of the pairs, or pairs for as long as there is time, or until all is decided."""
    experiment = bench.experiment
    title = "load" if experiment.restarts == 1 else f"load, restart {bench.restart + 1} of {experiment.restarts}"
    rounds = None
    if experiment.until_decided or experiment.minutes is not None:
        rounds = Rounds(bench, bench.done, bench.load_deadline())
        title += f", {rounds.forecast()}"
    bench.enter(title)
    bench.forecast.load_begins()
    if rounds is not None:
        rounds.run()
        return
    planned = schedule(experiment)
    blocks = [block for block in planned if block.restart == bench.restart]
    bench.load_runner().run(blocks, bench.forecast, planned=len(planned))


def _prove_gpu(bench: Bench) -> None:
    """Where the model ran, once all blocks are there."""
    if bench.gpu.recording is None:
        return
    if not bench.last:
        bench.gpu.note_processes()  # this restart's; they are gone when it is judged
        return
    bench.enter("proving where the model ran")
    bench.gpu.finish(bench.load_runner)


def _look(bench: Bench) -> None:
    """Whether the arms are alike and the machine is fit, before anything is measured."""
    if bench.restart == 0:
        bench.enter("checking fairness")
        check_fairness(bench)


def _probe(bench: Bench) -> None:
    """Whether an arm answers from memory what the load will repeat."""
    if bench.restart == 0:
        bench.progress.now("new requests to every server, among requests that they know")
        probes = [
            probe_cache(arm, bench.inputs[arm.payload], bench.signatures[label]) for label, arm in bench.arms.items()
        ]
        bench.store.write_all(CacheProbe, probes)


def _compare_answers(bench: Bench) -> None:
    """Whether the answers under load were those to the same inputs alone."""
    bench.enter("comparing answers under load")
    bench.answers.compare(bench.arms, bench.signatures, bench.inputs, bench.restart)


def _explain(bench: Bench) -> None:
    """Why the arms differ, once all blocks are there."""
    if bench.last:
        bench.enter("explaining the differences")
        explain(bench)


def _is_explained(experiment: Experiment) -> bool:
    return experiment.explain and _has_load(experiment)


def _has_load(experiment: Experiment) -> bool:
    return bool(load_cells(experiment.cells))


PHASES: tuple[Phase, ...] = (
    Phase(_has_load, _look),
    Phase(_has_load, _probe),
    Phase(_has_load, _load),
    Phase(has_searches, run_searches),
    Phase(lambda experiment: _has_load(experiment) or has_searches(experiment), _compare_answers),
    Phase(_has_load, _prove_gpu),
    Phase(_is_explained, _explain),
)


def phases_of(experiment: Experiment) -> tuple[Phase, ...]:
    """Those that this experiment asks for."""
    return tuple(phase for phase in PHASES if phase.wanted(experiment))
