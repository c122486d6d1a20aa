"""Engines on a CUDA device through torch: the device, the precision of products, and the kernel probe."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from servers.engines.batches import valid_inputs
from servers.engines.interface import DeviceMemory, Engine, EngineError, Finish, Request, first_line
from servers.engines.padding import Padding
from servers.engines.processors import cuda_index
from servers.engines.torch.copies import CudaCopies
from servers.engines.torch.runner import FLIGHTS, Build, Call, GraphRunner, event_pair
from servers.gpu.cuda_library import CudaError, device_uuid
from servers.protocol.tensors import Array

TOP_KERNELS = 8
"""How many kernels a kernel probe lists by name."""


def resolve_device(requested: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda:N`. Raises `EngineError` where it does not exist."""
    if requested == "cpu":
        return torch.device("cpu")
    if requested == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    index = cuda_index(requested)
    assert index is not None  # see EngineSettings.check
    if not torch.cuda.is_available():
        raise EngineError(f"device {requested}: torch {torch.__version__} finds no CUDA device; use device cpu")
    if index >= torch.cuda.device_count():
        raise EngineError(f"device {requested}: torch finds {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def set_fp32_products(*, tf32: bool) -> None:
    """Use TF32 in every product and convolution of this process, or in none: torch's default lets cuDNN use it."""
    precision = "tf32" if tf32 else "ieee"
    # torch keeps its older switches beside the newer ones, and torch.export raises where they differ.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]


def fp32_products() -> dict[str, str]:
    """The precision of FP32 products and convolutions, read back from torch."""
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "convolution": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined,unused-ignore]
    }


def device_details(device: torch.device) -> dict[str, object]:
    """The details of the card in the description of an engine."""
    details: dict[str, object] = {"cuda_build": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details |= {
            "device_name": properties.name,
            # torch's UUID has no prefix, which distinguishes a MIG instance from its GPU.
            "device_uuid": device_uuid(device.index or 0) or str(properties.uuid),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        }
    return details


class RunnerEngine(Engine):
    """An engine whose batches go through a `GraphRunner`."""

    _runner: GraphRunner | None = None
    _device: torch.device

    def _start(
        self,
        build: Build | None,
        rows: Sequence[int],
        device: torch.device,
        *,
        call: Call | None = None,
        sizes: Sequence[int] = (),
        at_load: Sequence[int] | None = None,
        copies: CudaCopies | None = None,
    ) -> None:
        self._device = device
        try:
            self._runner = GraphRunner(
                self._specification, device, rows, build=build, call=call, sizes=sizes, at_load=at_load, copies=copies
            )
        except CudaError as exc:
            raise EngineError(f"{device} cannot be used: {exc}") from exc
        self.flights = FLIGHTS
        self.device_index = device.index if device.type == "cuda" else None
        self.takes_addresses = self._runner.takes_addresses

    def start(
        self,
        requests: Sequence[Request],
        padding: Padding | None = None,
        outputs: Sequence[Mapping[str, DeviceMemory]] = (),
    ) -> Finish:
        """See `Engine`; `ValueError` is for a batch beyond the largest bucket, too."""
        if self._runner is None:
            return super().start(requests, padding, outputs)
        try:
            started = self._runner.start(requests, padding, outputs)
        except (RuntimeError, CudaError) as exc:
            raise self._failed(exc) from exc

        def finish() -> list[dict[str, Array]]:
            try:
                return started()
            except (RuntimeError, CudaError) as exc:
                raise self._failed(exc) from exc

        return finish

    def prepare_no_more(self) -> None:
        if self._runner is not None:
            self._runner.prepare_no_more()

    def _failed(self, exc: Exception) -> EngineError:
        return EngineError(f"{self._settings.kind} failed to execute the batch: {first_line(exc)}")

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch; raises `ValueError` for one beyond the largest bucket."""
        if self._runner is None:
            raise self._not_loaded()
        (answer,) = self.start([inputs])()
        return answer

    def executed_rows(self, rows: int) -> int:
        return rows if self._runner is None else self._runner.executed_rows(rows)

    def pin(self, address: int, byte_size: int) -> bool:
        return self._runner is not None and self._runner.copies.pin(address, byte_size)

    def unpin(self, address: int) -> None:
        if self._runner is not None:
            self._runner.copies.unpin(address)

    def ready(self) -> bool:
        return self._runner is None or self._runner.ready()

    def execution_ns(self, rows: int, repeats: int) -> list[int] | None:
        return None if (runner := self._ready_to_repeat(rows)) is None else runner.execution_ns(rows, repeats)

    def run_only(self, rows: int) -> bool:
        if (runner := self._ready_to_repeat(rows)) is not None:
            runner.run_only(rows)
        return runner is not None

    def _ready_to_repeat(self, rows: int) -> GraphRunner | None:
        if self._runner is not None and not self._runner.has_executed(rows):
            self.infer(valid_inputs(self._specification, rows))
        return self._runner

    def probe_kernels(self) -> Mapping[str, object] | None:
        """Profile one inference of one row by torch's profiler, which lists every kernel of the process."""
        if (runner := self._runner) is None:
            return None
        inputs = valid_inputs(self._specification, 1)
        return probe_kernels(lambda: runner.infer(inputs), self._device)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            if self.device_index is not None:
                with torch.cuda.device(self.device_index):  # for the same reason as in `TorchEngine.load`
                    torch.cuda.empty_cache()

    def _not_loaded(self) -> EngineError:
        return EngineError(f"the {self._settings.kind} engine is not loaded")


def probe_kernels(infer: Callable[[], object], device: torch.device) -> dict[str, object]:
    """Profile one call of `infer`, which returns when its answer is on the host.

    `kernel_count` leaves out copies and fills; `cuda_event_seconds` is between two events around the inference. Never
    call it in a measured window: the first call loads CUPTI, which takes a second, and profiling slows launches.
    """
    begin, end = event_pair()
    with torch.cuda.device(device), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started_ns = time.perf_counter_ns()
        begin.record()
        infer()
        end.record()
        end.synchronize()  # not the device: another model may capture a graph
        wall_ns = time.perf_counter_ns() - started_ns
    launches: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset")):
            launches[event.name].append(event.time_range.elapsed_us() / 1e6)
    kernels = [{"name": name, "count": len(times), "seconds": sum(times)} for name, times in launches.items()]
    return {
        "wall_seconds": wall_ns / 1e9,
        "cuda_event_seconds": begin.elapsed_time(end) / 1e3,
        "kernel_count": sum(map(len, launches.values())),
        "top_kernels": sorted(kernels, key=lambda kernel: -sum(launches[str(kernel["name"])]))[:TOP_KERNELS],
    }
