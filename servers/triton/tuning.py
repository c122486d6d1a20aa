"""The fields of a model's config.pbtxt that only affect its speed, and the config without them.

What is left is what Triton needs to load the model and to compute the same: names, tensors, files, instances,
parameters, accelerators and warm-up. A dynamic batcher without settings stays, except where merging itself can be what
costs; a model without one is given one. `abserve compare` runs a server with and without these fields, so that no arm
is slow because of its configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from servers.models.sources.triton_repository import CONFIG, read_config, step_folders
from servers.tuning import TuningError, keeps

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


def apply(models: Path, names: Iterable[str], tuning: str, target: Path) -> dict[str, str]:
    """The tuning in effect, by field, of these models in the repository `models` and of the models that they name.

    Where `tuning` leaves fields out, the changed configs are written into `target`, which may be `models` itself; the
    other files of a model become links there. Raises `UnknownModelError` and `TuningError`.
    """
    folders = list(step_folders(models, names))
    configs = {folder: read_config(folder) for folder in folders if (folder / CONFIG).is_file()}
    present = {field: value for config in configs.values() for field, value in tuning_of(config).items()}
    kept = keeps(tuning, present)
    if target != models:
        for folder in folders:
            _link(folder, target / folder.name)
    for folder, config in configs.items():
        left_out = tuning_of(config).keys() - kept
        for field in left_out:
            _remove(config, field)
        if left_out or target != models:
            _write(target / folder.name / CONFIG, config, keep=not left_out, source=folder / CONFIG)
    return {field: value for field, value in present.items() if field in kept}


def merge(models: Path, name: str, text: str) -> None:
    """Merge `text` into the config of a model: fields are set, repeated ones get more entries, and comments are lost.

    Raises `TuningError` for a text that is not part of a config.
    """
    from google.protobuf import text_format

    config = read_config(models / name)
    try:
        text_format.Merge(text, config)
    except text_format.ParseError as exc:
        raise TuningError(f"--merge-config {text}: {exc}; write it as in a config.pbtxt") from exc
    (models / name / CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")


def tuning_of(config: Any) -> dict[str, str]:
    """The fields of a ModelConfig that tune it, with their values on one line."""
    found = {}
    for field in FIELDS:
        holder, name = _holder(config, field)
        given = {} if holder is None else {one.name: value for one, value in holder.ListFields()}
        if name in given:
            found[field] = _text(given[name])
    for key in PARAMETERS.get(config.backend, ()):
        if key in config.parameters:
            found[f"parameters.{key}"] = config.parameters[key].string_value
    if config.max_batch_size > 0 and config.WhichOneof("scheduling_choice") is None:
        found[BATCHING] = ABSENT
    elif _plans_by_shape(config) and config.HasField(BATCHING) and not config.dynamic_batching.ListFields():
        found[BATCHING] = _text(config.dynamic_batching)
    return found


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
    for one in (name, *(WITH_PRIORITIES if name == "priority_levels" else ())):
        holder.ClearField(one)


def _link(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != CONFIG:
            (target / path.name).symlink_to(path.absolute())


def _write(path: Path, config: Any, *, keep: bool, source: Path) -> None:
    """An unchanged config is copied, so that its comments and the order of its lines stay."""
    from google.protobuf import text_format

    text = source.read_text(encoding="utf-8") if keep else text_format.MessageToString(config)
    path.write_text(text, encoding="utf-8")
