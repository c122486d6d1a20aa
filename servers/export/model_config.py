"""From a model specification to Triton's `config.pbtxt`: native ONNX Runtime and TensorRT backends, python backend.

The text is written by hand rather than through protobuf so that each setting carries its reason; a test parses every
generated file back through Triton's own protobuf. Batch dimensions are left out of all dims, as Triton wants them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from servers.contract.tensors import TensorSpec
from servers.engines.processors import cuda_index
from servers.models.specification import ModelSpecification

HEADER = "# Generated from the model specification; do not edit. Made again by: abserve triton-repo\n"


LONGEST_WAIT_US = 600_000_000
"""As good as never beside any latency, and still a timeout."""


def artefact_name(specification: ModelSpecification, suffix: str) -> str:
    """The file that a version folder must hold: model.onnx, model_uint8.plan …"""
    return f"model{'' if specification.payload == 'fp32' else '_' + specification.payload}.{suffix}"


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """Triton's dynamic batcher. A request that names no timeout of its own waits for at most `queue_timeout_us`, ≥ 1.

    Never 0, which is Triton's default: with it Triton ignores a request's own timeout, whatever the override says.
    """

    max_batch_size: int
    max_queue_delay_us: int = 2000
    queue_size: int = 512
    queue_timeout_us: int = LONGEST_WAIT_US


def onnxruntime_config(specification: ModelSpecification) -> str:
    """`<model>_onnx`: the native onnxruntime backend on GPU 0, FP32 without TF32."""
    return f"""{HEADER}name: {quote(specification.name + "_onnx")}
backend: "onnxruntime"
default_model_filename: {quote(artefact_name(specification, "onnx"))}
{signature_text(specification, specification.max_batch_size)}
# KIND_GPU, written out: without it Triton falls back to the CPU on a machine whose GPU it cannot use, and says nothing.
instance_group [ {{ kind: KIND_GPU count: 1 gpus: [ 0 ] }} ]
{_dynamic_batching(_gpu_batching(specification))}
# Only as a top-level parameter: Triton's own defaults overwrite this key inside the accelerator block below.
# 1 is HEURISTIC. Triton's default 0, EXHAUSTIVE, searches again at each batch size that it has not seen.
parameters {{ key: "cudnn_conv_algo_search" value: {{ string_value: "1" }} }}
# TF32 off, so that FP32 means FP32 on both arms. No CUDA graphs: this backend ignores optimization.cuda.graphs, and
# ONNX Runtime's own enable_cuda_graph would replay stale inputs, since Triton binds new buffers at each execution.
optimization {{ execution_accelerators {{
  gpu_execution_accelerator: [ {{ name: "cuda" parameters {{ key: "use_tf32" value: "0" }} }} ]
}} }}
# Every size: the CUDA provider plans its convolutions anew for each batch size, and the batcher forms all of them.
{_warmup(specification, range(1, specification.max_batch_size + 1), count=1)}
{_NO_CACHE}"""


def tensorrt_config(specification: ModelSpecification) -> str:
    """`<model>_tensorrt`: the native tensorrt backend on GPU 0 with a CUDA graph for every batch size."""
    sizes = warm_up_sizes(specification.max_batch_size)
    return f"""{HEADER}name: {quote(specification.name + "_tensorrt")}
backend: "tensorrt"
# FP16 or FP32 is a property of the plan: TensorRT 11 networks are strongly typed, there is no flag for it here.
default_model_filename: {quote(artefact_name(specification, "plan"))}
{signature_text(specification, specification.max_batch_size)}
# One optimisation profile, 1 to {specification.max_batch_size}; so there is no batch size to prefer, see below.
instance_group [ {{ kind: KIND_GPU count: 1 gpus: [ 0 ] profile: [ "0" ] }} ]
{_dynamic_batching(_gpu_batching(specification))}
optimization {{ cuda {{
  graphs: true
  # One CPU core spins while the GPU computes: lower latency, and a cost that a report of this arm has to name.
  busy_wait_events: true
  # The copy of the answer overlaps the next execution.
  output_copy_stream: true
  # Without graph_spec only the sizes 1 and {specification.max_batch_size} would have a graph. The lower bounds leave
  # no gap: a smaller batch runs the next larger graph, whose surplus rows hold anything and are thrown away.
  graph_spec [
{_graph_specs(specification, sizes)}
  ]
}} }}
# READY only after each graph has run: the first execution of a graph is slower than the others.
{_warmup(specification, sizes, count=5)}
{_NO_CACHE}"""


def python_config(
    specification: ModelSpecification,
    batching: BatchingSettings,
    device: str,
    parameters: Mapping[str, str],
) -> str:
    """`<model>`: the python backend executing `servers.triton.python_model`.

    `device` is cpu or cuda:N, already resolved. `parameters` says what executes inside (engine, precision, weights …);
    the model refuses to load when the engine reports anything else, so they may be read as settings in effect.
    """
    index = cuda_index(device)
    group = "kind: KIND_CPU count: 1" if index is None else f"kind: KIND_GPU count: 1 gpus: [ {index} ]"
    lines = "\n".join(
        f"parameters {{ key: {quote(key)} value: {{ string_value: {quote(value)} }} }}"
        for key, value in parameters.items()
    )
    return f"""{HEADER.replace("triton-repo", "serve triton")}name: {quote(specification.name)}
backend: "python"
{signature_text(specification, batching.max_batch_size)}
# One instance is one process with one engine; more of them would compete for the same cores or GPU.
instance_group [ {{ {group} }} ]
{_dynamic_batching(batching)}
# Read by the model and compared with what its engine reports. No model_warmup: the model warms its engine itself.
{lines}
{_NO_CACHE}"""


def warm_up_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Powers of two up to `max_batch_size`, and `max_batch_size` itself; ascending."""
    powers = [1 << exponent for exponent in range(max_batch_size.bit_length()) if 1 << exponent < max_batch_size]
    return (*powers, max_batch_size)


def quote(text: str) -> str:
    """A protobuf text-format string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else "".join(f"\\{b:03o}" for b in c.encode()) for c in escaped) + '"'


_NO_CACHE = """# An answer from a cache would not be an inference.
response_cache { enable: false }
"""


def _gpu_batching(specification: ModelSpecification) -> BatchingSettings:
    return BatchingSettings(max_batch_size=specification.max_batch_size, queue_timeout_us=500_000)


def signature_text(specification: ModelSpecification, max_batch_size: int) -> str:
    """Largest batch, inputs and outputs."""
    inputs = ", ".join(map(tensor_text, specification.inputs))
    outputs = ", ".join(map(tensor_text, specification.outputs))
    return f"max_batch_size: {max_batch_size}\ninput [ {inputs} ]\noutput [ {outputs} ]"


def tensor_text(tensor: TensorSpec) -> str:
    """One element of `input` or `output`."""
    return f"{{ name: {quote(tensor.name)} data_type: {_data_type(tensor)} dims: {_dims(tensor)} }}"


def _data_type(tensor: TensorSpec) -> str:
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"


def _dims(tensor: TensorSpec) -> str:
    return "[ " + ", ".join(map(str, tensor.item_shape)) + " ]"


def _dynamic_batching(batching: BatchingSettings) -> str:
    policy = (
        f"timeout_action: REJECT default_timeout_microseconds: {batching.queue_timeout_us} "
        f"allow_timeout_override: true max_queue_size: {batching.queue_size}"
    )
    return f"""# No preferred_batch_size: Triton advises against it unless sizes have profiles of their own.
# REJECT: what waited too long, or finds the queue full, is answered 503 at once instead of late.
{_timeout_reason(batching.queue_timeout_us)}dynamic_batching {{
  max_queue_delay_microseconds: {batching.max_queue_delay_us}
  default_queue_policy {{
    {policy}
  }}
}}"""


def _timeout_reason(queue_timeout_us: int) -> str:
    if queue_timeout_us != LONGEST_WAIT_US:
        return ""
    return "# 600 s, as good as never: without any default Triton ignores the timeout that a request brings itself.\n"


def _warmup(specification: ModelSpecification, sizes: Iterable[int], count: int) -> str:
    """Zeros, since Triton's random_data on FP32 is random bits, NaN and infinity included."""
    inputs = " ".join(
        f"inputs {{ key: {quote(t.name)} value: {{ data_type: {_data_type(t)} dims: {_dims(t)} zero_data: true }} }}"
        for t in specification.inputs
    )
    lines = ",\n".join(f'  {{ name: "batch_{n}" batch_size: {n} count: {count} {inputs} }}' for n in sizes)
    return f"model_warmup [\n{lines}\n]"


def _graph_specs(specification: ModelSpecification, sizes: tuple[int, ...]) -> str:
    inputs = " ".join(f"input {{ key: {quote(t.name)} value: {{ dim: {_dims(t)} }} }}" for t in specification.inputs)
    lines = []
    for smaller, size in zip((0, *sizes), sizes, strict=False):
        bound = f" graph_lower_bound {{ batch_size: {smaller + 1} {inputs} }}" if smaller + 1 < size else ""
        lines.append(f"    {{ batch_size: {size} {inputs}{bound} }}")
    return ",\n".join(lines)
