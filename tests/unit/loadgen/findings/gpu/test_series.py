"""Integrals over sampled series: holes stay holes, edges are cut exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from loadgen.findings.gpu.decision import bins, busy, energy_curve, usable_gaps
from loadgen.findings.gpu.records import DEFAULT_THRESHOLDS, DeviceReadings, TimeSpan, read_readings
from loadgen.records.store import StoredRunError

S = 1_000_000_000
PERIOD = S // 5


def device(
    sample_ends: list[int] | None = None, values: list[float] | None = None, energy: Sequence[tuple[float, float]] = ()
) -> DeviceReadings:
    none = np.empty(0)
    return DeviceReadings(
        uuid="GPU-1",
        sample_end_ns=np.array(sample_ends or [], dtype=np.int64),
        sample_busy=np.array(values or [], dtype=np.float64),
        energy_at_ns=np.array([int(at * S) for at, _ in energy], dtype=np.int64),
        energy_joules=np.array([joules for _, joules in energy], dtype=np.float64),
        power_at_ns=none.astype(np.int64),
        power_watts=none,
        sm_active_at_ns=none.astype(np.int64),
        sm_active=none,
    )


def window(start: float, end: float) -> TimeSpan:
    return TimeSpan(start_ns=int(start * S), end_ns=int(end * S))


def test_busy_seconds_are_cut_at_the_edges_of_the_window() -> None:
    ends = [PERIOD * n for n in range(1, 51)]  # 10 s
    readings = device(ends, [1.0] * 25 + [0.0] * 25)
    load = busy(readings, [window(4.1, 6.1)], DEFAULT_THRESHOLDS)
    assert load.busy_s == pytest.approx(0.9)
    assert load.covered_s == pytest.approx(2.0)
    assert (load.low, load.high) == pytest.approx((0.45, 0.45))


def test_a_lost_drain_is_a_hole_and_not_a_long_sample() -> None:
    ends = [PERIOD * n for n in range(1, 151) if not 50 < n <= 60]  # 2 s of 30 are missing
    load = busy(device(ends, [0.5] * len(ends)), [window(0, 30)], DEFAULT_THRESHOLDS)
    assert load.covered_s == pytest.approx(28.1, abs=0.01)  # the sample after the hole reaches back 1.5 periods
    assert load.low == pytest.approx(14.05 / 30, abs=0.001)
    assert load.high == pytest.approx((14.05 + 1.9) / 30, abs=0.001)


def test_no_samples_are_no_coverage() -> None:
    load = busy(device(), [window(0, 10)], DEFAULT_THRESHOLDS)
    assert (load.coverage, load.low, load.high) == (0.0, 0.0, 1.0)
    nothing = busy(device([PERIOD], [1.0]), [], DEFAULT_THRESHOLDS)
    assert (nothing.coverage, nothing.high) == (0.0, 1.0)


def test_energy_between_readings_is_interpolated_and_a_long_hole_is_unknown() -> None:
    curve = energy_curve(device(energy=[(0, 0), (1, 80), (2, 160), (6, 2000), (7, 2080)]), DEFAULT_THRESHOLDS)
    assert curve is not None
    assert curve.between(window(0.5, 1.5)) == pytest.approx(80)
    assert curve.between(window(0.5, 6.5)) == pytest.approx(2000)  # a counter needs its edges only
    assert curve.between(window(0.5, 3)) is None
    assert curve.between(window(-1, 1)) is None
    assert curve.between(window(6, 8)) is None
    assert curve.coverage([window(0, 1), window(3, 4)]) == pytest.approx(0.5)
    assert curve.total([window(0, 1), window(3, 4)]) is None
    assert curve.total([]) is None


def test_energy_that_runs_backwards_is_unknown() -> None:
    curve = energy_curve(device(energy=[(0, 500), (1, 10), (2, 90)]), DEFAULT_THRESHOLDS)
    assert curve is not None
    assert curve.between(window(0, 2)) is None


def test_bins_are_whole_and_start_with_the_window() -> None:
    parts = bins([window(0.25, 2.9), window(5, 5.5)], 1.0)
    assert [(b.start_ns / S, b.end_ns / S) for b in parts] == [(0.25, 1.25), (1.25, 2.25)]


def test_gaps_lose_their_settling_time_and_must_then_be_long_enough() -> None:
    assert usable_gaps([window(0, 6), window(10, 15)], DEFAULT_THRESHOLDS) == (window(1, 5.5),)


def header(**changes: object) -> str:
    line = {
        "type": "header", "schema": "abserve.gpu-readings/1", "clock": "CLOCK_MONOTONIC", "monotonic_ns": 1,
        "wall_ns": 2, "status": "ok",
    }  # fmt: skip
    return json.dumps(line | changes) + "\n"


def test_a_killed_samplers_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text(header() + '{"type":"reading","at_ns":5,"uuid":"GPU-1","energy_joules":1.5}\n{"type":"read')
    readings = read_readings(path.parent, [path.name])
    assert readings.devices["GPU-1"].energy_joules.tolist() == [1.5]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "its first line is not a header"),
        ('{"type":"end","at_ns":1,"reason":"stop"}\n', "its first line is not a header"),
        (header(schema="abserve.gpu-readings/2"), "this version reads abserve.gpu-readings/1"),
        (header() + "broken\n", "line 2"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text(content)
    with pytest.raises(StoredRunError, match=says):
        read_readings(path.parent, [path.name])
    with pytest.raises(StoredRunError, match="cannot be read"):
        read_readings(tmp_path, ["missing.jsonl"])


def test_a_reading_twice_in_two_files_counts_once(tmp_path: Path) -> None:
    """A sampler started anew drains the driver's whole buffer again."""
    line = '{"type":"samples","at_ns":9,"uuid":"GPU-1","utilization":[[7,0.5],[8,1.0]]}\n'
    for name in "01":
        (tmp_path / name).write_text(header() + line)
    assert read_readings(tmp_path, ["0", "1"]).devices["GPU-1"].sample_end_ns.tolist() == [7, 8]
