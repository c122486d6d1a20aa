"""ONNX Runtime executing an exported file: FP32 and FP16 on the CPU, TF32 too on CUDA, never silently elsewhere.

On CUDA the mode `graph` (and `auto`) binds fixed buffers and replays one CUDA graph a batch bucket; with `session`
every run allocates and launches anew. FP16 needs a file of its own (`abserve export --precision fp16`), which says so
in its metadata.

A healthy CUDA session may leave nodes on the CPU without a word. Operators that compute shapes belong there (a few
integers whose consumers are on the host); anything else, or more than a hundredth of the node time, is refused.

Importable without torch, so that the stub process of Triton's python backend can use the same engine.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from servers.contract.tensors import Array, TensorSpec
from servers.engines.batches import bucket_sizes, zero_inputs
from servers.engines.interface import EngineDescription, EngineError, first_line
from servers.engines.onnxruntime_graphs import GraphExecution
from servers.engines.processors import cuda_index, nvidia_device_present, thread_count
from servers.engines.settings import EngineSettings
from servers.gpu.cuda_library import device_uuid
from servers.gpu.info import MAX_CPU_TIME_RATIO
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource

PRECISIONS = {"cpu": ("fp32", "fp16"), "cuda": ("fp32", "tf32", "fp16")}
PRECISION_KEY = "abserve.precision"
"""In an ONNX file's metadata: the precision of its weights. A file without it holds FP32."""
MODES = {"cpu": ("session",), "cuda": ("graph", "session")}
"""The first one is what `auto` takes."""
CUDA_PROVIDER = "CUDAExecutionProvider"
SPINNING = "session.intra_op.allow_spinning"
PACKAGES = ("onnxruntime", "onnxruntime-gpu")
ELEMENT_TYPES = {"FP32": "tensor(float)", "FP16": "tensor(float16)", "UINT8": "tensor(uint8)", "INT64": "tensor(int64)"}

CPU_PROVIDER = "CPUExecutionProvider"
RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"

SHAPE_OPERATORS = frozenset(
    {
        *("Shape", "Size", "Constant", "ConstantOfShape", "Gather", "Squeeze", "Unsqueeze", "Concat", "Slice", "Cast"),
        *("Range", "Equal", "Where"),
        # Integer arithmetic on dimensions. The same names on activations would show in the node time.
        *("Add", "Sub", "Mul", "Div"),
    }
)


class OnnxRuntimeEngine:
    """See `servers.engines.interface.Engine`. Reads the file at `artefact_path`; `weights` only labels it."""

    def __init__(
        self,
        specification: ModelSpecification,
        weights: WeightsSource,
        settings: EngineSettings,
        artefact_path: Path,
    ) -> None:
        self._specification = specification
        self._weights = weights
        self._settings = settings
        self._path = artefact_path
        self._session: Any = None
        self._file_precision = "fp32"
        self._mode = ""
        self._graphs: GraphExecution | None = None
        self._placement: NodePlacement | None = None
        self._output_names = [tensor.name for tensor in specification.outputs]

    def load(self) -> None:
        """Create the session and make sure that it is the model and the provider that were asked for."""
        assert_one_package()
        import onnxruntime as ort

        if not self._path.is_file():
            raise EngineError(
                f"no ONNX file for {self._specification.name} at {self._path.name}; "
                f"run: abserve export --model {self._specification.name}"
            )
        ort.set_default_logger_severity(3)  # without a GPU, device discovery warns at every start
        index = self._resolve_cuda_index()
        device = "cpu" if index is None else "cuda"
        self._mode = self._settings.mode_on(device, MODES, PRECISIONS)
        try:
            session = ort.InferenceSession(
                str(self._path),
                self._session_options(on_cuda=index is not None),
                providers=self._providers(index, graphs=self._mode == "graph"),
            )
        except Exception as exc:  # ORT's exceptions share no base but Exception
            remedy = "; use mode session" if "graph capture" in str(exc) else ""
            reason = first_line(exc)
            raise EngineError(f"ONNX Runtime cannot load {self._path.name}: {reason}{remedy}") from exc
        if index is not None and CUDA_PROVIDER not in session.get_providers():
            raise EngineError(
                f"ONNX Runtime cannot use the GPU (providers in effect: {', '.join(session.get_providers())}); install "
                "the CUDA libraries with pip install 'onnxruntime-gpu[cuda,cudnn]', or use device cpu"
            )
        assert_signature(session.get_inputs(), self._specification.inputs, "inputs")
        assert_signature(session.get_outputs(), self._specification.outputs, "outputs")
        in_file = session.get_modelmeta().custom_metadata_map.get(PRECISION_KEY, "fp32")
        if (in_file == "fp16") != (self._settings.precision == "fp16"):
            raise EngineError(
                f"precision {self._settings.precision} was asked for, but {self._path.name} holds {in_file}; "
                f"run: abserve export --model {self._specification.name} --precision "
                f"{'fp16' if self._settings.precision == 'fp16' else 'fp32'}"
            )
        if index is not None:
            self._placement = self._verified_placement(session, index)
            if self._mode == "graph":
                self._graphs = self._captured(session, index)
        self._session, self._file_precision = session, in_file

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, on zeros."""
        for size in batch_sizes:
            self.infer(zero_inputs(self._specification.inputs, size))

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """One execution. On the CPU the session reads the caller's arrays in place; the answers are new arrays."""
        if self._session is None:
            raise EngineError("the onnxruntime engine is not loaded")
        try:
            if self._graphs is not None:
                return self._graphs.infer(inputs)
            outputs = self._session.run(self._output_names, inputs)
        except Exception as exc:  # ORT's exceptions share no base but Exception
            raise EngineError(f"ONNX Runtime failed to execute the batch: {first_line(exc)}") from exc
        return dict(zip(self._output_names, outputs, strict=True))

    def describe(self) -> EngineDescription:
        """Read back from the session: providers, their options, threads, spinning, node placement."""
        import onnxruntime as ort

        if self._session is None:
            raise EngineError("the onnxruntime engine is not loaded")
        providers: list[str] = self._session.get_providers()
        options: dict[str, dict[str, str]] = self._session.get_provider_options()
        session_options = self._session.get_session_options()
        cuda = options.get(CUDA_PROVIDER)
        return EngineDescription(
            kind="onnxruntime",
            version=ort.__version__,
            precision="tf32" if cuda is not None and cuda.get("use_tf32") == "1" else self._file_precision,
            mode=self._mode,
            device="cpu" if cuda is None else f"cuda:{cuda['device_id']}",
            threads=session_options.intra_op_num_threads if cuda is None else None,
            max_batch_size=self._settings.max_batch_size,
            weights=self._weights.label,
            details={
                "providers": providers,
                "provider_options": options.get(providers[0], {}),
                "package": installed_packages()[0],
                "graph_optimization_level": str(session_options.graph_optimization_level).rpartition(".")[2],
                "intra_op_spinning": session_options.get_session_config_entry(SPINNING) == "1",
                **({} if cuda is None else {"device_uuid": device_uuid(int(cuda["device_id"]))}),
                **self._cuda_details(),
            },
        )

    def close(self) -> None:
        """Drop the session, which ends its threads, and on CUDA its buffers."""
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
        self._session = None

    def execution_ns(self, count: int, repeats: int) -> list[int] | None:
        """Host time of `repeats` graph executions of `count` rows, each waited for, without copies; None elsewhere."""
        if self._graphs is None:
            return None
        times = []
        for _ in range(repeats):
            started_ns = time.perf_counter_ns()
            self._graphs.run_only(count)
            times.append(time.perf_counter_ns() - started_ns)
        return times

    def run_only(self, count: int) -> bool:
        """One graph execution of `count` rows, waited for, without copies; False where there are no graphs."""
        if self._graphs is not None:
            self._graphs.run_only(count)
        return self._graphs is not None

    def node_profile(self, folder: Path, rows: int, repeats: int) -> Path:
        """ONNX Runtime's own profile of batches on the CPU, by a second session like this one; a file in `folder`."""
        return self._profile(folder, None, rows, repeats)

    def _verified_placement(self, session: Any, index: int) -> NodePlacement:
        placement = read_placement(session)
        assert_on_gpu(placement)
        if placement.cpu_operators:
            ratio = measure_cpu_time_ratio(lambda folder: self._profile(folder, index))
            placement = replace(placement, cpu_time_ratio=ratio)
            assert_on_gpu(placement)
        return replace(placement, cpu_time_ratio=placement.cpu_time_ratio or 0.0)

    def _profile(self, folder: Path, index: int | None, rows: int = 4, repeats: int = 5) -> Path:
        """Some batches of a session like this one, without graphs, which would hide the nodes."""
        import onnxruntime as ort

        options = self._session_options(on_cuda=index is not None)
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        session = ort.InferenceSession(str(self._path), options, providers=self._providers(index, graphs=False))
        batch = zero_inputs(self._specification.inputs, rows)
        for _ in range(repeats):
            session.run(self._output_names, batch)
        return Path(session.end_profiling())

    def _captured(self, session: Any, index: int) -> GraphExecution:
        try:
            return GraphExecution(
                session,
                self._specification.inputs,
                self._specification.outputs,
                ("cuda", index),
                bucket_sizes(self._settings.max_batch_size),
            )
        except EngineError:
            raise
        except Exception as exc:  # ORT's exceptions share no base but Exception
            reason = first_line(exc)
            raise EngineError(f"ONNX Runtime cannot capture CUDA graphs: {reason}; use mode session") from exc

    def _cuda_details(self) -> dict[str, object]:
        placement = self._placement
        if placement is None:
            return {"nodes_by_provider": None}
        return {
            "nodes_by_provider": dict(placement.nodes_by_provider),
            "cpu_operators": dict(placement.cpu_operators),
            "cpu_non_shape_ops": list(placement.cpu_non_shape_ops),
            "cpu_time_ratio": placement.cpu_time_ratio,
            "cuda_graphs": self._graphs is not None,
            "buckets": None if self._graphs is None else list(self._graphs.buckets),
            "pinned_staging": None if self._graphs is None else self._graphs.pinned,
        }

    def _resolve_cuda_index(self) -> int | None:
        """None for the CPU. `auto` takes a GPU that the kernel shows and then insists on it: no silent fallback."""
        import onnxruntime as ort

        asked_for = self._settings.device
        offered = CUDA_PROVIDER in ort.get_available_providers()
        if asked_for == "cpu":
            return None
        if asked_for == "auto":
            return 0 if offered and nvidia_device_present() else None
        index = cuda_index(asked_for)
        if index is None:
            raise EngineError(f"unknown device {asked_for!r}; use auto, cpu or cuda:N")
        if not offered:
            raise EngineError(f"device {asked_for}: this onnxruntime has no CUDA provider; install onnxruntime-gpu")
        if not nvidia_device_present():
            raise EngineError(f"device {asked_for}: this machine shows no NVIDIA GPU; use device cpu")
        return index

    def _session_options(self, *, on_cuda: bool) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = thread_count(self._settings.threads)
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # Spinning between requests gained some 2 % latency on 2 quiet cores and cost a quarter more CPU, which an idle
        # arm would take from the other arm and from the client.
        options.add_session_config_entry(SPINNING, "0")
        if self._settings.precision == "fp16" and not on_cuda:
            # The CPU provider has few FP16 kernels, and one of its last optimisations crashes the process on such a
            # graph: with ORT_ENABLE_ALL loading segfaults.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        if on_cuda:
            options.add_session_config_entry(RECORD_PLACEMENT, "1")
        return options

    def _providers(self, index: int | None, *, graphs: bool) -> list[object]:
        if index is None:
            return [CPU_PROVIDER]
        import onnxruntime as ort

        ort.preload_dlls()  # finds the CUDA libraries of the nvidia-* wheels, which the loader does not search
        use_tf32 = "1" if self._settings.precision == "tf32" else "0"
        options = {"device_id": str(index), "use_tf32": use_tf32, "enable_cuda_graph": "1" if graphs else "0"}
        return [(CUDA_PROVIDER, options), CPU_PROVIDER]


def installed_packages() -> tuple[str, ...]:
    """Which of ONNX Runtime's two PyPI packages are installed."""
    found = []
    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            continue
        found.append(package)
    return tuple(found)


def assert_one_package() -> None:
    """Raise `EngineError` unless exactly one package is installed: both write to one folder, and the last one wins."""
    found = installed_packages()
    if len(found) > 1:
        raise EngineError(
            "both onnxruntime and onnxruntime-gpu are installed and overwrite each other; "
            "run: pip uninstall -y onnxruntime onnxruntime-gpu, then install one of them again"
        )
    if not found:
        raise EngineError("ONNX Runtime is not installed; run: pip install onnxruntime-gpu")


def assert_signature(nodes: Sequence[Any], tensors: Sequence[TensorSpec], what: str) -> None:
    """Raise `EngineError` unless a session's inputs or outputs are those of the model, with a free batch dimension."""

    def show(name: str, element: str, dims: Sequence[object]) -> str:
        return f"{name} {element}[{','.join(str(d) for d in dims)}]"

    found = [show(node.name, node.type, ["*", *node.shape[1:]]) for node in nodes]
    wanted = [show(t.name, ELEMENT_TYPES.get(t.datatype, t.datatype), ["*", *t.item_shape]) for t in tensors]
    fixed = [node.name for node in nodes if isinstance(node.shape[0], int)]
    if found != wanted:
        raise EngineError(f"the ONNX file's {what} are {found}, the model's are {wanted}; export it again")
    if fixed:
        raise EngineError(f"the ONNX file fixes the batch size of {fixed[0]}; export it again with a dynamic batch")


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """`cpu_time_ratio` is None where it was not measured because nothing is on the CPU, or all of it."""

    nodes_by_provider: Mapping[str, int]
    cpu_operators: Mapping[str, int]
    cpu_time_ratio: float | None = None

    @property
    def cpu_non_shape_ops(self) -> tuple[str, ...]:
        """Operators on the CPU that compute more than shapes."""
        return tuple(sorted(set(self.cpu_operators) - SHAPE_OPERATORS))


def read_placement(session: Any) -> NodePlacement:
    """Of a session created with `RECORD_PLACEMENT`."""
    providers: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        nodes = subgraph.get_nodes()
        providers[subgraph.ep_name] += len(nodes)
        if subgraph.ep_name == CPU_PROVIDER:
            operators.update(node.op_type for node in nodes)
    return NodePlacement(dict(providers), dict(operators))


def assert_on_gpu(placement: NodePlacement) -> None:
    """Raise `EngineError` for a session that is not a GPU engine."""
    total = sum(placement.nodes_by_provider.values())
    on_cpu = placement.nodes_by_provider.get(CPU_PROVIDER, 0)
    if placement.cpu_non_shape_ops or on_cpu == total:
        raise EngineError(
            f"ONNX Runtime placed {on_cpu} of {total} nodes on the CPU, with {_list(placement.cpu_non_shape_ops)} "
            "among them: this is not a GPU engine; export the model again, or use device cpu"
        )
    if placement.cpu_time_ratio is not None and placement.cpu_time_ratio > MAX_CPU_TIME_RATIO:
        raise EngineError(
            f"ONNX Runtime spends {placement.cpu_time_ratio:.1%} of its node time in {on_cpu} nodes on the CPU, more "
            f"than {MAX_CPU_TIME_RATIO:.0%}: this is not a GPU engine; export the model again, or use device cpu"
        )


def measure_cpu_time_ratio(profiled: Callable[[Path], Path]) -> float:
    """Share of node time on the CPU in a profile.

    `profiled` executes some batches of a session that profiles into the folder given, and returns the profile's path.
    The CUDA provider's nodes count with their launches alone, so the share is an upper bound.
    """
    with TemporaryDirectory(prefix="abserve-profile-") as folder:
        events = json.loads(profiled(Path(folder)).read_text())
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time"):
            times[event["args"].get("provider") or CPU_PROVIDER] += int(event["dur"])
    total = sum(times.values())
    if total == 0:
        raise EngineError("ONNX Runtime's profile names no node: its placement cannot be verified")
    return times[CPU_PROVIDER] / total


def _list(operators: tuple[str, ...]) -> str:
    return ", ".join(operators[:4]) + (" …" if len(operators) > 4 else "") if operators else "all of the model"
