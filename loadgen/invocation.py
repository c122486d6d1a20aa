"""Command lines that run this package's programs with this interpreter."""

from __future__ import annotations

import sys

OWN_MODULE: tuple[str, ...] = (sys.executable, "-P", "-m")
"""-P: a file in the current folder that has the name of a module must not be imported instead of it."""

ABSERVE: tuple[str, ...] = (*OWN_MODULE, "loadgen.entry")

ENGINE_WORKER: tuple[str, ...] = (*OWN_MODULE, "servers.measuring.worker")
