"""What `abserve calibrate` finds out about the load generator on one machine: the records, and what is read from them.

The generator is measured against a sink: a process that takes a request, keeps it for a known time and answers 2 KB.
What the generator then reports is its own doing. A cell that runs at more than half of the ceiling found here is
flagged by the check `generator_ceiling`.

`NoiseFloor`: what runs of an arm against itself have shown; `loadgen.result.noise_floor` makes and uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from loadgen.records.run import Record, Transport

SCHEMA: Literal["abserve.calibration/1"] = "abserve.calibration/1"
CEILING_SHARE_LIMIT = 0.5
"""Of the ceiling: above it a cell is flagged."""
Limit = Literal["generator", "sink or machine"]


class TimingError(Record, frozen=True, kw_only=True):
    """Reported latency against the time for which the sink says it kept the requests, at one load.

    An error is a quantile of the reported latencies minus the same quantile of the sink's own times, so it includes
    what carrying the request and the answer takes. None where a quantile has too few samples.
    """

    concurrency: int
    delay_ms: float
    """Planted in the sink."""
    requests_per_s: float
    ceiling_share: float
    """Of the ceiling of the same cell."""
    samples: int
    p50_us: float | None
    p99_us: float | None


class CalibrationCell(Record, frozen=True, kw_only=True):
    """One transport, payload and batch size."""

    transport: Transport
    payload: str
    batch_size: int
    payload_bytes: int
    """Of tensors in a request."""
    concurrency: int
    requests_per_s: float
    """The ceiling: a closed loop of that many users against a sink that answers at once."""
    images_per_s: float
    generator_cpu_share: float
    """Of one core, at the ceiling."""
    sink_cpu_cores: float | None
    """Kept busy by the sink's processes, at the ceiling."""
    cpu_us_per_request: float
    """Of the generator, user and system time."""
    limited_by: Limit
    """With the generator below 90 % of a core, something else gave the limit and the true ceiling is higher."""
    timing: tuple[TimingError, ...] = ()


class Calibration(Record, frozen=True, kw_only=True):
    """Everything of one machine and one set of versions."""

    FILE = "calibration.json"
    schema: Literal["abserve.calibration/1"] = SCHEMA
    fingerprint: str
    """Of the machine and the versions that bear on the generator; see `loadgen.machine.fingerprint`."""
    made_at: str
    command: str
    host: dict[str, str | int | float | None]
    packages: dict[str, str]
    sink_processes: int
    seconds: float
    """Of each ceiling measurement."""
    cells: tuple[CalibrationCell, ...]
    problems: tuple[str, ...] = ()
    """What could not be measured, and why."""


def ceiling_images_per_s(
    calibration: Calibration, transport: str, payload: str, batch_size: int, processes: int = 1
) -> float | None:
    """The most images a second that the generator can ask for in such a cell; None where the calibration lacks it.

    The time that a request takes is linear in its size, so between two measured batch sizes it is interpolated
    linearly; outside of them images a second are as at the nearest one. Generator processes add up.
    """
    own = sorted(
        ((cell.batch_size, cell.requests_per_s) for cell in calibration.cells if _is(cell, transport, payload)),
    )
    if not own:
        return None
    seconds = _request_seconds(own, batch_size)
    return processes * batch_size / seconds


def _is(cell: CalibrationCell, transport: str, payload: str) -> bool:
    return cell.transport == transport and cell.payload == payload


def _request_seconds(own: Sequence[tuple[int, float]], batch_size: int) -> float:
    if batch_size <= own[0][0]:
        return batch_size / (own[0][0] * own[0][1])
    for (low, low_rate), (high, high_rate) in pairwise(own):
        if low <= batch_size <= high:
            share = (batch_size - low) / (high - low)
            return (1.0 - share) / low_rate + share / high_rate
    last, rate = own[-1]
    return batch_size / (last * rate)


class FloorEntry(Record, frozen=True, kw_only=True):
    """Of one metric in one scenario."""

    scenario: str
    metric: str
    difference: float
    """The floor, as a share: 0.02 is 2 %."""
    pairs: int


class NoiseFloor(Record, frozen=True, kw_only=True):
    """One A/A run."""

    FILE = "noise_floors.json"
    schema: Literal["abserve.noise-floor/1"] = "abserve.noise-floor/1"
    fingerprint: str
    """Of the machine, see `loadgen.machine.fingerprint`."""
    servers: str
    """Host of servers that run elsewhere; empty for this machine."""
    title: str
    """What was measured against itself."""
    made_at: str
    restarts: int
    entries: tuple[FloorEntry, ...]


def used_gpu(document: Mapping[str, Any] | None) -> str | None:
    """The UUID of the GPU that the server executes on; None where it tells none, as on the CPU."""
    runtime = (document or {}).get("runtime")
    uuid = runtime.get("used_device_uuid") if isinstance(runtime, Mapping) else None
    return uuid if isinstance(uuid, str) else None


def own_devices(document: Mapping[str, Any] | None, used: Collection[str]) -> list[Mapping[str, Any]]:
    """The document's devices with one of these UUIDs; all of them where none has."""
    found = (document or {}).get("devices")
    devices = [device for device in found if isinstance(device, Mapping)] if isinstance(found, list) else []
    return [device for device in devices if isinstance(uuid := device.get("uuid"), str) and uuid in used] or devices
