"""ONNX Runtime executing an exported file: FP32, FP16 and INT8 on the CPU, TF32 too on CUDA, never silently elsewhere.

On CUDA the mode `graph` (and `auto`, for a model whose shapes follow from the batch and its padded axis) binds fixed
buffers and replays one CUDA graph per bucket; in mode `session` every run allocates and launches anew. FP16 and INT8
need their own files (`abserve export --precision fp16`), marked in their metadata; a user's file is judged by its
weights. An INT8 session that executes no product in INT8, read from a profile of its first batch, is refused.

A healthy CUDA session may place nodes on the CPU without saying so. Operators that compute shapes belong there (a few
integers whose consumers are on the host); anything else, or more than 1 % of the node time, is refused.

A captured graph replays with the addresses that it was captured with and ignores later bindings, so every bucket has
its own buffers, binding and `gpu_graph_id`, and a batch is padded to its bucket: in rows, and along the model's padded
axis with the axis' padding. Padding rows hold old values; rows do not influence each other, and the answers in padding
are cut off.

Importable without torch, so that the stub process of Triton's python backend can use the same engine.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from servers.engines.agreement import disagreement
from servers.engines.batches import (
    Bucket,
    axis_buckets,
    bucket_of,
    bucket_sizes,
    check_sizes,
    executed_mode,
    random_inputs,
)
from servers.engines.interface import Engine, EngineDescription, EngineError, export_command
from servers.engines.processors import cuda_index, nvidia_device_present, thread_count
from servers.gpu.cuda_library import device_uuid
from servers.gpu.info import MAX_CPU_TIME_RATIO
from servers.models.files import for_library, loadable_parts
from servers.models.specification import ModelSpecification, reason_of
from servers.options.libraries import installed_version, installed_versions
from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import Array, TensorSpec

PRECISION_KEY = "abserve.precision"
"""In an ONNX file's metadata: the precision of its weights. A file without it holds FP32."""
CUDA_PROVIDER = "CUDAExecutionProvider"
SPINNING = "session.intra_op.allow_spinning"
PACKAGES = ("onnxruntime", "onnxruntime-gpu")
STORED_PRECISIONS = ("fp16", "int8")
"""Precisions that need their own file; the others are ways to execute an FP32 file."""
INT8_PRODUCTS = frozenset(
    {
        *("QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat"),
        *("DynamicQuantizeMatMul", "QAttention", "DynamicQuantizeLSTM"),
    }
)
"""ONNX Runtime's operators that multiply in INT8."""
FLOAT_PRODUCTS = frozenset({"Conv", "FusedConv", "NhwcFusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"})
ELEMENT_TYPES = {
    **{f"{sign}INT{bits}": f"tensor({sign.lower()}int{bits})" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": "tensor(float16)",
    "FP32": "tensor(float)",
    "FP64": "tensor(double)",
    "BOOL": "tensor(bool)",
    "BYTES": "tensor(string)",
}


_ORT_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_ORT_PLACE = re.compile(r"/\S+\.\w+:\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)? ?")
"""For example /onnxruntime_src/…/model.cc:256 onnxruntime::Model::Model(onnx::ModelProto&&, …)."""


class OnnxRuntimeEngine(Engine):
    """Executes the ONNX file at `path`; `weights` only label it."""

    _session: Any = None
    _file_precision = "fp32"
    _mode = ""
    _graphs: GraphExecution | None = None
    _placement: NodePlacement | None = None
    _products: Mapping[str, int] | None = None

    def load(self) -> None:
        """Create the session and check that it has the requested model and provider."""
        assert_one_package()
        import onnxruntime as ort

        specification, settings, path = self._specification, self._settings, self._file
        if not path.is_file():
            command = export_command(specification, settings.kind)
            raise EngineError(f"no ONNX file for {specification.name} at {path.name}; run: {command}")
        ort.set_default_logger_severity(3)  # without a GPU, device discovery warns at every start
        index = self._resolve_cuda_index()
        self._mode, _ = executed_mode(specification, settings, "cpu" if index is None else "cuda")
        try:
            providers = self._providers(index, graphs=self._mode == "graph")
            with loadable_parts(path) as whole:
                session = ort.InferenceSession(for_library(whole), self._session_options(index), providers=providers)
        except Exception as exc:  # ORT's exceptions share no base but Exception
            reason = beyond_runtime(path, exc) or f"ONNX Runtime cannot load {path.name}: {ort_reason(exc)}"
            remedy = "; use mode session" if "graph capture" in str(exc) else ""
            raise EngineError(f"{reason}{remedy}") from exc
        if index is not None and CUDA_PROVIDER not in session.get_providers():
            raise EngineError(
                f"ONNX Runtime cannot use the GPU (providers in effect: {', '.join(session.get_providers())}); install "
                "the CUDA libraries with pip install 'onnxruntime-gpu[cuda,cudnn]', or use device cpu"
            )
        assert_signature(session.get_inputs(), specification.inputs, "inputs")
        assert_signature(session.get_outputs(), specification.outputs, "outputs")
        self._file_precision = self._stored_precision(session)
        expected = settings.precision if settings.precision in STORED_PRECISIONS else "fp32"
        if self._file_precision != expected:
            option = f"--precision {expected}"
            remedy = f"use --precision {self._file_precision}" if path == specification.file else ""
            raise EngineError(
                f"{path.name} holds {self._file_precision}, but the precision is {settings.precision}; "
                + (remedy or f"run: {export_command(specification, settings.kind, option)}")
            )
        if index is not None:
            self._placement = verified_placement(session, lambda folder: self._profile(folder, index))
            if self._mode == "graph":
                self._graphs = self._captured(session, index)
        if expected == "int8":
            self._products = self._executed_products()
        self._session = session
        self.checks_values = any(tensor.datatype == "BYTES" for tensor in specification.inputs)

    def check_values(self, inputs: Mapping[str, Array]) -> None:
        """Raises `InvalidRequestError` for strings that are not UTF-8: ONNX Runtime's are text."""
        for name, array in inputs.items():
            if array.dtype.hasobject:
                for place, element in enumerate(array.ravel().tolist()):
                    try:
                        element.decode()
                    except UnicodeDecodeError as exc:
                        raise InvalidRequestError(
                            f"element {place} of input '{name}' is not UTF-8, which the strings of this model must be"
                        ) from exc

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch. On the CPU the session reads the caller's arrays in place; the answers are new arrays."""
        session, names = self._loaded(), [tensor.name for tensor in self._specification.outputs]
        try:
            if self._graphs is not None:
                return self._graphs.infer(inputs)
            outputs = session.run(names, as_strings(inputs) if self._strings else inputs)
        except Exception as exc:  # ORT's exceptions share no base but Exception
            raise EngineError(f"ONNX Runtime failed to execute the batch: {ort_reason(exc)}") from exc
        answers = dict(zip(names, outputs, strict=True))
        return as_bytes(answers) if self._strings else answers

    def describe(self) -> EngineDescription:
        """Read back from the session: providers, their options, threads, spinning, node placement."""
        import onnxruntime as ort

        session = self._loaded()
        providers: list[str] = session.get_providers()
        options: dict[str, dict[str, str]] = session.get_provider_options()
        session_options = session.get_session_options()
        cuda, placement = options.get(CUDA_PROVIDER), self._placement
        details: dict[str, object] = {
            "providers": providers,
            "provider_options": options.get(providers[0], {}),
            "package": installed_packages()[0],
            "graph_optimization_level": str(session_options.graph_optimization_level).rpartition(".")[2],
            "nodes_by_provider": None,
        }
        if self._products is not None:
            details["executed_products"] = dict(self._products)
        if cuda is not None and placement is not None:
            details |= {
                "device_uuid": device_uuid(int(cuda["device_id"])),
                "nodes_by_provider": dict(placement.nodes_by_provider),
                "cpu_operators": dict(placement.cpu_operators),
                "cpu_non_shape_ops": list(placement.cpu_non_shape_ops),
                "cpu_time_ratio": placement.cpu_time_ratio,
                "cuda_graphs": self._graphs is not None,
                "buckets": None if self._graphs is None else list(self._graphs.buckets),
                "axis_buckets": None if self._graphs is None else list(self._graphs.axis_buckets),
                "pinned_staging": None if self._graphs is None else self._graphs.pinned,
            }
        return self._description(
            version=ort.__version__,
            precision="tf32" if cuda is not None and cuda.get("use_tf32") == "1" else self._file_precision,
            mode=self._mode,
            device="cpu" if cuda is None else f"cuda:{cuda['device_id']}",
            threads=session_options.intra_op_num_threads if cuda is None else None,
            details=details,
            spinning=_spinning(session_options) if cuda is None else None,
        )

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
        self._session = None

    def executed_rows(self, rows: int) -> int:
        return rows if self._graphs is None else bucket_of(self._graphs.buckets, rows)

    def run_only(self, rows: int) -> bool:
        if self._graphs is not None:
            self._graphs.run_only(rows)
        return self._graphs is not None

    def node_profile(self, folder: Path, rows: int, repeats: int, sizes: Mapping[str, int] | None = None) -> Path:
        """ONNX Runtime's own profile of batches on the CPU, from a second session like this one; a file in `folder`."""
        return self._profile(folder, None, rows, repeats, sizes)

    @property
    def _file(self) -> Path:
        assert self._path is not None  # see build_engine
        return self._path

    def _loaded(self) -> Any:
        if self._session is None:
            raise EngineError("the onnxruntime engine is not loaded")
        return self._session

    def _profile(
        self, folder: Path, index: int | None, rows: int = 4, repeats: int = 5, sizes: Mapping[str, int] | None = None
    ) -> Path:
        """Profile some batches of a session like this one, without graphs, which would hide the nodes."""
        import onnxruntime as ort

        options = self._session_options(index)
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        with loadable_parts(self._file) as whole:
            session = ort.InferenceSession(for_library(whole), options, providers=self._providers(index, graphs=False))
        batch = random_inputs(self._specification, rows, 0, sizes)
        for _ in range(repeats):
            session.run([tensor.name for tensor in self._specification.outputs], as_strings(batch))
        return Path(session.end_profiling())

    def _executed_products(self) -> Mapping[str, int]:
        """The operators that multiply, from the profile of one batch. Raises `EngineError` if none does in INT8."""
        with TemporaryDirectory(prefix="abserve-profile-") as folder:
            events = json.loads(self._profile(Path(folder), None, rows=1, repeats=1).read_bytes())
        nodes = {event["name"]: event["args"]["op_name"] for event in events if event.get("cat") == "Node"}
        products = Counter(name for name in nodes.values() if name in INT8_PRODUCTS | FLOAT_PRODUCTS)
        if not INT8_PRODUCTS.intersection(products):
            raise EngineError(
                f"ONNX Runtime executes no product of {self._file.name} in INT8, only "
                f"{', '.join(sorted(products)) or 'other operators'}; use --precision fp32"
            )
        return dict(sorted(products.items()))

    def _captured(self, session: Any, index: int) -> GraphExecution:
        specification, settings, axis = self._specification, self._settings, self._specification.padded_axis
        buckets = bucket_sizes(settings.max_batch_size, settings.buckets, halves=axis is None)
        along = () if axis is None else axis_buckets(axis, settings.pad_to, only=bool(settings.buckets))
        try:
            return GraphExecution(session, specification, ("cuda", index), buckets, along, settings.precision)
        except EngineError:
            raise
        except Exception as exc:  # ORT's exceptions share no base but Exception
            reason = ort_reason(exc)
            raise EngineError(f"ONNX Runtime cannot capture CUDA graphs: {reason}; use mode session") from exc

    def _stored_precision(self, session: Any) -> str:
        """The precision of the file; only a user's own has to be read for it."""
        marked: str | None = session.get_modelmeta().custom_metadata_map.get(PRECISION_KEY)
        if marked is not None or self._file != self._specification.file:
            return marked or "fp32"
        return precision_of_file(self._file)

    @property
    def _strings(self) -> bool:
        return any(t.datatype == "BYTES" for t in (*self._specification.inputs, *self._specification.outputs))

    def _resolve_cuda_index(self) -> int | None:
        """The CUDA device, or None for the CPU. `auto`: the first GPU, if this onnxruntime is built for CUDA."""
        import onnxruntime as ort

        device = self._settings.device
        offered = CUDA_PROVIDER in ort.get_available_providers()
        if device == "cpu":
            return None
        if device == "auto":
            return 0 if offered and nvidia_device_present() else None
        if not offered:
            raise EngineError(f"device {device}: this onnxruntime has no CUDA provider; install onnxruntime-gpu")
        if not nvidia_device_present():
            raise EngineError(f"device {device}: this machine has no NVIDIA GPU; use device cpu")
        return cuda_index(device)

    def _session_options(self, index: int | None) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = thread_count(self._settings.threads)
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # On a GPU these threads have hardly any work, and spinning would only take cores.
        spins = index is None and self._settings.spinning is not False
        options.add_session_config_entry(SPINNING, "1" if spins else "0")
        if index is not None:
            options.add_session_config_entry(RECORD_PLACEMENT, "1")
        elif self._settings.precision == "fp16":
            # The CPU provider has few FP16 kernels, and one of its last optimisations crashes the process on such a
            # graph: with ORT_ENABLE_ALL loading segfaults.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        return options

    def _providers(self, index: int | None, *, graphs: bool) -> list[object]:
        if index is None:
            return [CPU_PROVIDER]
        import onnxruntime as ort

        ort.preload_dlls()  # finds the CUDA libraries of the nvidia-* wheels, which the loader does not search
        use_tf32 = "1" if self._settings.precision == "tf32" else "0"
        options = {"device_id": str(index), "use_tf32": use_tf32, "enable_cuda_graph": "1" if graphs else "0"}
        return [(CUDA_PROVIDER, options), CPU_PROVIDER]


def ort_reason(exc: Exception) -> str:
    """ONNX Runtime's message without its code, the place in its sources and the signature of its C++ function."""
    return _ORT_PLACE.sub("", _ORT_CODE.sub("", reason_of(exc))).strip()


def beyond_runtime(path: Path, exc: Exception) -> str | None:
    """A sentence for a file whose IR or operators are newer than this ONNX Runtime; None for other errors."""
    text = str(exc)
    if match := re.search(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)", text):
        what, most, remedy = f"IR version {match[1]}", match[2], f"save it with model.ir_version = {match[2]}"
    elif match := re.search(r"Opset (\d+) is under development.* domain (\S+) is till opset (\d+)", text, re.DOTALL):
        what, most = f"opset {match[1]} of {match[2]}", match[3]
        remedy = f"export it with opset_version={most}" if match[2] == "ai.onnx" else f"export it with opset {most}"
    else:
        return None
    installed = installed_version(installed_packages()[0])
    return (
        f"{path.name} has {what}, ONNX Runtime {installed} takes at most {most}; {remedy}, or install a newer ONNX "
        "Runtime"
    )


def _spinning(options: Any) -> str:
    """Whether the session's threads spin, "on" or "off"; a single thread waits for no other."""
    spins = options.intra_op_num_threads != 1 and options.get_session_config_entry(SPINNING) == "1"
    return "on" if spins else "off"


def installed_packages() -> tuple[str, ...]:
    """Which of ONNX Runtime's two PyPI packages are installed."""
    return tuple(installed_versions(PACKAGES))


def assert_one_package() -> None:
    """Raise `EngineError` unless exactly one package is installed: both write to one folder, and the last one wins."""
    packages = installed_packages()
    if len(packages) > 1:
        raise EngineError(
            "both onnxruntime and onnxruntime-gpu are installed and overwrite each other; "
            "run: pip uninstall -y onnxruntime onnxruntime-gpu, then install one of them again"
        )
    if not packages:
        raise EngineError("ONNX Runtime is not installed; run: pip install onnxruntime-gpu")


def assert_signature(nodes: Sequence[Any], tensors: Sequence[TensorSpec], what: str) -> None:
    """Raise `EngineError` unless a session's inputs or outputs can be the model's, with a free batch dimension. A
    dimension with a name, or an output without a shape, may have any size."""

    def show(name: str, element: str, dims: Sequence[object]) -> str:
        return f"{name} {element}[{','.join(map(str, dims))}]"

    def fits(node: Any, tensor: TensorSpec) -> bool:
        dims = list(node.shape or [])
        dims_fit = not dims or (
            len(dims) == len(tensor.shape)
            and all(not isinstance(d, int) or d == size for d, size in zip(dims[1:], tensor.item_shape, strict=True))
        )
        return dims_fit and node.type == ELEMENT_TYPES.get(tensor.datatype, tensor.datatype)

    by_name = {node.name: node for node in nodes}
    if by_name.keys() != {t.name for t in tensors} or not all(fits(by_name[t.name], t) for t in tensors):
        actual = [show(node.name, node.type, ["*", *node.shape[1:]]) for node in nodes]
        expected = [show(t.name, ELEMENT_TYPES.get(t.datatype, t.datatype), ["*", *t.item_shape]) for t in tensors]
        raise EngineError(f"the ONNX file's {what} are {actual}, the model's are {expected}; export it again")
    fixed = [node.name for node in nodes if node.shape and isinstance(node.shape[0], int)]
    if fixed:
        raise EngineError(f"the ONNX file fixes the batch size of {fixed[0]}; export it again with a dynamic batch")


def precision_of_file(path: Path) -> str:
    """The precision of an ONNX file, as `stored_precision` reads it. Raises `EngineError` for another file."""
    import onnx

    try:
        return stored_precision(onnx.load(path, load_external_data=False))
    except Exception as exc:  # protobuf's DecodeError, of which each implementation has its own
        raise EngineError(f"{path.name} is not an ONNX file that can be read: {reason_of(exc)}") from exc


def mark_precision(model: Any, precision: str) -> None:
    """Say in an ONNX model's metadata what `stored_precision` is to read."""
    from onnx import helper

    properties = {entry.key: entry.value for entry in model.metadata_props}
    helper.set_model_props(model, {**properties, PRECISION_KEY: precision})


def stored_precision(model: Any) -> str:
    """The precision of an ONNX file, read without its external data: as marked, else that of most of its weights."""
    from onnx import TensorProto

    for entry in model.metadata_props:
        if entry.key == PRECISION_KEY:
            return str(entry.value)
    names = {
        TensorProto.FLOAT: "fp32",
        TensorProto.FLOAT16: "fp16",
        **dict.fromkeys((TensorProto.INT8, TensorProto.UINT8), "int8"),
    }
    counts = {"fp32": 0, "fp16": 0, "int8": 0}  # the first one wins where there are no weights
    for tensor in model.graph.initializer:
        if tensor.data_type in names:
            counts[names[tensor.data_type]] += prod(tensor.dims)
    return max(counts, key=lambda name: counts[name])


def as_strings(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """ONNX Runtime's strings are UTF-8 text, the protocol's are bytes. Raises `EngineError` for other bytes."""
    try:
        return {name: _mapped(bytes.decode, array) for name, array in inputs.items()}
    except UnicodeDecodeError as exc:
        raise EngineError("the strings of this model must be UTF-8 text") from exc


def as_bytes(outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """The opposite of `as_strings`."""
    return {name: _mapped(str.encode, array) for name, array in outputs.items()}


def _mapped(convert: Callable[[Any], Any], array: Array) -> Array:
    if not array.dtype.hasobject:
        return array
    mapped = np.empty(array.shape, object)
    mapped.ravel()[:] = [convert(element) for element in array.ravel()]
    return mapped


CPU_PROVIDER = "CPUExecutionProvider"
RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"

SHAPE_OPERATORS = frozenset(
    {
        *("Shape", "Size", "Constant", "ConstantOfShape", "Gather", "Squeeze", "Unsqueeze", "Concat", "Slice", "Cast"),
        *("Range", "Equal", "Where", "Expand", "Reshape", "Min", "Max", "Mod"),
        *("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"),
        # Integer arithmetic on dimensions. The same names on activations would show in the node time.
        *("Add", "Sub", "Mul", "Div"),
    }
)
MAX_SHAPE_BYTES = 1024
"""A shape operator with a larger output does more than compute a shape."""
NO_GRAPH = "-1"
_RUNS_TO_CAPTURE = 3


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Where the nodes of a session run. `cpu_time_ratio` is the share of node time on the CPU; None: not measured."""

    nodes_by_provider: Mapping[str, int]
    cpu_operators: Mapping[str, int]
    cpu_time_ratio: float | None = None

    @property
    def cpu_non_shape_ops(self) -> tuple[str, ...]:
        """Operators on the CPU that compute more than shapes."""
        return tuple(sorted(set(self.cpu_operators) - SHAPE_OPERATORS))


def verified_placement(session: Any, profile: Callable[[Path], Path]) -> NodePlacement:
    """The placement of a session created with `RECORD_PLACEMENT`; `EngineError` if it is not a GPU engine. `profile` is
    called only if nodes are on the CPU, see `measure_cpu_time_ratio`."""
    placement = read_placement(session)
    assert_on_gpu(placement)
    ratio = measure_cpu_time_ratio(profile) if placement.cpu_operators else 0.0
    placement = replace(placement, cpu_time_ratio=ratio)
    assert_on_gpu(placement)
    return placement


def read_placement(session: Any) -> NodePlacement:
    """The nodes of a session created with `RECORD_PLACEMENT`."""
    providers: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        nodes = subgraph.get_nodes()
        providers[subgraph.ep_name] += len(nodes)
        if subgraph.ep_name == CPU_PROVIDER:
            operators.update(node.op_type for node in nodes)
    return NodePlacement(dict(providers), dict(operators))


def assert_on_gpu(placement: NodePlacement) -> None:
    """Raise `EngineError` for a session that leaves more than shapes to the CPU."""
    total = sum(placement.nodes_by_provider.values())
    on_cpu = placement.nodes_by_provider.get(CPU_PROVIDER, 0)
    operators, ratio = placement.cpu_non_shape_ops, placement.cpu_time_ratio
    remedy = "so this is not a GPU engine; export the model again, or use device cpu"
    if operators or on_cpu == total:
        named = ", ".join(operators[:4]) + (" …" if len(operators) > 4 else "") if operators else "all of the model"
        raise EngineError(
            f"ONNX Runtime placed {on_cpu} of {total} nodes on the CPU, with {named} among them, {remedy}"
        )
    if ratio is not None and ratio > MAX_CPU_TIME_RATIO:
        raise EngineError(
            f"ONNX Runtime spends {ratio:.1%} of its node time in {on_cpu} nodes on the CPU, more than "
            f"{MAX_CPU_TIME_RATIO:.0%}, {remedy}"
        )


def measure_cpu_time_ratio(profile: Callable[[Path], Path]) -> float:
    """Share of node time on the CPU in a profile, without small shapes: shape operators with at most `MAX_SHAPE_BYTES`.

    `profile` executes some batches of a session that profiles into the folder given, and returns the profile's path.
    The CUDA provider's nodes count with their launches alone, so the share is an upper bound. Without that exception it
    would refuse a transformer: 76 shape nodes of BERT took 2.2 % on an H200, and their time does not grow with the
    batch.
    """
    with TemporaryDirectory(prefix="abserve-profile-") as folder:
        events = json.loads(profile(Path(folder)).read_text())
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time"):
            facts = event["args"]
            provider = facts.get("provider") or CPU_PROVIDER
            small = int(facts.get("output_size", MAX_SHAPE_BYTES + 1)) <= MAX_SHAPE_BYTES
            shapes = provider == CPU_PROVIDER and small and facts.get("op_name") in SHAPE_OPERATORS
            times["shapes" if shapes else provider] += int(event["dur"])
    total = sum(times.values())
    if total == 0:
        raise EngineError("ONNX Runtime's profile names no node, so its placement cannot be verified; use device cpu")
    return times[CPU_PROVIDER] / total


class _BoundGraph(NamedTuple):
    staged: Mapping[str, Array]  # views of the staging memory
    inputs: Mapping[str, Any]  # OrtValues on the device
    outputs: Mapping[str, Any]
    binding: Any
    options: Any


class GraphExecution:
    """Captures at construction; not thread-safe. `device` is the session's: ("cuda", index). `axis_buckets` are the
    sizes of the model's padded axis, empty for a model without one. `precision` is the one that the session computes
    in."""

    def __init__(
        self,
        session: Any,
        specification: ModelSpecification,
        device: tuple[str, int],
        buckets: Sequence[int],
        axis_buckets: Sequence[int] = (),
        precision: str = "fp32",
    ) -> None:
        self._session, self._specification = session, specification
        self.buckets, self.axis_buckets = tuple(buckets), tuple(axis_buckets)
        self._axis = specification.padded_axis if axis_buckets else None
        sizes = [Bucket(rows, along) for rows in self.buckets for along in (self.axis_buckets or (None,))]
        inputs, largest = specification.inputs, sizes[-1]
        self._staging = {t.name: np.zeros(prod(largest.shape_of(specification, t)), t.dtype) for t in inputs}
        self.pinned = sum(map(pin, self._staging.values())) == len(self._staging)
        self._by_size = {size: self._prepare(size, number, device) for number, size in enumerate(sizes, start=1)}
        self._executed: dict[int, Bucket] = {}
        for size in reversed(sizes):  # the largest first, so that the arena grows once
            for _ in range(_RUNS_TO_CAPTURE):
                self._replay(size)
        self._prove(precision)

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Execute one batch; the answers are new arrays. Raises `ValueError` for one beyond the largest."""
        check_sizes(self._specification, inputs)
        rows, axis = len(inputs[self._specification.inputs[0].name]), self._axis
        along = None if axis is None else axis.size_of(inputs)
        bucket = self._bucket(rows, along)
        graph = self._by_size[bucket]
        for name, array in inputs.items():
            staged = graph.staged[name]
            if array.shape == staged.shape and array.flags.c_contiguous:
                graph.inputs[name].update_inplace(array)
                continue
            if array.shape[1:] != staged.shape[1:]:
                assert axis is not None
                staged[:rows] = axis.padding.get(name, 0)
            staged[tuple(map(slice, array.shape))] = array
            graph.inputs[name].update_inplace(staged)
        self._replay(bucket)
        self._executed[rows] = bucket
        answers = {name: value.numpy()[:rows] for name, value in graph.outputs.items()}
        if axis is not None and along is not None:
            answers = {name: axis.cut(name, array, along) for name, array in answers.items()}
        return {name: array.copy() for name, array in answers.items()}

    def run_only(self, rows: int) -> None:
        """Execute the bucket of the last batch of `rows` on the contents of its buffers, and wait for it."""
        self._replay(self._executed.get(rows) or self._bucket(rows, self.axis_buckets[0] if self._axis else None))

    def close(self) -> None:
        """Drop bindings and buffers. Idempotent."""
        self._by_size.clear()
        for array in self._staging.values():
            unpin(array)
        self._staging.clear()

    def _bucket(self, rows: int, along: int | None) -> Bucket:
        return Bucket(bucket_of(self.buckets, rows), None if along is None else bucket_of(self.axis_buckets, along))

    def _replay(self, bucket: Bucket) -> None:
        graph = self._by_size[bucket]
        self._session.run_with_iobinding(graph.binding, graph.options)

    def _prepare(self, bucket: Bucket, number: int, device: tuple[str, int]) -> _BoundGraph:
        import onnxruntime as ort

        shape_of = partial(bucket.shape_of, self._specification)

        def on_device(tensor: TensorSpec) -> Any:
            return ort.OrtValue.ortvalue_from_shape_and_type([*shape_of(tensor)], tensor.dtype, *device)

        staged = {}
        for tensor in self._specification.inputs:
            shape = shape_of(tensor)
            staged[tensor.name] = self._staging[tensor.name][: prod(shape)].reshape(shape)
        inputs = {tensor.name: on_device(tensor) for tensor in self._specification.inputs}
        outputs = {tensor.name: on_device(tensor) for tensor in self._specification.outputs}
        binding, options = self._session.io_binding(), ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        for name, value in inputs.items():
            value.update_inplace(staged[name])
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return _BoundGraph(staged, inputs, outputs, binding, options)

    def _prove(self, precision: str) -> None:
        """Check that a replay reads the new input and not the captured one: compare with a run without any graph."""
        import onnxruntime as ort

        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", NO_GRAPH)
        # Between two buckets, so that the padding is proved as well.
        sizes = self._specification.along(max(1, self.axis_buckets[0] - 1) if self.axis_buckets else None)
        batch = random_inputs(self._specification, min(3, self.buckets[-1]), 2, sizes)
        names = [tensor.name for tensor in self._specification.outputs]
        expected = dict(zip(names, self._session.run(names, batch, options), strict=True))
        fault = disagreement(self._specification, expected, self.infer(batch), precision).fault
        if fault is not None:
            raise EngineError(
                f"ONNX Runtime answers differently with CUDA graphs than without them ({fault}); use mode session"
            )


def pin(array: Array) -> bool:
    """Page-lock an array's memory, so that the device fetches it without a copy in the driver; False if CUDA cannot."""
    runtime = _cuda_runtime()
    if runtime is None:
        return False
    return int(runtime.cudaHostRegister(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), 0)) == 0


def unpin(array: Array) -> None:
    """Undo `pin`; without effect on memory that is not page-locked."""
    runtime = _cuda_runtime()
    if runtime is not None and runtime.cudaHostUnregister(ctypes.c_void_p(array.ctypes.data)) != 0:
        runtime.cudaGetLastError()  # or CUDA reports it to the next caller


def _cuda_runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that ONNX Runtime has loaded into this process."""
    for major in (13, 12):
        try:
            return ctypes.CDLL(f"libcudart.so.{major}")
        except OSError:
            continue
    return None
