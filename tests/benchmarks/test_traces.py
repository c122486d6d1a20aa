"""What traces cost the native server, in CPU time of its cheapest request (a few bytes, an engine that does nothing).

    python -m pytest tests/benchmarks/test_traces.py -m benchmark -s

Needs `abserve[traces]`. Three servers are asked in alternating rounds: one without `--traces`, one that traces no
request, one that traces all. A share of 1 % costs what the second one costs, and a hundredth of what the third adds;
measured like this the noise of the machine is a hundredth, too. One more server is as the first, which shows the noise
that is left, and one has a key with a limit.
"""

from __future__ import annotations

import random
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.benchmarks.test_native_cpu import NATIVE, connections_to, request_bytes, round_cpu_us, running
from tests.span_receiver import receiving

ROUNDS, REQUESTS, CONNECTIONS = 61, 200, 4
MOST = 1.02
KEY = "benchmark-key-0123456789"


@pytest.mark.benchmark
@pytest.mark.timeout(540)
def test_one_percent_of_traced_requests_costs_at_most_two_percent(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY} requests=100\n")
    request = request_bytes(16)
    keyed = request.replace(b"\r\n", f"\r\nAuthorization: Bearer {KEY}\r\n".encode(), 1)
    with ExitStack() as stack:
        url = stack.enter_context(receiving()).url
        options = {
            "without": "",
            "again": "",
            "none traced": f"traces={url!r}, trace_share=0.0",
            "all traced": f"traces={url!r}, trace_share=1.0",
            "keys": f"api_key_file={str(tmp_path / 'keys')!r}",
        }
        arms = {}
        for name, more in options.items():
            source = NATIVE.replace("keep_alive_timeout_s=600", f"keep_alive_timeout_s=600, {more}")
            pid, port = stack.enter_context(running(source, "0"))
            arms[name] = pid, stack.enter_context(connections_to(port, CONNECTIONS))
        rounds: list[dict[str, float]] = []
        for _ in range(1 + ROUNDS):
            order = random.sample(sorted(arms), len(arms))
            rounds.append(
                {name: round_cpu_us(*arms[name], keyed if name == "keys" else request, REQUESTS) for name in order}
            )
    us = {name: statistics.median(figures[name] for figures in rounds[1:]) for name in arms}
    ratio = {name: us[name] / us["without"] for name in arms}
    at_one_percent = 0.99 * ratio["none traced"] + 0.01 * ratio["all traced"]
    figures = ", ".join(f"{name} {us[name]:.1f} µs ({ratio[name]:.3f})" for name in arms)
    sys.stdout.write(f"\n{figures}; 1 % traced: {at_one_percent:.3f}\n")
    assert at_one_percent < MOST * max(1.0, ratio["again"])
