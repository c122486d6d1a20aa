"""The command line for a test that needs a verdict on a machine whose other work may take it away; it warms language
models up for a moment only, and looks for caches with few requests."""

from __future__ import annotations

from pathlib import Path

from loadgen.checks import tokens
from loadgen.entry import main
from loadgen.measure import load_runner
from loadgen.measure.machine_watch import read_processors
from loadgen.measure.probes import fairness

if __name__ == "__main__":
    read_processors.__defaults__ = Path("/no machine"), None
    tokens.WAITED_LIMIT, load_runner.WARM_UP_SECONDS, fairness.GROUPS = 1.0, 0.2, 8
    main()
