"""What the readings of a GPU say about a load: utilisation and energy over time, activity (D), attribution (A).

D: whether the GPU did more under the load than beside it, by utilisation and by energy together. A: whether that was
this arm's doing: by process, by exclusion, or by moving with its requests. A hole in a series is a hole in the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from loadgen.records.run import Record
from loadgen.studies.gpu_proof.readings import DeviceReadings, EdgeLine, Ns, Readings, Values
from loadgen.studies.gpu_proof.records import Activity, Attribution, EvidenceFile, Gpu, Thresholds, Window

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


def usable_gaps(gaps: Sequence[Window], thresholds: Thresholds) -> tuple[Window, ...]:
    """Gaps without their settling time and their margin, those long enough."""
    settle_ns, margin_ns = int(thresholds.gap_settle_s * 1e9), int(thresholds.gap_margin_s * 1e9)
    cut = [Window(start_ns=gap.start_ns + settle_ns, end_ns=gap.end_ns - margin_ns) for gap in gaps]
    return tuple(gap for gap in cut if gap.seconds >= thresholds.min_gap_s)


def measure_gpu(
    device: DeviceReadings,
    windows: Sequence[Window],
    gaps: Sequence[Window],
    items: int,
    thresholds: Thresholds,
) -> Gpu:
    """Numbers of one device; `gaps` as `usable_gaps` gives them. `items` are the images of the windows."""
    load, idle = busy(device, windows, thresholds), busy(device, gaps, thresholds)
    each = [busy(device, [gap], thresholds) for gap in gaps]
    curve = energy_curve(device, thresholds)
    energy = curve.total(windows) if curve else None
    idle_power = _idle_power(curve, gaps)
    excess = None if energy is None or idle_power is None else energy - idle_power * load.window_s
    energy_coverage = curve.coverage(windows) if curve else 0.0
    gap_energy_coverage = curve.coverage(gaps) if curve else 0.0
    return Gpu(
        busy_s=load.busy_s,
        covered_s=load.covered_s,
        coverage=min(load.coverage, energy_coverage),
        gap_coverage=min(idle.coverage, gap_energy_coverage),
        utilisation_low=load.low,
        utilisation_high=load.high,
        idle_utilisation_low=idle.low,
        idle_utilisation_high=idle.high,
        gap_utilisation_high=tuple(part.high for part in each),
        idle_utilisation_sigma=_idle_utilisation_sigma(device, gaps, thresholds),
        energy_joules=energy,
        energy_source=None if energy is None or curve is None else curve.source,
        idle_power_watts=idle_power,
        idle_power_sigma_watts=_idle_power_sigma(curve, gaps, thresholds),
        energy_excess_joules=excess,
        joules_per_item=energy / items if energy is not None and items > 0 else None,
        excess_joules_per_item=excess / items if excess is not None and items > 0 else None,
    )


def judge_activity(gpu: Gpu, window_s: float, thresholds: Thresholds) -> Activity | None:
    """`active`, `idle` or `weak`; None without energy or an idle baseline, or with a GPU that was busy in the gaps.

    Each side is held to the reading that is worst for it: "active" counts unsampled load as idle and unsampled gaps
    as busy, "idle" the other way round. So a lost reading never makes an arm look idle.
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


def _idle_power(curve: EnergyCurve | None, gaps: Sequence[Window]) -> float | None:
    """Mean power over the gaps whose energy is known, in watts."""
    if curve is None:
        return None
    known = [(energy, gap.seconds) for gap in gaps if (energy := curve.between(gap)) is not None]
    seconds = sum(length for _, length in known)
    return sum(energy for energy, _ in known) / seconds if seconds > 0 else None


def _idle_power_sigma(curve: EnergyCurve | None, gaps: Sequence[Window], thresholds: Thresholds) -> float | None:
    """Of the power of 1 s bins. Not divided by the root of their number: neighbouring bins are not independent, and
    what differs between two gaps would differ in the load too."""
    if curve is None:
        return None
    return _sigma([e / part.seconds for part in bins(gaps, thresholds.bin_s) if (e := curve.between(part)) is not None])


def _idle_utilisation_sigma(device: DeviceReadings, gaps: Sequence[Window], thresholds: Thresholds) -> float | None:
    parts: list[Busy] = [busy(device, [part], thresholds) for part in bins(gaps, thresholds.bin_s)]
    return _sigma([part.busy_s / part.covered_s for part in parts if part.coverage >= thresholds.min_coverage])


def _sigma(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return stdev(values, fmean(values))


def measure_attribution(
    device: DeviceReadings,
    edges: Sequence[EdgeLine],
    windows: Sequence[Window],
    gaps: Sequence[Window],
    gpu: Gpu,
    completions_ns: Ns,
    server_pids: Collection[int],
    own_pids: Collection[int],
    thresholds: Thresholds,
) -> Attribution:
    """`edges`: of this arm's load. `server_pids`: the process tree of the arm's server; `own_pids`: of all arms'.
    Both in the PID namespace of this machine; empty where unknown."""
    listed = _listed(device.uuid, edges)
    own = set(own_pids) | set(server_pids)
    correlation, p_value, count = correlate(device, (*windows, *gaps), completions_ns, thresholds)
    return Attribution(
        pid_resolved=bool(listed & set(server_pids)) if listed and server_pids else None,
        exclusive=listed <= own if listed and own else None,
        foreign_pids=tuple(sorted(listed - own)) if listed is not None and own else (),
        gaps_idle=_gaps_idle(gpu, thresholds),
        correlation=correlation,
        p_value=p_value,
        bins=count,
    )


def judge_attribution(attribution: Attribution, thresholds: Thresholds) -> bool:
    """Any of the three ways suffices; one that could not be tried does not."""
    if attribution.pid_resolved:
        return True
    if attribution.exclusive and attribution.gaps_idle:
        return True
    return (
        attribution.correlation is not None
        and attribution.p_value is not None
        and attribution.correlation >= thresholds.min_correlation
        and attribution.p_value < thresholds.max_p_value
    )


def correlate(
    device: DeviceReadings, windows: Sequence[Window], completions_ns: Ns, thresholds: Thresholds
) -> tuple[float | None, float | None, int]:
    """Pearson's ρ of completed requests per second and busy time in bins of 1 s, or of a whole window that is shorter,
    its p by circular shift, the number of bins.

    The shift keeps the autocorrelation of both series, which a permutation would destroy (and thereby find
    significance everywhere). Bins that the samples do not cover take no part. `windows`: the arm's load and the gaps,
    never another arm's load; in order of time, joined end to end.
    """
    kept: list[tuple[float, float]] = []
    ordered = np.sort(completions_ns)
    ordered_windows = sorted(windows, key=lambda w: w.start_ns)
    for part in (part for w in ordered_windows for part in (bins([w], thresholds.bin_s) or (w,))):
        share = busy(device, [part], thresholds)
        if share.coverage >= thresholds.min_coverage:
            done = np.searchsorted(ordered, part.end_ns) - np.searchsorted(ordered, part.start_ns)
            kept.append((float(done) / part.seconds, share.busy_s / share.covered_s))
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


def _listed(uuid: str, edges: Sequence[EdgeLine]) -> set[int]:
    """Processes on the device at any edge; empty where no list could be read or all of them are hidden."""
    return {
        process.pid
        for edge in edges
        for device in edge.devices
        if device.uuid == uuid and device.processes is not None
        for process in device.processes
    }


def _gaps_idle(gpu: Gpu, thresholds: Thresholds) -> bool | None:
    if len(gpu.gap_utilisation_high) < 2:
        return None
    return max(gpu.gap_utilisation_high) <= thresholds.idle_utilisation_points / 100.0


STEP_S = 1.0
Points = tuple[tuple[float, float], ...]


class GpuSeries(Record, frozen=True, kw_only=True):
    """One device. Points are (seconds since the run's first request, mean over the second before)."""

    uuid: str
    name: str | None
    utilisation: Points
    """Share of the time in which a kernel ran."""
    power_watts: Points
    sm_active: Points
    """Share of the multiprocessors' time with a warp on them; empty where the device does not tell."""


def gpu_series(readings: Readings | None, evidence: EvidenceFile | None, origin_ns: int) -> tuple[GpuSeries, ...]:
    """Of the devices that a finding is about, from the first gap to the last; of all where no finding names one."""
    if readings is None or evidence is None:
        return ()
    named = {record.uuid for record in evidence.records if record.uuid is not None} & set(readings.devices)
    names = {device.uuid: device.name for header in readings.headers for device in header.devices}
    span = _span(evidence)
    found = []
    for uuid, device in readings.devices.items():
        if named and uuid not in named:
            continue
        found.append(
            GpuSeries(
                uuid=uuid,
                name=names.get(uuid),
                utilisation=_points(device.sample_end_ns, device.sample_busy, span, origin_ns),
                power_watts=_points(device.power_at_ns, device.power_watts, span, origin_ns),
                sm_active=_points(device.sm_active_at_ns, device.sm_active, span, origin_ns),
            )
        )
    return tuple(found)


def _span(evidence: EvidenceFile) -> Window | None:
    windows: Sequence[Window] = [
        *evidence.gaps,
        *(window for record in evidence.records for window in record.inputs.load.windows),
    ]
    if not windows:
        return None
    return Window(start_ns=min(w.start_ns for w in windows), end_ns=max(w.end_ns for w in windows))


def _points(at_ns: Ns, values: Values, span: Window | None, origin_ns: int) -> Points:
    if span is not None:
        inside = (at_ns >= span.start_ns) & (at_ns <= span.end_ns)
        at_ns, values = at_ns[inside], values[inside]
    if len(at_ns) == 0:
        return ()
    steps = np.ceil((at_ns - origin_ns) / (STEP_S * 1e9)).astype(np.int64)
    found, places = np.unique(steps, return_inverse=True)
    means = np.bincount(places, weights=values) / np.bincount(places)
    return tuple((float(step * STEP_S), float(f"{mean:.4g}")) for step, mean in zip(found, means, strict=True))
