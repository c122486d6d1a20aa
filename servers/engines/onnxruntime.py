"""ONNX Runtime executing an exported file: FP32 and FP16 on the CPU, TF32 too on CUDA, never silently elsewhere.

FP16 needs a file of its own (`abserve export --precision fp16`), which says so in its metadata.

Importable without torch, so that the stub process of Triton's python backend can use the same engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from servers.contract.tensors import Array, TensorSpec
from servers.engines.interface import EngineDescription, EngineError
from servers.engines.processors import cuda_index, nvidia_device_present, thread_count
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource

PACKAGES = ("onnxruntime", "onnxruntime-gpu")
PRECISIONS = {"cpu": ("fp32", "fp16"), "cuda": ("fp32", "tf32", "fp16")}
PRECISION_KEY = "abserve.precision"
"""In an ONNX file's metadata: the precision of its weights. A file without it holds FP32."""
MODES = ("session",)
CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
ELEMENT_TYPES = {"FP32": "tensor(float)", "FP16": "tensor(float16)", "UINT8": "tensor(uint8)", "INT64": "tensor(int64)"}


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
        if self._settings.mode not in ("auto", *MODES):
            raise EngineError(
                f"the onnxruntime engine does not offer mode {self._settings.mode}; use auto or {MODES[0]}"
            )
        if self._settings.precision not in PRECISIONS[device]:
            raise EngineError(
                f"the onnxruntime engine does not offer {self._settings.precision} on {device}; "
                f"use one of: {', '.join(PRECISIONS[device])}"
            )
        try:
            session = ort.InferenceSession(
                str(self._path), self._session_options(on_cuda=index is not None), providers=self._providers(index)
            )
        except Exception as exc:  # ORT's exceptions share no base but Exception
            raise EngineError(f"ONNX Runtime cannot load {self._path.name}: {str(exc).partition(chr(10))[0]}") from exc
        if index is not None and CUDA_PROVIDER not in session.get_providers():
            raise EngineError(
                f"ONNX Runtime cannot use the GPU (providers in effect: {', '.join(session.get_providers())}); install "
                "the CUDA libraries with pip install 'onnxruntime-gpu[cuda,cudnn]', or use device cpu"
            )
        _assert_signature(session.get_inputs(), self._specification.inputs, "inputs")
        _assert_signature(session.get_outputs(), self._specification.outputs, "outputs")
        in_file = session.get_modelmeta().custom_metadata_map.get(PRECISION_KEY, "fp32")
        if (in_file == "fp16") != (self._settings.precision == "fp16"):
            raise EngineError(
                f"precision {self._settings.precision} was asked for, but {self._path.name} holds {in_file}; "
                f"run: abserve export --model {self._specification.name} --precision "
                f"{'fp16' if self._settings.precision == 'fp16' else 'fp32'}"
            )
        self._session, self._file_precision = session, in_file

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, on zeros."""
        for size in batch_sizes:
            self.infer({t.name: np.zeros((size, *t.item_shape), t.dtype) for t in self._specification.inputs})

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """One execution. On the CPU the session reads the caller's arrays in place; the answers are new arrays."""
        if self._session is None:
            raise EngineError("the onnxruntime engine is not loaded")
        try:
            outputs = self._session.run(self._output_names, inputs)
        except Exception as exc:  # ORT's exceptions share no base but Exception
            raise EngineError(f"ONNX Runtime failed to execute the batch: {str(exc).partition(chr(10))[0]}") from exc
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
            mode="session",
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
                "nodes_by_provider": _nodes_by_provider(self._session) if cuda is not None else None,
            },
        )

    def close(self) -> None:
        """Drop the session, which ends its threads."""
        self._session = None

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
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        return options

    def _providers(self, index: int | None) -> list[object]:
        if index is None:
            return [CPU_PROVIDER]
        import onnxruntime as ort

        ort.preload_dlls()  # finds the CUDA libraries of the nvidia-* wheels, which the loader does not search
        use_tf32 = "1" if self._settings.precision == "tf32" else "0"
        return [(CUDA_PROVIDER, {"device_id": str(index), "use_tf32": use_tf32}), CPU_PROVIDER]


SPINNING = "session.intra_op.allow_spinning"


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


def _assert_signature(nodes: Sequence[Any], tensors: Sequence[TensorSpec], what: str) -> None:
    def show(name: str, element: str, dims: Sequence[object]) -> str:
        return f"{name} {element}[{','.join(str(d) for d in dims)}]"

    found = [show(node.name, node.type, ["*", *node.shape[1:]]) for node in nodes]
    wanted = [show(t.name, ELEMENT_TYPES.get(t.datatype, t.datatype), ["*", *t.item_shape]) for t in tensors]
    fixed = [node.name for node in nodes if isinstance(node.shape[0], int)]
    if found != wanted:
        raise EngineError(f"the ONNX file's {what} are {found}, the model's are {wanted}; export it again")
    if fixed:
        raise EngineError(f"the ONNX file fixes the batch size of {fixed[0]}; export it again with a dynamic batch")


def _nodes_by_provider(session: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        counts[subgraph.ep_name] += len(subgraph.get_nodes())
    return dict(counts)
