"""Registers the AOTInductor engine without importing torch; the engine is in `servers.engines.torch.engine`."""

from __future__ import annotations

from servers.engines.settings import EngineKind

KIND = EngineKind(
    "servers.engines.torch.engine:AOTInductorEngine",
    {"cpu": ("package",)},
    {"cpu": ("fp32",)},
    ("torch",),
    executes="package",
)
