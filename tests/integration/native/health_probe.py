"""How long a health check takes, asked again and again from a process of its own: `health_probe.py PORT LEAST`.

It prints one time in seconds per line, at least LEAST of them, until its standard input ends. A client in the process
of the tests would wait for the attackers there, which take Python's interpreter.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PAUSE_S = 0.005


@dataclass
class Health:
    """The times of one probe, complete once it has ended."""

    seconds: list[float] = field(default_factory=list)

    @property
    def slowest_s(self) -> float:
        return max(self.seconds)


@contextlib.contextmanager
def probed(port: int, least: int = 10) -> Iterator[Health]:
    """Ask in the `with` block, and at least so often; the times are known behind it."""
    health = Health()
    command = [sys.executable, str(Path(__file__)), str(port), str(least)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert float(process.stdout.readline()) > 0  # it has begun
        yield health
        lines, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    health.seconds += map(float, lines.split())


def slowest_quiet_s(port: int) -> float:
    """The slowest of 50 checks while nothing else is asked."""
    with probed(port, 50) as health:
        pass
    return health.slowest_s


def main() -> int:
    port, least = map(int, sys.argv[1:])
    while not select.select([sys.stdin], [], [], PAUSE_S)[0] or least > 0:
        least -= 1
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().status == 200
        connection.close()
        sys.stdout.write(f"{time.perf_counter() - began:.6f}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
