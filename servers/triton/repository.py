"""Writes the working folder of a tritonserver: a model repository, a backend directory and a folder with libpython.

    FOLDER/models/<model>/config.pbtxt      generated; clients can read its parameters
    FOLDER/models/<model>/1/model.py        python backend: one import of `servers.triton.python_backend`
    FOLDER/models/<model>/1/engine.json     paths on this machine, which a published config must not show
    FOLDER/models/<model>/1/model.onnx      native backends: a link to the exported file; or model.plan
    FOLDER/backends/<name>/                 links into an installation whose stub is elsewhere
    FOLDER/lib/libpython3.X.so.1.0          a link, so that the loader's path gains only this file

Nothing large is copied; the artefact stays in its place. Only a file that fills its batches up is written here.

`apply_tuning` leaves out of the configs the fields that only affect the speed. What is left is what Triton needs to
load the model and to compute the same: names, tensors, files, instances, parameters, accelerators and warm-up. A
dynamic batcher without settings stays, except where merging itself can be what costs; a model without one is given one.
`abserve compare` runs a server with and without these fields, so that no arm is slow because of its configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servers.engines.processors import openmp_spinning
from servers.engines.settings import EngineSettings
from servers.models.batch_multiple import fill_batches
from servers.models.files import onnx_parts, place_parts
from servers.models.sources.triton_repository import CONFIG, read_config, step_folders
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.options.defaults import SPINS, OptionError, chosen_tuning
from servers.triton.config import (
    MODEL_PY,
    NATIVE_BACKENDS,
    NO_BATCHING,
    artefact_name,
    dynamic_batching,
    ensemble_config,
    parameters_from_model,
    parameters_from_settings,
    preprocess_config,
    preprocess_files,
    preprocess_name,
    python_config,
)
from servers.triton.installation import Installation
from servers.triton.settings import TritonSettings

MARKER, MODELS, BACKENDS, LIBRARIES = ".abserve-triton", "models", "backends", "lib"
"""What is in the working folder."""
_PLAIN = re.compile(r"[\w./+,=@%-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """One model of the repository, and the exported file with its manifest if the engine executes one."""

    specification: ModelSpecification
    artefact: Path | None = None
    manifest: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """How Triton executes every model of a repository; `engine` is resolved (see `settings.resolve_engine`)."""

    settings: TritonSettings
    engine: EngineSettings
    weights: WeightsSource
    backend: str = "python"

    def name(self, specification: ModelSpecification) -> str:
        """The name under which Triton serves it."""
        return specification.name + ("" if self.backend == "python" else NATIVE_BACKENDS[self.backend].ending)

    @property
    def instances(self) -> int:
        """The instances of each executed model on each device."""
        return self.settings.instances_on(self.engine.device, self.backend)

    @property
    def batching(self) -> str:
        """The batcher's field of a config."""
        if self.settings.batching == "none":
            return NO_BATCHING
        return dynamic_batching(self.settings.max_queue_delay_us, self.settings.queue_size)


def assert_usable(folder: Path) -> None:
    """Raise `OptionError` if `folder` holds foreign files: Triton serves everything that it finds."""
    if folder.is_dir() and not (folder / MARKER).exists() and any(folder.iterdir()):
        raise OptionError(
            f"the working folder {folder} holds other files, which would be removed; give --work-dir an empty folder"
        )


def backend_folder(folder: Path, installation: Installation) -> Path:
    """The backend directory of a tritonserver with this working folder."""
    return installation.backend_folder if installation.stub_in_place else folder / BACKENDS


def lay_out(
    folder: Path, installation: Installation, placed: Sequence[PlacedModel] = (), serving: Serving | None = None
) -> None:
    """Write `folder` anew, without models where they are the user's. Raises `OptionError` if it cannot be written or
    holds foreign files."""
    libraries = folder / LIBRARIES
    try:
        assert_usable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
        for name in (MODELS, BACKENDS, LIBRARIES):
            shutil.rmtree(folder / name, ignore_errors=True)
        for model in placed:
            assert serving is not None
            place = _place_python if serving.backend == "python" else _place_native
            place(folder / MODELS, model, serving)
        if not installation.stub_in_place:
            _link_backends(folder / BACKENDS, installation)
        libraries.mkdir()
        if installation.libpython is not None:
            (libraries / installation.libpython.name).symlink_to(installation.libpython)
    except OSError as exc:
        raise OptionError(
            f"cannot write the working folder {folder}: {exc.strerror or exc}; give another one with --work-dir"
        ) from exc


def plain_path(path: Path) -> Path:
    """The path itself, or a link to it where it has characters that the python backend cannot take: it puts the path
    into a shell's command, and Python there imports only from paths in ASCII. Raises `OptionError`."""
    if _PLAIN.fullmatch(str(path)):
        return path
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")):
        folder = Path(place) / f"abserve-paths-{os.getuid()}"
        if not _PLAIN.fullmatch(place):
            continue
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():
                continue
            link = folder / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
            if not link.is_symlink():
                with suppress(FileExistsError):  # made by another process at this moment
                    link.symlink_to(path.absolute())
            return link
    raise OptionError(
        f"tritonserver cannot use {path}, whose name has blanks or letters beyond ASCII, and no folder for a link to "
        "it can be written; set TMPDIR to one"
    )


def _place_python(models: Path, model: PlacedModel, serving: Serving) -> None:
    engine, parameters = serving.engine, _parameters(model, serving, model.specification)
    specification = replace(model.specification, max_batch_size=engine.max_batch_size)
    if engine.device == "cpu" and engine.kind in SPINS:
        openmp_sleeps = engine.kind == "torch" and openmp_spinning(engine.threads) == "off"  # by a variable of the user
        sleeps = engine.threads == 1 or engine.spinning is False or openmp_sleeps
        parameters["spinning"] = "off" if sleeps else "on"
    config = python_config(
        *(specification, serving.batching, engine.device, parameters),
        instances=serving.instances,
        ragged=bool(engine.pad_to),
    )
    private = {
        "model": specification.reference,  # the config's parameter `payload` names the variant
        "weights": serving.weights.text,
        "artefact": None if model.artefact is None else str(model.artefact.absolute()),
    }
    write_model(
        models / specification.name,
        config,
        {
            "model.py": MODEL_PY.format("servers.triton.python_backend", "EngineModel"),
            "engine.json": json.dumps(private),
        },
    )


def _place_native(models: Path, model: PlacedModel, serving: Serving) -> None:
    """The exported file behind a native backend; for JPEG the model that decodes, and the ensemble of both."""
    specification = replace(model.specification, max_batch_size=serving.engine.max_batch_size)
    executed = replace(specification.executed, max_batch_size=specification.max_batch_size)
    assert model.artefact is not None
    backend, parameters = NATIVE_BACKENDS[serving.backend], _parameters(model, serving, executed)
    more = {}
    if serving.backend == "onnxruntime":
        more = {"cudnn_conv_algo_search": serving.settings.cudnn_conv_algo_search}
    config = backend.config(executed, serving.batching, serving.engine.device, parameters, serving.instances, **more)
    folder = models / serving.name(executed)
    write_model(folder, config, {})
    artefact = folder / "1" / artefact_name(executed, backend.suffix)
    if not artefact.exists():  # JPEG and UINT8 execute the same file
        if (multiple := serving.settings.batch_multiple) > 1:
            fill_batches(model.artefact, artefact, multiple)
        else:
            parts = onnx_parts(model.artefact) if model.artefact == executed.file else (model.artefact,)
            place_parts(parts, artefact.parent, artefact.name)
    if specification.decodes_to is not None:
        name, decoding = serving.name(specification), serving.settings.decoding
        decoder = preprocess_config(specification, decoding.thread_count, decoding.max_pixels)
        write_model(models / preprocess_name(specification), decoder, preprocess_files(specification))
        write_model(models / name, ensemble_config(specification, name, serving.name(executed)), {})


def _parameters(model: PlacedModel, serving: Serving, executed: ModelSpecification) -> dict[str, str]:
    settings, sha256 = serving.settings, None if model.manifest is None else str(model.manifest["sha256"])
    return {
        **parameters_from_settings(serving.engine, serving.weights, model.artefact, sha256),
        **parameters_from_model(executed, serving.engine.pad_to, settings.decoding),
        **({"batch_multiple": str(settings.batch_multiple)} if settings.batch_multiple > 1 else {}),
    }


def write_model(folder: Path, config: str, files: Mapping[str, str]) -> None:
    """A model's folder with the files of its one version."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    for name, content in files.items():
        (folder / "1" / name).write_text(content, encoding="utf-8")


def _link_backends(folder: Path, installation: Installation) -> None:
    """Every backend of the installation, and in the python backend's folder the stub for this Python."""
    folder.mkdir(parents=True)
    assert installation.stub is not None
    for source in map(installation.backend_folder.joinpath, installation.backends):
        if source.name != "python":
            (folder / source.name).symlink_to(source)
            continue
        (folder / "python").mkdir()
        for file in (*filter(Path.is_file, source.iterdir()), installation.stub):
            (folder / "python" / file.name).unlink(missing_ok=True)
            (folder / "python" / file.name).symlink_to(file)


BATCHING = "dynamic_batching"
FIELDS = (
    f"{BATCHING}.max_queue_delay_microseconds",
    f"{BATCHING}.default_queue_policy",
    f"{BATCHING}.preferred_batch_size",
    f"{BATCHING}.preserve_ordering",
    f"{BATCHING}.priority_levels",
    "optimization.graph",
    "optimization.priority",
    "optimization.cuda",
    "optimization.input_pinned_memory",
    "optimization.output_pinned_memory",
    "optimization.gather_kernel_buffer_threshold",
    "optimization.eager_batching",
    "response_cache",
)
WITH_PRIORITIES = ("default_priority_level", "priority_queue_policy")
"""Fields that Triton refuses without `priority_levels`."""
PARAMETERS = {
    "onnxruntime": (
        "cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream",
        "inter_op_thread_count", "execution_mode", "enable_mem_arena", "enable_mem_pattern",
        "memory.enable_memory_arena_shrinkage",
    ),
}  # fmt: skip
"""Parameters that tune a backend; a python model's parameters are its own."""
ABSENT = "absent"


def apply_tuning(models: Path, names: Iterable[str], tuning: str, target: Path) -> dict[str, str]:
    """The tuning in effect, by field, of these models in the repository `models` and of the models that they name.
    Where `tuning` leaves fields out, the changed configs are written into `target`, which may be `models` itself; the
    other files of a model become links there. Raises `UnknownModelError` and `OptionError`."""
    folders = list(step_folders(models, names))
    configs = {folder: read_config(folder) for folder in folders if (folder / CONFIG).is_file()}
    present = {field: value for config in configs.values() for field, value in tuning_of(config).items()}
    remaining = chosen_tuning(tuning, present)
    if target != models:
        for folder in folders:
            _link(folder, target / folder.name)
    for folder, config in configs.items():
        left_out = tuning_of(config).keys() - remaining
        for field in left_out:
            _remove(config, field)
        if left_out or target != models:
            _write_config(target / folder.name / CONFIG, config, keep=not left_out, source=folder / CONFIG)
    return {field: value for field, value in present.items() if field in remaining}


def merge_config(models: Path, name: str, text: str) -> None:
    """Merge `text` into the config of a model: fields are set, repeated ones get more entries, and comments are lost.
    Raises `OptionError` for a text that is not part of a config."""
    from google.protobuf import text_format

    config = read_config(models / name)
    try:
        text_format.Merge(text, config)
    except text_format.ParseError as exc:
        raise OptionError(f"--merge-config {text}: {exc}; write it as in a config.pbtxt") from exc
    (models / name / CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")


def tuning_of(config: Any) -> dict[str, str]:
    """The fields of a ModelConfig that tune it, with their values on one line."""
    tuning = {}
    for field in FIELDS:
        holder, name = _holder(config, field)
        values = {} if holder is None else {field_.name: value for field_, value in holder.ListFields()}
        if name in values:
            tuning[field] = _text(values[name])
    for key in PARAMETERS.get(config.backend, ()):
        if key in config.parameters:
            tuning[f"parameters.{key}"] = config.parameters[key].string_value
    if config.max_batch_size > 0 and config.WhichOneof("scheduling_choice") is None:
        tuning[BATCHING] = ABSENT
    elif _plans_by_shape(config) and config.HasField(BATCHING) and not config.dynamic_batching.ListFields():
        tuning[BATCHING] = _text(config.dynamic_batching)
    return tuning


def _plans_by_shape(config: Any) -> bool:
    """Whether a batch of another size than the one before may cost more than merging gains: on a GPU, ONNX Runtime
    plans its convolutions anew for each (ResNet-50, 32 clients: a ninth of the images/s of one client)."""
    groups = config.instance_group
    on_cpu = bool(groups) and all(group.kind == group.KIND_CPU for group in groups)
    return config.backend == "onnxruntime" and not on_cpu


def _holder(config: Any, field: str) -> tuple[Any, str]:
    """The message that holds a field, or None where it is not set."""
    *path, name = field.split(".")
    for part in path:
        if not config.HasField(part):
            return None, name
        config = getattr(config, part)
    return config, name


def _text(value: object) -> str:
    from google.protobuf import text_format
    from google.protobuf.message import Message

    if isinstance(value, Message):
        if [field.name for field in value.DESCRIPTOR.fields] == ["enable"]:
            return f"{{ enable: {str(getattr(value, 'enable')).lower()} }}"  # noqa: B009 (no attribute of every message)
        return " ".join(["{", *text_format.MessageToString(value, as_one_line=True).split(), "}"])
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | str) else str(list(value))  # type: ignore[call-overload]


def _remove(config: Any, field: str) -> None:
    if field == BATCHING:
        if config.HasField(BATCHING):
            config.ClearField(BATCHING)
        else:
            config.dynamic_batching.SetInParent()
        return
    if field.startswith("parameters."):
        del config.parameters[field.removeprefix("parameters.")]
        return
    holder, name = _holder(config, field)
    for cleared in (name, *(WITH_PRIORITIES if name == "priority_levels" else ())):
        holder.ClearField(cleared)


def _link(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != CONFIG:
            (target / path.name).symlink_to(path.absolute())


def _write_config(path: Path, config: Any, *, keep: bool, source: Path) -> None:
    """An unchanged config is copied, so that its comments and the order of its lines stay."""
    from google.protobuf import text_format

    text = source.read_text(encoding="utf-8") if keep else text_format.MessageToString(config)
    path.write_text(text, encoding="utf-8")
