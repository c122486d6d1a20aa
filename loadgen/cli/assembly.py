"""From settings to experiments: one per combination of transport and payload, checked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from loadgen.client.grpc import parse_grpc_address
from loadgen.client.input_files import image_folder
from loadgen.client.inputs import InputError
from loadgen.client.requests import Address, AddressError
from loadgen.client.tls import TlsError, tls_context
from loadgen.experiment.plan import (
    AS_SERVED,
    Combination,
    PlanError,
    buckets,
    check_models,
    check_restarts,
    check_stack,
    decide_padding,
    expects_gpu,
    ignored_settings,
    make_arms,
    make_workloads,
    measurable_scenarios,
    minutes_of,
    plan_combinations,
)
from loadgen.experiment.settings import DEFAULT_PROJECT, ExperimentSettings
from loadgen.probes.ceiling.plan import has_own_engines
from loadgen.records.run import MODEL_WEIGHTS, PLAIN, ArmRequest, Experiment, Label, Transport, option_of
from loadgen.verdict.thresholds import plan_conditions


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """What to run: one experiment per combination. In a matrix each has its own folder."""

    runs: tuple[tuple[Combination, Experiment], ...]
    is_matrix: bool
    notes: tuple[str, ...] = ()
    """Sentences about settings that are ignored."""


def plan_experiment(settings: ExperimentSettings) -> ExperimentPlan:
    """What to run. Raises `PlanError` for options that contradict each other or cannot be measured."""
    arms = make_arms(settings)
    combinations = plan_combinations(arms, settings)
    for arm, combination in product(arms, combinations):
        check_reachable(arm, combination.transport)
    check_stack(settings, arms, combinations)
    check_models(settings, arms)
    check_inputs(settings, combinations)
    workloads = make_workloads(settings, measurable_scenarios(settings, arms), gpu=expects_gpu(*arms))
    has_load = any(workload.has_blocks for workload in workloads)
    if expects_gpu(*arms) and not has_load:
        raise PlanError("the GPU verification needs a scenario with load; add one, as in --scenarios single,ramp")
    own_engines = has_own_engines(arms, settings.deployment)
    if settings.ceiling and not own_engines:
        raise PlanError("--ceiling measures engines of servers that abserve starts, and it starts none; leave it out")
    if settings.ceiling and not has_load:
        raise PlanError("--ceiling is compared with the load; add a scenario of load, as in --scenarios batched")
    check_restarts(settings, workloads)
    minutes = minutes_of(settings)
    plan_conditions(settings.fail_if, workloads, tuple(settings.arms))
    is_matrix, full = settings.matrix or len(combinations) > 1, settings.preset == "full"

    def experiment(combination: Combination) -> Experiment:
        alone = {"transport": (combination.transport,), "payload": (combination.payload,), "matrix": False}
        own = settings.model_copy(update=alone) if is_matrix else settings
        compose = own.deployment == "compose"
        return Experiment(
            arms=arms,
            model=own.model,
            weights=AS_SERVED if compose else own.weights or MODEL_WEIGHTS,
            precision=own.precision,
            pad_to=buckets(own),
            inputs=own.inputs,
            sequence_length=own.sequence_length,
            payload=combination.payload,
            transport=combination.transport,
            workloads=workloads,
            preset=own.preset,
            seed=own.seed,
            equivalence_margin=own.margin,
            threads=own.threads,
            processes=own.processes,
            gpu_control=own.gpu_control,
            handicap_check=own.handicap_check,
            restarts=own.restarts,
            minutes=minutes if has_load else None,
            until_decided=own.until == "decided",
            time_limit_minutes=own.time_limit if own.until == "decided" else None,
            request_timeout_s=own.request_timeout,
            explain=full if own.explain is None else own.explain,
            explain_seconds=own.explain_minutes * 60.0,
            ceiling=own_engines and (full if own.ceiling is None else own.ceiling),
            deployment=own.deployment,
            compose_project=(own.compose_project or DEFAULT_PROJECT) if compose else None,
            settings=own.content(),
            settings_sha256=own.sha256(),
        )

    runs = tuple((one, experiment(one)) for one in combinations)
    return ExperimentPlan(runs, is_matrix, ignored_settings(settings))


def check_reachable(arm: ArmRequest, transport: Transport) -> None:
    """Raises `PlanError` for a URL that is malformed, and for a server that does not offer the transport."""
    if arm.target in PLAIN and transport != "http":
        raise PlanError(f"{option_of(arm.label)} {arm.target} serves HTTP only; use --transport http")
    if arm.embedded:
        return
    option = option_of(arm.label)
    try:
        address = Address.parse(arm.target, arm.access)
        if arm.grpc is not None:
            parse_grpc_address(arm.grpc, arm.access)
        tls_context(arm.access, "h2")
    except (AddressError, TlsError) as exc:
        raise PlanError(f"{option}: {exc}") from None
    if transport == "grpc" and arm.grpc is None:
        raise PlanError(f"{option} {arm.target} has no gRPC address; add {option_of(arm.label, 'grpc')} HOST:PORT")
    if transport == "shm" and not address.is_local:
        raise PlanError(f"{option} {arm.target} is on another machine, which shares no memory; use --transport http")


def check_inputs(settings: ExperimentSettings, combinations: Sequence[Combination]) -> None:
    """Raises `PlanError` for inputs that do not exist, or that contradict another setting."""
    if settings.inputs is None:
        return
    if settings.sequence_length is not None:
        raise PlanError("--inputs have their own lengths; leave --sequence-length out")
    try:
        images = image_folder(settings.inputs)
    except (InputError, OSError) as exc:
        raise PlanError(str(exc)) from exc
    if images is None and len({one.payload for one in combinations}) > 1:
        raise PlanError(f"--inputs {settings.inputs} are of one payload; give one --payload")


def check_servers(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Check the servers of a run before anything is written: servers that run must be ready, and `abserve serve` checks
    the model, the weights and every option of the others; then the user's inputs and lengths. Returns the experiments
    with the padding that every arm can do. Raises `PlanError`."""
    from loadgen.bench.preparation import make_deployment, make_inputs, model_name, prepare_inputs
    from loadgen.client.endpoint import EndpointError
    from loadgen.launch.interface import Deployment, DeploymentError, RemoteDeployment
    from loadgen.storage.store import RunStore

    checked: dict[tuple[Label, str], Deployment] = {}
    decided = []
    with TemporaryDirectory(prefix="abserve-check-") as folder:
        for experiment in experiments:
            deployments: dict[Label, Deployment] = {}
            unpadded = msgspec.structs.replace(experiment, pad_to=None)  # the servers first say whether they can
            for arm in sorted(experiment.arms, key=lambda one: not one.embedded):  # these tell the model's name
                key = (arm.label, experiment.payload_of(arm))
                if key in checked:
                    continue
                try:
                    deployment = make_deployment(arm, unpadded, RunStore(Path(folder)), Path(folder))
                    checked[key] = deployments[arm.label] = deployment
                    deployment.check(model_name(arm, experiment, deployments))
                except (DeploymentError, EndpointError) as exc:
                    reason = str(exc).removeprefix(f"abserve serve {arm.target} cannot start: ")
                    raise PlanError(f"{option_of(arm.label)} {arm.target}: {reason}") from exc
            known = {arm.label: checked[arm.label, experiment.payload_of(arm)] for arm in experiment.arms}
            cannot_pad = {label: one.cannot_pad for label, one in known.items() if one.cannot_pad is not None}
            pads_to = {label: one.pads_to for label, one in known.items()}
            decided.append(decide_padding(experiment, cannot_pad, pads_to))
        try:
            for number, experiment in enumerate(decided):
                started = any(arm.embedded and not arm.own_repository for arm in experiment.arms)
                # Otherwise the inputs come from `abserve samples` with its defaults, which fit a model that is served.
                if not started or experiment.inputs or experiment.sequence_length or experiment.pad_to:
                    place = Path(folder) / str(number) / "samples"
                    _, inputs = prepare_inputs(experiment, place)
                    running = checked[experiment.baseline.label, experiment.payload_of(experiment.baseline)]
                    if inputs is None and experiment.inputs and isinstance(running, RemoteDeployment):
                        name = experiment.model_of(experiment.baseline) or experiment.model
                        make_inputs(experiment, place, running.signature(name))
        except (InputError, EndpointError) as exc:
            raise PlanError(str(exc)) from exc
    return decided


def check_out(out: Path | None) -> None:
    """Raises `PlanError` for a folder that cannot take a new run."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise PlanError(f"--out {out} is a file; give a folder")
    if (out / "experiment.json").exists():
        raise PlanError(f"--out {out} already holds a run; give another folder")
    place = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    try:
        TemporaryDirectory(dir=place).cleanup()
    except OSError as exc:
        raise PlanError(f"--out {out}: cannot write to {place}: {exc.strerror or exc}; give another folder") from exc


def default_out(model: str) -> Path:
    """A new folder results/TIME-MODEL, in UTC, with a number appended where another run began in the same second."""
    name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2], flags=re.ASCII).strip("-.") or "model"
    name = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{name[:80]}"
    folder, number = Path("results") / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{name}-{number}")
        except OSError:  # writing the run's first record reports the reason and the remedy
            return folder
        else:
            return folder
