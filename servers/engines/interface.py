"""What every engine offers, whatever executes underneath."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from servers.contract.tensors import Array


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Settings in effect, read back from the engine after loading, never copied from what was asked for."""

    kind: str  # torch, onnxruntime or tensorrt
    version: str
    precision: str  # fp32, tf32, fp16 or bf16
    mode: str  # eager, traced, scripted, compile, graph, session …
    device: str  # cpu or cuda:N
    threads: int | None  # intra-op threads; None on a GPU
    max_batch_size: int
    weights: str  # as a person should read it: "random weights (seed 0)" or a tag or file name
    details: Mapping[str, object] = field(default_factory=dict)


class Engine(Protocol):
    """A loaded model. Not thread-safe: one thread calls `infer` at a time.

    Life: construct (cheap) → `load` → `warm_up` → `infer`* → `close`.
    """

    def load(self) -> None:
        """Read weights and build whatever executes. Raises `EngineError` with the remedy in the message."""

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Execute every given batch size once, so that no compilation or allocation is left for a request."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch.

        `inputs`: one C-contiguous array an input, all with the same first dimension n, 1 ≤ n ≤ max_batch_size; the
        engine may read them until it returns and not after. Returns arrays that the caller owns: no later call
        writes to them.
        """

    def describe(self) -> EngineDescription:
        """What is in effect; after `load` only."""

    def close(self) -> None:
        """Free device memory and threads. Idempotent."""


def staging_of(engine: Engine) -> Mapping[str, Array]:
    """Pinned memory of a loaded engine, one array of max_batch_size rows per input; empty for an engine without.

    A batch that is assembled there, from the front, is given to `infer` without another copy on the host.
    """
    staging: Mapping[str, Array] = getattr(engine, "staging", {})
    return staging


PROFILE_AT_START = "ABSERVE_PROFILE_AT_START"
"""Environment variable: 0 leaves the profiled inference out, for starts that are timed."""


def profiled(engine: Engine) -> EngineDescription | None:
    """The description of a warm engine after one profiled inference, whose kernels it lists in `details["canary"]`.

    None for an engine without a profiler, where `PROFILE_AT_START` says no and where profiling is not possible. Takes
    about a second on a GPU, so it belongs to the start and never to a measured window.
    """
    canary = getattr(engine, "canary", None)
    if canary is None or os.environ.get(PROFILE_AT_START) == "0":
        return None
    try:
        canary()
    except Exception:  # noqa: BLE001  a driver that lets nobody profile must not keep a server from starting
        return None
    return engine.describe()


def first_line(exc: BaseException) -> str:
    """What a library's exception says, without the pages that may follow."""
    return str(exc).partition("\n")[0]


class EngineError(Exception):
    """An engine cannot be built or has failed; the message names the remedy where there is one."""
