"""AOTInductor, as the command line knows it without importing torch; `servers.engines.torch_package` has the engine."""

from __future__ import annotations

from servers.engines.settings import EngineKind

KIND = EngineKind(
    "servers.engines.torch_package:AOTInductorEngine",
    {"cpu": ("package",)},
    {"cpu": ("fp32",)},
    ("torch",),
    executes="package",
)
