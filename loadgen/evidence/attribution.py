"""A: whether the GPU's activity was this arm's: by process, by exclusion, or by moving with its requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from loadgen.evidence.readings import DeviceReadings, EdgeLine, Ns, Values
from loadgen.evidence.records import Attribution, Gpu, Window
from loadgen.evidence.series import bins, busy
from loadgen.evidence.thresholds import Thresholds


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
    """`edges`: of this arm's load. `server_pids`: the process tree of the arm's server; `own_pids`: of both arms'.
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
    """Pearson's ρ of completed requests and busy time in 1 s bins, its p by circular shift, the number of bins.

    The shift keeps the autocorrelation of both series, which a permutation would destroy (and thereby find
    significance everywhere). Bins that the samples do not cover take no part. `windows`: the arm's load and the gaps,
    never another arm's load; in order of time, joined end to end.
    """
    kept: list[tuple[float, float]] = []
    ordered = np.sort(completions_ns)
    for part in bins(sorted(windows, key=lambda w: w.start_ns), thresholds.bin_s):
        share = busy(device, [part], thresholds)
        if share.coverage >= thresholds.min_coverage:
            done = np.searchsorted(ordered, part.end_ns) - np.searchsorted(ordered, part.start_ns)
            kept.append((float(done), share.busy_s / share.covered_s))
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
