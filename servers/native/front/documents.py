"""The documents that describe the server: metadata, configuration, statistics and metrics.

HTTP and gRPC both send the JSON documents, in Triton's shapes. The Prometheus metrics, in seconds and items, are
written here and not by prometheus_client: that takes 2 ms per scrape, and clients that scrape without reading the
answers held the event loop for seconds. The text before a value never changes, so it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version as package_version
from itertools import accumulate, chain

from servers.engines.processors import cuda_index
from servers.native.front.generation import GenerationService
from servers.native.front.inference import ModelService
from servers.native.front.region_table import RegionTable
from servers.native.shared.interface import ModelState
from servers.native.shared.statistics import Histogram
from servers.protocol.records import ModelSignature
from servers.protocol.tensors import TensorSpec

SERVER_NAME = "abserve-native"
EXTENSIONS = ("parameters", "statistics", "model_configuration", "model_repository")

_REPOSITORY_STATES = {
    ModelState.LOADING: ("LOADING", ""),
    ModelState.ACCEPTING: ("LOADING", ""),
    ModelState.READY: ("READY", ""),
    ModelState.FAILED: ("UNAVAILABLE", "failed"),
    ModelState.UNLOADED: ("UNAVAILABLE", "unloaded"),
    ModelState.STOPPING: ("UNLOADING", ""),
}

Document = dict[str, object]


async def server_metadata(regions: RegionTable | None) -> Document:
    """The server, without `regions` that of a language model; shared memory is listed where a client can register
    it."""
    extensions = ["generate" if regions is None else "binary_tensor_data", *EXTENSIONS]
    if regions is not None:
        shared = {"system_shared_memory": regions.allowed, "cuda_shared_memory": await regions.offers_cuda()}
        extensions += [name for name, offered in shared.items() if offered]
    return {"name": SERVER_NAME, "version": package_version("abserve"), "extensions": extensions}


def openai_models(services: Iterable[GenerationService]) -> Document:
    """OpenAI's list of models, with vLLM's maximum length."""
    return {
        "object": "list",
        "data": [
            {
                "id": service.signature.name,
                "object": "model",
                "created": 0,
                "owned_by": "abserve",
                "max_model_len": service.max_length,
            }
            for service in services
        ],
    }


def model_metadata(service: ModelService) -> Document:
    """A model's tensors. `platform` is the engine's kind, empty until it is loaded."""
    signature = service.signature
    return {
        "name": signature.name,
        "versions": [signature.version],
        "platform": service.description.kind if service.description is not None else "",
        "inputs": [_tensor(spec) for spec in signature.inputs],
        "outputs": [_tensor(spec) for spec in signature.outputs],
    }


def model_config(service: ModelService) -> Document:
    """A model's configuration, with the parameters in effect as the loaded engine reports them.

    Raises `RefusedError` until the model is loaded.
    """
    description = service.description
    if description is None:
        service.check_ready()
        raise AssertionError("a ready service has a description")
    signature = service.signature
    devices = description.device.split(",")
    gpus = [index for device in devices if (index := cuda_index(device)) is not None]
    return {
        "name": signature.name,
        "platform": "",
        "backend": description.kind,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": signature.max_batch_size,
        "input": [_config_tensor(spec, signature) for spec in signature.inputs],
        "output": [_config_tensor(spec, signature) for spec in signature.outputs],
        **service.batching(),
        "instance_group": [
            {
                "name": f"{signature.name}_0",
                "kind": "KIND_GPU" if gpus else "KIND_CPU",
                "count": 1 if gpus else len(devices),  # on each GPU
                "gpus": gpus,
            }
        ],
        "parameters": {key: {"string_value": value} for key, value in parameters_in_effect(service).items()},
        "model_warmup": [],
    }


def parameters_in_effect(service: ModelService) -> dict[str, str]:
    """The engine's settings in effect as text, without those that do not apply to it."""
    return {} if service.description is None else service.parameters(service.description)


def repository_index(services: Iterable[ModelService], ready_only: bool) -> list[Document]:
    """The models and their states."""
    rows = []
    for service in services:
        if ready_only and not service.ready:
            continue
        state, reason = _REPOSITORY_STATES[service.state]
        row: Document = {"name": service.signature.name, "version": service.signature.version, "state": state}
        rows.append({**row, "reason": reason} if reason else row)
    return rows


def statistics(services: Iterable[ModelService]) -> Document:
    """Triton's statistics of some models, with the seconds of the stages of each one's start."""
    return {
        "model_stats": [
            {
                **service.statistics.snapshot().as_model_stats(service.signature.name, service.signature.version),
                "abserve_start": service.description.details.get("start", {}) if service.description else {},
            }
            for service in services
        ]
    }


def _tensor(spec: TensorSpec) -> Document:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _config_tensor(spec: TensorSpec, signature: ModelSignature) -> Document:
    datatype = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {
        "name": spec.name,
        "data_type": datatype,
        "dims": list(spec.item_shape if signature.max_batch_size else spec.shape),
        **({"optional": True} if spec.optional else {}),
    }


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "abserve_native"

Labels = tuple[tuple[str, str], ...]


def render(services: Iterable[ModelService]) -> bytes:
    """The exposition text: each family once, with its samples of every model."""
    families: dict[str, list[str]] = {}
    for service in services:
        _add_service(families, service)
    return "".join(chain.from_iterable(families.values())).encode()


def _add_service(families: dict[str, list[str]], service: ModelService) -> None:
    counters = service.statistics.snapshot()
    labels: Labels = (("model", service.signature.name), ("version", service.signature.version))

    def family(kind: str, name: str, help_text: str) -> list[str]:
        first = f"# HELP {PREFIX}_{name} {help_text}\n# TYPE {PREFIX}_{name} {kind}\n"
        return families.setdefault(name, [first])

    def add(kind: str, name: str, help_text: str, value: float, **more: str) -> None:
        family(kind, name, help_text).append(f"{_start(name, (*labels, *more.items()))}{value}\n")

    def add_histogram(name: str, help_text: str, values: Histogram, unit: float) -> None:
        lines = family("histogram", name, help_text)
        starts = _bucket_starts(name, labels, values.bounds, unit)
        lines += [f"{start}{count}\n" for start, count in zip(starts, accumulate(values.counts), strict=True)]
        lines.append(f"{_start(f'{name}_count', labels)}{values.count}\n")
        lines.append(f"{_start(f'{name}_sum', labels)}{values.total / unit}\n")

    add("counter", "requests_success_total", "Requests answered.", counters.request_duration.count)
    add("counter", "client_disconnects_total", "Requests whose client left before the answer.", counters.disconnects)
    add("counter", "items_total", "Items executed; a request of batch n counts n times.", counters.inference_count)
    help_text = "Items executed, with those that only fill a batch."
    add("counter", "executed_items_total", help_text, counters.executed_rows)
    add("counter", "executions_total", "Batches executed.", counters.compute_duration.count)
    for reason, count in counters.failures.items():
        add("counter", "requests_failure_total", "Requests not answered.", count, reason=reason)
    for stage, times in counters.stages.items():
        help_text = "Time that answered requests spent in each stage."
        add("counter", "stage_seconds_total", help_text, times["ns"] / 1e9, stage=stage)
    add(
        "gauge",
        "pending_requests",
        "Requests waiting for the engine or for their images.",
        counters.decoding + counters.queued,
    )
    add("gauge", "ready", "1 when inference requests are answered.", int(service.ready))
    parameters = parameters_in_effect(service)
    info = {"reference" if key == "model" else key: value for key, value in parameters.items()}
    add("gauge", "engine_info", "The engine's settings in effect.", 1, **info)
    help_text = "Bytes of connections that --record missed."
    add("counter", "unrecorded_bytes_total", help_text, counters.unrecorded_bytes)
    duration, queue, compute = counters.request_duration, counters.queue_duration, counters.compute_duration
    add_histogram("request_duration_seconds", "From the request's head to its answer.", duration, 1e9)
    add_histogram("queue_duration_seconds", "Waiting for the engine and for other requests to join.", queue, 1e9)
    add_histogram("compute_duration_seconds", "Execution of one batch, copies included.", compute, 1e9)
    if service.generates:
        add("counter", "prompt_tokens_total", "Tokens of prompts that got a slot.", counters.prompt_tokens)
        add("counter", "output_tokens_total", "Tokens generated.", counters.output_tokens)
        add("gauge", "slots_in_use", "Requests being generated.", counters.slots_in_use)
        help_text = "From a request's head to its first token."
        add_histogram("first_token_duration_seconds", help_text, counters.first_token, 1e9)
    else:
        add_histogram("executed_batch_size", "Items in one executed batch.", counters.batch_size, 1)


@lru_cache(maxsize=1024)
def _start(name: str, labels: Labels) -> str:
    """A sample's line up to its value."""
    escaped = [(key, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")) for key, value in labels]
    text = ",".join(f'{key}="{value}"' for key, value in sorted(escaped))
    return f"{PREFIX}_{name}{{{text}}} "


@lru_cache(maxsize=64)
def _bucket_starts(name: str, labels: Labels, bounds: tuple[int, ...], unit: float) -> tuple[str, ...]:
    """The lines of a histogram's buckets up to their values."""
    upper = [str(float(f"{bound / unit:.6g}")) for bound in bounds]
    return tuple(_start(f"{name}_bucket", (*labels, ("le", text))) for text in (*upper, "+Inf"))
