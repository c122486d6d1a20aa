"""Asks a server for its health from a process that shares no interpreter with an attack.

`python -m tests.integration.native.health_probe PORT LEAST [CA]` asks until its input ends, at least LEAST times, and
then writes how long each answer took, in seconds. With CA, a PEM file, it asks over TLS.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PAUSE_S = 0.01
LONGEST_S = 60


class Health:
    """What a probe has seen; known when it has ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @property
    def slowest_s(self) -> float:
        return max(self.seconds)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        slowest_ms, median_ms = self.slowest_s * 1e3, self.median_s * 1e3
        return f"{len(self.seconds)} answers, slowest {slowest_ms:.1f} ms, median {median_ms:.1f} ms"


@contextlib.contextmanager
def probed(port: int, least: int = 1, ca: Path | None = None) -> Iterator[Health]:
    """Ask during the `with` block, at least so often."""
    health = Health()
    command = [sys.executable, "-m", "tests.integration.native.health_probe", str(port), str(least)]
    command += [] if ca is None else [str(ca)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as probe:
        assert probe.stdout is not None
        assert probe.stdout.readline() == b"asking\n"
        try:
            yield health
        finally:
            output, _ = probe.communicate(timeout=2 * LONGEST_S)
        health.seconds = json.loads(output)


def slowest_quiet_s(port: int) -> float:
    """The slowest of 50 checks while nothing else is asked."""
    with probed(port, 50) as health:
        pass
    return health.slowest_s


def main() -> int:
    port, least = map(int, sys.argv[1:3])
    tls = ssl.create_default_context(cafile=sys.argv[3]) if sys.argv[3:] else None
    seconds: list[float] = []
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    sys.stdout.write("asking\n")
    sys.stdout.flush()
    while len(seconds) < least or not ended.wait(PAUSE_S):
        began = time.perf_counter()
        connection = (
            http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
            if tls is None
            else http.client.HTTPSConnection("127.0.0.1", port, timeout=LONGEST_S, context=tls)
        )
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().status == 200
        connection.close()
        seconds.append(time.perf_counter() - began)
    json.dump(seconds, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
