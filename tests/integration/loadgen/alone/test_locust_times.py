"""The times and the rate that Locust shows are those of our samples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.integration.loadgen.test_locustfile import locust


def test_locust_and_we_time_the_same(fake_url: Callable[..., str], images: Path, tmp_path: Path) -> None:
    out = tmp_path / "raw"
    options = ["-u", "4", "-r", "4", "--samples-dir", str(images), "--samples-out", str(out), "--json"]
    (entry,) = json.loads(locust(fake_url("--delay-ms", "5"), *options).stdout)
    (path,) = out.glob("Concurrent-*.npy")
    samples = np.load(path)
    latency_ms = (samples["end_ns"] - samples["send_ns"]) / 1e6
    assert entry["total_response_time"] == pytest.approx(latency_ms.sum(), rel=0.2)


def test_locusts_rate_leaves_out_the_time_of_the_preparation(fake_url: Callable[..., str], tmp_path: Path) -> None:
    """Reading so many lines takes a second or more, in which nothing is sent."""
    line = json.dumps({"pixel_values": [0] * (3 * 224 * 224)})
    (tmp_path / "many.jsonl").write_text(f"{line}\n" * 60)
    options = ["--inputs", str(tmp_path / "many.jsonl"), "--samples-out", str(tmp_path / "raw")]
    done = locust(fake_url("--delay-ms", "5"), "-u", "1", *options, "Single", seconds=5)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "raw").glob("Single-*.npy")
    samples = np.load(path)
    sent_per_s = len(samples) / ((samples["end_ns"].max() - samples["send_ns"].min()) / 1e9)
    summary = re.search(r"Aggregated .*\| +([0-9.]+) +[0-9.]+\n", done.stdout + done.stderr)
    assert summary is not None
    assert float(summary[1]) == pytest.approx(sent_per_s, rel=0.1)
