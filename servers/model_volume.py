"""`python -m servers.model_volume {gpu|cpu}`: fills the volume that the containers of docker-compose.yml share.

    ROOT/artefacts/                       what `abserve export` makes
    ROOT/samples/                         sample inputs, for the load generator
    ROOT/launch/native.json, triton.json  launch plans; the containers become the processes that they describe
    ROOT/triton-cpu/                      the working folder of the wheel's tritonserver            (cpu)
    ROOT/repository/                      a model repository for Triton's own backends              (gpu)
    ROOT/plan/request.json, *.onnx        what the TensorRT plan is to be built from                (gpu)

Settings come from the environment: ABSERVE_MODELS_{MODEL,WEIGHTS,TRITON_BACKENDS}, and those of both servers. What is
up to date is left alone. Files that others read appear under their name when they are whole.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from servers.engines.interface import EngineError
from servers.export.artefacts import ensure_artefact
from servers.export.errors import ExportError
from servers.export.file_form import executed_form
from servers.export.triton_config import artefact_name, onnxruntime_config, tensorrt_config
from servers.models.atomic_folder import FolderError, file_sha256
from servers.models.registry import DEFAULT_MODEL, UnknownModelError, get_specification
from servers.models.samples import write_samples
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, WeightsSource, parse_weights, pin

Kind = Literal["gpu", "cpu"]
BACKENDS = ("onnxruntime", "tensorrt")
ABSERVE = (sys.executable, "-P", "-m", "loadgen.entry")
PLAN_REQUEST_SCHEMA = "abserve.plan-request/1"


class VolumeError(Exception):
    """The volume cannot be filled as asked; the message is one sentence with the remedy."""


def fill(root: Path, kind: Kind, environment: Mapping[str, str]) -> None:
    """Everything that the containers of one profile need. Raises `VolumeError` and what an export raises."""
    specification = get_specification(environment.get("ABSERVE_MODELS_MODEL", DEFAULT_MODEL))
    asked_for = parse_weights(environment.get("ABSERVE_MODELS_WEIGHTS") or specification.default_weights)
    weights = pin(asked_for, specification.find_pretrained)
    say(f"sample inputs: {'written' if write_samples(specification, root / 'samples') else 'up to date'}")
    shared = {"model": specification.name, "weights": weights.text, "artefacts": str(root / "artefacts")}
    ports = {"host": "0.0.0.0", "http-port": "8100", "grpc-port": "8101"}
    _write_launch_plan(root, "native", {**shared, **ports}, environment)
    if kind == "cpu":
        ports = {"host": "0.0.0.0", "http-port": "8000", "grpc-port": "8001", "metrics-port": "8002"}
        working = {"work-dir": str(root / "triton-cpu"), "device": "cpu"}
        _write_launch_plan(root, "triton", {**shared, **ports, **working}, environment)
    else:
        _lay_out_repository(root, specification, weights, parse_backends(environment))


def parse_backends(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Which of Triton's own backends get the model. Raises `VolumeError` for one that we have no configuration for."""
    text = environment.get("ABSERVE_MODELS_TRITON_BACKENDS", ",".join(BACKENDS))
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or set(names) - set(BACKENDS):
        raise VolumeError(f"TRITON_BACKENDS={text}: give {', '.join(BACKENDS)} or both, separated by a comma")
    return names


def _write_launch_plan(root: Path, server: str, options: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """What is not among `options` comes from the server's own environment variables."""
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    done = subprocess.run(
        [*ABSERVE, "serve", server, *arguments, "--print-launch"], stdout=subprocess.PIPE, env=dict(environment),
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise VolumeError(f"serve {server} cannot be launched with these settings; its reason is above")
    line = done.stdout.strip().rpartition(b"\n")[2]
    write_whole(root / "launch" / f"{server}.json", line + b"\n")
    say(f"launch plan: {json.loads(line)['title']}")


def _lay_out_repository(
    root: Path, specification: ModelSpecification, weights: WeightsSource, backends: tuple[str, ...]
) -> None:
    """`<model>_onnx` with its file, `<model>_tensorrt` without: that one is built where its TensorRT is."""
    repository, plan = root / "repository", root / "plan"
    for folder in repository.glob("*") if repository.is_dir() else ():
        if folder.name not in {f"{specification.name}_{suffix}" for suffix in _suffixes(backends)}:
            shutil.rmtree(folder)  # Triton serves all that it finds
    if "onnxruntime" in backends:
        form = executed_form("onnxruntime", "fp32")
        artefact = ensure_artefact(specification, weights, root / "artefacts", form=form, progress=say)
        place = repository / f"{specification.name}_onnx"
        link_whole(artefact.path, place / "1" / artefact_name(specification, "onnx"))
        write_whole(place / "config.pbtxt", onnxruntime_config(specification).encode())
    if "tensorrt" not in backends:
        with suppress(FileNotFoundError):
            (plan / "request.json").unlink()
        return
    # TensorRT 11 networks are strongly typed: an FP16 plan comes from an FP16 file.
    form = executed_form("tensorrt", "fp16")
    artefact = ensure_artefact(specification, weights, root / "artefacts", form=form, progress=say)
    place = repository / f"{specification.name}_tensorrt"
    write_whole(place / "config.pbtxt", tensorrt_config(specification).encode())
    (place / "1").mkdir(exist_ok=True)
    link_whole(artefact.path, plan / artefact.path.name)
    request = {
        "schema": PLAN_REQUEST_SCHEMA,
        "onnx": artefact.path.name,
        "onnx_sha256": file_sha256(artefact.path),
        "input": specification.inputs[0].name,
        "item_shape": list(specification.inputs[0].item_shape),
        "max_batch_size": specification.max_batch_size,
        "plan": str(place / "1" / artefact_name(specification, "plan")),
    }
    write_whole(plan / "request.json", json.dumps(request, indent=2).encode() + b"\n")


def _suffixes(backends: tuple[str, ...]) -> tuple[str, ...]:
    return tuple({"onnxruntime": "onnx", "tensorrt": "tensorrt"}[name] for name in backends)


def write_whole(path: Path, content: bytes) -> None:
    """Under a temporary name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def link_whole(source: Path, target: Path) -> None:
    """A hard link, so that hundreds of megabytes lie on the disk once; a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.samefile(source):
        return  # renaming a link onto another one to the same file would do nothing, and leave both
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:
        shutil.copyfile(source, part)
    part.replace(target)


def say(text: str) -> None:
    """A line in the container's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Exit status 1 with one sentence when it cannot be done."""
    if sys.argv[1:] not in (["gpu"], ["cpu"]):
        sys.stderr.write("usage: python -m servers.model_volume gpu|cpu\n")
        return 2
    try:
        fill(Path(os.environ.get("ABSERVE_MODELS_ROOT", "/models")), sys.argv[1], os.environ)  # type: ignore[arg-type]  # checked above
    except (VolumeError, UnknownModelError, WeightsError, EngineError, ExportError, FolderError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
