"""What the GPU did over the run, in steps of a second, for drawing; nothing is judged by it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.evidence.readings import Ns, Readings, Values
from loadgen.evidence.records import EvidenceFile, Window
from loadgen.records.run import Record

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
