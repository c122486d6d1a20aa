"""From a model specification to Triton's `config.pbtxt`: native ONNX Runtime and TensorRT backends, python backend.

Templates and not protobuf make the text, so that each setting carries its reason; a test parses every generated file
with Triton's own protobuf. Triton's dims leave the batch dimension out; a dimension of variable size is -1. A launch
writes model, engine and weights as parameters into the config, and the model of the python backend reads them.

For JPEG on the native backends a python model decodes, and an ensemble connects it to the model that executes:

    <model>_preprocess   python backend: image BYTES → pixel_values UINT8, the code of the native server
    <model>_jpeg_onnx    ensemble of that and <model>_uint8_onnx; also <model>_jpeg_tensorrt
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from servers.engines.batches import axis_buckets, warm_on_cpu, warm_up_sizes
from servers.engines.interface import EngineDescription
from servers.engines.padding import pad_to_text, parse_pad_to
from servers.engines.processors import cuda_index
from servers.engines.settings import EngineSettings, parse_spinning
from servers.language.engine import GENERATE_INPUTS, GENERATE_OUTPUTS
from servers.models.images import MAX_PIXELS, DecodingSettings
from servers.models.registry import DEFAULT_MODEL
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.options.defaults import MAX_QUEUE_DELAY_US
from servers.protocol.tensors import TensorSpec

HEADER = "# Generated from the model specification; do not edit. To generate it again: abserve triton-repo{}\n"

MODEL_PY = """import sys

# Triton puts the folder in which it was started first, and a folder servers there would be imported instead.
sys.path.sort(key=lambda path: not path)
# abserve must be installed beside Triton, since the code is in {0}.
from abserve.packages import FOLDER

sys.path.insert(0, FOLDER)
from {0} import {1}

TritonPythonModel = {1}
"""
"""Where the class of a python model is: its module and its name."""
REFERENCE = "reference.txt"
"""Beside model.py: the path of a user's model."""
_EMPTY = {".gitkeep": ""}
NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})

QUEUE_TIMEOUT_US = 600_000_000
"""With a queue limit, of a request without its own timeout: far beyond any latency. Triton ignores the timeouts of
requests without a default, and its batcher may sleep for 0.5 s, so a timeout near that rejects single requests."""


def artefact_name(specification: ModelSpecification, suffix: str) -> str:
    """The name of the file in a version folder: model.onnx, model_uint8.plan …"""
    return f"model{'_uint8' if specification.payload == 'uint8' else ''}.{suffix}"


def write_model_repository(root: Path, specifications: Iterable[ModelSpecification]) -> tuple[Path, ...]:
    """Write `<model>_onnx` and `<model>_tensorrt` of every specification under `root`; returns the written files. For
    JPEG these are ensembles, and there is `<model>_preprocess`. Each has a version folder `1` for the artefact; a
    `.gitkeep` keeps an empty one, and the decoding model reads the path of a user's model from `reference.txt`."""
    written = []
    for specification in specifications:
        for name, text, files in _models(specification):
            folder = root / name
            (folder / "1").mkdir(parents=True, exist_ok=True)
            beside = {folder / "1" / file: content for file, content in files.items()}
            for path, content in {folder / "config.pbtxt": text, **beside}.items():
                path.write_text(content, encoding="utf-8")
                written.append(path)
    return tuple(written)


def _models(specification: ModelSpecification) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """Name, config and the files in the version folder of each model."""
    if specification.payload != "jpeg":
        for backend in NATIVE_BACKENDS.values():
            yield specification.name + backend.ending, backend.config(specification), _EMPTY
        return
    yield preprocess_name(specification), preprocess_config(specification), preprocess_files(specification)
    for backend in NATIVE_BACKENDS.values():
        name, executing = specification.name + backend.ending, specification.executed.name + backend.ending
        yield name, ensemble_config(specification, name, executing), _EMPTY


def dynamic_batching(max_queue_delay_us: int = MAX_QUEUE_DELAY_US, queue_size: int = 0) -> str:
    """Triton's batcher, with only the settings that were asked for: each line costs speed
    (docs/triton.md#what-each-line-costs). `queue_size` is the most waiting requests; 0: no limit and no queue policy.
    """
    delay = f" max_queue_delay_microseconds: {max_queue_delay_us}" if max_queue_delay_us else ""
    if not queue_size:
        return f"dynamic_batching {{{delay} }}"
    return f"""# A queue policy, which was asked for: with any of these lines a waiting request may sleep up to 0.5 s.
dynamic_batching {{{delay} default_queue_policy {{
  timeout_action: REJECT default_timeout_microseconds: {QUEUE_TIMEOUT_US}
  allow_timeout_override: true max_queue_size: {queue_size}
}} }}"""


BATCHING = dynamic_batching()
NO_BATCHING = "# No dynamic_batching: each request is executed alone."
HEURISTIC = 1
"""Of cudnn_conv_algo_search."""


def onnxruntime_config(
    specification: ModelSpecification,
    batching: str = BATCHING,
    device: str = "cuda:0",
    parameters: Mapping[str, str] = NO_PARAMETERS,
    instances: int = 1,
    cudnn_conv_algo_search: int = HEURISTIC,
) -> str:
    """`<model>_onnx`: the native onnxruntime backend on `device`, cpu or cuda:N. Inputs and outputs have the model's
    datatypes in every precision, which is a property of the file.

    `parameters` are the settings of a launch (precision, weights …), which the config shows to clients. Each of the
    `instances` executes with its own threads. With the parameter batch_multiple the file executes only multiples of it.
    """
    largest = specification.max_batch_size
    multiple = int(parameters.get("batch_multiple", "1"))
    sizes = sorted({min(size, largest) for size in range(multiple, largest + multiple, multiple)})
    if device == "cpu":
        where = f"""{_instance_group(device, instances)}
parameters {{ key: "intra_op_thread_count" value: {{ string_value: {quote(parameters.get("threads", "0"))} }} }}"""
        warm = _warmup(specification, warm_on_cpu(sizes if multiple > 1 else warm_up_sizes(largest)), (None,), count=1)
    else:
        tf32 = int(parameters.get("precision") == "tf32")
        where = f"""\
# KIND_GPU, written out: without it Triton falls back to the CPU without a message where it cannot use the GPU.
{_instance_group(device, instances)}
# Only as a top-level parameter: Triton's own defaults overwrite this key inside the accelerator block below.
# 1 is HEURISTIC, 2 DEFAULT. Triton's default 0, EXHAUSTIVE, searches again at each new batch size.
parameters {{ key: "cudnn_conv_algo_search" value: {{ string_value: "{cudnn_conv_algo_search}" }} }}
# TF32 only where it was asked for, so that FP32 means FP32; FP16 does not use it. No CUDA graphs: this backend ignores
# optimization.cuda.graphs, and ONNX Runtime's own enable_cuda_graph would replay stale inputs, since Triton binds new
# buffers at each execution.
optimization {{ execution_accelerators {{
  gpu_execution_accelerator: [ {{ name: "cuda" parameters {{ key: "use_tf32" value: "{tf32}" }} }} ]
}} }}
# Every size: the CUDA provider plans its convolutions anew for each batch size, and the batcher forms all of them."""
        warm = _warmup(specification, sizes, (None,), count=1)
    return f"""{_header(specification, parameters)}name: {quote(specification.name + "_onnx")}
backend: "onnxruntime"
default_model_filename: {quote(artefact_name(specification, "onnx"))}
{_signature(specification)}
{batching}
{_parameter_lines(parameters)}{where}
{warm}
"""


def tensorrt_config(
    specification: ModelSpecification,
    batching: str = BATCHING,
    device: str = "cuda:0",
    parameters: Mapping[str, str] = NO_PARAMETERS,
    instances: int = 1,
) -> str:
    """`<model>_tensorrt`: the native tensorrt backend on `device` with a CUDA graph for every batch size. `parameters`
    as for `onnxruntime_config`."""
    sizes, along = warm_up_sizes(specification.max_batch_size), _axis_sizes(specification)
    exact = _EXACT_SIZES if specification.axes else ""
    return f"""{_header(specification, parameters)}name: {quote(specification.name + "_tensorrt")}
backend: "tensorrt"
# FP16 or FP32 is a property of the plan: TensorRT 11 networks are strongly typed, there is no flag for it here.
default_model_filename: {quote(artefact_name(specification, "plan"))}
{_signature(specification)}
# One optimisation profile, 1 to {specification.max_batch_size}; so there is no batch size to prefer, see below.
{_instance_group(device, instances, ' profile: [ "0" ]')}
{batching}
{_parameter_lines(parameters)}optimization {{ cuda {{
  graphs: true
  # One CPU core spins while the GPU computes: lower latency at the price of CPU time.
  busy_wait_events: true
  # The copy of the answer overlaps the next execution.
  output_copy_stream: true
  # Without graph_spec only the sizes 1 and {specification.max_batch_size} would have a graph. The lower bounds leave
  # no gap: a smaller batch runs the next larger graph, whose surplus rows are thrown away.{exact}
  graph_spec [
{_graph_specs(specification, sizes, along)}
  ]
}} }}
# READY only after each graph has run: the first execution of a graph is slower than the others.
{_warmup(specification, sizes, along, count=5)}
"""


class NativeBackend(NamedTuple):
    """One of Triton's own backends, which executes an exported file."""

    ending: str
    """Of its models' names."""
    suffix: str
    """Of its files."""
    mode: str
    """How it executes: with optimization.cuda.graphs, which onnxruntime ignores."""
    config: Callable[..., str]
    """Writes a model's config.pbtxt."""


NATIVE_BACKENDS: Mapping[str, NativeBackend] = {
    "onnxruntime": NativeBackend("_onnx", "onnx", "session", onnxruntime_config),
    "tensorrt": NativeBackend("_tensorrt", "plan", "graph", tensorrt_config),
}


def preprocess_name(specification: ModelSpecification) -> str:
    """The name of the model that decodes for all ensembles."""
    return f"{specification.base}_preprocess"


def preprocess_files(specification: ModelSpecification) -> Mapping[str, str]:
    """The files of the decoding model's version folder. A user's model is found by its path, which no config shows."""
    private = {} if specification.reference == specification.label else {REFERENCE: specification.reference}
    return {"model.py": MODEL_PY.format("servers.triton.python_backend", "DecodingModel"), **private}


def preprocess_config(
    specification: ModelSpecification, decode_threads: int = 0, max_image_pixels: int = MAX_PIXELS
) -> str:
    """The decoding model of the JPEG variant. A bad image is an INVALID_ARG of this step: the ensemble answers 400."""
    return f"""{_header(specification)}name: {quote(preprocess_name(specification))}
backend: "python"
max_batch_size: {specification.max_batch_size}
input [ {", ".join(map(_tensor, specification.inputs))} ]
output [ {", ".join(map(_tensor, specification.executed.inputs))} ]
# The threads of one process decode on the CPU.
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
# Waiting requests are decoded together.
dynamic_batching {{ }}
parameters {{ key: "model" value: {{ string_value: {quote(specification.label)} }} }}
# 0: one thread per core, at most four.
parameters {{ key: "decode_threads" value: {{ string_value: "{decode_threads}" }} }}
parameters {{ key: "max_image_pixels" value: {{ string_value: "{max_image_pixels}" }} }}
"""


def ensemble_config(specification: ModelSpecification, name: str, executing: str) -> str:
    """The ensemble `name`: the decoding step, then the model `executing`, which takes the UINT8 pixels."""
    (image,), (pixels,), (output,) = specification.inputs, specification.executed.inputs, specification.outputs
    return f"""{_header(specification)}name: {quote(name)}
platform: "ensemble"
{_signature(specification)}
ensemble_scheduling {{ step [
  {{
    model_name: {quote(preprocess_name(specification))} model_version: -1
    input_map {{ key: {quote(image.name)} value: {quote(image.name)} }}
    output_map {{ key: {quote(pixels.name)} value: {quote(pixels.name)} }}
  }},
  {{
    model_name: {quote(executing)} model_version: -1
    input_map {{ key: {quote(pixels.name)} value: {quote(pixels.name)} }}
    output_map {{ key: {quote(output.name)} value: {quote(output.name)} }}
  }}
] }}
"""


def python_config(
    specification: ModelSpecification,
    batching: str,
    device: str,
    parameters: Mapping[str, str],
    *,
    instances: int = 1,
    ragged: bool = False,
) -> str:
    """`<model>`: the python backend executing `servers.triton.python_backend`.

    `device` is cpu, cuda:N or a list of GPUs, already resolved. `parameters` are the engine's settings (engine,
    precision, weights …); the model refuses to load when its engine reports other ones, so they may be read as settings
    in effect.
    With `ragged`, requests of different sizes along the padded axis share a batch, which the model pads.
    """
    return f"""{_header(specification, parameters)}name: {quote(specification.name)}
backend: "python"
{_signature(specification, ragged=ragged)}
# One instance is one process with one engine; several compete for the same cores or GPU.
{_instance_group(device, instances)}
{batching}
# The model compares these with the settings of its engine. No model_warmup: the model warms its engine itself.
{_parameter_lines(parameters)}"""


def language_config(name: str, device: str, parameters: Mapping[str, str]) -> str:
    """The python backend executing `servers.triton.language_model`: a stream of responses for each request.
    `parameters` are the engine's settings; the model refuses to load when its engine has other ones."""
    return f"""# Generated from the options of a launch; do not edit.
name: {quote(name)}
backend: "python"
# The engine batches tokens by itself, so that Triton has nothing to merge: no batch dimension, and no batcher.
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [ {", ".join(map(_whole_tensor, GENERATE_INPUTS))} ]
output [ {", ".join(map(_whole_tensor, GENERATE_OUTPUTS))} ]
# One instance is one process with one engine, whose loop generates for all requests.
{_instance_group(device)}
# The model compares these with the settings of its engine.
{_parameter_lines(parameters)}"""


def vllm_config(name: str, device: str) -> str:
    """Triton's vLLM backend: text in and text out. The engine's arguments are in model.json beside it."""
    group = "instance_group [ { kind: KIND_MODEL count: 1 } ]" if device == "cpu" else _instance_group(device)
    return f"""# Generated from the options of a launch; do not edit.
name: {quote(name)}
backend: "vllm"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }}
]
output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }} ]
{group}
"""


def quote(text: str) -> str:
    """A protobuf text-format string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else "".join(f"\\{b:03o}" for b in c.encode()) for c in escaped) + '"'


_EXACT_SIZES = """
  # Items of other sizes than these run without a graph: a graph would take their values for those of a larger item."""


def _header(specification: ModelSpecification, parameters: Mapping[str, str] = NO_PARAMETERS) -> str:
    if parameters:  # only a launch has them
        return "# Generated from the model specification and the options of a launch; do not edit.\n"
    return HEADER.format("" if specification.reference == DEFAULT_MODEL else f" --model {specification.label}")


def _instance_group(device: str, count: int = 1, more: str = "") -> str:
    """So many instances on the CPU, or on each GPU of the list."""
    if device == "cpu":
        return f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]"
    gpus = ", ".join(str(cuda_index(gpu)) for gpu in device.split(","))
    return f"instance_group [ {{ kind: KIND_GPU count: {count} gpus: [ {gpus} ]{more} }} ]"


def _parameter_lines(parameters: Mapping[str, str]) -> str:
    return "".join(
        f"parameters {{ key: {quote(key)} value: {{ string_value: {quote(value)} }} }}\n"
        for key, value in parameters.items()
    )


def _signature(specification: ModelSpecification, *, ragged: bool = False) -> str:
    axis = specification.padded_axis if ragged else None
    inputs = ", ".join(
        _tensor(tensor, ragged=axis is not None and tensor.name in axis.places) for tensor in specification.inputs
    )
    outputs = ", ".join(map(_tensor, specification.outputs))
    return f"max_batch_size: {specification.max_batch_size}\ninput [ {inputs} ]\noutput [ {outputs} ]"


def _tensor(tensor: TensorSpec, *, ragged: bool = False) -> str:
    allowed = " allow_ragged_batch: true" if ragged else ""
    return f"{{ name: {quote(tensor.name)} data_type: {_data_type(tensor)} dims: {_dims(tensor)}{allowed} }}"


def _whole_tensor(tensor: TensorSpec) -> str:
    """Of a model without a batch dimension."""
    optional = " optional: true" if tensor.optional else ""
    return f"{{ name: {quote(tensor.name)} data_type: {_data_type(tensor)} dims: {_listed(tensor.shape)}{optional} }}"


def _data_type(tensor: TensorSpec) -> str:
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"


def _dims(tensor: TensorSpec) -> str:
    """Triton has no empty dims: a tensor of one value per item is [n, 1] in a request and [n] for the model."""
    return _listed(tensor.item_shape) if tensor.item_shape else "[ 1 ] reshape: { shape: [ ] }"


def _listed(shape: Iterable[int]) -> str:
    return f"[ {', '.join(map(str, shape))} ]"


def _axis_sizes(specification: ModelSpecification) -> tuple[int | None, ...]:
    """The sizes of the main axis that get a graph; (None,) for a model without axes."""
    axis = specification.main_axis
    return (None,) if axis is None else axis_buckets(axis)


def _item_dims(specification: ModelSpecification, tensor: TensorSpec, along: int | None) -> str:
    """The dims of one item with this size of the axis that varies, and the default of all others."""
    return _listed(specification.item_shape(tensor, specification.along(along)) or (1,))


def _warmup(specification: ModelSpecification, batches: Iterable[int], sizes: Iterable[int | None], count: int) -> str:
    """Warm-up requests of zeros, since Triton's random_data on FP32 is random bits, NaN and infinity included."""
    lines = []
    for rows, along in product(batches, sizes):
        inputs = " ".join(
            f"inputs {{ key: {quote(t.name)} value: {{ data_type: {_data_type(t)} "
            f"dims: {_item_dims(specification, t, along)} zero_data: true }} }}"
            for t in specification.inputs
        )
        name = f"batch_{rows}" if along is None else f"batch_{rows}_size_{along}"
        lines.append(f'  {{ name: "{name}" batch_size: {rows} count: {count} {inputs} }}')
    listed = ",\n".join(lines)
    return f"model_warmup [\n{listed}\n]"


def _graph_specs(specification: ModelSpecification, batches: tuple[int, ...], sizes: Iterable[int | None]) -> str:
    lines = []
    for along in sizes:
        inputs = " ".join(
            f"input {{ key: {quote(t.name)} value: {{ dim: {_item_dims(specification, t, along)} }} }}"
            for t in specification.inputs
        )
        for smaller, rows in zip((0, *batches), batches, strict=False):
            bound = f" graph_lower_bound {{ batch_size: {smaller + 1} {inputs} }}" if smaller + 1 < rows else ""
            lines.append(f"    {{ batch_size: {rows} {inputs}{bound} }}")
    return ",\n".join(lines)


VERIFIED = ("engine", "precision", "mode", "device", "weights", "threads", "spinning", "max_batch_size")
"""The parameters that the model compares with the loaded engine; decoding cannot turn out otherwise."""
_OPEN = (("mode", "auto"), ("spinning", None))


def parameters_from_settings(
    engine: EngineSettings, weights: WeightsSource, artefact: Path | None, artefact_sha256: str | None
) -> dict[str, str]:
    """The engine's settings as parameters: names without paths, since clients read the config and people publish it.
    `engine` is resolved (see `servers.triton.settings.resolve_engine`)."""
    parameters = {
        "engine": engine.kind,
        "precision": engine.precision,
        "mode": engine.mode,
        "device": engine.device,
        "weights": "none" if engine.kind == "null" else weights.label,
    }
    if engine.device == "cpu":
        parameters["threads"] = str(engine.threads)
    if artefact is not None:
        parameters["artefact"] = artefact.name
    if artefact_sha256 is not None:
        parameters["artefact_sha256"] = artefact_sha256
    return parameters


def parameters_from_model(
    specification: ModelSpecification, pad_to: Sequence[int], decoding: DecodingSettings
) -> dict[str, str]:
    """The model with its payload, the sizes of a padded axis and, for JPEG, the decoding settings."""
    parameters: dict[str, str] = {"model": specification.label, "payload": specification.payload}
    if specification.padded_axis is not None:
        parameters["pad_to"] = pad_to_text(pad_to)
    if specification.payload == "jpeg":
        parameters["decode_threads"] = str(decoding.thread_count)
        parameters["max_image_pixels"] = str(decoding.max_pixels)
    return parameters


def decoding_from_parameters(parameters: Mapping[str, str]) -> DecodingSettings:
    """The decoding settings of a JPEG model. Raises `KeyError` for a missing parameter."""
    return DecodingSettings(int(parameters["decode_threads"]), int(parameters["max_image_pixels"]))


def parameters_of_instance(parameters: Mapping[str, str], number: str) -> dict[str, str]:
    """The parameters as they are for an instance on GPU `number`, where the model has instances on several."""
    several = "," in parameters["device"]
    return {**parameters, "device": f"cuda:{number}"} if several else dict(parameters)


def settings_from_parameters(parameters: Mapping[str, str], max_batch_size: int) -> EngineSettings:
    """The engine of a config, where `max_batch_size` is a separate field. Raises `KeyError` for a missing parameter."""
    return EngineSettings(
        kind=parameters["engine"],
        precision=parameters["precision"],
        mode=parameters["mode"],
        device=parameters["device"],
        threads=int(parameters.get("threads", "0")),
        max_batch_size=max_batch_size,
        pad_to=parse_pad_to(parameters.get("pad_to", "")),
        spinning=parse_spinning(parameters.get("spinning", "")),
    )


def contradicting_parameters(parameters: Mapping[str, str], in_effect: Mapping[str, object]) -> tuple[str, ...]:
    """A phrase for each parameter of a language model's config of which its engine reports another value."""
    return tuple(
        f"{name} is {in_effect[name]!r}, the config says {value!r}"
        for name, value in parameters.items()
        if name in in_effect and str(in_effect[name]) != value
    )


def contradictions(parameters: Mapping[str, str], max_batch_size: int, in_effect: EngineDescription) -> tuple[str, ...]:
    """A phrase for each difference between config and engine; with mode "auto" the engine may choose, and spinning may
    be left out."""
    config = {**parameters, "max_batch_size": str(max_batch_size)}
    differences = []
    for name in VERIFIED:
        actual = getattr(in_effect, "kind" if name == "engine" else name)
        actual = None if actual is None else str(actual)
        if actual != config.get(name) and (name, config.get(name)) not in _OPEN:
            differences.append(f"{name} is {actual!r}, the config says {config.get(name)!r}")
    return tuple(differences)
