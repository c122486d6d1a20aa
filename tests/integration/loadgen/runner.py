"""A whole run on the fake servers as a program, which runs some code first: `runner.py FOLDER SERVER CODE` with the
experiment as its input."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import Experiment

if __name__ == "__main__":
    exec(sys.argv[3])
    experiment = msgspec.json.decode(sys.stdin.buffer.read(), type=Experiment)
    state = run_experiment(experiment, Path(sys.argv[1]), RunProgress(), abserve=(sys.executable, sys.argv[2]))
    sys.exit({"finished": 0, "failed": 1, "interrupted": 130}[state.state])
