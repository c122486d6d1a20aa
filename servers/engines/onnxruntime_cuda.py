"""ONNX Runtime on CUDA: the check that the GPU does the work, and CUDA graphs over fixed buffers.

A healthy CUDA session may place nodes on the CPU without saying so. Operators that compute shapes belong there (a few
integers whose consumers are on the host); anything else, or more than 1 % of the node time, is refused.

A captured graph replays with the addresses that it was captured with and ignores later bindings, so every bucket has
its own buffers, binding and `gpu_graph_id`, and a batch is padded to its bucket. Padding rows hold old values of the
bucket; rows do not influence each other, and the answers of padding rows are cut off.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from servers.contract.tensors import Array, TensorSpec
from servers.engines.batches import bucket_of, random_array, row_cosines
from servers.engines.interface import EngineError
from servers.gpu.info import MAX_CPU_TIME_RATIO

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
NO_GRAPH = "-1"
_RUNS_TO_CAPTURE = 3
_MIN_COSINE = 0.9999


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
    """The placement of a session created with `RECORD_PLACEMENT`; `EngineError` if it is not a GPU engine.

    `profile` is called only if nodes are on the CPU, see `measure_cpu_time_ratio`.
    """
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
    """Share of node time on the CPU in a profile.

    `profile` executes some batches of a session that profiles into the folder given, and returns the profile's path.
    The CUDA provider's nodes count with their launches alone, so the share is an upper bound.
    """
    with TemporaryDirectory(prefix="abserve-profile-") as folder:
        events = json.loads(profile(Path(folder)).read_text())
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time"):
            times[event["args"].get("provider") or CPU_PROVIDER] += int(event["dur"])
    total = sum(times.values())
    if total == 0:
        raise EngineError("ONNX Runtime's profile names no node, so its placement cannot be verified; use device cpu")
    return times[CPU_PROVIDER] / total


class _Bucket(NamedTuple):
    inputs: Mapping[str, Any]  # OrtValues on the device
    outputs: Mapping[str, Any]
    binding: Any
    options: Any


class GraphExecution:
    """Captures at construction; not thread-safe. `device` is the session's: ("cuda", index)."""

    def __init__(
        self,
        session: Any,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        device: tuple[str, int],
        buckets: Sequence[int],
    ) -> None:
        self._session = session
        self._inputs, self._outputs = inputs, outputs
        self.buckets = tuple(buckets)
        self._staging = {t.name: np.zeros((self.buckets[-1], *t.item_shape), t.dtype) for t in inputs}
        self.pinned = sum(map(pin, self._staging.values())) == len(self._staging)
        self._by_size = {size: self._prepare(size, number, device) for number, size in enumerate(self.buckets, start=1)}
        for size in reversed(self.buckets):  # the largest first, so that the arena grows once
            for _ in range(_RUNS_TO_CAPTURE):
                self.run_only(size)
        self._prove()

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Execute one batch; the answers are new arrays."""
        rows = len(inputs[self._inputs[0].name])
        size = bucket_of(self.buckets, rows)
        bucket = self._by_size[size]
        for name, array in inputs.items():
            if rows == size and array.flags.c_contiguous:
                bucket.inputs[name].update_inplace(array)
            else:
                staging = self._staging[name]
                staging[:rows] = array
                bucket.inputs[name].update_inplace(staging[:size])
        self.run_only(rows)
        return {name: value.numpy()[:rows].copy() for name, value in bucket.outputs.items()}

    def run_only(self, rows: int) -> None:
        """Execute the bucket of `rows` on the contents of its buffers, and wait for it."""
        bucket = self._by_size[bucket_of(self.buckets, rows)]
        self._session.run_with_iobinding(bucket.binding, bucket.options)

    def close(self) -> None:
        """Drop bindings and buffers. Idempotent."""
        self._by_size.clear()
        for array in self._staging.values():
            unpin(array)
        self._staging.clear()

    def _prepare(self, size: int, number: int, device: tuple[str, int]) -> _Bucket:
        import onnxruntime as ort

        def on_device(tensor: TensorSpec) -> Any:
            shape = [size, *tensor.item_shape]
            return ort.OrtValue.ortvalue_from_shape_and_type(shape, tensor.dtype, *device)

        inputs = {tensor.name: on_device(tensor) for tensor in self._inputs}
        outputs = {tensor.name: on_device(tensor) for tensor in self._outputs}
        binding, options = self._session.io_binding(), ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        for name, value in inputs.items():
            value.update_inplace(self._staging[name][:size])
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return _Bucket(inputs, outputs, binding, options)

    def _prove(self) -> None:
        """Check that a replay reads the new input and not the captured one: compare with a run without any graph."""
        import onnxruntime as ort

        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", NO_GRAPH)
        generator = np.random.default_rng(2)
        rows = min(3, self.buckets[-1])
        batch = {t.name: random_array(generator, (rows, *t.item_shape), t.dtype) for t in self._inputs}
        names = [tensor.name for tensor in self._outputs]
        expected = self._session.run(names, batch, options)
        answers = self.infer(batch)
        for name, want in zip(names, expected, strict=True):
            # A stale answer may be all zeros: its cosine is NaN, which fails.
            cosine = row_cosines(answers[name].reshape(rows, -1), want.reshape(rows, -1))
            if not (cosine >= _MIN_COSINE).all():
                raise EngineError(
                    "ONNX Runtime answers differently with CUDA graphs than without them "
                    f"(cosine {cosine.min():.6f}); use mode session"
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
