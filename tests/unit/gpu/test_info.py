"""The /gpu-info document keeps its shape with and without a GPU, and never turns unknown into zero."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from servers.gpu.info import Runtime, gpu_info
from servers.gpu.reader import SENTENCES, DeviceSnapshot, GpuProcess, GpuSnapshot

DEVICE_KEYS = {
    *("index", "uuid", "name", "pci_bus_id", "compute_capability", "mig_enabled", "memory_total_bytes"),
    *("memory_used_bytes", "utilization_ratio", "power_watts", "power_limit_watts", "energy_joules_total"),
    *("temperature_celsius", "sm_clock_hertz", "clock_event_reasons", "pcie", "processes", "supports", "unavailable"),
}


@dataclass
class Scripted:
    snapshot: GpuSnapshot
    closed: bool = False

    def read(self) -> GpuSnapshot:
        return self.snapshot

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("status", sorted(SENTENCES))
def test_every_status_has_a_sentence_and_the_whole_schema(status):
    reader = Scripted(GpuSnapshot(status=status, return_code=12, error="as NVML says it"))
    document = gpu_info(None, reader)
    assert reader.closed
    assert document["status"] == status
    assert document["message"].endswith(".")
    assert document["devices"] == []
    assert document["runtime"] is None
    assert document["nvml"]["error"] == "as NVML says it"
    assert set(document["host"]) == {"in_container", "pid_namespace", "wsl", "cuda_visible_devices"}
    json.dumps(document)


def test_a_device_shows_what_is_known_and_null_for_the_rest(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = DeviceSnapshot(
        0,
        uuid="GPU-1",
        utilization_ratio=0.5,
        pcie_gen=5,
        processes=(GpuProcess(7, None),),
        unavailable={"power_watts": "Not Supported"},
    )
    runtime = Runtime("torch", "2", "cuda:0", {"parameters_by_device": {"cuda:0": 3}})
    document = gpu_info(runtime, Scripted(GpuSnapshot(status="ok", return_code=0, devices=(device,))))
    (shown,) = document["devices"]
    assert set(shown) == DEVICE_KEYS
    assert shown["power_watts"] is None
    assert shown["unavailable"] == {"power_watts": "Not Supported"}
    assert shown["pcie"] == {"gen": 5, "width": None}
    assert shown["processes"] == ({"pid": 7, "used_bytes": None},)
    assert document["runtime"]["used_device_uuid"] == "GPU-1"
    assert document["runtime"]["placement"]["result"] == "unknown"  # where parameters lie proves nothing yet
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    again = gpu_info(runtime, Scripted(GpuSnapshot(status="ok", devices=(device,))))
    assert again["runtime"]["used_device_uuid"] is None
