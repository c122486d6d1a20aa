"""The activity that GPU readings show for a load: utilisation and energy over time, activity (D), attribution (A).

D: whether the GPU did more under the load than in the idle gaps, by utilisation and by energy together. A: whether
that was this arm's doing: by process, by exclusion, or by moving with its requests. A hole in a series leaves the
answer unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Literal

import numpy as np

from loadgen.probes.gpu_proof.readings import DeviceReadings, EdgeLine, Ns, Values
from loadgen.probes.gpu_proof.records import Activity, Attribution, Gpu, Thresholds, Window
from loadgen.records.run import Label

EndedBefore = Callable[[Ns], Ns]
"""How many good answers of a load had ended before each of some moments."""
PERIOD_QUANTILE = 0.1
"""Quantile of the distances between samples that is taken as the driver's period: low, so that lost samples do not
stretch it."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Utilisation over some windows."""

    busy_s: float
    covered_s: float
    window_s: float

    @property
    def coverage(self) -> float:
        """Share of the windows' time that samples cover; 0 without windows."""
        return min(1.0, self.covered_s / self.window_s) if self.window_s > 0 else 0.0

    @property
    def low(self) -> float:
        """Share of time busy if the GPU was idle wherever there is no sample."""
        return self.busy_s / self.window_s if self.window_s > 0 else 0.0

    @property
    def high(self) -> float:
        """Share of time busy if the GPU was busy wherever there is no sample."""
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
    return Busy(busy_s, covered_s, sum(window.seconds for window in windows))


def _sample_starts(ends: Ns, thresholds: Thresholds) -> Ns:
    if len(ends) < 2:
        return ends.copy()
    distances = np.diff(ends)
    longest = int(np.quantile(distances, PERIOD_QUANTILE) * thresholds.max_sample_stretch)
    starts: Ns = ends - np.minimum(np.concatenate([distances[:1], distances]), longest)
    return starts


@dataclass(frozen=True, slots=True)
class EnergyCurve:
    """Joules against time: the device's counter, or the running integral of its power where it has no counter."""

    source: Literal["counter", "power"]
    at_ns: Ns
    joules: Values
    bracket_ns: int
    backwards: bool = False
    """The counter fell: the driver was reloaded, or this is another device."""

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
        """Energy over all windows; None if one is unknown or there are no windows."""
        parts = [self.between(window) for window in windows]
        known = [part for part in parts if part is not None]
        return sum(known) if parts and len(known) == len(parts) else None

    def coverage(self, windows: Sequence[Window]) -> float:
        """Share of the windows' time with a known energy."""
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


def energy_curve(device: DeviceReadings, thresholds: Thresholds) -> EnergyCurve:
    """The counter if it was read at least twice, else the power's integral (trapezoids), which may be empty."""
    bracket_ns = int(thresholds.max_energy_bracket_s * 1e9)
    if len(device.energy_at_ns) > 1:
        backwards = bool((np.diff(device.energy_joules) < 0).any())
        return EnergyCurve("counter", device.energy_at_ns, device.energy_joules, bracket_ns, backwards)
    watts = device.power_watts
    steps = (watts[1:] + watts[:-1]) / 2.0 * np.diff(device.power_at_ns) / 1e9
    return EnergyCurve("power", device.power_at_ns, np.concatenate([[0.0], np.cumsum(steps)]), bracket_ns)


def bins(windows: Sequence[Window], bin_s: float) -> tuple[Window, ...]:
    """Whole bins inside the windows, from each window's start; a shorter rest at its end is dropped."""
    step = int(bin_s * 1e9)
    return tuple(
        Window(start_ns=start, end_ns=start + step)
        for window in windows
        for start in range(window.start_ns, window.end_ns - step + 1, step)
    )


def usable_gaps(gaps: Sequence[Window], thresholds: Thresholds) -> tuple[Window, ...]:
    """The gaps without their settling time and their margin, if they are still long enough."""
    settle_ns, margin_ns = int(thresholds.gap_settle_s * 1e9), int(thresholds.gap_margin_s * 1e9)
    cut = [Window(start_ns=gap.start_ns + settle_ns, end_ns=gap.end_ns - margin_ns) for gap in gaps]
    return tuple(gap for gap in cut if gap.seconds >= thresholds.min_gap_s)


def measure_gpu(
    device: DeviceReadings, windows: Sequence[Window], gaps: Sequence[Window], items: int, thresholds: Thresholds
) -> Gpu:
    """Figures of one device; `gaps` as `usable_gaps` returns them, `items` executed in the windows.

    The sigmas are of 1 s bins, not divided by the root of their number: neighbouring bins are not independent, and
    what differs between two gaps would differ in the load too.
    """
    load, idle = busy(device, windows, thresholds), busy(device, gaps, thresholds)
    curve = energy_curve(device, thresholds)
    energy = curve.total(windows)
    known = [(joules, gap.seconds) for gap in gaps if (joules := curve.between(gap)) is not None]
    known_s = sum(seconds for _, seconds in known)
    idle_power = sum(joules for joules, _ in known) / known_s if known_s > 0 else None
    excess = None if energy is None or idle_power is None else energy - idle_power * load.window_s
    idle_bins = bins(gaps, thresholds.bin_s)
    idle_watts = [joules / part.seconds for part in idle_bins if (joules := curve.between(part)) is not None]
    idle_parts = [busy(device, [part], thresholds) for part in idle_bins]
    idle_busy = [part.busy_s / part.covered_s for part in idle_parts if part.coverage >= thresholds.min_coverage]
    return Gpu(
        busy_s=load.busy_s,
        covered_s=load.covered_s,
        coverage=min(load.coverage, curve.coverage(windows)),
        gap_coverage=min(idle.coverage, curve.coverage(gaps)),
        utilisation_low=load.low,
        utilisation_high=load.high,
        idle_utilisation_low=idle.low,
        idle_utilisation_high=idle.high,
        gap_utilisation_high=tuple(busy(device, [gap], thresholds).high for gap in gaps),
        idle_utilisation_sigma=stdev(idle_busy) if len(idle_busy) > 1 else None,
        energy_joules=energy,
        energy_source=None if energy is None else curve.source,
        idle_power_watts=idle_power,
        idle_power_sigma_watts=stdev(idle_watts) if len(idle_watts) > 1 else None,
        energy_excess_joules=excess,
        joules_per_item=energy / items if energy is not None and items > 0 else None,
        excess_joules_per_item=excess / items if excess is not None and items > 0 else None,
    )


def judge_activity(gpu: Gpu, window_s: float, thresholds: Thresholds) -> Activity | None:
    """`active`, `idle` or `weak`; None without energy or an idle baseline, or if the GPU was busy in the gaps.

    Each side must hold under the assumption that is worst for it: "active" counts unsampled load as idle and unsampled
    gaps as busy, "idle" the other way round. So a lost reading never makes an arm look idle.
    """
    if gpu.energy_excess_joules is None or gpu.idle_power_watts is None or window_s <= 0:
        return None
    if gpu.idle_utilisation_low > thresholds.max_gap_utilisation:
        return None
    idle_energy = gpu.idle_power_watts * window_s
    if (
        gpu.utilisation_high - gpu.idle_utilisation_low <= thresholds.idle_utilisation_points / 100.0
        and abs(gpu.energy_excess_joules) <= thresholds.idle_energy_share * idle_energy
    ):
        return "idle"
    if gpu.idle_utilisation_sigma is None or gpu.idle_power_sigma_watts is None:
        return None
    rise = max(thresholds.active_utilisation_points / 100.0, thresholds.sigmas * gpu.idle_utilisation_sigma)
    extra = max(thresholds.active_energy_share * idle_energy, thresholds.sigmas * gpu.idle_power_sigma_watts * window_s)
    if gpu.utilisation_low - gpu.idle_utilisation_high >= rise and gpu.energy_excess_joules >= extra:
        return "active"
    return "weak"


def measure_attribution(
    device: DeviceReadings,
    edges: Sequence[EdgeLine],
    windows: Sequence[Window],
    gaps: Sequence[Window],
    gpu: Gpu,
    ended_before: EndedBefore,
    server_pids: Collection[int],
    own_pids: Collection[int],
    thresholds: Thresholds,
    unknown: Mapping[Label, str],
    label: Label,
) -> Attribution:
    """Measure the attribution. `edges`: of this arm's load. `server_pids`: the process tree of the arm's server;
    `own_pids`: of all arms'. Both in the PID namespace of this machine; empty if unknown. `unknown`: the arms whose
    processes are unknown, and why."""
    lists = [one.processes or () for edge in edges for one in edge.devices if one.uuid == device.uuid]
    listed = {process.pid for processes in lists for process in processes}
    held = [[p.used_bytes for p in processes if p.pid in server_pids] for processes in lists]
    own = set(own_pids) | set(server_pids)
    correlation, p_value, count = correlate(device, (*windows, *gaps), ended_before, thresholds)
    idle_limit = thresholds.idle_utilisation_points / 100.0
    return Attribution(
        pid_resolved=bool(listed & set(server_pids)) if listed and server_pids else None,
        exclusive=listed <= own if listed and own else None,
        foreign_pids=tuple(sorted(listed - own)) if own else (),
        gaps_idle=max(gpu.gap_utilisation_high) <= idle_limit if len(gpu.gap_utilisation_high) > 1 else None,
        correlation=correlation,
        p_value=p_value,
        bins=count,
        foreign=bool(listed - own) if listed & own and not unknown else None,
        memory_bytes=max((sum(size or 0 for size in sizes) for sizes in held), default=0) or None,
        processes_unknown=unknown.get(label),
    )


def judge_attribution(attribution: Attribution, thresholds: Thresholds) -> bool:
    """Whether one of the three ways attributes the activity to the arm; a way that could not be tried does not."""
    if attribution.pid_resolved or (attribution.exclusive and attribution.gaps_idle):
        return True
    return (
        attribution.correlation is not None
        and attribution.p_value is not None
        and attribution.correlation >= thresholds.min_correlation
        and attribution.p_value < thresholds.max_p_value
    )


def correlate(
    device: DeviceReadings, windows: Sequence[Window], ended_before: EndedBefore, thresholds: Thresholds
) -> tuple[float | None, float | None, int]:
    """Pearson's ρ of completed requests per second and busy share, its p by circular shift, and the number of bins.

    Bins are 1 s, or a whole window that is shorter; those that the samples do not cover are left out. The shift keeps
    the autocorrelation of both series, which a permutation would destroy (and thereby find significance everywhere).
    `windows`: the arm's load and the gaps, never another arm's load; they are joined in order of time.
    """
    kept: list[tuple[float, float]] = []
    ordered_windows = sorted(windows, key=lambda w: w.start_ns)
    parts = [part for w in ordered_windows for part in (bins([w], thresholds.bin_s) or (w,))]
    edges_ns = np.array([(part.start_ns, part.end_ns) for part in parts], dtype=np.int64).reshape(-1, 2)
    done = np.diff(ended_before(edges_ns), axis=1)[:, 0].tolist()
    for part, answers in zip(parts, done, strict=True):
        share = busy(device, [part], thresholds)
        if share.coverage >= thresholds.min_coverage:
            kept.append((answers / part.seconds, share.busy_s / share.covered_s))
    if len(kept) < 3:
        return None, None, len(kept)
    requests, activity = np.array(kept, dtype=np.float64).T
    found = _pearson(requests, activity)
    if found is None:
        return None, None, len(kept)
    # The unshifted series counts among the shifts (Phipson & Smyth 2010), so p is never 0.
    shifted = [_pearson(np.roll(requests, shift), activity) for shift in range(len(kept))]
    as_good = sum(1 for value in shifted if value is not None and value >= found - 1e-12)
    return found, as_good / len(kept), len(kept)


def _pearson(a: Values, b: Values) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 0 else None
