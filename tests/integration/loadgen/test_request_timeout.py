"""`--request-timeout`: how long a request of the load may take, in every part of a run that sends one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.loadgen.conftest import UNWATCHED_ABSERVE


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize(("seconds", "kept"), [("0.07", False), pytest.param("5", True, marks=pytest.mark.slow)])
def test_a_request_counts_as_failed_after_the_given_time(
    tmp_path: Path, fake_url: Callable[..., str], seconds: str, kept: bool
) -> None:
    urls = [fake_url("--model", "other", "--no-stats", "--delay-ms", "200") for _ in range(2)]
    done = subprocess.run(
        [
            *UNWATCHED_ABSERVE, "compare", "--a", urls[0], "--b", urls[1], "--model", "other", "--inputs", "random",
            "--scenarios", "single", "--requests", "3", "--rounds", "1", "--request-timeout", seconds,
            "--out", str(tmp_path / "run"),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    experiment = json.loads((tmp_path / "run/experiment.json").read_bytes())
    assert experiment["request_timeout_s"] == float(seconds)
    said = f"no complete response within {seconds} s"
    assert (said in done.stdout + done.stderr) != kept, done.stdout + done.stderr
    assert json.loads((tmp_path / "run/parity.json").read_bytes())["ok"], "the first answers may take longer"
    state = json.loads((tmp_path / "run/run.json").read_bytes())["state"]
    assert state == ("finished" if kept else "failed"), done.stdout + done.stderr
