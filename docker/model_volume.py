"""`model_volume.py {gpu|cpu}`: fills the volume that the containers of docker-compose.yml share.

    ROOT/artefacts/                       exported files, as from `abserve export`
    ROOT/samples/                         sample inputs for the load generator
    ROOT/launch/native.json, triton.json  launch plans; the containers become the processes that they describe
    ROOT/triton-cpu/                      the working folder of the wheel's tritonserver            (cpu)
    ROOT/repository/                      a model repository for Triton's own backends              (gpu)
    ROOT/plan/request.json, *.onnx        what `docker/tensorrt/build_plan.py` builds               (gpu)

Settings come from the environment: ABSERVE_MODELS_{ROOT,MODEL,WEIGHTS,PRECISION,TRITON_BACKENDS}, and those of both
servers, of which Triton's own backends take ABSERVE_TRITON_{MAX_BATCH_SIZE,MAX_QUEUE_DELAY_US}. Every server and
backend gets the same precision. Files that are up to date stay. A file gets its name when it is complete, since other
containers read it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from abserve.packages import FOLDER

sys.path.insert(0, FOLDER)

from servers.engines.interface import EngineError
from servers.engines.settings import precision_on
from servers.export.artefacts import ensure_artefact
from servers.export.manifest import ExportError, executed_form
from servers.export.tensorrt import profile_shapes
from servers.models.files import FolderError, file_sha256
from servers.models.registry import DEFAULT_MODEL, UnknownModelError, get_specification
from servers.models.samples import write_samples
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, WeightsSource, parse_weights, pin
from servers.options.defaults import MAX_QUEUE_DELAY_US, PRECISION
from servers.triton.config import (
    NATIVE_BACKENDS,
    artefact_name,
    dynamic_batching,
    onnxruntime_config,
    tensorrt_config,
)

Kind = Literal["gpu", "cpu"]
ABSERVE = (sys.executable, "-P", "-m", "abserve")
PLAN_REQUEST_SCHEMA = "abserve.plan-request/1"


say = partial(print, flush=True)


class VolumeError(Exception):
    """The volume cannot be filled with these settings; the message is one sentence with the remedy."""


def fill(root: Path, kind: Kind, environment: Mapping[str, str]) -> None:
    """Everything that the containers of one profile need. Raises `VolumeError` and the errors of an export."""
    specification = get_specification(environment.get("ABSERVE_MODELS_MODEL", DEFAULT_MODEL))
    requested = parse_weights(environment.get("ABSERVE_MODELS_WEIGHTS") or specification.default_weights)
    backends, precision = parse_backends(environment), parse_precision(environment, kind)
    weights = pin(requested, specification.find_pretrained)
    say(f"sample inputs: {'written' if write_samples(specification, root / 'samples') else 'up to date'}")
    shared = {
        "model": specification.reference,
        "weights": weights.text,
        "artefacts": str(root / "artefacts"),
        "host": "0.0.0.0",
        "precision": precision,
    }
    _write_launch_plan(root, "native", {**shared, "http-port": "8100", "grpc-port": "8101"}, environment)
    if kind == "cpu":
        ports = {"http-port": "8000", "grpc-port": "8001", "metrics-port": "8002"}
        working = {"work-dir": str(root / "triton-cpu"), "device": "cpu"}
        _write_launch_plan(root, "triton", {**shared, **ports, **working}, environment)
    else:
        largest = _number(environment, "ABSERVE_TRITON_MAX_BATCH_SIZE", specification.max_batch_size)
        delay_us = _number(environment, "ABSERVE_TRITON_MAX_QUEUE_DELAY_US", MAX_QUEUE_DELAY_US)
        _lay_out_repository(
            root, replace(specification, max_batch_size=largest), weights, backends, precision, delay_us
        )


def parse_backends(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The backends of Triton that get the model. Raises `VolumeError` for an unknown one."""
    text = environment.get("ABSERVE_MODELS_TRITON_BACKENDS", ",".join(NATIVE_BACKENDS))
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or set(names) - set(NATIVE_BACKENDS):
        raise VolumeError(f"TRITON_BACKENDS={text}: use {' or '.join(NATIVE_BACKENDS)}, or both separated by a comma")
    return names


def parse_precision(environment: Mapping[str, str], kind: Kind) -> str:
    """The precision of every server and backend. Raises `VolumeError` for one that no file of Triton's backends has."""
    text = environment.get("ABSERVE_MODELS_PRECISION") or PRECISION
    precision = precision_on("cuda" if kind == "gpu" else "cpu", text)
    if precision not in ("fp32", "tf32", "fp16"):
        raise VolumeError(f"PRECISION={text}: use auto, fp32, tf32 or fp16")
    return precision


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise VolumeError(f"{name}={text}: give a whole number")
    return int(text)


def _write_launch_plan(root: Path, server: str, options: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """The server's own environment variables set everything that is not in `options`."""
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [*ABSERVE, "serve", server, *arguments, "--print-launch"]
    protected = {f"ABSERVE_{server.upper()}_ANYONE": "true"}  # compose publishes ports on loopback only
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**environment, **protected}, check=False)
    if done.returncode != 0:
        raise VolumeError(f"serve {server} refuses these settings; the reason is above")
    line = done.stdout.strip().rpartition(b"\n")[2]
    write_whole(root / "launch" / f"{server}.json", line + b"\n")
    say(f"launch plan: {json.loads(line)['title']}")


def _lay_out_repository(
    root: Path,
    specification: ModelSpecification,
    weights: WeightsSource,
    backends: tuple[str, ...],
    precision: str,
    max_queue_delay_us: int,
) -> None:
    """`<model>_onnx` with its file, and `<model>_tensorrt` without: its plan is built where its TensorRT is."""
    repository, request_file = root / "repository", root / "plan" / "request.json"
    batching = dynamic_batching(max_queue_delay_us)
    places = {name: repository / f"{specification.name}{NATIVE_BACKENDS[name].ending}" for name in backends}
    for folder in repository.glob("*"):
        if folder not in places.values():
            shutil.rmtree(folder)  # Triton serves everything that it finds
    if "onnxruntime" in backends:
        form = executed_form("onnxruntime", precision)
        artefact = ensure_artefact(specification, weights, root / "artefacts", form=form, progress=say)
        link_whole(artefact.path, places["onnxruntime"] / "1" / artefact_name(specification, "onnx"))
        config = onnxruntime_config(specification, batching, parameters={"precision": precision})
        write_whole(places["onnxruntime"] / "config.pbtxt", config.encode())
    if "tensorrt" not in backends:
        request_file.unlink(missing_ok=True)
        return
    # TensorRT 11 networks are strongly typed: an FP16 plan needs an FP16 file.
    form = executed_form("tensorrt", precision)
    artefact = ensure_artefact(specification, weights, root / "artefacts", form=form, progress=say)
    config = tensorrt_config(specification, batching, parameters={"precision": precision})
    write_whole(places["tensorrt"] / "config.pbtxt", config.encode())
    (places["tensorrt"] / "1").mkdir(exist_ok=True)
    link_whole(artefact.path, request_file.with_name(artefact.path.name))
    request = {
        "schema": PLAN_REQUEST_SCHEMA,
        "onnx": artefact.path.name,
        "onnx_sha256": file_sha256(artefact.path),
        "precision": precision,
        "profile": profile_shapes(specification, specification.max_batch_size),
        "plan": str(places["tensorrt"] / "1" / artefact_name(specification, "plan")),
    }
    write_whole(request_file, json.dumps(request, indent=2).encode() + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def link_whole(source: Path, target: Path) -> None:
    """A hard link, which saves hundreds of megabytes; a copy if the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.samefile(source):
        return  # renaming a link onto a link to the same file does nothing and leaves both
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:
        shutil.copyfile(source, part)
    part.replace(target)


def main() -> int:
    """Exit status 1 with one sentence if the volume cannot be filled."""
    if sys.argv[1:] not in (["gpu"], ["cpu"]):
        sys.stderr.write("usage: model_volume.py gpu|cpu\n")
        return 2
    try:
        fill(Path(os.environ.get("ABSERVE_MODELS_ROOT", "/models")), sys.argv[1], os.environ)  # type: ignore[arg-type]  # checked above
    except (VolumeError, UnknownModelError, WeightsError, EngineError, ExportError, FolderError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
