"""How our own programs are run as processes: by this interpreter, from the installed package."""

from __future__ import annotations

import sys

OWN_MODULE: tuple[str, ...] = (sys.executable, "-P", "-m")
"""-P: a file in the user's current folder that happens to be called like a module of ours or of a library must not be
imported in its place."""

ABSERVE: tuple[str, ...] = (*OWN_MODULE, "loadgen.entry")
