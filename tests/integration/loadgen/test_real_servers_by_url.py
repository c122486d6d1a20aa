"""Real servers that run already: their processes are found by the port, and a Triton arm is named by its backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.client.connection import Address, TlsRefused
from loadgen.client.grpc import GrpcConnection
from loadgen.client.http import HttpConnection
from loadgen.launch.deployment import RemoteDeployment
from loadgen.launch.embedded import EmbeddedDeployment, make_certificate
from loadgen.measure.arms import Arm
from loadgen.records.run import DEFAULT_ACCESS, Access, ArmRecord, ArmRequest

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


MODULE = """
import torch
from servers.models import Input, Output, UserModel


def rows():
    return UserModel(torch.nn.ReLU(), [Input("x", "FP32", ["batch", 4])], [Output("y", "FP32", ["batch", 4])])
"""


@pytest.mark.parametrize("kind", ["native", "triton", "fastapi", pytest.param("litserve", marks=pytest.mark.slow)])
def test_a_server_that_is_started_with_a_certificate_is_reached_over_tls(kind: str, tmp_path: Path) -> None:
    if kind == "litserve":
        pytest.importorskip("litserve")
    (tmp_path / "module.py").write_text(MODULE)
    pem = make_certificate(tmp_path, "tls", None)
    options = {"model": f"{tmp_path}/module.py:rows", "precision": "fp32", "tls-certificate": pem}
    options |= (
        {"work-dir": str(tmp_path / "triton"), "backend": "python", "engine": "torch"} if kind == "triton" else {}
    )
    started = EmbeddedDeployment(kind, options, tmp_path / "log")
    started.access = Access(ca=pem)
    try:
        started.start()
        assert started.model is not None
        started.wait_ready(started.model, READY_SECONDS)
        assert started.endpoint().signature(started.model).inputs[0].name == "x"

        def ways(access: Access) -> list[GrpcConnection | HttpConnection]:
            grpc = [started.grpc_address] if kind in ("native", "triton") else []
            http = [started.url] if kind != "triton" else []
            return [
                *(GrpcConnection(address or "", timeout_s=60, access=access) for address in grpc),
                *(HttpConnection(Address.parse(url, access)) for url in http),
            ]

        for way in ways(started.access):
            way.connect()
            way.close()
        for way in ways(DEFAULT_ACCESS):
            with pytest.raises(TlsRefused, match="unknown authority"):
                way.connect()
    finally:
        started.stop()
