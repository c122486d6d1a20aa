"""Our client and NVIDIA's perf_analyzer find the same throughput and p50 in the same workload, in one run, taking
turns.

python -m pytest -s -m slow tests/integration/loadgen/test_perf_analyzer_agrees.py      prints both, by workload
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.client.endpoint import Endpoint
from loadgen.client.generator import GeneratorProcess
from loadgen.client.inputs import write_synthetic
from loadgen.client.messages import Open, Prepare
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.metrics.registry import throughput_per_s
from loadgen.records.samples import latencies_ms
from loadgen.records.targets import Transport

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

ABSERVE = (sys.executable, "-P", "-m", "loadgen.entry")
MODEL = "openclip_vit_b32"
USERS = 2
ROUNDS = 4
AGREEMENT = 1.05


@contextmanager
def serving(batch: int, log: Path) -> Iterator[EmbeddedDeployment]:
    """Without a model; an answer takes longer than its transport, as one of a model does: 20 ms, and 12 ms an image in
    batches. Without that time, what is compared is the CPU that two clients take from a server on the same cores."""
    options = {"engine": "null", "model": MODEL, "added-delay-ms": str(max(20, 12 * batch))}
    deployment = EmbeddedDeployment("native", options, log, abserve=ABSERVE)
    deployment.start()
    try:
        deployment.wait_ready(MODEL, 90)
        yield deployment
    finally:
        deployment.stop()


@dataclass(frozen=True)
class Finding:
    """What one client says of one workload: requests/s and ms."""

    throughput: float
    p50_ms: float


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_throughput_and_p50_within_five_percent(
    perf_analyzer: Any, tmp_path: Path, transport: Transport, batch: int
) -> None:
    with serving(batch, tmp_path / "server.log") as server:
        rounds = compare(server, perf_analyzer, tmp_path, transport, batch)
    for name in ("throughput", "p50_ms"):
        ours_found, theirs_found = (
            np.array([getattr(found, name) for found in one]) for one in zip(*rounds, strict=True)
        )
        ratios = ours_found / theirs_found
        ratio = float(np.exp(np.median(np.log(ratios))))
        sys.stdout.write(
            f"\n{transport}, batch {batch}, {name}: ours {np.median(ours_found):.2f}, perf_analyzer "
            f"{np.median(theirs_found):.2f}; ratio {ratio:.3f} ({ratios.min():.3f} to {ratios.max():.3f})\n"
        )
        assert 1 / AGREEMENT <= ratio <= AGREEMENT, f"{name}, ours / theirs: {ratio:.3f}, rounds {ratios.round(3)}"


def compare(
    server: EmbeddedDeployment, perf_analyzer: Any, tmp_path: Path, transport: Transport, batch: int
) -> list[tuple[Finding, Finding]]:
    """Ours and theirs of each round; the round before the first warms the server's buffers and is not counted."""
    signature = Endpoint(server.url).signature(MODEL)
    write_synthetic(signature, tmp_path / "samples", "fp32", 0)
    generator = GeneratorProcess(tmp_path / "generator.log")
    try:
        generator.prepare(
            Prepare(
                samples_directory=str(tmp_path / "samples"), payload="fp32", signature=signature,
                batch_sizes=(batch,), seed=0, transport=transport,
            )
        )  # fmt: skip
        rounds = []
        for number in range(ROUNDS + 1):
            pair = {}
            for who in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                if who == "ours":
                    pair[who] = ours(generator, server, batch, tmp_path / f"{number}.npy")
                else:
                    pair[who] = theirs(perf_analyzer, server, transport, batch)
            rounds.append((pair["ours"], pair["theirs"]))
    finally:
        generator.stop()
    return rounds[1:]


def ours(generator: GeneratorProcess, server: EmbeddedDeployment, batch: int, samples_path: Path) -> Finding:
    command = Open(
        url=server.url, grpc_address=server.grpc_address, batch_size=batch, concurrency=USERS, requests=20,
        seconds=3.0 if batch == 1 else 6.0, max_seconds=20.0, timeout_s=20.0,
        samples_path=str(samples_path),
    )  # fmt: skip
    generator.open(command)
    outcome = generator.go(command)
    assert outcome.errors == 0
    samples = np.load(samples_path)
    throughput = throughput_per_s(samples)
    assert throughput is not None
    return Finding(throughput, float(np.median(latencies_ms(samples))))


def theirs(perf_analyzer: Any, server: EmbeddedDeployment, transport: Transport, batch: int) -> Finding:
    address = server.grpc_address if transport == "grpc" else server.url.removeprefix("http://")
    output = perf_analyzer.run(
        *("-m", MODEL, "-i", transport, "-u", str(address), "-b", str(batch), "--concurrency-range", str(USERS)),
        # Three windows, taken whatever they are: the rounds show the noise.
        *("--measurement-interval", "1000" if batch == 1 else "3000", "--stability-percentage", "999"),
    )
    throughput = re.search(r"throughput: ([\d.]+) infer/sec", output)
    p50 = re.search(r"p50 latency: (\d+) usec", output)
    assert throughput is not None, output
    assert p50 is not None, output
    return Finding(float(throughput[1]), int(p50[1]) / 1e3)
