"""What else looks at the GPUs of a machine with four takes the servers' own: conditions, noise floor, sampler."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

from loadgen.checks.noise_floor import gpu_of
from loadgen.measure.gpu_recording import gpu_options
from loadgen.measure.machine import fingerprint
from loadgen.measure.probes.fairness import IDLE_SECONDS, as_condition, read_busy_share, read_conditions
from loadgen.records.machine import own_devices, used_gpus
from loadgen.records.run import ArmRecord, Label
from loadgen.report.sections.conditions import gpu_text

HOST = {"cpu_model": "x", "cpu_count": 16}


def document(used: str | None, count: int = 4, *, status: str = "ok") -> dict[str, Any]:
    devices = [{"uuid": f"GPU-{n}", "name": "H200", "processes": [{"pid": 100 + n}]} for n in range(count)]
    return {"status": status, "nvml": {"driver_version": "580"}, "devices": devices,
            "runtime": {"used_device_uuid": used}}  # fmt: skip


def arm(label: Label, gpu_info: dict[str, Any] | None, device: str = "cuda:0", *, launched: bool = True) -> ArmRecord:
    return ArmRecord(
        label=label, title="x", target="native", url="http://127.0.0.1:1", server_name=None, server_version=None,
        launched=launched, argv=None, settings={}, in_effect={"device": device}, model_config=None, gpu_info=gpu_info,
        artefact=None,
    )  # fmt: skip


def test_the_devices_that_are_used() -> None:
    assert [device["uuid"] for device in own_devices(document("GPU-2"), {"GPU-2"})] == ["GPU-2"]
    assert len(own_devices(document("GPU-2"), ())) == 4
    assert len(own_devices(document("MIG-2"), {"MIG-2"})) == 4
    assert own_devices(None, {"GPU-2"}) == []
    assert [used_gpus(told) for told in (document("GPU-2"), document(None), {"runtime": None})] == [("GPU-2",), (), ()]
    several = {"runtime": {"used_device_uuid": None, "used_device_uuids": ["GPU-3", "GPU-1", 7]}}
    assert used_gpus(several) == ("GPU-1", "GPU-3")


def test_the_report_names_the_gpu_and_of_how_many() -> None:
    assert gpu_text(document("GPU-2")) == "H200 GPU-2, 1 of 4"
    assert gpu_text(document("GPU-0", 1)) == "H200 GPU-0, 1 of 1"
    assert gpu_text(document(None)) == gpu_text(document("GPU-elsewhere")) == "4 × H200"
    assert gpu_text(document(None, 1)) == "H200"
    assert gpu_text({"status": "no_library"}) == "no library"
    several = document("GPU-2")
    several["runtime"]["used_device_uuids"] = ["GPU-2", "GPU-0"]
    assert gpu_text(several) == "H200 GPU-0 and H200 GPU-2, 2 of 4"


def test_conditions_are_those_of_the_used_gpu() -> None:
    conditions = read_conditions({}, [arm("a", document("GPU-2")), arm("b", document("GPU-2"))])
    assert [(gpu.uuid, gpu.pids) for gpu in conditions.gpus] == [("GPU-2", (102,))]
    silent = read_conditions({}, [arm("a", document(None)), arm("b", None)])
    assert len(silent.gpus) == 4
    assert read_conditions({}, [arm("a", None)]).gpus == ()


def test_a_noise_floor_belongs_to_the_gpu_that_it_was_measured_on() -> None:
    digests = {fingerprint(HOST, gpu=gpu_of(document(f"GPU-{n}"))) for n in range(4)}
    assert len(digests) == 4
    alone = document("GPU-0", 1)
    assert fingerprint(HOST, gpu=gpu_of(alone)) == fingerprint(HOST, gpu=alone)
    assert fingerprint(HOST, gpu=gpu_of(document("GPU-0"))) == fingerprint(HOST, gpu=alone)
    assert gpu_of(document("GPU-0", status="no_driver")) is None


@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        (arm("a", document("GPU-2")), arm("b", document("GPU-2")), ("--gpu", "GPU-2")),
        (arm("a", document("GPU-2")), arm("b", document("GPU-3")), ("--gpu", "GPU-2", "--gpu", "GPU-3")),
        (arm("a", document("GPU-2")), arm("b", None, "cpu"), ("--gpu", "GPU-2")),
        (arm("a", document("GPU-2")), arm("b", document(None)), ()),
        (arm("a", document("GPU-2")), arm("b", None, launched=False), ("--gpu", "all")),
    ],
)
def test_the_sampler_is_told_what_the_servers_told(a: ArmRecord, b: ArmRecord, options: tuple[str, ...]) -> None:
    assert gpu_options([a, b]) == options


def test_other_cores_load_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [100.0, 100.0, 2.0, 4.0]
    monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds, **_: list(shares))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3})
    assert read_busy_share() == pytest.approx(0.03)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 7})
    assert read_busy_share() == pytest.approx(0.515)
    assert IDLE_SECONDS < 1


def test_processes_without_a_number_are_left_out() -> None:
    processes = [{"pid": "x"}, {"pid": 7}, {"pid": True}, {}, 3]
    assert as_condition({"processes": processes}).pids == (7,)
    assert as_condition({"processes": "x"}).pids is None
