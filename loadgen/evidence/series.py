"""Integrals of sampled utilisation and energy over windows of time; a hole in the series is a hole in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadgen.evidence.readings import DeviceReadings, Ns, Values
from loadgen.evidence.records import Window
from loadgen.evidence.thresholds import Thresholds

PERIOD_QUANTILE = 0.1
"""Which of the distances between samples is the driver's period: a low one, so that lost samples do not stretch it."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Utilisation over some windows."""

    busy_s: float
    covered_s: float
    window_s: float

    @property
    def coverage(self) -> float:
        """Share of the windows that samples stand for; 0 for no window at all."""
        return min(1.0, self.covered_s / self.window_s) if self.window_s > 0 else 0.0

    @property
    def low(self) -> float:
        """Share of time busy if the GPU was idle wherever there is no sample."""
        return self.busy_s / self.window_s if self.window_s > 0 else 0.0

    @property
    def high(self) -> float:
        """And if it was busy there."""
        if self.window_s <= 0:
            return 1.0
        return min(1.0, (self.busy_s + max(0.0, self.window_s - self.covered_s)) / self.window_s)


def busy(device: DeviceReadings, windows: Sequence[Window], thresholds: Thresholds) -> Busy:
    """`busy_s = Σ u·Δt` and `covered_s = ΣΔt` over the parts of the samples that lie in the windows.

    A sample ends at its time stamp and begins at the one before, but not earlier than `max_sample_stretch` periods.
    """
    ends = device.sample_end_ns
    starts = _sample_starts(ends, thresholds)
    busy_s = covered_s = 0.0
    for window in windows:
        overlap = np.clip(np.minimum(ends, window.end_ns) - np.maximum(starts, window.start_ns), 0, None) / 1e9
        covered_s += float(overlap.sum())
        busy_s += float((overlap * device.sample_busy).sum())
    return Busy(busy_s=busy_s, covered_s=covered_s, window_s=sum(window.seconds for window in windows))


def _sample_starts(ends: Ns, thresholds: Thresholds) -> Ns:
    if len(ends) < 2:
        return ends.copy()
    distances = np.diff(ends)
    longest = int(np.quantile(distances, PERIOD_QUANTILE) * thresholds.max_sample_stretch)
    starts = np.empty_like(ends)
    starts[1:] = np.maximum(ends[:-1], ends[1:] - longest)
    starts[0] = ends[0] - min(int(distances[0]), longest)
    return starts


@dataclass(frozen=True, slots=True)
class EnergyCurve:
    """Joules against time: the device's counter, or the running integral of its power where it has no counter."""

    source: Literal["counter", "power"]
    at_ns: Ns
    joules: Values
    bracket_ns: int
    backwards: bool
    """The counter fell: the driver was loaded anew, or the device is another one."""

    def between(self, window: Window) -> float | None:
        """Energy over a window; None where a reading is missing at an edge, or power anywhere inside."""
        if self.backwards:
            return None
        start, end = self._at(window.start_ns), self._at(window.end_ns)
        if start is None or end is None:
            return None
        if self.source == "power":
            first, last = np.searchsorted(self.at_ns, (window.start_ns, window.end_ns))
            inside = self.at_ns[max(0, first - 1) : last + 1]
            if len(inside) > 1 and int(np.diff(inside).max()) > self.bracket_ns:
                return None
        return end - start

    def total(self, windows: Sequence[Window]) -> float | None:
        """Over all windows; None if one is unknown or there is none."""
        parts = [self.between(window) for window in windows]
        known = [part for part in parts if part is not None]
        return sum(known) if parts and len(known) == len(parts) else None

    def coverage(self, windows: Sequence[Window]) -> float:
        """Share of the windows' time whose energy is known."""
        whole = sum(window.seconds for window in windows)
        known = sum(window.seconds for window in windows if self.between(window) is not None)
        return known / whole if whole > 0 else 0.0

    def _at(self, at_ns: int) -> float | None:
        after = int(np.searchsorted(self.at_ns, at_ns))
        if after < len(self.at_ns) and self.at_ns[after] == at_ns:
            return float(self.joules[after])
        if after in (0, len(self.at_ns)) or self.at_ns[after] - self.at_ns[after - 1] > self.bracket_ns:
            return None
        return float(np.interp(at_ns, self.at_ns[after - 1 : after + 1], self.joules[after - 1 : after + 1]))


def energy_curve(device: DeviceReadings, thresholds: Thresholds) -> EnergyCurve | None:
    """The counter if it was read at least twice, else the power's integral (trapezoids); None without either."""
    bracket_ns = int(thresholds.max_energy_bracket_s * 1e9)
    if len(device.energy_at_ns) > 1:
        backwards = bool((np.diff(device.energy_joules) < 0).any())
        return EnergyCurve("counter", device.energy_at_ns, device.energy_joules, bracket_ns, backwards)
    if len(device.power_at_ns) > 1:
        watts = device.power_watts
        steps = (watts[1:] + watts[:-1]) / 2.0 * np.diff(device.power_at_ns) / 1e9
        joules = np.concatenate([[0.0], np.cumsum(steps)])
        return EnergyCurve("power", device.power_at_ns, joules, bracket_ns, backwards=False)
    return None


def bins(windows: Sequence[Window], bin_s: float) -> tuple[Window, ...]:
    """Whole bins inside the windows, from each window's start; what is left at its end is dropped."""
    step = int(bin_s * 1e9)
    return tuple(
        Window(start_ns=start, end_ns=start + step)
        for window in windows
        for start in range(window.start_ns, window.end_ns - step + 1, step)
    )
