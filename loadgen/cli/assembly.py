"""From settings to what a run is given: the arms, the cells, and the combinations of transport and payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loadgen.experiment.combinations import Combination, plan_combinations
from loadgen.experiment.plan import SCENARIOS, PlanError, expects_gpu, make_cells
from loadgen.experiment.repetition import check_repetition, least_rounds, minutes_of
from loadgen.experiment.search_plan import make_search_cells
from loadgen.experiment.settings import ArmSettings, ExperimentSettings
from loadgen.experiment.stack_request import AS_SERVED, DEFAULT_PROJECT, check_stack_request, parse_deployment
from loadgen.records.run import ArmRequest, Experiment, Label, option_of
from loadgen.result.thresholds import plan_conditions
from loadgen.studies.ceiling.plan import has_own_engines


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """What to run, one experiment a combination."""

    runs: tuple[tuple[Combination, Experiment], ...]
    is_matrix: bool
    """Whether each has a folder of its own."""


def plan_experiment(settings: ExperimentSettings) -> ExperimentPlan:
    """What to run. Raises `PlanError` for what does not exist and for what contradicts itself."""
    arms = tuple(make_arm(label, arm) for label, arm in settings.arms.items())
    combinations = plan_combinations(arms, settings.model, settings.transport, settings.payload, matrix=settings.matrix)
    scenarios = _measurable(settings.scenarios, arms)
    kind = parse_deployment(settings.deployment, settings.compose_project)
    if kind == "compose":
        check_stack_request(
            arms,
            transports=[one.transport for one in combinations],
            scenarios=scenarios,
            weights=settings.weights,
            threads=settings.threads,
        )
    cells = make_cells(
        settings.preset,
        scenarios,
        batch_sizes=settings.batch_sizes,
        concurrency=settings.concurrency,
        requests=settings.requests,
        rounds=settings.rounds,
        least_rounds=least_rounds(settings),
        gpu=expects_gpu(*arms),
        rates=settings.rates,
        arrivals=settings.arrivals,
        connections=settings.connections,
        open_seconds=settings.open_seconds,
    ) + make_search_cells(
        settings.preset,
        scenarios,
        bounds_ms=settings.slo_p99_ms,
        queries=settings.slo_queries,
        connections=settings.connections,
        ramp_users=settings.ramp_users,
        rounds=settings.rounds,
    )
    names = [cell.name for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PlanError(f"two loads would both be called {twice}: give values that differ in their first six digits")
    if expects_gpu(*arms) and not any(cell.has_blocks for cell in cells):
        raise PlanError("where the model ran is proven by blocks of load: add one, as in --scenarios single,ramp")
    own_engines = has_own_engines(arms, kind)
    if settings.ceiling and not own_engines:
        raise PlanError("--ceiling measures engines of servers that abserve starts; there is none here: leave it out")
    if settings.ceiling and not any(cell.has_blocks for cell in cells):
        raise PlanError("--ceiling is what a load is divided by: add a scenario of load, as in --scenarios batched")
    check_repetition(settings, cells)
    minutes = minutes_of(settings)
    plan_conditions(settings.fail_if, cells, tuple(settings.arms))
    is_matrix = settings.matrix or len(combinations) > 1

    def experiment(combination: Combination) -> Experiment:
        transport, payload = combination.transport, combination.payload
        alone = {"transport": (transport,), "payload": (payload,), "matrix": False}
        own = settings.model_copy(update=alone) if is_matrix else settings
        return Experiment(
            arms=arms,
            model=own.model,
            weights=AS_SERVED if kind == "compose" else own.weights,
            payload=payload,
            transport=transport,
            cells=cells,
            preset=own.preset,
            seed=own.seed,
            equivalence_margin=own.margin,
            threads=own.threads,
            processes=own.processes,
            gpu_control=own.gpu_control,
            restarts=own.restarts,
            minutes=minutes if any(cell.has_blocks for cell in cells) else None,
            until_decided=own.until == "decided",
            time_limit_minutes=own.time_limit if own.until == "decided" else None,
            explain=own.preset == "full" if own.explain is None else own.explain,
            explain_seconds=own.explain_minutes * 60.0,
            ceiling=own_engines and (own.preset == "full" if own.ceiling is None else own.ceiling),
            deployment=kind,
            compose_project=(own.compose_project or DEFAULT_PROJECT) if kind == "compose" else None,
            settings=own.content(),
            settings_sha256=own.sha256(),
        )

    return ExperimentPlan(tuple((one, experiment(one)) for one in combinations), is_matrix)


def _measurable(scenarios: Sequence[str], arms: Sequence[ArmRequest]) -> Sequence[str]:
    """Without the default's cold starts where an arm is a URL: nobody but its owner can start that server. Raises
    `PlanError` where they were asked for."""
    if "cold-start" not in scenarios or all(arm.embedded for arm in arms):
        return scenarios
    if tuple(scenarios) != SCENARIOS:
        raise PlanError(
            "cold starts are measured of servers that abserve starts, and an arm is a URL: leave cold-start out of "
            "--scenarios"
        )
    return [name for name in scenarios if name != "cold-start"]


def make_arm(label: Label, arm: ArmSettings) -> ArmRequest:
    """One arm. Raises `PlanError` for a target that is none and for what has no effect on it."""
    target, options = arm.target, _without_dashes(arm.options)
    if target not in {"native", "triton"}:
        if "://" not in target and ":" not in target:
            raise PlanError(f"{option_of(label)} {target}: give native, triton or a URL like http://127.0.0.1:8000")
        if options:
            raise PlanError(f"{option_of(label, 'option')} has no effect on {target}, which is not started by us")
    elif arm.grpc is not None:
        raise PlanError(f"{option_of(label, 'grpc')} has no effect on {target}, whose address we choose ourselves")
    return ArmRequest(label=label, target=target, settings=options, payload=arm.payload, grpc=arm.grpc)


def default_out(model: str) -> Path:
    """A new folder results/TIME-MODEL, in UTC; with a number behind it where another run began in the same second."""
    name = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{model}"
    folder, number = Path("results") / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{name}-{number}")
        except OSError:  # the run's first record says why, with the remedy
            return folder
        else:
            return folder


def _without_dashes(options: Mapping[str, str]) -> dict[str, str]:
    return {name.strip().lstrip("-"): value for name, value in options.items()}
