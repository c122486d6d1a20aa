"""What a server asks of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Asked for; `Engine.describe` tells what took effect, and an engine that cannot honour one refuses to load."""

    kind: str = "torch"  # torch, onnxruntime, tensorrt, null
    precision: str = "fp32"  # fp32, tf32, fp16, bf16
    mode: str = (
        "auto"  # auto, eager, traced, scripted, compile, graph, session; an engine refuses what it does not know
    )
    device: str = "auto"  # auto, cpu, cuda:N
    threads: int = 0  # intra-op threads on the CPU; 0: all cores this process may use
    max_batch_size: int = 32
