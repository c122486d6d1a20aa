"""A server that stalls for 200 ms of every second: what a closed loop hides, an open loop shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loadgen.client.endpoint import Endpoint
from loadgen.client.generator import GeneratorProcess
from loadgen.client.inputs import write_synthetic
from loadgen.client.messages import Open, Prepare

pytestmark = pytest.mark.slow

STALL_MS = 200.0


def test_the_open_loop_sees_the_stall_that_the_closed_loop_waits_out(
    fake_url: Callable[..., str], tmp_path: Path
) -> None:
    url = fake_url("--delay-ms", "4", "--stall-ms", str(STALL_MS))
    signature = Endpoint(url).signature("openclip_vit_b32")
    write_synthetic(signature, tmp_path / "samples", "fp32", 0)
    generator = GeneratorProcess(tmp_path / "generator.log")
    stalled = {}
    try:
        generator.prepare(
            Prepare(
                samples_directory=str(tmp_path / "samples"),
                payload="fp32",
                signature=signature,
                batch_sizes=(1,),
                seed=0,
            )
        )
        for name, load in (
            ("closed", {"concurrency": 1}),
            ("open", {"concurrency": 32, "arrivals": "poisson", "rate_per_s": 60.0, "arrivals_seed": 1}),
        ):
            path = tmp_path / f"{name}.npy"
            command = Open(
                url=url, batch_size=1, requests=1, seconds=4.0, max_seconds=10.0, timeout_s=10.0,
                samples_path=str(path), **load,
            )  # fmt: skip
            generator.open(command)
            outcome = generator.go(command)
            assert (outcome.errors, outcome.cut_reason) == (0, None)
            samples = np.load(path)
            latency_ms = (samples["end_ns"] - samples["intended_ns"]) / 1e6
            assert latency_ms.max() > STALL_MS / 2, "both meet the stall"
            stalled[name] = int((latency_ms > STALL_MS / 2).sum())
    finally:
        generator.stop()
    # Of every second 100 ms are more than 100 ms before a stall's end: a tenth of the 240 requests of independent
    # clients come then. The one user of the closed loop meets each stall once. A slow machine adds to both.
    assert stalled["open"] >= 10
    assert 1 <= stalled["closed"] < stalled["open"] / 2
