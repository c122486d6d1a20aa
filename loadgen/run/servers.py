"""The servers of a run: started together, described, and compared by their answers.

They can be restarted: each time all are started, described and compared again.
"""

from __future__ import annotations

from dataclasses import replace

from loadgen.bench.answers import ParityTarget, check_parity
from loadgen.bench.arms import Arm
from loadgen.bench.bench import Bench
from loadgen.bench.preparation import READY_SECONDS, make_deployment, model_name
from loadgen.client.endpoint import EndpointError, Signature
from loadgen.launch.compose import ComposeDeployment, require_one_way
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.launch.interface import RUNNING_READY_SECONDS, DeploymentError
from loadgen.records.run import ArmRecord, Label, ParityRecord, option_of, shown
from loadgen.stats.agreement import Tolerance


class ParityFailedError(Exception):
    """The arms do not compute the same function, so their speed is not compared."""


def make_arms(bench: Bench) -> None:
    """Find the servers without starting any; the end of the run stops launched servers and restores a stack.
    Raises `AddressError`, and `DeploymentError` for a stack that is not up."""
    experiment = bench.experiment
    for request in experiment.arms:
        deployment = make_deployment(request, experiment, bench.store, bench.work, bench.abserve)
        model, payload = experiment.model_of(request) or experiment.model, experiment.payload_of(request)
        bench.arms[request.label] = Arm(
            request,
            deployment,
            model,
            experiment.transport,
            payload,
            request_timeout_s=experiment.request_timeout_s,
        )
        bench.resources.callback(deployment.restore if isinstance(deployment, ComposeDeployment) else deployment.stop)


def start_servers(bench: Bench) -> None:
    """Start all at once on fresh ports, in the reverse order each time; describe and store them. Raises
    `DeploymentError`, `EndpointError`, `ParityFailedError`."""
    order = list(bench.arms.items())
    for label, arm in reversed(order) if bench.restart % 2 else order:
        bench.progress.now(f"{shown(label)}: {arm.request.target}")
        arm.deployment.start()
    require_one_way([arm.deployment for arm in bench.arms.values()])
    bench.records = [_await(bench, label) for label in bench.arms]
    bench.store.write_all(ArmRecord, bench.records)
    _require_batch_sizes(bench)
    bench.signatures = _signatures(bench)


def _await(bench: Bench, label: Label) -> ArmRecord:
    arm = bench.arms[label]
    bench.progress.now(f"waiting until {shown(label)} ({arm.request.target}) is ready")
    try:
        if isinstance(arm.deployment, ComposeDeployment):
            model = arm.deployment.await_model(arm.model, READY_SECONDS)
        else:
            deployments = {one: other.deployment for one, other in bench.arms.items()}
            model = model_name(arm.request, bench.experiment, deployments)
        bench.arms[label] = arm = replace(arm, model=model)
        arm.deployment.wait_ready(arm.model, READY_SECONDS if arm.deployment.launched else RUNNING_READY_SECONDS)
        record = arm.record()
    except (DeploymentError, EndpointError) as exc:
        raise DeploymentError(f"arm {label} ({arm.request.target}): {exc}") from exc
    bench.progress.arm_ready(record)
    return record


def _require_batch_sizes(bench: Bench) -> None:
    """Raises `DeploymentError` when a server would refuse a batch size of the load."""
    largest = bench.experiment.largest_batch
    limits = {record.label: (record, record.in_effect.get("max_batch_size")) for record in bench.records}
    small = {label: (record, n) for label, (record, n) in limits.items() if isinstance(n, int) and 0 < n < largest}
    if not small:
        return
    taken = " and ".join(f"arm {label} ({record.title}) accepts at most {n}" for label, (record, n) in small.items())
    options = " ".join(
        f"{option_of(label, 'option')} max-batch-size={largest}"
        if isinstance(bench.arms[label].deployment, EmbeddedDeployment)
        else f"a larger max_batch_size on the server of arm {label}"
        for label in small
    )
    raise DeploymentError(
        f"the load has batches of {largest}, but {taken}; give {options}, or leave that size out of --batch-sizes"
    )


def _signatures(bench: Bench) -> dict[Label, Signature]:
    """The inputs and outputs of each arm. Raises `ParityFailedError` when they differ; the inputs may, where the arms
    get different payloads."""
    inputs_alike = len(bench.experiment.payloads) == 1
    signatures = {label: arm.endpoint.signature(arm.model) for label, arm in bench.arms.items()}
    interfaces = {
        label: " → ".join(
            (
                ", ".join(sorted(f"{one.name} ({one.datatype})" for one in signature.inputs)) if inputs_alike else "…",
                ", ".join(sorted(one.name for one in signature.outputs)),
            )
        )
        for label, signature in signatures.items()
    }
    (first, expected), *others = interfaces.items()
    different = [f"{label} has {interface}" for label, interface in others if interface != expected]
    if different:
        message = (
            f"the arms do not serve the same model: {first} has {expected}, {', '.join(different)}; "
            "name the same model on all arms"
        )
        bench.store.write(ParityRecord(cases=(), ok=False, error=message))
        raise ParityFailedError(message)
    for label, arm in bench.arms.items():
        bench.arms[label] = replace(arm, signature=signatures[label])
    return signatures


def require_parity(bench: Bench, tolerance: Tolerance) -> None:
    """Compare the arms' answers to the same inputs, at each batch size of the load. Raises `ParityFailedError` after
    storing the comparison."""
    count = next(iter(bench.inputs.values())).count
    bench.progress.now(f"sending {count} inputs to every server, alone and in mixed batches")
    limits = [size for record in bench.records if isinstance(size := record.in_effect.get("max_batch_size"), int)]
    limits += [1 for signature in bench.signatures.values() if not signature.batched]
    used = {workload.batch_size for workload in bench.experiment.workloads}
    largest = max(1, min([*limits, max({8, *used})]))
    arms = {
        label: ParityTarget(arm.target, bench.signatures[label], bench.inputs[arm.payload], arm.request_timeout_s)
        for label, arm in bench.arms.items()
    }
    sizes = {largest, *(size for size in used if size < largest)}
    record = check_parity(arms, sizes, tolerance, bench.experiment.lengths)
    bench.store.write(record)
    bench.progress.parity_done(record)
    if record.error is not None:
        raise ParityFailedError(f"the arms' answers cannot be checked, so their speed is not compared: {record.error}")
    if not record.ok:
        first, *more = [case for case in record.cases if not case.ok]
        others = f", and {len(more)} more of {len(record.cases)} cases" if more else ""
        raise ParityFailedError(
            "the arms do not give the same answers, so their speed is not compared: "
            f"{first.name} (output {first.output} {first.fault}){others}"
        )
