"""Checks on the run as a whole: did it finish, do the arms agree, what do they run on."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.checks.outcome import PLAN, Check, CheckName, cell_scope, make_check
from loadgen.analysis.comparisons import MIN_PAIRS, Comparison
from loadgen.quantities import share
from loadgen.storage.run_lock import is_running
from loadgen.storage.stored_run import StoredRun


def check_run(run: StoredRun) -> list[Check]:
    """Everything that does not need a sample."""
    return [_finished(run), _parity(run), *_cold_starts(run), _weights(run), *_native_backend(run)]


def _finished(run: StoredRun) -> Check:
    state = run.state
    if state is None:
        return make_check(CheckName.RUN_FINISHED, None, scope=PLAN, threshold="finished", detail="run.json is missing")
    unfinished = "the run still runs" if is_running(run.directory) else "the run was killed during"
    detail = {
        "running": f"{unfinished}: {state.phase}",
        "finished": "finished",
        "interrupted": f"interrupted during: {state.phase}",
        "failed": f"failed during {state.phase}: {state.error}",
    }[state.state]
    return make_check(
        CheckName.RUN_FINISHED,
        state.state == "finished",
        scope=PLAN,
        value=state.state,
        threshold="finished",
        detail=detail,
    )


def _parity(run: StoredRun) -> Check:
    parity = run.parity
    if parity is None or (not parity.cases and parity.error is None):
        return make_check(CheckName.PARITY, None, detail="parity was not measured")
    lowest = min((case.cosine_min for case in parity.cases), default=None)
    failed = [case.name for case in parity.cases if not case.ok]
    if parity.error is not None:
        detail = parity.error
    elif failed:
        detail = (
            f"{len(failed)} of {len(parity.cases)} cases disagree ({', '.join(failed)}); lowest cosine {lowest:.6f}"
        )
    else:
        detail = f"lowest cosine {lowest:.6f} over {len(parity.cases)} cases"
    return make_check(
        CheckName.PARITY,
        parity.ok and not failed and parity.error is None,
        value=lowest,
        threshold=parity.threshold_cosine,
        detail=detail,
    )


def _cold_starts(run: StoredRun) -> list[Check]:
    checks = []
    for cell in run.experiment.cells:
        if cell.scenario != "cold-start":
            continue
        planned = 2 * cell.pairs
        good = [start for start in run.cold_starts if start.error is None and start.first_answer_ns is not None]
        errors = [start.error for start in run.cold_starts if start.error]
        detail = f"{len(good)} of {planned} starts came up" + (f"; first error: {errors[0]}" if errors else "")
        checks.append(
            make_check(
                CheckName.COLD_STARTS_SUCCEEDED,
                len(good) >= planned and not errors,
                scope=cell_scope(cell.name),
                value=len(good),
                threshold=planned,
                detail=detail,
            )
        )
    return checks


def _weights(run: StoredRun) -> Check:
    weights = run.experiment.weights
    if run.experiment.deployment == "compose":  # the stack chose them
        told = dict.fromkeys(str(w) for arm in run.arms if (w := arm.in_effect.get("weights")) is not None)
        if not told:
            detail = "no server of the stack tells its weights"
            return make_check(CheckName.TRAINED_WEIGHTS, None, threshold="trained", detail=detail)
        weights = next((name for name in told if name.startswith("random")), ", ".join(told))
    random = weights.startswith("random")
    detail = f"weights: {weights}"
    if random:
        detail = f"random weights ({weights}): the speed is real, the embeddings mean nothing"
    return make_check(CheckName.TRAINED_WEIGHTS, not random, value=weights, threshold="trained", detail=detail)


def _native_backend(run: StoredRun) -> list[Check]:
    checks = []
    for arm in run.arms:
        backend = str((arm.model_config or {}).get("backend", ""))
        if backend == "python":
            checks.append(
                make_check(
                    CheckName.NATIVE_BACKEND,
                    False,
                    value="python",
                    threshold="onnxruntime or tensorrt",
                    detail=f"{arm.label.upper()} is Triton {arm.server_version or ''} with its python backend: "
                    "this says nothing about Triton's native onnxruntime and tensorrt backends",
                )
            )
    return checks


def check_comparisons(comparisons: Sequence[Comparison], margin: float) -> list[Check]:
    """How much the pairs can tell, from each cell's leading metric."""
    checks = []
    for leading in leading_comparisons(comparisons):
        scope = cell_scope(leading.scenario)
        checks.append(
            make_check(
                CheckName.ENOUGH_PAIRS,
                leading.pairs >= MIN_PAIRS,
                scope=scope,
                value=leading.pairs,
                threshold=MIN_PAIRS,
                detail=f"{leading.pairs} complete pair{'' if leading.pairs == 1 else 's'}",
            )
        )
        effect = leading.minimal_detectable_effect
        checks.append(
            make_check(
                CheckName.SENSITIVITY,
                None if effect is None else effect <= margin,
                scope=scope,
                value=effect,
                threshold=margin,
                detail="the smallest difference that it can see is unknown"
                if effect is None
                else f"a true difference of {share(effect)} would be named in 80 % of such runs (δ is {share(margin)})",
            )
        )
    return checks


def leading_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """One a scenario: its throughput, the median latency of an open loop, the time to the first answer of a cold
    start."""
    return [c for c in comparisons if c.leading]
