"""The exporter over a scripted GPU, a stub library and none at all, scraped over HTTP."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families

from servers.gpu import nvml
from servers.gpu.exporter import CPU_MODES, DEFINITIONS, HOST_DEFINITIONS, GpuExporter, GpuPolling
from servers.gpu.readings import EdgeReading, GpuProcess, Reading
from tests.scripted_reader import Fault, NullReader, Phase, ScriptedReader

S = 1_000_000_000
UUID = "GPU-5c719ed0-0000-0000-0000-000000000000"
RECEIVED = "pcie_receive_bytes"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Clock:
    now_ns = 100 * S

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns + 1_700_000_000 * S


@pytest.fixture
def clock() -> Clock:
    return Clock()


def polling_of(clock: Clock, reader: type[ScriptedReader] = ScriptedReader, *script: Any, **more: Any) -> GpuPolling:
    clocks = clock.monotonic_ns, clock.wall_ns
    return GpuPolling(reader(*clocks, *script, **more), *clocks)


@pytest.fixture
def export() -> Iterator[Callable[[GpuPolling], GpuExporter]]:
    running: list[GpuExporter] = []

    def start(polling: GpuPolling) -> GpuExporter:
        running.append(GpuExporter(polling, "127.0.0.1", 0))
        return running[-1]

    yield start
    for exporter in running:
        exporter.close()


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> Any:
    return samples.get((name, tuple(sorted(labels.items()))))


def poll_for(polling: GpuPolling, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now_ns += S
        polling.poll()


def test_every_family_of_a_full_reading(export: Any, clock: Clock) -> None:
    class Full(ScriptedReader):
        """With what only a real GPU has."""

        def reading(self, index: int) -> Reading:
            more = {
                "memory_utilization_ratio": 0.1, "power_limit_watts": 700.0, "memory_total_bytes": 1e11,
                "sm_clock_hertz": 1.98e9, "clock_event_reasons": 0x4 | 0x40, "software_power_cap_ns": 3e9,
                "temperature_celsius": 40.0, "pcie_transmit_bytes": 10.0, "pcie_receive_bytes": 20.0,
                "sm_active_ratio": 0.5, "tensor_active_ratio": 0.25, "dram_active_ratio": 0.125,
            }  # fmt: skip
            return Reading(values={**super().reading(index).values, **more})

        def edge(self, index: int) -> EdgeReading:
            failed = {"temperature": "UNKNOWN"}
            return EdgeReading((GpuProcess(1, None),), {"corrected": 2, "uncorrected": 0}, failed)

    phases = [Phase(100 * S, 120 * S, 0.5, 500.0)]
    polling = polling_of(clock, Full, phases)
    exporter = export(polling)
    poll_for(polling, clock, 20)
    found = scrape(exporter.port)
    definitions = (*DEFINITIONS, *HOST_DEFINITIONS)
    assert {name for name, _ in found} == {definition.name for definition in definitions}
    for definition in definitions:
        labels = next(dict(labels) for name, labels in found if name == definition.name)
        assert set(labels) == set(definition.labels), definition.name
    assert value(found, "nvml_up") == 1
    assert value(found, "nvml_device_power_limit_watts", uuid=UUID) == 700
    assert value(found, "nvml_device_clock_event_active", uuid=UUID, reason="software_power_cap") == 1
    assert value(found, "nvml_device_clock_event_active", uuid=UUID, reason="idle") == 0
    assert value(found, "nvml_device_clock_event_seconds_total", uuid=UUID, reason="software_power_cap") == 3
    assert value(found, "nvml_device_ecc_errors_total", uuid=UUID, type="corrected") == 2
    assert value(found, "nvml_errors_total", call="temperature", code="UNKNOWN") >= 2
    busy = value(found, "nvml_device_busy_seconds_total", uuid=UUID)
    observed = value(found, "nvml_device_observed_seconds_total", uuid=UUID)
    assert observed == pytest.approx(34, abs=2.5)  # 20 s and the buffer's past
    assert busy == pytest.approx(0.5 * 20, abs=1.2)


def test_without_a_gpu_nothing_looks_like_one(export: Any) -> None:
    found = scrape(export(GpuPolling(NullReader())).port)
    assert value(found, "nvml_up") == 0
    assert {name for name, _ in found if name.startswith("nvml")} == {"nvml_up", "nvml_collect_duration_seconds"}


def test_the_host_is_shown_with_and_without_a_gpu(export: Any) -> None:
    found = scrape(export(GpuPolling(NullReader())).port)
    assert {dict(labels)["mode"] for name, labels in found if name == "host_cpu_seconds_total"} == set(CPU_MODES)
    used = sum(value(found, "host_cpu_seconds_total", mode=mode) for mode in CPU_MODES)
    assert used == pytest.approx(sum(psutil.cpu_times()[: len(CPU_MODES)]), rel=0.01)
    available, total = (value(found, f"host_memory_{kind}_bytes") for kind in ("available", "total"))
    assert 0 < available < total == psutil.virtual_memory().total


def test_a_lost_gpu_loses_its_series_and_comes_back(export: Any, clock: Clock) -> None:
    fault = Fault(110 * S, 120 * S, "*", "GPU_IS_LOST")
    polling = polling_of(clock, ScriptedReader, (), [fault])
    exporter = export(polling)
    poll_for(polling, clock, 5)
    before = scrape(exporter.port)
    assert value(before, "nvml_device_power_watts", uuid=UUID) == 80
    poll_for(polling, clock, 8)
    during = scrape(exporter.port)
    assert value(during, "nvml_up") == 0
    assert not [name for name, labels in during if dict(labels).get("uuid")]
    assert value(during, "nvml_errors_total", call="energy", code="GPU_IS_LOST") == 1
    poll_for(polling, clock, 10)
    after = scrape(exporter.port)
    assert value(after, "nvml_up") == 1
    for counter in ("nvml_device_busy_seconds_total", "nvml_device_observed_seconds_total"):
        assert value(after, counter, uuid=UUID) >= value(before, counter, uuid=UUID)
    assert value(after, "nvml_last_success_timestamp_seconds") >= value(before, "nvml_last_success_timestamp_seconds")


def test_a_failed_reading_is_absent_and_counted(export: Any, clock: Clock) -> None:
    faults = [Fault(0, 2**62, "power", "UNKNOWN"), Fault(0, 2**62, "energy", "NOT_SUPPORTED")]
    polling = polling_of(clock, ScriptedReader, (), faults)
    poll_for(polling, clock, 3)
    assert polling.points["nvml_errors_total"] == {("power", "UNKNOWN"): 3, ("energy", "NOT_SUPPORTED"): 1}
    found = scrape(export(polling).port)
    assert value(found, "nvml_device_power_watts", uuid=UUID) is None
    assert value(found, "nvml_device_utilization_ratio", uuid=UUID) == 0
    assert value(found, "nvml_up") == 1


@pytest.mark.parametrize(("first", "second", "grown"), [(10, 25, 15), (2**32 - 10, 5, 15), (2**40, 2**40 + 1, 1)])
def test_wrapping_counters(clock: Clock, first: float, second: float, grown: float) -> None:
    readings = iter([first, second])

    class Wrapping(ScriptedReader):
        def reading(self, index: int) -> Reading:
            return Reading(values={RECEIVED: float(next(readings))})

    polling = polling_of(clock, Wrapping)
    poll_for(polling, clock, 2)
    assert polling.points["nvml_device_pcie_bytes_total"][UUID, "receive"] == grown


def test_a_driver_that_counts_from_zero_again_has_not_moved_gigabytes(clock: Clock) -> None:
    readings = iter([Reading({RECEIVED: 1e9}), Reading({RECEIVED: 1e9 + 5}), Reading(lost=True)])

    class Reloaded(ScriptedReader):
        def reading(self, index: int) -> Reading:
            return next(readings, Reading({RECEIVED: 10.0}))

    polling = polling_of(clock, Reloaded)
    poll_for(polling, clock, 6)
    assert polling.points["nvml_device_pcie_bytes_total"][UUID, "receive"] == 5


@pytest.mark.parametrize("with_library", [True, False])
def test_the_command(stub_library: Path, library_environment: Any, with_library: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen.entry", "gpu-exporter", "--port", "0"],
        env=library_environment(stub_library if with_library else None), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = scrape(int(line.partition("127.0.0.1:")[2].partition("/")[0]))
        assert value(found, "nvml_up") == float(with_library)
        if with_library:
            assert value(found, "nvml_device_power_watts", uuid="GPU-stub") == 80
        with urllib.request.urlopen(line.partition("on ")[2].partition("/metrics")[0] + "/gpu-info") as answer:
            document = json.load(answer)
        assert [device["uuid"] for device in document["devices"]] == (["GPU-stub"] if with_library else [])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_taken_port_is_a_mistake_on_the_command_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "loadgen.entry", "gpu-exporter", "--port", str(port)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"127.0.0.1:{port}" in done.stderr


def test_a_hole_in_the_samples_is_not_observed_time(clock: Clock) -> None:
    """Held up for 30 s, of which the driver kept 14.2: what was lost counts as one sample of at most 1 s."""
    polling = polling_of(clock, idle_busy=0.5)
    poll_for(polling, clock, 1)
    observed, busy = "nvml_device_observed_seconds_total", "nvml_device_busy_seconds_total"
    before = polling.points
    clock.now_ns += 30 * S
    polling.poll()
    after = polling.points
    assert after[observed][UUID,] - before[observed][UUID,] == pytest.approx(14.0 + 1.0)
    assert after[busy][UUID,] == pytest.approx(0.5 * after[observed][UUID,])


def test_an_exception_while_polling_takes_the_values_away_until_there_are_new_ones(export: Any, clock: Clock) -> None:
    """It ended the polling: the last values stayed, and `nvml_up 1` with them."""

    class Odd(ScriptedReader):
        odd = False

        def reading(self, index: int) -> Reading:
            if Odd.odd:
                raise IndexError("a value of a type that no release had before")
            return super().reading(index)

    polling = polling_of(clock, Odd)
    port = export(polling).port
    poll_for(polling, clock, 3)
    assert value(scrape(port), "nvml_up") == 1
    Odd.odd = True
    poll_for(polling, clock, 3)
    found = scrape(port)
    assert value(found, "nvml_up") == 0
    assert value(found, "nvml_errors_total", call="poll", code="IndexError") == 3
    assert {name for name, _ in found if name.startswith("nvml_device")} == set()
    Odd.odd = False
    poll_for(polling, clock, 3)
    assert value(scrape(port), "nvml_up") == 1
    assert value(scrape(port), "nvml_device_power_watts", uuid=UUID) is not None


def test_values_of_a_driver_that_hangs_disappear(export: Any, clock: Clock) -> None:
    polling = polling_of(clock)
    exporter = export(polling)
    exporter._ended.set()  # nothing polls any more, as when a call of the driver does not return
    exporter._thread.join()
    assert value(scrape(exporter.port), "nvml_up") == 1
    clock.now_ns += 11 * S
    found = scrape(exporter.port)
    assert value(found, "nvml_up") == 0
    assert value(found, "nvml_last_success_timestamp_seconds") == 100 + 1_700_000_000
    assert {name for name, _ in found if name.startswith("nvml_device")} == set()


def test_a_value_of_an_unknown_type_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(_handle: object, fields: list[int]) -> list[Any]:
        kinds = [99, *[3] * (len(fields) - 1)]
        return [SimpleNamespace(nvmlReturn=0, valueType=kind, value=SimpleNamespace(ullVal=7)) for kind in kinds]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", values)
    found, failed = nvml._read_field_values(None)
    assert set(found.values()) == {7}
    assert list(failed.values()) == ["VALUE_TYPE_99"]


def test_an_answer_that_cannot_be_read_is_a_failed_call() -> None:
    calls = nvml._Calls()
    assert calls.run("name", lambda _: b"\xff".decode(), None) is None
    assert (calls.failed, calls.lost) == ({"name": "UnicodeDecodeError"}, False)
