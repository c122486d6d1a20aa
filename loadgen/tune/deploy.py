"""Files that deploy the best of each target, in DIR/deploy.

    native.sh, triton.sh …      the command line of each target's best
    triton/models/              Triton's model repository with its config.pbtxt, as the final served it
    compose.override.yml        the settings of both servers for docker-compose.yml
    exposed/                    the winner behind TLS and keys, for compose and for Kubernetes (see `exposed`)
    experiment.yaml             repeats the final comparison

Nothing is started. The repository is laid out by `abserve serve triton … --print-launch`, so it is the one that the
measured server had. Large files in it are links to the exported ones.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from loadgen.base.child_process import ABSERVE
from loadgen.base.documents import user_path, write_atomically
from loadgen.experiment.options import write_content
from loadgen.launch.deployment import DeploymentError
from loadgen.launch.embedded import EmbeddedDeployment, to_arguments
from loadgen.measure.preparation import serve_options
from loadgen.records.payloads import is_language
from loadgen.report.files import EXPERIMENT_FILE
from loadgen.tune.exposed import compose_file, kubernetes_manifest, nginx_conf
from loadgen.tune.outcome import TuningOutcome

FOLDER, COMPOSE_FILE, EXPOSED = "deploy", "compose.override.yml", "exposed"
REPOSITORY = "triton/models"
IN_STACK = ("native", "triton")
"""Targets that docker-compose.yml has."""
OF_STACK = ("model", "weights", "precision")
"""Options that its containers take from ABSERVE_MODELS_…, the same for both servers."""
OF_MACHINE = ("host", "artefacts", "tritonserver")
"""Options that name an address or a folder of this machine, which containers do not have."""
OF_TRITON_ON_GPU = ("max-batch-size", "max-queue-delay-us")
"""What the stack's Triton on a GPU, which is NVIDIA's image, takes of the options of `abserve serve triton`."""


def best_options(outcome: TuningOutcome) -> dict[str, dict[str, str]]:
    """The options of `abserve serve` for each target at its best, by target, as the final started it; empty without a
    valid final, since what was wrong there may be wrong in use."""
    if outcome.final is None or not outcome.final.valid:
        return {}
    arms = {arm.label: arm for arm in outcome.final.experiment.arms}
    return {
        target.space.target: serve_options(arm, outcome.final.experiment) | arm.settings
        for target in outcome.targets
        if target.best is not None and (arm := arms.get(target.best.name)) is not None
    }


def best_commands(outcome: TuningOutcome) -> dict[str, str]:
    """The command line of each target at its best."""
    return {
        target: shlex.join(["abserve", "serve", target, *to_arguments(options)])
        for target, options in best_options(outcome).items()
    }


def write_deployment(directory: Path, outcome: TuningOutcome, abserve: Sequence[str] = ABSERVE) -> tuple[str, ...]:
    """Write the files into DIR/deploy anew. Returns what could not be made, a sentence each. Raises `OSError`."""
    folder, options = directory / FOLDER, best_options(outcome)
    shutil.rmtree(folder, ignore_errors=True)
    if outcome.final is None:
        return ()
    folder.mkdir(parents=True)
    settings, sha256 = outcome.final.experiment.settings, outcome.final.experiment.settings_sha256
    if settings is not None and sha256 is not None:
        write_atomically(folder / EXPERIMENT_FILE, write_content(settings, sha256).encode())
    if not options:
        what = "rough, because others used the machine" if outcome.final.rough else "not valid"
        return (f"the final is {what}, so no file starts a server; repeat it with the experiment in deploy",)
    for target, command in best_commands(outcome).items():
        script = folder / f"{target}.sh"
        write_atomically(script, _script(target, command).encode())
        script.chmod(0o755)
    problems = []
    if "triton" in options and (problem := _write_repository(folder, options["triton"], abserve)):
        problems.append(f"no model repository: {problem}")
    if problem := no_compose_file(options):
        problems.append(f"no compose file: {problem}")
    else:
        write_atomically(folder / COMPOSE_FILE, compose_override(options).encode())
    target = winner(outcome, list(options))
    if problem := _write_exposed(folder / EXPOSED, outcome, target, options[target]):
        problems.append(f"no deployment behind TLS and keys: {problem}")
    return tuple(problems)


def winner(outcome: TuningOutcome, targets: Sequence[str]) -> str:
    """The target that leads the final; the first one where none does."""
    best = outcome.pairs[0].at_best if outcome.pairs else None
    leads = [t.space.target for t in outcome.targets if t.best is not None and best and best.winner == t.best.name]
    return next((target for target in leads if target in targets), targets[0])


def _write_exposed(folder: Path, outcome: TuningOutcome, target: str, options: Mapping[str, str]) -> str | None:
    """Write the files that let others reach the winner. Returns why they cannot be made, without a full stop."""
    assert outcome.final is not None
    labels = [t.best.name for t in outcome.targets if t.best is not None and t.space.target == target]
    in_effect = next(arm.in_effect for arm in outcome.final.arms if arm.label in labels)
    device, threads = str(in_effect.get("device", "cpu")), str(in_effect.get("threads", ""))
    gpus = sum(name.startswith("cuda") for name in device.split(","))
    if problem := no_compose_file({target: options}):
        return problem
    if target == "triton" and gpus:
        return "on a GPU the containers have NVIDIA's Triton, which compose.override.yml starts"
    environment = outcome.final.environment
    cores = int((environment.host.get("cpu_count") if environment is not None else None) or 1)
    if threads.isdigit() and not gpus:
        cores = int(threads) or cores
    arguments = to_arguments({name: value for name, value in options.items() if name not in OF_MACHINE})
    folder.mkdir()
    for name, content in (
        *([] if target == "native" else [("nginx.conf", nginx_conf())]),
        ("compose.yml", compose_file(target, arguments, cores, gpus)),
        ("kubernetes.yml", kubernetes_manifest(target, arguments, cores, gpus)),
    ):
        write_atomically(folder / name, content.encode())
    return None


def deployed_files(directory: Path) -> dict[str, str]:
    """The files in DIR/deploy as paths relative to DIR, and what each is."""
    words = {
        **{
            f"{script.name}": f"starts {script.stem} at its best" for script in sorted(directory.glob(f"{FOLDER}/*.sh"))
        },
        REPOSITORY: "Triton's model repository; copy it with cp -rL",
        COMPOSE_FILE: f"docker compose -f docker-compose.yml -f {COMPOSE_FILE} up --wait",
        f"{EXPOSED}/compose.yml": "the winner behind TLS and keys: docker compose up --wait",
        f"{EXPOSED}/kubernetes.yml": "the same for Kubernetes: kubectl apply -f kubernetes.yml",
        EXPERIMENT_FILE: f"abserve compare {EXPERIMENT_FILE} repeats the final",
    }
    return {f"{FOLDER}/{name}": what for name, what in words.items() if (directory / FOLDER / name).exists()}


def _script(target: str, command: str) -> str:
    """Further options, such as --http-port, follow the script's name."""
    return f'#!/bin/sh\n# {target} at its best; add options such as --host and --http-port.\nexec {command} "$@"\n'


def _write_repository(folder: Path, options: Mapping[str, str], abserve: Sequence[str]) -> str | None:
    """Lay the repository out and keep its models. Returns why that failed, without a full stop."""
    if "triton-repository" in options:
        return "the models are those of your own repository"
    work = folder / Path(REPOSITORY).parent
    deployment = EmbeddedDeployment(
        "triton", {**options, "work-dir": str(work)}, folder / "triton.log", abserve=abserve
    )
    try:
        deployment.check(options["model"])
    except DeploymentError as exc:
        shutil.rmtree(work, ignore_errors=True)
        return str(exc)
    for path in work.glob("*"):
        if path.name == Path(REPOSITORY).name:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return None


def no_compose_file(options: Mapping[str, Mapping[str, str]]) -> str | None:
    """Why the stack of docker-compose.yml cannot run these servers, without a full stop; None if it can."""
    model = next(iter(options.values()))["model"]
    if is_language(model):
        return "its containers serve no language models"
    weights = dict.fromkeys(own["weights"] for own in options.values() if "weights" in own)
    for name in (model, *weights):
        if name.endswith(".onnx") or ".py:" in name or user_path(name).exists():
            return f"its containers do not have {name}"
    if not set(options) & set(IN_STACK):
        return f"it has {' and '.join(IN_STACK)} only"
    for name in OF_STACK:
        if len({own.get(name) for target, own in options.items() if target in IN_STACK}) > 1:
            return f"its servers share one {name}, and the best of each differ in it"
    return None


def compose_override(options: Mapping[str, Mapping[str, str]]) -> str:
    """An override of docker-compose.yml: the containers that plan the servers get their settings as variables."""
    environment: dict[str, str] = {}
    ignored: list[str] = []
    for target in IN_STACK:
        for name, value in options.get(target, {}).items():
            if name in OF_MACHINE:
                continue
            if name in OF_STACK:
                environment[f"ABSERVE_MODELS_{_variable(name)}"] = value
                continue
            environment[f"ABSERVE_{target.upper()}_{_variable(name)}"] = value or "true"
            if target == "triton" and name == "backend" and value in ("onnxruntime", "tensorrt"):
                environment["ABSERVE_MODELS_TRITON_BACKENDS"] = value
            elif target == "triton" and name not in OF_TRITON_ON_GPU:
                ignored.append(name)
    services = {service: {"environment": environment} for service in ("models", "models-cpu")}
    note = f"# On a GPU, Triton is NVIDIA's image, which takes nothing of: {', '.join(ignored)}\n" if ignored else ""
    body = yaml.safe_dump({"services": services}, sort_keys=False, default_flow_style=False, width=120)
    return f"# docker compose -f docker-compose.yml -f {COMPOSE_FILE} up --wait\n{note}{body}"


def _variable(option: str) -> str:
    return option.upper().replace("-", "_")
