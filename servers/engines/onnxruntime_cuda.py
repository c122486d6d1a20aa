"""ONNX Runtime on CUDA: the check that the GPU does the work, and CUDA graphs over fixed buffers.

A healthy CUDA session may place nodes on the CPU without saying so. Operators that compute shapes belong there (a few
integers whose consumers are on the host); anything else, or more than 1 % of the node time, is refused.

A captured graph replays with the addresses that it was captured with and ignores later bindings, so every bucket has
its own buffers, binding and `gpu_graph_id`, and a batch is padded to its bucket: in rows, and along the model's padded
axis with the axis' padding. Padding rows hold old values; rows do not influence each other, and the answers in padding
are cut off.
"""

from __future__ import annotations

import ctypes
import json
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
from servers.engines.batches import Bucket, bucket_of, check_sizes, random_inputs
from servers.engines.interface import EngineError
from servers.gpu.info import MAX_CPU_TIME_RATIO
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array, TensorSpec

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


class _Graph(NamedTuple):
    staged: Mapping[str, Array]  # views of the staging memory
    inputs: Mapping[str, Any]  # OrtValues on the device
    outputs: Mapping[str, Any]
    binding: Any
    options: Any


class GraphExecution:
    """Captures at construction; not thread-safe. `device` is the session's: ("cuda", index).

    `axis_buckets` are the sizes of the model's padded axis, empty for a model without one. `precision` is the one that
    the session computes in.
    """

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

    def _prepare(self, bucket: Bucket, number: int, device: tuple[str, int]) -> _Graph:
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
        return _Graph(staged, inputs, outputs, binding, options)

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
        found = disagreement(self._specification, expected, self.infer(batch), precision)
        if found.fault is not None:
            raise EngineError(
                f"ONNX Runtime answers differently with CUDA graphs than without them ({found.fault}); use mode session"
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
