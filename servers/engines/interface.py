"""The interface of every engine."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from servers.contract.tensors import Array
from servers.engines.batches import valid_inputs
from servers.engines.settings import EngineError as EngineError
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource

PROFILE_AT_START = "ABSERVE_PROFILE_AT_START"
"""Environment variable: 0 skips the kernel probe, for starts that are timed."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Settings in effect, read back from the engine after loading and never copied from the requested ones."""

    kind: str  # torch, onnxruntime, tensorrt or null
    version: str
    precision: str  # fp32, tf32, fp16 or bf16
    mode: str  # eager, traced, scripted, compile, graph or session
    device: str  # cpu or cuda:N
    threads: int | None  # intra-op threads; None on a GPU
    max_batch_size: int
    weights: str  # for a reader: "random weights (seed 0)", or a tag or file name
    details: Mapping[str, object] = field(default_factory=dict)


class Engine(ABC):
    """A loaded model. Not thread-safe: one thread calls `infer` at a time.

    Life: construct (cheap) → `load` → `warm_up` → `infer`* → `close`. A new engine is a subclass with `load`, `infer`,
    `describe` and `close`, and an entry in `servers.engines.settings.KINDS`.
    """

    kernel_probe: Mapping[str, object] | None = None
    """The result of `probe_kernels`: wall_seconds, cuda_event_seconds, kernel_count, top_kernels."""

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

    @abstractmethod
    def load(self) -> None:
        """Read weights and build the executable model. Raises `EngineError` with the remedy in the message."""

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, so that no compilation or allocation is left for a request.

        A model with a padded axis executes each at every size of `pad_to`, without those at the axis' default size. A
        CPU prepares nothing for a shape, and large ones take it minutes: there each size is executed once.
        """
        axis, pad_to = self._specification.padded_axis, self._settings.pad_to
        sizes = [{axis.name: size} for size in pad_to if size <= axis.largest] if axis is not None else []
        shapes = list(product(batch_sizes, sizes or [{}]))
        if sizes and self.describe().device == "cpu":
            shapes = [(rows, along) for rows, along in shapes if rows == batch_sizes[0] or along is sizes[0]]
        for rows, along in shapes:
            self.infer(valid_inputs(self._specification, rows, along))

    @abstractmethod
    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch.

        `inputs`: one C-contiguous array per input, all with the same first dimension n, 1 ≤ n ≤ max_batch_size; the
        engine reads them only until it returns. Returns arrays that the caller owns: no later call writes to them.
        """

    @abstractmethod
    def describe(self) -> EngineDescription:
        """The settings in effect; after `load` only."""

    def close(self) -> None:  # noqa: B027  an engine without resources has nothing to free
        """Free device memory and threads. Idempotent."""

    def execution_ns(self, rows: int, repeats: int) -> list[int] | None:  # noqa: ARG002
        """Times of `repeats` executions without copies to or from the host; None if not possible.

        The batch has the shapes of the last one of `rows` rows that `infer` executed.
        """
        return None

    def run_only(self, rows: int) -> bool:  # noqa: ARG002
        """Execute a batch as in `execution_ns` once, and wait; False if the engine cannot."""
        return False

    def probe_kernels(self) -> bool:
        """Profile one inference and keep its CUDA kernels in `kernel_probe`; False where no GPU executes."""
        return False

    def _description(
        self,
        *,
        version: str,
        precision: str,
        mode: str,
        device: str,
        threads: int | None,
        details: Mapping[str, object],
    ) -> EngineDescription:
        settings = self._settings
        label = "none" if self._weights is None else self._weights.label
        probe = {} if self.kernel_probe is None else {"kernel_probe": self.kernel_probe}
        return EngineDescription(
            settings.kind,
            version,
            precision,
            mode,
            device,
            threads,
            settings.max_batch_size,
            label,
            {**details, **probe},
        )


def staging_of(engine: Engine) -> Mapping[str, Array]:
    """Pinned memory of a loaded engine, one array of max_batch_size rows per input.

    Empty for an engine without it, and for a model with inputs of variable size. `infer` does not copy a batch that
    starts at the first row of this memory.
    """
    staging: Mapping[str, Array] = getattr(engine, "staging", {})
    return staging


def profiled(engine: Engine) -> EngineDescription | None:
    """The description of a warm engine after one profiled inference; its kernels are in `details["kernel_probe"]`.

    None for an engine without a profiler, where `PROFILE_AT_START` is 0, and where the driver refuses to profile.
    Takes about a second on a GPU, so call it at the start and never in a measured window.
    """
    if os.environ.get(PROFILE_AT_START) == "0":
        return None
    try:
        return engine.describe() if engine.probe_kernels() else None
    except Exception:  # noqa: BLE001  a driver that refuses to profile must not stop a server from starting
        return None


def first_line(exc: BaseException) -> str:
    """The first line of an exception's message; libraries may add pages."""
    return str(exc).partition("\n")[0]


def export_command(specification: ModelSpecification, options: str = "") -> str:
    """The command that makes the file of a model."""
    payload = " --payload uint8" if specification.payload == "uint8" else ""
    model = specification.reference or specification.name
    return f"abserve export --model {model}{payload}{f' {options}' if options else ''}"
