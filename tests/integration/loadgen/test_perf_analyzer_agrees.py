"""Our client and NVIDIA's perf_analyzer find the same throughput in the same cell, in one run, taking turns."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.deployment.embedded import EmbeddedDeployment
from loadgen.endpoint import Endpoint
from loadgen.generator_messages import Open, Prepare
from loadgen.generator_process import GeneratorProcess
from loadgen.inputs import write_synthetic
from loadgen.records import Transport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ABSERVE = (sys.executable, "-P", "-m", "loadgen.entry")
MODEL = "openclip_vit_b32"
USERS = 2
ROUNDS = 4


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


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_throughput_within_ten_percent(perf_analyzer: Any, tmp_path: Path, transport: Transport, batch: int) -> None:
    with serving(batch, tmp_path / "server.log") as server:
        ratios = compare(server, perf_analyzer, tmp_path, transport, batch)
    ratio = float(np.exp(np.median(np.log(ratios))))
    assert 0.9 <= ratio <= 1.1, f"ours / theirs: {ratio:.3f}, rounds {[f'{r:.3f}' for r in ratios]}"


def compare(
    server: EmbeddedDeployment, perf_analyzer: Any, tmp_path: Path, transport: Transport, batch: int
) -> list[float]:
    """Ours by theirs, a ratio a round; the round before the first warms the server's buffers and is not counted."""
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
        ratios = []
        for number in range(ROUNDS + 1):
            pair = {}
            for who in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                if who == "ours":
                    pair[who] = ours(generator, server, batch)
                else:
                    pair[who] = theirs(perf_analyzer, server, transport, batch)
            ratios.append(pair["ours"] / pair["theirs"])
    finally:
        generator.stop()
    return ratios[1:]


def ours(generator: GeneratorProcess, server: EmbeddedDeployment, batch: int) -> float:
    command = Open(
        url=server.url, grpc_address=server.grpc_address, batch_size=batch, concurrency=USERS, requests=20,
        seconds=3.0 if batch == 1 else 6.0, max_seconds=20.0, timeout_s=20.0,
    )  # fmt: skip
    generator.open(command)
    outcome = generator.go(command)
    assert outcome.errors == 0
    return batch * outcome.requests / ((outcome.window_end_ns - outcome.window_start_ns) / 1e9)


def theirs(perf_analyzer: Any, server: EmbeddedDeployment, transport: Transport, batch: int) -> float:
    address = server.grpc_address if transport == "grpc" else server.url.removeprefix("http://")
    output = perf_analyzer.run(
        *("-m", MODEL, "-i", transport, "-u", str(address), "-b", str(batch), "--concurrency-range", str(USERS)),
        # Three windows, taken whatever they are: the rounds show the noise.
        *("--measurement-interval", "1000" if batch == 1 else "3000", "--stability-percentage", "999"),
    )
    found = re.search(r"throughput: ([\d.]+) infer/sec", output)
    assert found is not None, output
    return float(found[1])
