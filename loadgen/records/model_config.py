"""Reads Triton's model configuration as JSON, which the native server returns in the same shape.

Missing parts are empty: another server may return anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgen.records.run import ArmRecord, StepRecord

GPU_ONLY_BACKENDS = ("tensorrt",)
"""Triton backends that execute on a GPU or not at all."""
DECODING_SETTINGS = ("model", "decode_threads", "max_image_pixels")
"""The parameters of a step that decodes which hold for the ensemble."""
_PIXEL_DIMENSIONS = 3
_VLLM_GRAPHS = {"0": "none", "1": "piecewise", "2": "full", "[2, 0]": "full decoding", "[2, 1]": "full and piecewise"}
"""vLLM's CUDAGraphMode: of decoding and of steps that also read prompts."""
_MOST_INSTANCES = 2**31
_MOST_DELAY_US = 2**53
_MOST_TEXT = 120


def read_triton(config: Mapping[str, Any] | None, steps: Sequence[StepRecord] = ()) -> dict[str, object]:
    """All settings in effect of a model on a Triton server, as far as its configuration says them: parameters,
    instances, batching, optimization, device (cpu, cuda:0, cuda:0,cuda:1, or cuda where no GPU is named), precision.

    `steps` are the models that an ensemble calls. Their settings are its own: of each the value that all of them have
    which do not only decode.
    """
    config = config or {}
    backend = backend_name(config)
    ensemble = backend == "ensemble" or bool(steps)
    settings = effective_settings(config) if config else {}
    if ensemble:
        settings = _ensemble_settings(settings, steps)
    device = settings.get("device") or (None if ensemble else _device(config, backend))
    derived = {
        "device": device,
        "precision": settings.get("precision") or _precision(config),
        "optimization": _optimization(config),
    }
    settings |= {name: str(value)[:_MOST_TEXT] for name, value in derived.items() if value}
    parts = [read_triton(step.config) for step in steps]
    policies = (queue_policy(config), *(str(part.get("queue_policy") or "") for part in parts))
    if policy := " and ".join(dict.fromkeys(filter(None, policies))):
        settings["queue_policy"] = policy
    spinning = {_spinning(config, backend, device), *(part.get("spinning") for part in parts)} - {None}
    if spinning:
        settings["spinning"] = max(map(str, spinning))  # on, if any of them spins
    return settings


def read_vllm(
    info: Mapping[str, Any] | None, version: str | None, served: Mapping[str, Any] | None = None
) -> dict[str, object]:
    """The settings in effect of vLLM, from its answer to /server_info?config_format=json, with the names that abserve's
    own servers use. `served` says what abserve gave it to load: model, weights, weights_sha256."""
    config = mapping(mapping(info).get("vllm_config"))
    model, cache, scheduler = (mapping(config.get(f"{name}_config")) for name in ("model", "cache", "scheduler"))
    dtype = str(model.get("dtype") or "").removeprefix("torch.")
    device = mapping(config.get("device_config")).get("device_type") or mapping(config.get("device_config")).get(
        "device"
    )
    speculative = mapping(config.get("speculative_config"))
    variables = str(mapping(mapping(info).get("system_env")).get("env_vars"))
    unbound = mapping(mapping(info).get("vllm_env")).get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    threads = re.search(r"^OMP_NUM_THREADS=(\d+)$", variables, re.MULTILINE) if unbound and device == "cpu" else None
    parallel = mapping(config.get("parallel_config"))
    graphs = mapping(config.get("compilation_config")).get("cudagraph_mode")
    settings = {
        "engine": "vllm",
        "engine_version": version,
        "precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype),
        "device": device,
        "threads": threads and threads[1],  # bound to cores, vLLM has as many as it chose, and does not say how many
        "slots": whole(scheduler.get("max_num_seqs")),
        "max_length": whole(model.get("max_model_len")),
        "prefill_chunk": whole(scheduler.get("max_num_batched_tokens")),
        "prefix_cache": cache.get("enable_prefix_caching"),
        "quantization": model.get("quantization"),
        "eager": model.get("enforce_eager"),
        "cuda_graphs": None if graphs is None else _VLLM_GRAPHS.get(str(graphs), graphs),
        "fronts": whole(parallel.get("_api_process_count")),
        "async_scheduling": scheduler.get("async_scheduling"),
        "stream_interval": whole(scheduler.get("stream_interval")),
        "generation_config": model.get("generation_config"),
        "kv_cache_tokens": whole(cache.get("kv_cache_size_tokens")),
        "tensor_parallel": whole(parallel.get("tensor_parallel_size")),
        "speculative": speculative.get("method") or ("on" if speculative else None),
    }
    named = {name: value for name in ("model", "weights", "weights_sha256") if (value := mapping(served).get(name))}
    return {name: str(value)[:_MOST_TEXT] for name, value in {**settings, **named}.items() if value not in (None, "")}


def triton_title(
    config: Mapping[str, Any] | None, version: str | None, precision: object, steps: Sequence[StepRecord] = ()
) -> str:
    """A model's name for reports, with the server's version: Triton 2.51, onnxruntime backend, fp16."""
    backend = backend_name(config or {})
    backends = list(dict.fromkeys(name for step in steps if (name := backend_name(step.config or {}))))
    kind = f"{backend} backend" if backend and backend != "ensemble" else backend
    if backends:
        kind = f"ensemble of the {' and '.join(backends)} backend{'s' if len(backends) > 1 else ''}"
    names = ["Triton" if version is None else f"Triton {'.'.join(version.split('.')[:2])}", kind, precision]
    return ", ".join(str(name) for name in names if name)


def _ensemble_settings(declared: Mapping[str, object], steps: Sequence[StepRecord]) -> dict[str, object]:
    """The settings in effect of an ensemble. `declared` are those of its own configuration, which has no batcher and no
    instances. What depends on a step that cannot be read is left out."""
    decoding, executing = split_steps(steps)
    parts = [read_triton(step.config) for step in executing]
    shared = {
        name: value
        for name, value in (parts[0] if parts else {}).items()
        if name not in ("platform", "max_batch_size", "payload") and all(part.get(name) == value for part in parts)
    }
    devices, precisions = ([part.get(name) for part in parts] for name in ("device", "precision"))
    if gpu := next((device for device in devices if str(device).startswith("cuda")), None):
        shared["device"] = gpu
    if len(names := set(map(str, filter(None, precisions)))) == 1:
        shared["precision"] = names.pop()
    settings: dict[str, object] = {
        name: value
        for step in decoding
        for name, value in effective_settings(step.config).items()
        if name in DECODING_SETTINGS
    }
    settings |= shared | {name: value for name, value in declared.items() if name != "instances"}
    settings.pop("dynamic_batching", None)
    settings.pop("max_queue_delay_us", None)
    if steps and all(step.config is not None for step in steps):
        settings["dynamic_batching"] = any(part.get("dynamic_batching") for part in parts)
        delay_us = _delay_us(steps)
        if delay_us is not None:
            settings["max_queue_delay_us"] = delay_us
    if steps:
        named = (f"{step.model} ({backend_name(step.config or {}) or 'unknown'})" for step in steps)
        settings["steps"] = " → ".join(named)[: 4 * _MOST_TEXT]
    return settings


def _delay_us(steps: Sequence[StepRecord]) -> int | None:
    """How long a lone request waits in the queues of all steps, one after the other; None if no step has a dynamic
    batcher, or one does not say it."""
    total_us = None
    for step in steps:
        settings = effective_settings(step.config)
        if settings["dynamic_batching"]:
            delay_us = settings.get("max_queue_delay_us")
            if not isinstance(delay_us, int):
                return None
            total_us = (total_us or 0) + step.calls * delay_us
    return None if total_us is None or total_us > _MOST_DELAY_US else total_us


def step_calls(config: Mapping[str, Any] | None) -> dict[tuple[str, str | None], int]:
    """The models that an ensemble's own steps call and their versions (None: the latest), in order, each with the
    number of its calls; empty for other models."""
    calls: Counter[tuple[str, str | None]] = Counter()
    for step in map(mapping, listed(mapping((config or {}).get("ensemble_scheduling")).get("step"))):
        if name := step.get("model_name"):
            version = whole(step.get("model_version"))
            calls[str(name), None if version is None else str(version)] += 1
    return dict(calls)


def split_steps(steps: Sequence[StepRecord]) -> tuple[list[StepRecord], list[StepRecord]]:
    """The steps that only decode, and those that execute; all execute if otherwise none would."""
    decoding = [step for step in steps if step.config is not None and _decodes(step.config)]
    executing = [step for step in steps if step not in decoding]
    return (decoding, executing) if executing else ([], list(steps))


def _decodes(config: Mapping[str, Any]) -> bool:
    """Whether a model turns files or texts into pixels or numbers: it takes bytes, and returns only integers or tensors
    of three dimensions. Scores and vectors are what a model computes from them."""
    takes = [mapping(tensor).get("data_type") for tensor in listed(config.get("input"))]
    returns = [mapping(tensor) for tensor in listed(config.get("output"))]
    return (
        "TYPE_STRING" in takes
        and bool(returns)
        and all(
            str(tensor.get("data_type")).removeprefix("TYPE_").startswith(("INT", "UINT"))
            or (tensor.get("data_type") != "TYPE_STRING" and len(listed(tensor.get("dims"))) >= _PIXEL_DIMENSIONS)
            for tensor in returns
        )
    )


def executed_models(arm: ArmRecord) -> list[ArmRecord]:
    """The models that execute an arm's requests, each as if it was the arm's only one: of an ensemble the steps that
    do not only decode."""
    return [
        msgspec.structs.replace(arm, model_config=step.config, in_effect=read_triton(step.config), steps=())
        for step in split_steps(arm.steps)[1]
    ] or [arm]


def executed_config(arm: ArmRecord) -> Mapping[str, Any] | None:
    """The configuration of the model that executes an arm's requests; of an ensemble with several of them its own."""
    models = executed_models(arm)
    return models[0].model_config if len(models) == 1 else arm.model_config


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


def reported_padding(config: Mapping[str, Any] | None) -> str | None:
    """The sizes to which requests of different lengths are padded, as in 32,64; "none" if only requests of equal
    lengths share a batch; None: not reported. Triton merges requests of different shapes only where an input has
    `allow_ragged_batch`."""
    if config is None:
        return None
    if (reported := effective_settings(config).get("pad_to")) is not None:
        return str(reported)
    inputs = [mapping(tensor) for tensor in listed(config.get("input"))]
    varies = any(str(size) == "-1" for tensor in inputs for size in listed(tensor.get("dims")))
    ragged = any(tensor.get("allow_ragged_batch") is True for tensor in inputs)
    return "none" if varies and not ragged and backend_name(config) != "ensemble" else None


def pad_sizes(rule: str) -> tuple[int, ...]:
    """The sizes of a reported rule, ascending; empty for "none" and for anything that is not a list of sizes."""
    sizes = {whole(part.strip()) for part in rule.split(",")}
    return tuple(sorted(size for size in sizes if size)) if all(sizes) else ()


def padding_in_effect(arm: ArmRecord) -> str | None:
    """An arm's padding as `reported_padding` reads it."""
    reported = arm.in_effect.get("pad_to")
    return reported_padding(arm.model_config) if reported is None else str(reported)


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
    names = ["CUDA graphs"] if graphs else []
    for name, parameters in (*_accelerators(config, "gpu"), *_accelerators(config, "cpu")):
        shown = ", ".join(f"{key}={value}" for key, value in parameters.items())
        names.append(f"{name} accelerator" + (f" ({shown})" if shown else ""))
    return ", ".join(names)


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


def real(value: object) -> float | None:
    """The value if it is a number, else None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
