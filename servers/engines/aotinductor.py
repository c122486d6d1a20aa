"""AOTInductor, as the command line knows it without importing torch; `servers.engines.torch.engine` has the engine."""

from __future__ import annotations

from servers.engines.settings import EngineKind

KIND = EngineKind(
    "servers.engines.torch.engine:AOTInductorEngine",
    {"cpu": ("package",)},
    {"cpu": ("fp32",)},
    ("torch",),
    executes="package",
)
