"""The rate that Locust shows is that of our samples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.integration.loadgen.test_locustfile import locust


def test_locusts_rate_leaves_out_the_time_of_the_preparation(fake_url: Callable[..., str], tmp_path: Path) -> None:
    """Reading so many lines takes a second or more, in which nothing is sent."""
    line = json.dumps({"pixel_values": [0] * (3 * 224 * 224)})
    (tmp_path / "many.jsonl").write_text(f"{line}\n" * 30)
    options = ["--inputs", str(tmp_path / "many.jsonl"), "--samples-out", str(tmp_path / "raw")]
    done = locust(fake_url("--delay-ms", "5", "--side", "224"), "-u", "1", *options, "Single", seconds=5)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "raw").glob("Single-*.npy")
    samples = np.load(path)
    sent_per_s = len(samples) / ((samples["end_ns"].max() - samples["send_ns"].min()) / 1e9)
    summary = re.search(r"Aggregated .*\| +([0-9.]+) +[0-9.]+\n", done.stdout + done.stderr)
    assert summary is not None
    assert float(summary[1]) == pytest.approx(sent_per_s, rel=0.1)
