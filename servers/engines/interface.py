"""The interface that every engine implements, and the memory in which its requests and outputs lie."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from servers.engines.batches import valid_inputs, warm_on_cpu
from servers.engines.padding import Padding, Staging, divide
from servers.engines.settings import EngineError as EngineError
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.options.stages import stage
from servers.protocol.tensors import Array

PLANS_FOLDER = "ABSERVE_PLANS_FOLDER"
"""Environment variable: where what engines choose is stored; default: the user's cache."""
CHOICES = "ABSERVE_CHOICES"
"""Environment variable: `stored` reads what an earlier start chose, `fresh` chooses again, `off` leaves every model in
its own form."""
PROFILE_AT_START = "ABSERVE_PROFILE_AT_START"
"""Environment variable: 0 skips the kernel probe, for starts that are timed."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Settings in effect, read back from the engine after loading and never copied from the requested ones."""

    kind: str  # torch, onnxruntime, tensorrt, …
    version: str
    precision: str  # fp32, tf32, fp16, bf16, int8 or fp8
    mode: str  # eager, traced, graph, session, …
    device: str  # cpu or cuda:N
    threads: int | None  # intra-op threads; None on a GPU
    max_batch_size: int
    weights: str  # for a reader: "random weights (seed 0)", or a tag or file name
    details: Mapping[str, object] = field(default_factory=dict)
    spinning: str | None = None  # whether intra-op threads spin while they wait, "on" or "off"; None: unknown, or a GPU


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A C-contiguous tensor in device memory that this process's primary context of the device can address."""

    address: int
    device: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class HostMemory:
    """A tensor in the host memory of a caller, given by addresses, because a NumPy array takes longer to make. It lies
    in C-contiguous pieces of equal numbers of rows, one at each address."""

    addresses: Sequence[int]
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    piece_bytes: int

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.piece_bytes * len(self.addresses)


Request = Mapping[str, Array | HostMemory | DeviceMemory]
"""The inputs of one request by name; the first dimension of each is its rows."""

Finish = Callable[[], list[dict[str, Array]]]
"""Waits for a started batch and returns each request's outputs, in order; to be called once."""


class Engine(ABC):
    """A loaded model. Not thread-safe: one thread at a time calls its methods, with the exceptions that they name.

    Life: construct (cheap) → `load` → `warm_up` → `start` or `infer`, any number of times → `close`. A new engine is a
    module with a subclass that has `load`, `infer`, `describe` and `close`, and with an `EngineKind` that a package
    registers as an entry point of `servers.engines.settings.ENTRY_POINTS`; see docs/engines.md.
    """

    check_seconds: float = 0.0
    """The part of `load` that only compares answers: a server without that check would start sooner by it."""
    flights: int = 1
    """How many started batches may be unfinished at once."""

    device_index: int | None = None
    """The device whose memory `start` takes; None: it takes none."""
    takes_addresses: bool = False
    """Whether `start` takes `HostMemory`."""

    checks_values: bool = False
    """Whether the engine refuses some values of its datatypes; known after `load`."""

    _staging: Staging | None = None

    def __init__(
        self,
        specification: ModelSpecification,
        settings: EngineSettings,
        weights: WeightsSource | None = None,
        path: Path | None = None,
    ) -> None:
        """`weights` only label an engine that executes the file at `path`."""
        self._specification, self._settings, self._path = specification, settings, path
        self._weights = weights

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Count the time of this block to `check_seconds`."""
        started_ns = perf_counter_ns()
        try:
            with stage("verify"):
                yield
        finally:
            self.check_seconds += (perf_counter_ns() - started_ns) / 1e9

    @abstractmethod
    def load(self) -> None:
        """Read weights and build the executable model. Raises `EngineError` with the remedy in the message."""

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, so that no compilation or allocation is left for a request.

        A model with a padded axis executes each at every size of `pad_to`, without those at the axis' default size. A
        CPU prepares nothing for a shape, and large ones take it long: there each size is executed once, and of the
        batch sizes those of `warm_on_cpu`.
        """
        axis, pad_to = self._specification.padded_axis, self._settings.pad_to
        sizes = [{axis.name: size} for size in pad_to if size <= axis.largest] if axis is not None else []
        on_cpu = self.describe().device == "cpu"
        if on_cpu:
            batch_sizes = warm_on_cpu(batch_sizes)
        shapes = list(product(batch_sizes, sizes or [{}]))
        if sizes and on_cpu:
            shapes = [(rows, along) for rows, along in shapes if rows == batch_sizes[0] or along is sizes[0]]
        for rows, along in shapes:
            self.infer(valid_inputs(self._specification, rows, along))

    def check_values(self, inputs: Mapping[str, Array]) -> None:  # noqa: B027  most take any values
        """Raise `InvalidRequestError` for one request's values that the engine cannot take. In a batch they would fail
        those of others. A server calls it for each request if `checks_values`; any thread."""

    def prepare_no_more(self) -> None:  # noqa: B027  most prepare nothing
        """From now on `start` raises `InvalidRequestError` for a shape that is not prepared. The thread that starts the
        batches of a server may not wait for a compilation: other models wait for it."""

    def start(
        self,
        requests: Sequence[Request],
        padding: Padding | None = None,
        outputs: Sequence[Mapping[str, DeviceMemory]] = (),
    ) -> Finish:
        """Execute one batch of requests, without waiting for it where the engine can do that.

        Arrays have any strides and alignment; items have one shape, or sizes that `padding` merges. The engine may read
        the requests' memory until the batch is finished. The function that is returned gives each request the outputs
        that it would get alone, in arrays that the caller owns. Another thread may call it, but each batch's after that
        of the batch before it.

        `outputs` has one mapping per request, or is empty: the engine copies an output named there to that memory,
        which has at least its bytes, and leaves it out of the request's answer.

        Raises `EngineError`, here or from the function; then the batch is finished, and its memory is no longer read.
        `ValueError` is for a batch that the engine cannot take. This implementation executes before it returns.
        """
        assert not outputs  # see device_index
        arrays = [
            {name: value for name, value in request.items() if isinstance(value, np.ndarray)} for request in requests
        ]
        if self._staging is None:
            self._staging = Staging()
        outputs_of_batch = self.infer(self._staging.gather(arrays, padding))
        rows = [len(next(iter(inputs.values()))) for inputs in arrays]
        sizes = [] if padding is None else [padding.axis.size_of(inputs) for inputs in arrays]
        answers = divide(outputs_of_batch, rows, sizes, padding)
        return lambda: answers

    def ready(self) -> bool:
        """Whether the oldest unfinished batch has been executed, so that its function returns at once."""
        return True

    def executed_rows(self, rows: int) -> int:
        """The rows that are executed for a batch of `rows`: more than `rows` if the engine pads it."""
        return rows

    @property
    def row_bytes(self) -> int:
        """The bytes of one row's inputs, at the axes' default sizes; a dimension of no axis counts as 1."""
        shape_of = self._specification.item_shape
        return sum(abs(prod(shape_of(tensor))) * tensor.dtype.itemsize for tensor in self._specification.inputs)

    def execution_ns(self, rows: int, repeats: int) -> list[int] | None:
        """Times of `repeats` executions of a batch without copies to or from the host, for measurements; None if not
        possible. The batch has the shapes of the last one of `rows` rows that `infer` executed. These are host times of
        `run_only`."""
        times = []
        for _ in range(repeats):
            started_ns = perf_counter_ns()
            if not self.run_only(rows):
                return None
            times.append(perf_counter_ns() - started_ns)
        return times

    def run_only(self, rows: int) -> bool:  # noqa: ARG002
        """Execute that batch once, and wait; False if not possible."""
        return False

    def pin(self, address: int, byte_size: int) -> bool:  # noqa: ARG002
        """Page-lock the caller's host memory, whole pages, so that `start` copies from it without waiting; any thread.
        False if the engine has no use for that, or the driver refuses: the memory can be used all the same. No array
        given to `start` may cross its boundaries."""
        return False

    def unpin(self, address: int) -> None:  # noqa: B027  most pin nothing
        """Undo `pin`, before the memory is freed, when no unfinished batch uses it; any thread."""

    @abstractmethod
    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch. `inputs`: one C-contiguous array per input, all with the same first dimension n, 1 ≤ n ≤
        max_batch_size; the engine reads them only until it returns. Returns arrays that the caller owns: no later call
        writes to them."""

    @abstractmethod
    def describe(self) -> EngineDescription:
        """The settings in effect; after `load` only."""

    def close(self) -> None:  # noqa: B027  an engine without resources has nothing to free
        """Free device memory and threads. Idempotent."""

    def probe_kernels(self) -> Mapping[str, object] | None:
        """Profile one inference: wall_seconds, cuda_event_seconds, kernel_count, top_kernels; None without a GPU."""
        return None

    def _description(
        self,
        *,
        version: str,
        precision: str,
        mode: str,
        device: str,
        threads: int | None,
        details: Mapping[str, object],
        spinning: str | None = None,
    ) -> EngineDescription:
        settings = self._settings
        label = "none" if self._weights is None else self._weights.label
        return EngineDescription(
            settings.kind, version, precision, mode, device, threads, settings.max_batch_size, label, details, spinning
        )


def profiled(engine: Engine) -> EngineDescription | None:
    """The description of a warm engine after one profiled inference; its kernels are in `details["kernel_probe"]`. None
    for an engine without a profiler, where `PROFILE_AT_START` is 0, and where the driver refuses to profile. Takes
    about a second on a GPU, so call it at the start and never in a measured window."""
    if os.environ.get(PROFILE_AT_START) == "0":
        return None
    try:
        probe = engine.probe_kernels()
        description = engine.describe()
        return None if probe is None else replace(description, details={**description.details, "kernel_probe": probe})
    except Exception:  # noqa: BLE001  a driver that refuses to profile must not stop a server from starting
        return None


EXPORTS = {
    "tensorrt": "--to tensorrt",
    "tensorrt-jax": "--to tensorrt --operators jax",
    "onnxruntime-jax": "--operators jax",
    "aotinductor": "--to aotinductor",
}
"""By engine, the options of `abserve export` that make its file; others need none."""


def export_command(specification: ModelSpecification, engine: str, options: str = "") -> str:
    """The command that makes the file of a model for an engine."""
    payload = " --payload uint8" if specification.payload == "uint8" else ""
    model = specification.reference or specification.name
    return " ".join(filter(None, (f"abserve export --model {model}{payload}", EXPORTS.get(engine), options)))
