"""How our own command line is run as a process: the one that belongs to this interpreter."""

from __future__ import annotations

import sys

ABSERVE: tuple[str, ...] = (sys.executable, "-m", "loadgen.entry")
