"""AOTInductor, as the command line knows it without importing torch; `servers.engines.torch_package` has the engine."""

from __future__ import annotations

from servers.engines.settings import EngineKind

KIND = EngineKind(
    "servers.engines.torch_package:AOTInductorEngine",
    {"cpu": ("package",), "cuda": ("package",)},
    {"cpu": ("fp32",), "cuda": ("fp32", "tf32", "fp16", "bf16")},
    ("torch",),
    executes="package",
)
