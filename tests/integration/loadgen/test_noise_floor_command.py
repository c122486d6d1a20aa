"""`abserve noise-floor` as a user runs it: an arm against itself, stored, and found by the next comparison."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.loadgen.conftest import UNWATCHED_ABSERVE

FakeUrl = Callable[..., str]


def abserve(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*UNWATCHED_ABSERVE, *arguments]
    environment = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_left")
def test_a_floor_is_measured_kept_and_used(tmp_path: Path, fake_url: FakeUrl) -> None:
    url = fake_url("--model", "other", "--no-stats")
    load = ("--model", "other", "--inputs", "random", "--scenarios", "single", "--requests", "20")
    floor = abserve(tmp_path, "noise-floor", "--a", url, *load, "--rounds", "2", "--out", str(tmp_path / "floor"))
    assert floor.returncode == 0, floor.stdout + floor.stderr
    assert "identical arms differ by up to" in floor.stdout
    (stored,) = json.loads(next((tmp_path / "cache" / "abserve").glob("noise-floor-*.json")).read_bytes())
    assert {entry["metric"] for entry in stored["entries"]} >= {"throughput", "latency_p50"}
    assert stored["restarts"] == 1

    other = fake_url("--model", "other", "--no-stats")
    done = abserve(
        tmp_path, "compare", "--a", url, "--b", other, *load, "--rounds", "1", "--out", str(tmp_path / "run")
    )
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    found = next(c for c in result["comparisons"] if c["metric"] == "throughput")
    by_metric = {entry["metric"]: entry["difference"] for entry in stored["entries"]}
    assert found["noise_floor"] == by_metric["throughput"]
    assert next(c["state"] for c in result["checks"] if c["name"] == "noise_floor") == "passed"
    assert "Noise floor of this machine" in " ".join(done.stdout.split())

    again = abserve(tmp_path, "noise-floor", "--from", str(tmp_path / "run"))
    assert again.returncode == 1
    assert "the run compares different arms" in again.stderr
