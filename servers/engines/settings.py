"""What a server asks of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servers import defaults
from servers.engines.interface import EngineError


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Asked for; `Engine.describe` tells what took effect, and an engine that cannot honour one refuses to load."""

    kind: str = "torch"  # torch, onnxruntime, tensorrt, null
    precision: str = defaults.PRECISION  # fp32, tf32, fp16, bf16
    # auto, eager, traced, scripted, compile, graph, session; an engine refuses what it does not know
    mode: str = defaults.MODE
    device: str = defaults.DEVICE  # auto, cpu, cuda:N
    threads: int = 0  # intra-op threads on the CPU; 0: all cores this process may use
    max_batch_size: int = defaults.MAX_BATCH_SIZE

    def mode_on(self, device: str, modes: Mapping[str, Sequence[str]], precisions: Mapping[str, Sequence[str]]) -> str:
        """The mode to execute in; `auto` is the first one that the engine offers on a `device`, cpu or cuda.

        Raises `EngineError` for a mode or a precision that it does not offer there.
        """
        mode = modes[device][0] if self.mode == "auto" else self.mode
        if mode not in modes[device]:
            raise EngineError(
                f"the {self.kind} engine does not offer mode {mode} on {device}; "
                f"use one of: auto, {', '.join(modes[device])}"
            )
        if self.precision not in precisions[device]:
            raise EngineError(
                f"the {self.kind} engine does not offer {self.precision} on {device}; "
                f"use one of: {', '.join(precisions[device])}"
            )
        return mode
