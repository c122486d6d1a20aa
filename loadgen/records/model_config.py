"""Reads Triton's model configuration as JSON, which the native server returns in the same shape.

Missing parts are empty: another server may return anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.records.run import ArmRecord

GPU_ONLY_BACKENDS = ("tensorrt",)
"""Triton backends that execute on a GPU or not at all."""
_MOST_INSTANCES = 2**31
_MOST_TEXT = 120


@dataclass(frozen=True, slots=True)
class TritonModel:
    """A model on a Triton server, by its configuration alone. None: the configuration does not say it."""

    title: str
    """Name for reports: Triton 2.51, onnxruntime backend."""
    backend: str
    """onnxruntime, tensorrt, python, ensemble …; empty if unknown."""
    device: str | None
    """cpu, cuda:0, cuda:0,cuda:1, or cuda where no GPU is named."""
    precision: str | None
    settings: dict[str, object]
    """All settings in effect: parameters, instances, batching, optimization, device, precision."""


def read_triton(
    config: Mapping[str, Any] | None, version: str | None, steps: Sequence[Mapping[str, Any]] = ()
) -> TritonModel:
    """Read a model's configuration. `version`: of the server; `steps`: the configurations of an ensemble's models."""
    config = config or {}
    parts = [read_triton(step, None) for step in steps]
    settings = effective_settings(config) if config else {}
    backend = backend_name(config)
    device, precision = settings.get("device") or _device(config, backend), settings.get("precision")
    if parts:
        devices = [part.device for part in parts]
        device = next((one for one in devices if one and one.startswith("cuda")), None)
        device = device or ("cpu" if set(devices) == {"cpu"} else None)
        precisions = {part.precision for part in parts} - {None}
        precision = precisions.pop() if len(precisions) == 1 else None
    precision = precision or _precision(config)
    found = {"device": device, "precision": precision, "optimization": _optimization(config)}
    settings |= {name: str(value)[:_MOST_TEXT] for name, value in found.items() if value}
    policies = (queue_policy(config), *(str(part.settings.get("queue_policy") or "") for part in parts))
    if policy := " and ".join(dict.fromkeys(filter(None, policies))):
        settings["queue_policy"] = policy
    spinning = {_spinning(config, backend, device), *(part.settings.get("spinning") for part in parts)} - {None}
    if spinning:
        settings["spinning"] = max(map(str, spinning))  # on, if any of them spins
    backends = list(dict.fromkeys(part.backend for part in parts if part.backend))
    kind = f"{backend} backend" if backend and backend != "ensemble" else backend
    if backends:
        kind = f"ensemble of the {' and '.join(backends)} backend{'s' if len(backends) > 1 else ''}"
    names = ["Triton" if version is None else f"Triton {'.'.join(version.split('.')[:2])}", kind, precision]
    return TritonModel(
        title=", ".join(str(name) for name in names if name),
        backend=backend,
        device=None if device is None else str(device),
        precision=None if precision is None else str(precision),
        settings=settings,
    )


def step_names(config: Mapping[str, Any] | None) -> list[str]:
    """The models of an ensemble's steps, without repetition; empty for other models."""
    steps = listed(mapping((config or {}).get("ensemble_scheduling")).get("step"))
    return list(dict.fromkeys(str(name) for step in steps if (name := mapping(step).get("model_name"))))


def effective_settings(config: Mapping[str, Any] | None) -> dict[str, object]:
    """The settings that a model's configuration contains: its `parameters`, batching and instances."""
    if config is None:
        return {}
    settings: dict[str, object] = {}
    for name, value in mapping(config.get("parameters")).items():
        settings[name] = value.get("string_value") if isinstance(value, Mapping) else value
    for name in ("backend", "platform", "max_batch_size"):
        if config.get(name) not in (None, ""):
            settings[name] = config[name]
    batching = config.get("dynamic_batching")
    settings["dynamic_batching"] = isinstance(batching, Mapping)
    if isinstance(batching, Mapping):
        delay = whole(batching.get("max_queue_delay_microseconds", 0))
        if delay is not None:
            settings["max_queue_delay_us"] = delay
    counts = [(whole(group.get("count", 1)), len(listed(group.get("gpus")))) for group in groups(config)]
    instances = sum(count * max(gpus, 1) for count, gpus in counts if count is not None)  # a count is per GPU
    if counts and all(count is not None for count, _ in counts) and instances < _MOST_INSTANCES:
        settings["instances"] = instances
    return settings


def _device(config: Mapping[str, Any], backend: str) -> str | None:
    """The device that the kinds of all instances imply; none for KIND_AUTO and where a Python model may ignore them."""
    kinds = {str(group.get("kind")) for group in groups(config)}
    if backend == "python":
        return None
    if backend in GPU_ONLY_BACKENDS or kinds == {"KIND_GPU"}:
        gpus = {whole(gpu) for group in groups(config) for gpu in listed(group.get("gpus"))} - {None}
        return ",".join(f"cuda:{gpu}" for gpu in sorted(gpus, key=str)) or "cuda"
    return "cpu" if kinds == {"KIND_CPU"} else None


def _precision(config: Mapping[str, Any]) -> str | None:
    """What an accelerator's `precision_mode` or the types of all floating-point tensors imply. FP32 tensors imply
    nothing: a model of half precision may have them."""
    modes = {str(mapping(parameters).get("precision_mode")).lower() for _, parameters in _accelerators(config, "gpu")}
    if len(modes) == 1 and modes <= {"fp16", "bf16", "int8"}:
        return modes.pop()
    tensors = (*listed(config.get("input")), *listed(config.get("output")))
    types = {str(mapping(tensor).get("data_type")).removeprefix("TYPE_") for tensor in tensors}
    floats = types & {"FP16", "BF16", "FP32", "FP64"}
    return floats.pop().lower() if floats in ({"FP16"}, {"BF16"}) else None


def _spinning(config: Mapping[str, Any], backend: str, device: object) -> object:
    """Whether threads spin while they wait, "on" or "off". The onnxruntime backend passes no setting of it on, so on a
    CPU they do as ONNX Runtime's do by default; a single thread waits for none."""
    parameters = mapping(config.get("parameters"))
    if backend != "onnxruntime" or device != "cpu" or _accelerators(config, "cpu"):
        return mapping(parameters.get("spinning")).get("string_value")
    return "off" if mapping(parameters.get("intra_op_thread_count")).get("string_value") == "1" else "on"


def _optimization(config: Mapping[str, Any]) -> str:
    """CUDA graphs and execution accelerators with their parameters; empty without."""
    graphs = mapping(mapping(config.get("optimization")).get("cuda")).get("graphs") is True
    found = ["CUDA graphs"] if graphs else []
    for name, parameters in (*_accelerators(config, "gpu"), *_accelerators(config, "cpu")):
        shown = ", ".join(f"{key}={value}" for key, value in parameters.items())
        found.append(f"{name} accelerator" + (f" ({shown})" if shown else ""))
    return ", ".join(found)


def _accelerators(config: Mapping[str, Any], processor: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and parameters of each execution accelerator for gpu or cpu."""
    optimization = mapping(config.get("optimization"))
    entries = listed(mapping(optimization.get("execution_accelerators")).get(f"{processor}_execution_accelerator"))
    return [(str(entry.get("name")), mapping(entry.get("parameters"))) for entry in map(mapping, entries)]


def accelerators(arm: ArmRecord) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and parameters of each execution accelerator for a GPU."""
    return _accelerators(arm.model_config or {}, "gpu")


POLICY_EFFECT = (
    "turns Triton's prefetching off, so a request that arrives before the instance waits again can sleep for 0.5 s"
)
"""The end of a sentence about a queue policy. See PriorityQueue in Triton's core, and the server's issue 8870."""


def queue_policy(config: Mapping[str, Any]) -> str:
    """What turns the prefetching of Triton's dynamic batcher off, as lines of a config.pbtxt; empty without."""
    batching = mapping(config.get("dynamic_batching"))
    policy, lines = mapping(batching.get("default_queue_policy")), []
    for name in ("default_timeout_microseconds", "allow_timeout_override", "max_queue_size"):
        value = "true" if policy.get(name) is True else whole(policy.get(name))
        lines += [f"{name}: {value}"] if value else []
    parts = [f"default_queue_policy {{ {' '.join(lines)} }}"] if lines else []
    if levels := whole(batching.get("priority_levels")):
        parts.append(f"priority_levels: {levels}")
    return " and ".join(parts)


def queue_policy_of(arm: ArmRecord) -> str:
    """The queue policy in effect of a Triton server, also of an ensemble's models; empty without, and for servers that
    have another batcher."""
    if arm.server_name != "triton":
        return ""
    return str(arm.in_effect.get("queue_policy") or queue_policy(arm.model_config or {}))


def groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The instance groups."""
    return [group for group in listed(config.get("instance_group")) if isinstance(group, Mapping)]


def kind_of(arm: ArmRecord) -> str:
    """KIND_CPU, KIND_GPU or empty."""
    return next((str(group.get("kind", "")) for group in groups(arm.model_config or {})), "")


def backend_of(arm: ArmRecord) -> str:
    """The backend in the configuration, or `platform` in older ones (onnxruntime_onnx, tensorrt_plan)."""
    return backend_name(arm.model_config or {})


def backend_name(config: Mapping[str, Any]) -> str:
    """The backend of a configuration; empty if it names none."""
    return str(config.get("backend") or str(config.get("platform") or "").partition("_")[0])


def whole(value: object) -> int | None:
    """Read a number from 0, also from text, as in protobuf's JSON for 64 bits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
