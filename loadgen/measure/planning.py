"""From settings to experiments that can run: the models of servers at URLs, one experiment per combination of transport
and payload, and what the servers say of them before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from loadgen.client.connection import Address, AddressError
from loadgen.client.endpoint import EndpointError
from loadgen.client.grpc import parse_grpc_address
from loadgen.client.inputs import InputError, image_folder
from loadgen.client.tls import TlsError, tls_context
from loadgen.experiment.language import check_kind, plan_loads
from loadgen.experiment.plan import (
    AS_SERVED,
    Combination,
    PlanError,
    buckets,
    check_best,
    check_models,
    check_restarts,
    check_stack,
    check_surface,
    check_tls,
    decide_padding,
    expects_gpu,
    ignored_settings,
    make_arms,
    minutes_of,
)
from loadgen.experiment.settings import DEFAULT_PROJECT, ExperimentSettings, defaults_of
from loadgen.findings.ceiling import has_own_engines
from loadgen.launch.deployment import Deployment, DeploymentError
from loadgen.launch.discovery import find_language_models, find_models
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.measure.language import model_info
from loadgen.measure.preparation import make_deployment, model_name
from loadgen.measure.sent import SENT
from loadgen.records.names import names_of
from loadgen.records.payloads import TOKENS, implied_payload, served_name
from loadgen.records.run import MODEL_WEIGHTS, ArmRequest, Experiment, Label, body_in_words, option_of
from loadgen.records.store import RunStore
from loadgen.records.targets import ROUTES, TARGETS, TOKEN_TRANSPORTS, Kind, Transport, is_token_transport
from loadgen.verdict.thresholds import plan_conditions


def name_models(
    settings: ExperimentSettings, show: Callable[[str], None] | None = None
) -> tuple[ExperimentSettings, tuple[str, ...]]:
    """The settings with the model that servers at URLs have in common, if no setting names it, and notes about that;
    `show` gets what the servers answered. Raises `PlanError`."""
    arms = make_arms(settings)
    settings, notes = with_language_models(settings, arms, show)
    if settings.kind is Kind.TOKENS:
        return settings, notes
    if label := next((label for label, arm in settings.arms.items() if arm.body), None):
        raise PlanError(f"{option_of(label, 'body')} is for language models, and {settings.model} is not one")
    if "model" in settings.model_fields_set or any(arm.embedded for arm in arms):
        return settings, ()
    for arm in arms:
        check_reachable(arm, "http")
    payload = settings.payload[0] if settings.payload else implied_payload(settings.model)
    preferred = served_name(settings.model, payload) or settings.model
    try:
        found, notes = find_models(arms, preferred)
    except DeploymentError as exc:
        raise PlanError(str(exc)) from exc
    names = set(found.values())
    if names == {preferred}:
        return settings, notes
    named = {
        label: arm if len(names) == 1 else arm.model_copy(update={"model": found[label]})
        for label, arm in settings.arms.items()
    }
    model = found[next(iter(settings.arms))]
    return settings.model_copy(update={"arms": named, "model": model}), notes


def with_language_models(
    settings: ExperimentSettings, arms: Sequence[ArmRequest], show: Callable[[str], None] | None = None
) -> tuple[ExperimentSettings, tuple[str, ...]]:
    """The settings with the model, the protocol and the fields of the requests of each server at a URL, if these serve
    language models, and notes about them. A comparison of nothing but such servers is one of language models, whatever
    it calls the model. Raises `PlanError`."""
    urls = [arm for arm in arms if not arm.embedded]
    if not urls or (len(urls) < len(arms) and settings.kind is Kind.TENSORS):
        return settings, ()
    for arm in urls:
        check_reachable(arm, "http")
    preferred = served_name(settings.model, TOKENS) or settings.model
    asked = tuple(name for name in settings.transport or () if is_token_transport(name))
    is_named = "model" in settings.model_fields_set
    try:
        found = find_language_models(
            urls, preferred, certain=settings.kind is Kind.TOKENS, named=is_named, asked=asked, show=show
        )  # fmt: skip
    except DeploymentError as exc:
        raise PlanError(str(exc)) from exc
    if found is None:
        return settings, ()
    named = dict(settings.arms)
    notes: list[str] = []
    common = [
        name
        for name in TOKEN_TRANSPORTS
        if all(name in served.bodies for served in found.values())
        and all(name in TARGETS[arm.target].protocols for arm in arms if arm.embedded)
    ]
    names = names_of(arms, ())
    for label, served in found.items():
        given = named[label]
        able = sorted(served.bodies, key=TOKEN_TRANSPORTS.index)
        chosen = next((name for name in (*asked, *common) if name in able), able[0])
        body = dict(served.bodies[chosen])
        notes += served.notes
        if body != (given.body or {}):
            notes.append(f"{names[label]} is asked {body_in_words(body)}, because it refuses the usual fields")
        model = given.model if served.model == preferred else served.model
        named[label] = given.model_copy(update={"model": model, "transport": chosen, "body": body or None})
    update: dict[str, object] = {"arms": named}
    if settings.kind is Kind.TENSORS:
        defaults = defaults_of(Kind.TOKENS, settings.preset)
        update |= {name: value for name, value in defaults.items() if name not in settings.model_fields_set}
        if settings.transport is None:
            update["transport"] = tuple(common[:1]) or None
        if "model" not in settings.model_fields_set:
            update["model"] = found[arms[0].label].model
    return settings.model_copy(update=update), tuple(notes)


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
    check_kind(settings, arms)
    check_best(settings)
    check_surface(settings)
    combinations, arms, workloads = plan_loads(settings, arms)
    for arm, combination in product(arms, combinations):
        check_reachable(arm, arm.transport or combination.transport)
    check_stack(settings, arms, combinations)
    check_tls(settings, arms, combinations)
    check_models(settings, arms)
    check_inputs(settings, combinations)
    has_load = any(workload.has_blocks for workload in workloads)
    if expects_gpu(*arms) and not has_load:
        raise PlanError("the GPU verification needs a scenario with load; add one, as in --scenarios single,concurrent")
    starts_engines = has_own_engines(arms, settings.deployment) and settings.kind is Kind.TENSORS
    if settings.ceiling and not starts_engines:
        raise PlanError("--ceiling measures engines of servers that abserve starts, and it starts none; leave it out")
    if settings.ceiling and not has_load:
        raise PlanError("--ceiling is compared with the load; add a scenario of load, as in --scenarios batched")
    check_restarts(settings, workloads)
    minutes = minutes_of(settings)
    plan_conditions(settings.fail_if, workloads, tuple(settings.arms))
    is_matrix = settings.matrix or len(combinations) > 1
    if settings.best and is_matrix:
        raise PlanError("--best compares over one transport with one payload; give one of each")
    # The rest of the time is for the surface, or for choosing.
    full = settings.preset == "full" and not settings.surface and not settings.best

    def experiment(combination: Combination) -> Experiment:
        asked = settings
        if is_matrix:
            alone = {"transport": (combination.transport,), "payload": (combination.payload,), "matrix": False}
            asked = settings.model_copy(update=alone)
        compose = asked.deployment == "compose"
        return asked.stored(
            Experiment,
            arms=arms,
            weights=AS_SERVED if compose else asked.weights or MODEL_WEIGHTS,
            pad_to=buckets(asked),
            payload=combination.payload,
            transport=combination.transport,
            workloads=workloads,
            equivalence_margin=asked.margin,
            minutes=minutes if has_load else None,
            until_decided=asked.until == "decided" or bool(asked.surface),
            time_limit_minutes=asked.time_limit if asked.until == "decided" else None,
            request_timeout_s=asked.request_timeout,
            explain=full if asked.explain is None else asked.explain,
            explain_seconds=asked.explain_minutes * 60.0,
            ceiling=starts_engines and (full if asked.ceiling is None else asked.ceiling),
            compose_project=(asked.compose_project or DEFAULT_PROJECT) if compose else None,
            settings=asked.content(),
            settings_sha256=asked.sha256(),
        )

    runs = tuple((combination, experiment(combination)) for combination in combinations)
    return ExperimentPlan(runs, is_matrix, ignored_settings(settings))


def check_reachable(arm: ArmRequest, transport: Transport) -> None:
    """Raises `PlanError` for a URL that is malformed, and for a server that does not offer the transport."""
    if arm.embedded:
        offered = TARGETS[arm.target].transports
        if transport not in (*offered, *TARGETS[arm.target].protocols):
            titles = " and ".join(ROUTES[name].title for name in offered)
            raise PlanError(
                f"{option_of(arm.label)} {arm.target} serves {titles} only; use --transport {','.join(offered)}"
            )
        return
    option = option_of(arm.label)
    try:
        address = Address.parse(arm.target, arm.access)
        if arm.grpc is not None:
            parse_grpc_address(arm.grpc, arm.access)
        tls_context(arm.access, "h2")
    except (AddressError, TlsError) as exc:
        raise PlanError(f"{option}: {exc}") from None
    if ROUTES[transport].is_grpc and arm.grpc is None:
        address_option = f"{option_of(arm.label, 'grpc')} HOST:PORT"
        raise PlanError(f"{option} {arm.target} has no {ROUTES[transport].title} address; add {address_option}")
    if ROUTES[transport].shares_memory and not address.is_local:
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
    if images is None and len({combination.payload for combination in combinations}) > 1:
        raise PlanError(f"--inputs {settings.inputs} are of one payload; give one --payload")


def check_servers(experiments: Sequence[Experiment], say: Callable[[str], object]) -> list[Experiment]:
    """Check the servers of a run before anything is written: a language model must hold the longest answers, servers
    that run must be ready, and `abserve serve` checks the model, the weights and every option of the others; then the
    user's inputs. Returns the experiments with the padding that every arm can do; `say` gets what takes long. Raises
    `PlanError`."""
    try:
        for experiment in experiments:
            model_info(experiment)
    except InputError as exc:
        raise PlanError(str(exc)) from exc
    checked: dict[tuple[Label, str], Deployment] = {}
    decided = []

    def check(arm: ArmRequest, deployments: Mapping[Label, Deployment], experiment: Experiment) -> None:
        try:
            deployments[arm.label].check(model_name(arm, experiment, deployments))
        except (DeploymentError, EndpointError) as exc:
            reason = str(exc).removeprefix(f"abserve serve {arm.target} cannot start: ")
            raise PlanError(f"{option_of(arm.label)} {arm.target}: {reason}") from exc

    with TemporaryDirectory(prefix="abserve-check-") as folder:
        for experiment in experiments:
            deployments: dict[Label, Deployment] = {}
            unpadded = msgspec.structs.replace(experiment, pad_to=None)  # the servers first say whether they can
            left = [arm for arm in experiment.arms if (arm.label, experiment.payload_of(arm)) not in checked]
            for arm in left:
                try:
                    deployment = make_deployment(arm, unpadded, RunStore(Path(folder)), Path(folder))
                except (DeploymentError, EndpointError) as exc:
                    raise PlanError(f"{option_of(arm.label)} {arm.target}: {exc}") from exc
                checked[arm.label, experiment.payload_of(arm)] = deployments[arm.label] = deployment
            to_start = [arm for arm in left if isinstance(deployments[arm.label], EmbeddedDeployment)]
            if to_start:
                names = names_of(experiment.arms, ())
                said = ", ".join(names[arm.label] for arm in to_start)
                say(f"asking whether the model can be served: {said}; each imports its engine for that")
            with ThreadPoolExecutor() as pool:
                list(pool.map(partial(check, deployments=deployments, experiment=experiment), to_start))
            for arm in sorted(left, key=lambda arm: not arm.embedded):  # those to start have told the model's name
                if arm not in to_start:
                    check(arm, deployments, experiment)
            by_label = {arm.label: checked[arm.label, experiment.payload_of(arm)] for arm in experiment.arms}
            reasons = {label: deployment.cannot_pad for label, deployment in by_label.items()}
            cannot_pad = {label: reason for label, reason in reasons.items() if reason is not None}
            pads_to = {label: deployment.pads_to for label, deployment in by_label.items()}
            decided.append(decide_padding(experiment, cannot_pad, pads_to))
        try:
            for number, experiment in enumerate(decided):
                baseline = checked[experiment.baseline.label, experiment.payload_of(experiment.baseline)]
                place = Path(folder) / str(number) / "samples"
                decided[number] = SENT[experiment.kind].checked(experiment, baseline, place)
        except (InputError, EndpointError) as exc:
            raise PlanError(str(exc)) from exc
    return decided
