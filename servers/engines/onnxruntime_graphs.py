"""ONNX Runtime's CUDA graphs: one a batch bucket, over device buffers whose addresses never change.

A captured graph replays with the addresses that it was captured with and ignores later bindings, so every bucket has
buffers, a binding and a `gpu_graph_id` of its own, and a batch is padded to its bucket. Padding rows hold whatever the
bucket held before; rows do not influence each other, and their answers are cut off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servers.contract.tensors import Array, TensorSpec
from servers.engines.batches import bucket_of, random_array, row_cosines
from servers.engines.interface import EngineError

NO_GRAPH = "-1"
_RUNS_TO_CAPTURE = 3
_MIN_COSINE = 0.9999


@dataclass(frozen=True, slots=True)
class _Bucket:
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
                self._run(self._by_size[size])
        self._prove()

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One batch; the answers are new arrays."""
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
        self._run(bucket)
        return {name: value.numpy()[:rows].copy() for name, value in bucket.outputs.items()}

    def run_only(self, rows: int) -> None:
        """Execute the bucket of `rows` on what its buffers hold, and wait for it."""
        self._run(self._by_size[bucket_of(self.buckets, rows)])

    def close(self) -> None:
        """Drop bindings and buffers. Idempotent."""
        self._by_size.clear()
        for array in self._staging.values():
            unpin(array)
        self._staging.clear()

    def _run(self, bucket: _Bucket) -> None:
        self._session.run_with_iobinding(bucket.binding, bucket.options)

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
        """A replay reads the new input and not the one it was captured on: compared with a run without any graph."""
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
                    "ONNX Runtime's CUDA graphs answer otherwise than the session without them "
                    f"(cosine {cosine.min():.6f}); use mode session"
                )


def pin(array: Array) -> bool:
    """Page-lock an array's memory, so that the device fetches it without a copy in the driver; False where CUDA's
    runtime is not to be found or declines."""
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
