"""Prepares a run: exported models, sample inputs and the deployments of the arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loadgen.base.child_process import ABSERVE, ChildProcess
from loadgen.base.documents import user_path
from loadgen.client.endpoint import Signature
from loadgen.client.inputs import (
    GIVEN,
    MANIFEST,
    PHOTOGRAPHS,
    RANDOM_INPUTS,
    InputError,
    SampleInputs,
    as_model_inputs,
    image_folder,
    largest_length,
    read_given,
    read_inputs,
    signature_of,
    write_samples,
)
from loadgen.experiment.language import longest_answer
from loadgen.experiment.plan import care_of, default_sizes, has_mixed_lengths
from loadgen.launch.compose import PROJECT, ComposeDeployment
from loadgen.launch.deployment import Deployment, RemoteDeployment, RemoteLanguageDeployment
from loadgen.launch.embedded import EmbeddedDeployment, make_certificate
from loadgen.measure.errors import RunError
from loadgen.records.payloads import OWN_TENSORS, reference
from loadgen.records.run import (
    DEFAULT_ACCESS,
    MODEL_WEIGHTS,
    Access,
    ArmRequest,
    Experiment,
    Label,
    asked_for,
    option_of,
)
from loadgen.records.store import RunStore
from loadgen.records.targets import ROUTES, TARGETS, Kind

READY_SECONDS = 300.0
"""Time limit for a launched server to start."""
Inputs = Mapping[str, SampleInputs]
"""Sample inputs by payload, all made from the same pictures."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What several runs of one model with the same inputs make once."""

    samples: Path
    """The folder of the samples; the first run fills it."""
    exported: set[tuple[str, ...]] = field(default_factory=set)
    """The files that `export_artefacts` has made."""


def needs_artefact(arm: ArmRequest) -> bool:
    """Whether the arm executes an exported file instead of the torch module, or may do so."""
    engine = arm.settings.get("engine", "auto" if arm.target == "triton" else "torch")
    return arm.embedded and not arm.own_repository and engine in ("auto", "onnxruntime")


def make_deployment(
    arm: ArmRequest, experiment: Experiment, store: RunStore, work: Path, abserve: Sequence[str] = ABSERVE
) -> Deployment:
    """The deployment of an arm, not yet started. Raises `AddressError` for an unusable URL, `DeploymentError` when a
    compose stack is not up."""
    deployment = _deployment(arm, experiment, store, work, abserve)
    deployment.largest_batch = experiment.largest_batch
    if (plan_s := care_of(experiment).plan_s) is not None and isinstance(deployment, EmbeddedDeployment):
        deployment.plan_seconds = plan_s
    return deployment


def _deployment(
    arm: ArmRequest, experiment: Experiment, store: RunStore, work: Path, abserve: Sequence[str]
) -> Deployment:
    if not arm.embedded:
        grpc = arm.grpc if ROUTES[experiment.transport].is_grpc else None
        remote = {Kind.TENSORS: RemoteDeployment, Kind.TOKENS: RemoteLanguageDeployment}[experiment.kind]
        return remote(arm.target, grpc, arm.access, model_option=option_of(arm.label, "model"))
    if experiment.deployment == "compose":
        return ComposeDeployment(arm.target, experiment.compose_project or PROJECT, asked_for(arm.settings, "backend"))
    log_path = store.log_path(f"{arm.label}-{arm.target}")
    options = serve_options(arm, experiment)
    if TARGETS[arm.target].has_folder:
        options["work-dir"] = str(work / f"{arm.target}-{arm.label}")
    access = DEFAULT_ACCESS
    if experiment.tls:
        options["tls-certificate"] = ca = make_certificate(work, f"tls-{arm.label}", arm.settings.get("host"))
        access = Access(ca=ca)
    deployment = EmbeddedDeployment(arm.target, {**options, **arm.settings}, log_path, abserve=abserve)
    deployment.access = access
    return deployment


def _room_for_tokens(experiment: Experiment) -> dict[str, str]:
    most = max((load.concurrency for load in experiment.workloads), default=1)
    return {"max-length": str(longest_answer(experiment.workloads)), "slots": str(most)}


_ROOM: Mapping[Kind, Callable[[Experiment], dict[str, str]]] = {
    Kind.TENSORS: lambda _: {},
    Kind.TOKENS: _room_for_tokens,
}
"""The options that say how much is served at once."""


def serve_options(arm: ArmRequest, experiment: Experiment) -> dict[str, str]:
    """The options of `abserve serve` that follow from the experiment; the arm's settings replace them."""
    options = {"model": reference(experiment.reference_of(arm), experiment.inputs)}
    if arm.own_repository:
        return options
    options["threads"] = str(experiment.threads)
    if experiment.weights != MODEL_WEIGHTS:
        options["weights"] = experiment.weights
    if experiment.precision is not None:
        options["precision"] = experiment.precision
    options |= _ROOM[experiment.kind](experiment)
    if experiment.payload_of(arm) not in OWN_TENSORS:
        options["payloads"] = experiment.payload_of(arm)
    if experiment.pad_to and not TARGETS[arm.target].is_plain and asked_for(arm.settings, "pad_to") is None:
        options["pad-to"] = ",".join(map(str, experiment.pad_to))
    return {**options, **TARGETS[arm.target].for_transports.get(experiment.transport, {})}


def model_name(arm: ArmRequest, experiment: Experiment, deployments: Mapping[Label, Deployment]) -> str:
    """The name under which the arm's server serves its model: by its launch plan, by the settings, or as the servers
    that abserve starts with the same model call it."""
    deployment = deployments.get(arm.label)
    if deployment is not None and deployment.model is not None:
        return deployment.model
    alike = (
        other
        for other in experiment.arms
        if other.model == arm.model and experiment.payload_of(other) == experiment.payload_of(arm)
    )
    names = (deployments[other.label].model for other in alike if other.label in deployments)
    return experiment.model_of(arm) or next(filter(None, names), experiment.model)


def export_artefacts(
    experiment: Experiment,
    store: RunStore,
    say: Callable[[str], None],
    abserve: Sequence[str] = ABSERVE,
    exported: set[tuple[str, ...]] | None = None,
) -> None:
    """Run `abserve export` for the arms that need it, once per file, and pass its output lines on. A model that is a
    file itself needs none, nor do those in `exported`, to which the others are added. Raises `RunError`."""
    exported = set() if exported is None else exported
    exports = {
        (
            reference(experiment.reference_of(arm), experiment.inputs),
            arm.settings.get("artefacts", ""),
            "" if experiment.payload_of(arm) in OWN_TENSORS else "uint8",
            (asked_for(arm.settings, "precision") or experiment.precision or "").replace("tf32", "fp32"),
        )
        for arm in experiment.arms
        if needs_artefact(arm) and not _is_file(experiment.reference_of(arm))
    }  # a JPEG variant executes the file of the UINT8 one, TF32 that of FP32; the export knows the default precision
    for model, place, payload, precision in sorted(exports - exported):
        argv = [*abserve, "export", "--model", model]
        argv += ["--weights", experiment.weights] if experiment.weights != MODEL_WEIGHTS else []
        argv += ["--payload", payload] if payload else []
        argv += ["--precision", precision] if precision else []
        argv += ["--artefacts", place] if place else []
        exported.add((model, place, payload, precision))
        try:
            _export(argv, store.log_path("export"), say)
        except RunError:
            if not care_of(experiment).leaves_out:  # an arm that does not start without the file
                raise


def _is_file(model: str) -> bool:
    """Whether the model is an ONNX file, alone or in a folder for Triton."""
    return model.endswith(".onnx") or (user_path(model) / "config.pbtxt").is_file()


def _export(argv: Sequence[str], log_path: Path, say: Callable[[str], None]) -> None:
    process = ChildProcess(argv, log_path=log_path, pipes=True, causes=(r"^error: (?P<cause>.+)",))
    try:
        assert process.popen.stdout is not None
        for raw in process.popen.stdout:
            line = raw.decode("utf-8", "replace").strip()
            if line:
                say(line)
        code = process.popen.wait()
    finally:
        process.stop()
    if code != 0:
        raise RunError(f"the export failed: {process.cause() or process.failure()}")


def prepare_inputs(
    experiment: Experiment, folder: Path, abserve: Sequence[str] = ABSERVE
) -> tuple[Experiment, Inputs | None]:
    """The sample inputs in every payload that an arm takes, and the experiment with the sizes to pad to. No inputs if
    only a server's metadata tell what the user's own must be. Raises `InputError`."""
    starts = experiment.deployment == "embedded" and any(
        arm.embedded and not arm.own_repository for arm in experiment.arms
    )
    images = image_folder(experiment.inputs)
    user_inputs = experiment.inputs is not None and images is None
    if user_inputs and not starts:
        return experiment, None
    place = folder.with_name("model") if user_inputs else folder
    try:
        if not (place / MANIFEST).exists():  # else `with_generated_inputs` has written the same
            write_samples(
                reference(experiment.model, experiment.inputs), place, abserve,
                sequence_length=experiment.sequence_length, seed=experiment.seed, images=images,
            )  # fmt: skip
    except InputError as exc:
        if user_inputs:  # they are only asked for the model's axis
            return experiment, None
        if starts:
            raise
        raise InputError(
            f"{exc}; give your own with --inputs DIR or FILE, or --inputs random for random values of the right shapes"
        ) from exc
    described = {payload: read_inputs(place, payload) for payload in experiment.payloads}
    samples = next(iter(described.values()))
    padded = _with_padding(experiment, samples, place)
    if not starts:  # the running servers pad as they are configured
        padded = msgspec.structs.replace(padded, pad_to=None)
    if not user_inputs:
        return padded, described
    signature = signature_of(place, experiment.payload_of(experiment.baseline))
    if signature is None:
        return padded, None
    by_payload = make_inputs(experiment, folder, signature)
    try:
        return padded, {payload: as_model_inputs(inputs, samples, place) for payload, inputs in by_payload.items()}
    except InputError as exc:
        raise InputError(f"--inputs {experiment.inputs}: {exc}") from exc


def with_generated_inputs(
    experiment: Experiment, folder: Path, signature: Signature, abserve: Sequence[str] = ABSERVE
) -> Experiment:
    """The experiment of servers that run already, with random values as its inputs unless `abserve samples` knows
    their model by its name: then its samples fit the metadata."""
    if experiment.inputs is not None or experiment.sequence_length is not None:
        return experiment
    with suppress(InputError):
        write_samples(reference(experiment.model), folder, abserve, seed=experiment.seed)
        samples = signature_of(folder, experiment.payload_of(experiment.baseline))
        if samples is not None and _alike(samples, signature):
            return experiment
    return msgspec.structs.replace(experiment, inputs=RANDOM_INPUTS)


def _alike(samples: Signature, served: Signature) -> bool:
    """Whether the samples are inputs of a server's model."""
    expected = {tensor.name: tensor for tensor in served.inputs}
    given = {tensor.name: tensor for tensor in samples.inputs}
    if not expected.keys() - served.optional <= given.keys() <= expected.keys():
        return False
    return all(
        tensor.datatype == expected[name].datatype
        and len(tensor.shape) == len(expected[name].shape)
        and all(-1 in sizes or len(set(sizes)) == 1 for sizes in zip(tensor.shape, expected[name].shape, strict=True))
        for name, tensor in given.items()
    )


def _with_padding(experiment: Experiment, samples: SampleInputs, folder: Path) -> Experiment:
    """The experiment with the sizes to which servers pad. Raises `InputError` for settings that the model has no axis
    for, and for lengths that the samples do not have."""
    options = [("--sequence-length", experiment.sequence_length), ("--pad-to", experiment.pad_to)]
    if samples.axis is None:
        if option := next((option for option, value in options if value), None):
            raise InputError(f"{experiment.model} has no inputs of variable length; leave {option} out")
        return msgspec.structs.replace(experiment, pad_to=None, cannot_pad={})
    largest = largest_length(folder)
    if experiment.pad_to and 0 < largest < experiment.pad_to[-1]:
        raise InputError(
            f"--pad-to {experiment.pad_to[-1]}: the largest {samples.axis} of {experiment.model} is {largest}"
        )
    for length in experiment.lengths:
        samples.groups(length)
    if experiment.pad_to is not None:
        return experiment
    alike = bool(experiment.cannot_pad) or not has_mixed_lengths(experiment)
    return msgspec.structs.replace(experiment, pad_to=() if alike else default_sizes(largest, samples.lengths))


def make_inputs(experiment: Experiment, folder: Path, signature: Signature) -> Inputs:
    """The user's own inputs, or random values, as the metadata demand. Raises `InputError`, also for several payloads:
    they would not be the same picture in two payloads."""
    if len(experiment.payloads) > 1:
        raise InputError(f"--inputs {experiment.inputs} are of one payload; use the same payload for all arms")
    payload = experiment.payload_of(experiment.baseline)
    return {payload: read_given(experiment.inputs, signature, folder, payload, experiment.seed)}


def describe_inputs(inputs: Inputs, seed: int) -> dict[str, str | int]:
    """A description for the stored record: the first payload's description, the seed of generated inputs, and the
    digests of the other payloads."""
    first, *rest = inputs.items()
    about = first[1].describe()
    seeded = {"seed": seed} if about["kind"] not in (PHOTOGRAPHS, GIVEN) else {}
    return about | seeded | {f"sha256_{name}": more.describe()["sha256"] for name, more in rest}
