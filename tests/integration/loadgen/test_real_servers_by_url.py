"""Real servers that run already: their processes are found by the port, and a Triton arm is named by its backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.launch.deployment import RemoteDeployment
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.measure.arms import Arm
from loadgen.records.run import ArmRecord, ArmRequest

pytestmark = pytest.mark.usefixtures("no_process_left")

READY_SECONDS = 120.0


def by_url(kind: str, folder: Path) -> ArmRecord:
    """Start a server, find it again by its URL alone, and return what its arm says."""
    options = {"engine": "null", "max-batch-size": "8"} | ({"work-dir": str(folder)} if kind == "triton" else {})
    started = EmbeddedDeployment(kind, options, folder / "log")
    try:
        started.start()
        assert started.model is not None
        started.wait_ready(started.model, READY_SECONDS)
        found = RemoteDeployment(started.url)
        assert set(found.pids()) == set(started.pids()) != set()
        assert found.processes_unknown is None
        cpu_ns = found.cpu_ns()
        assert cpu_ns is not None
        assert cpu_ns > 0
        return Arm(ArmRequest(label="b", target=found.url), found, started.model).record()
    finally:
        started.stop()


def test_a_tritonserver_says_its_backend_and_its_python_stub_is_its_own(tmp_path: Path) -> None:
    record = by_url("triton", tmp_path)
    assert record.title.startswith("Triton 2.51, python backend, fp32")
    assert (record.in_effect["backend"], record.in_effect["device"], record.in_effect["instances"]) == (
        "python", "cpu", 1,
    )  # fmt: skip


def test_a_native_server_keeps_what_it_says(tmp_path: Path) -> None:
    record = by_url("native", tmp_path)
    assert record.title.startswith("abserve-native ")
    assert record.in_effect["engine"] == "null"
