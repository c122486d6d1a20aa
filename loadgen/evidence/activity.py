"""D: whether the GPU did more under the load than beside it, by utilisation and by energy together."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from loadgen.evidence.readings import DeviceReadings
from loadgen.evidence.records import Activity, Gpu, Window
from loadgen.evidence.series import Busy, EnergyCurve, bins, busy, energy_curve
from loadgen.evidence.thresholds import Thresholds


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
    """`active`, `idle` or `weak`; None without energy or an idle baseline.

    Each side is held to the reading that is worst for it: "active" counts unsampled load as idle and unsampled gaps
    as busy, "idle" the other way round. So a lost reading never makes an arm look idle.
    """
    if gpu.energy_excess_joules is None or gpu.idle_power_watts is None or window_s <= 0:
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
