"""The command line for a test that needs a verdict on a machine whose other work may take it away."""

from __future__ import annotations

from pathlib import Path

from loadgen.entry import main
from loadgen.measure.machine_watch import read_processors

if __name__ == "__main__":
    read_processors.__defaults__ = Path("/no machine"), None
    main()
