"""`--request-timeout`: how long a request of the load may take, in every part of a run that sends one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.loadgen.conftest import abserve


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize(("seconds", "kept"), [("0.07", False), pytest.param("5", True, marks=pytest.mark.slow)])
def test_a_request_counts_as_failed_after_the_given_time(
    tmp_path: Path, fake_url: Callable[..., str], seconds: str, kept: bool
) -> None:
    urls = [fake_url("--model", "other", "--no-stats", "--delay-ms", "200") for _ in range(2)]
    _, output = abserve(
        "compare", "--a", urls[0], "--b", urls[1], "--model", "other", "--inputs", "random", "--scenarios", "single",
        "--requests", "3", "--rounds", "1", "--request-timeout", seconds, "--out", str(tmp_path / "run"),
    )  # fmt: skip
    experiment = json.loads((tmp_path / "run/experiment.json").read_bytes())
    assert experiment["request_timeout_s"] == float(seconds)
    said = f"no complete response within {seconds} s"
    assert (said in output) != kept, output
    assert json.loads((tmp_path / "run/parity.json").read_bytes())["ok"], "the first answers may take longer"
    state = json.loads((tmp_path / "run/run.json").read_bytes())["state"]
    assert state == ("finished" if kept else "failed"), output
