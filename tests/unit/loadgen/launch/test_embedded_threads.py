"""The threads of a server that a run starts follow from its own option, not from the environment of the caller."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from loadgen.launch.embedded import EmbeddedDeployment
from tests.integration.loadgen.conftest import await_true

SERVER = "import os; print('threads', os.environ.get('OMP_NUM_THREADS'), flush=True)"


@pytest.mark.parametrize(
    ("inherited", "options", "expected"),
    [
        ("7", {"threads": "0"}, str(len(os.sched_getaffinity(0)))),
        ("7", {}, str(len(os.sched_getaffinity(0)))),
        ("7", {"threads": "3"}, "3"),
        (None, {"threads": "3"}, "None"),
    ],
)
def test_threads_follow_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inherited: str | None, options: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if inherited is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", inherited)
    plan = {"argv": [sys.executable, "-c", SERVER], "env": {}, "http_url": "http://h:1", "model": "m", "title": "t"}
    planner = (sys.executable, "-c", f"print({json.dumps(plan)!r})")
    log = tmp_path / "log"
    deployment = EmbeddedDeployment("native", options, log, abserve=planner)
    deployment.start()
    try:
        await_true(lambda: f"threads {expected}\n" in log.read_text(), "the server has printed its threads")
    finally:
        deployment.stop()
