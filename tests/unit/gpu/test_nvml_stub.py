"""The real ctypes path of pynvml against a stub library: every way in which NVML can be missing, old or broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Evaluate = Callable[..., Any]
CONNECT = """
import dataclasses, json
from servers.gpu.nvml import NvmlReader
reader = NvmlReader()
connection = reader.connect()
show = dataclasses.asdict(connection)
for name in ("reading", "edge"):
    show[name] = [dataclasses.asdict(getattr(reader, name)(d.index)) for d in connection.devices]
batch = [reader.samples(d.index, 0) for d in connection.devices]
show["samples"] = [dataclasses.asdict(b) for b in batch]
show["more"] = [len(reader.samples(0, b.samples[-1][0]).samples) for b in batch if b.samples]
reader.close()
reader.close()
print(json.dumps(show))
"""
INFO = """
import json
from servers.gpu.info import gpu_info
print(json.dumps(gpu_info(None)))
"""


def test_no_library(evaluate: Evaluate) -> None:
    found = evaluate(CONNECT, None)
    assert (found["status"], found["devices"]) == ("no_library", [])
    assert evaluate(INFO, None)["status"] == "no_library"


@pytest.mark.parametrize(
    ("code", "status"),
    [(18, "driver_mismatch"), (9, "no_driver"), (4, "no_permission"), (15, "gpu_lost"), (999, "error")],
)
def test_a_library_that_cannot_be_initialised(evaluate: Evaluate, stub_library: Path, code: int, status: str) -> None:
    found = evaluate(CONNECT, stub_library, STUB_INIT=str(code))
    assert (found["status"], found["devices"]) == (status, [])
    document = evaluate(INFO, stub_library, STUB_INIT=str(code))
    assert (document["status"], document["nvml"]["return_code"]) == (status, code)


def test_a_driver_without_a_device(evaluate: Evaluate, stub_library: Path) -> None:
    assert evaluate(CONNECT, stub_library, STUB_EMPTY="1")["status"] == "no_device"
    assert evaluate(INFO, stub_library, STUB_EMPTY="1")["status"] == "no_device"


def test_a_working_device_with_symbols_missing(evaluate: Evaluate, stub_library: Path) -> None:
    found = evaluate(CONNECT, stub_library)
    assert (found["status"], found["driver_version"], found["cuda_driver_version"]) == ("ok", "580.65", "13.0")
    (device,) = found["devices"]
    assert (device["uuid"], device["mig_enabled"], device["supports_gpm"]) == ("GPU-stub", False, None)
    (reading,) = found["reading"]
    assert reading["values"]["power_watts"] == 80.0
    assert reading["values"]["utilization_ratio"] == 0.4
    assert reading["values"]["energy_joules"] > 0
    assert reading["failed"]["temperature"] == "FUNCTION_NOT_FOUND"
    assert "temperature_celsius" not in reading["values"]
    assert not reading["lost"]
    (batch,) = found["samples"]
    assert len(batch["samples"]) == 71
    assert {share for _, share in batch["samples"]} == {0.4}
    assert found["more"][0] <= 1  # the ring buffer moved on by at most one sample meanwhile
    (edge,) = found["edge"]
    assert len(edge["processes"]) == 1
    assert (edge["ecc_errors"], edge["failed"]) == (None, {"ecc_errors": "FUNCTION_NOT_FOUND"})


def test_a_missing_symbol_is_an_absent_reading(evaluate: Evaluate, stub_without_energy: Path) -> None:
    (reading,) = evaluate(CONNECT, stub_without_energy)["reading"]
    assert reading["failed"]["energy"] == "FUNCTION_NOT_FOUND"
    assert "energy_joules" not in reading["values"]
    device = evaluate(INFO, stub_without_energy)["devices"][0]
    assert device["energy_joules_total"] is None
    assert "energy_joules_total" in device["unavailable"]


def test_no_new_sample_is_no_failure(evaluate: Evaluate, stub_library: Path) -> None:
    assert evaluate(CONNECT, stub_library, STUB_QUIET="1")["samples"] == [{"samples": [], "failed": {}, "lost": False}]


def test_mig_has_no_utilisation(evaluate: Evaluate, stub_library: Path) -> None:
    found = evaluate(CONNECT, stub_library, STUB_MIG="1")
    assert found["devices"][0]["mig_enabled"] is True
    assert found["reading"][0]["failed"]["utilization"] == "NOT_SUPPORTED"
    assert found["samples"] == [{"samples": [], "failed": {"samples": "NOT_SUPPORTED"}, "lost": False}]
    device = evaluate(INFO, stub_library, STUB_MIG="1")["devices"][0]
    assert (device["mig_enabled"], device["utilization_ratio"]) == (True, None)


def test_a_lost_device_is_seen_in_every_call(evaluate: Evaluate, stub_library: Path) -> None:
    code = CONNECT.replace(
        "connection = reader.connect()", "connection = reader.connect(); import os; open(os.environ['STUB_LOST'], 'w')"
    )
    lost = stub_library / "lost"
    try:
        found = evaluate(code, stub_library, STUB_LOST=str(lost))
    finally:
        lost.unlink(missing_ok=True)
    assert found["status"] == "ok"
    for name in ("reading", "edge", "samples"):
        assert found[name][0]["lost"], name
    assert found["reading"][0]["values"] == {}
