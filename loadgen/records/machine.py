"""Records about one machine: the calibration of the load generator (`abserve calibrate`) and the noise floor.

The generator is calibrated against a sink: a process that takes a request, keeps it for a known time and answers with
2 KB, or with a stream of tokens, so that the generator's own cost remains. The check `generator_ceiling` warns
about a workload that reaches more than half of the maximum found here. `loadgen.checks.noise_floor` makes and applies
the noise floor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from loadgen.records.run import Record
from loadgen.records.targets import ROUTES, Transport

SCHEMA: Literal["abserve.calibration/1"] = "abserve.calibration/1"
CEILING_SHARE_LIMIT = 0.5
"""Share of the generator's maximum above which `generator_ceiling` warns."""
Limit = Literal["generator", "sink or machine"]


class TimingError(Record, frozen=True, kw_only=True):
    """Reported latency minus the time for which the sink kept the requests, at one load. An error is a quantile of the
    reported latencies minus the same quantile of the sink's times, so it includes the transfer of request and response.
    None if a quantile has too few samples."""

    concurrency: int
    delay_ms: float
    """Time for which the sink keeps each request."""
    requests_per_s: float
    ceiling_share: float
    """Share of the maximum of the same workload."""
    samples: int
    p50_us: float | None
    p99_us: float | None


class CalibrationWorkload(Record, frozen=True, kw_only=True):
    """The calibration of one transport, payload and batch size."""

    transport: Transport
    payload: str
    batch_size: int
    payload_bytes: int
    """Bytes of tensors per request."""
    concurrency: int
    requests_per_s: float
    """The maximum: a closed loop of that many users against a sink that answers at once."""
    images_per_s: float
    generator_cpu_share: float
    """Share of one core that the generator uses at the maximum."""
    sink_cpu_cores: float | None
    """Cores that the sink's processes keep busy at the maximum."""
    cpu_us_per_request: float
    """CPU time of the generator, user and system."""
    limited_by: Limit
    """If the generator uses less than 90 % of a core, something else was the limit and the true maximum is higher."""
    timing: tuple[TimingError, ...] = ()


class TokenCeiling(Record, frozen=True, kw_only=True):
    """What it costs one generator process to receive streamed tokens, each in a read of its own."""

    transport: Transport
    concurrency: int
    measured_tokens_per_s: float
    """The rate at which the sink sent them."""
    cpu_us_per_token: float
    """CPU time of the generator, user and system, with the token's share of its request's."""
    tokens_per_s: float
    """The ceiling: that cost takes a whole core. Above it chunks come several per read, and their times are late."""


class Calibration(Record, frozen=True, kw_only=True):
    """The calibration of one machine with one set of versions."""

    FILE = "calibration.json"
    schema: Literal["abserve.calibration/1"] = SCHEMA
    fingerprint: str
    """Hash of the machine and the versions that affect the generator; see `loadgen.measure.machine`."""
    made_at: str
    command: str
    host: dict[str, str | int | float | None]
    packages: dict[str, str]
    sink_processes: int
    seconds: float
    """Length of each measurement."""
    workloads: tuple[CalibrationWorkload, ...]
    problems: tuple[str, ...] = ()
    """Measurements that failed, and why."""
    tokens: tuple[TokenCeiling, ...] = ()
    """Empty in calibrations from before language models."""


def ceiling_images_per_s(
    calibration: Calibration, transport: str, payload: str, batch_size: int, processes: int = 1
) -> float | None:
    """The most items per second that the generator can send; None if the calibration lacks the transport or payload.
    The time of a request is linear in its size, so it is interpolated between measured batch sizes; outside of them
    items per second are those of the nearest one. Generator processes add up."""
    measured = sorted(
        (workload.batch_size, 1.0 / workload.requests_per_s)
        for workload in calibration.workloads
        if (workload.transport, workload.payload) == (transport, payload)
    )
    if not measured:
        return None
    nearest = min(max(batch_size, measured[0][0]), measured[-1][0])
    seconds = float(np.interp(nearest, [size for size, _ in measured], [request_s for _, request_s in measured]))
    return processes * nearest / seconds


def ceiling_tokens_per_s(calibration: Calibration, transport: Transport, processes: int = 1) -> float | None:
    """The most streamed tokens per second that the generator can receive; None if the calibration lacks the transport.
    Generator processes add up. Chunks of text are those of completions."""
    like = "completions" if ROUTES[transport].is_text else transport
    measured = (ceiling.tokens_per_s for ceiling in calibration.tokens if ceiling.transport == like)
    return max((processes * tokens_per_s for tokens_per_s in measured), default=None)


class FloorEntry(Record, frozen=True, kw_only=True):
    """The noise floor of one metric in one scenario."""

    workload: str = msgspec.field(name="scenario")
    metric: str
    difference: float
    """The floor, as a share: 0.02 is 2 %."""
    pairs: int


class NoiseFloor(Record, frozen=True, kw_only=True):
    """The noise floors from one A/A run."""

    FILE = "noise_floors.json"
    schema: Literal["abserve.noise-floor/1"] = "abserve.noise-floor/1"
    fingerprint: str
    """Hash of the machine; see `loadgen.measure.machine`."""
    servers: str
    """Host of servers on another machine; empty for this machine."""
    title: str
    """The arm that was compared with itself."""
    made_at: str
    restarts: int
    entries: tuple[FloorEntry, ...]
    model: str | None = None
    """None, like the payload and the transport, in a floor from before they were kept; it counts for no run."""
    payload: str | None = None
    transport: str | None = None
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    """The arm's settings as requested."""
    problem: str | None = None
    """Why the floors of the machine cannot be read; there are no entries then."""

    @property
    def arm(self) -> tuple[object, ...]:
        """What the floor is of: it counts for no other arm, model, payload or transport."""
        return self.servers, self.title, self.model, self.payload, self.transport, tuple(sorted(self.settings.items()))


def used_gpus(document: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The UUIDs of the GPUs that the server uses, ascending; none if it does not report them, as on the CPU."""
    runtime = (document or {}).get("runtime")
    if not isinstance(runtime, Mapping):
        return ()
    several, one = runtime.get("used_device_uuids"), runtime.get("used_device_uuid")
    named = several if isinstance(several, list | tuple) else [one]  # older documents have one
    return tuple(sorted({uuid for uuid in named if isinstance(uuid, str)}))


def own_devices(document: Mapping[str, Any] | None, used: Collection[str] = ()) -> list[Mapping[str, Any]]:
    """The devices of a /gpu-info document with one of these UUIDs; all devices if none has."""
    listed = (document or {}).get("devices")
    devices = [device for device in listed if isinstance(device, Mapping)] if isinstance(listed, list) else []
    return [device for device in devices if isinstance(uuid := device.get("uuid"), str) and uuid in used] or devices
