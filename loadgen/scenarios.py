"""The locustfile, `locust -f loadgen/scenarios.py`: all of it is in `loadgen.locust.scenarios`."""

import sys
from pathlib import Path

# Locust puts the folder in which it was started first, and a file loadgen.py there would be imported instead.
sys.path.sort(key=lambda path: path in ("", str(Path.cwd())))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of an installed abserve: not on the path

from loadgen.locust.scenarios import *  # noqa: F403
