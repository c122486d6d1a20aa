"""Which recorded requests a block sends, and when: a pure function of the folder, the workload and a seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np

from loadgen.experiment.schedule import Offsets
from loadgen.records.traffic import STRETCH_S, RecordedRequest, RecordedTraffic, TrafficError

INFER = re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?/infer$")
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
MOST_BYTES = 2**30
"""Most bytes of the contents of one replay, which every process of the load generator holds."""
_WRONG = {"http": range(400, 500), "grpc": (3, 5, 7, 12, 16)}
"""The statuses of requests that were wrong themselves, such as INVALID_ARGUMENT of gRPC. They are not replayed. Those
that a server failed to answer are: they were a part of its load."""
_TRIES = 1000


class Replay(msgspec.Struct, frozen=True):
    """Blocks of this many seconds of the traffic in a folder, over one transport, `speed` times as fast."""

    folder: str
    transport: Literal["http", "grpc"]
    seconds: float
    speed: float = 1.0

    @property
    def source(self) -> tuple[str, str]:
        """What decides its requests, whichever of them a block sends, and when."""
        return self.folder, self.transport

    def requests(self) -> tuple[RecordedRequest, ...]:
        """The requests of the folder that can be replayed. Raises `TrafficError`."""
        return _replayable(self.folder, self.transport)

    def content(self, request: RecordedRequest) -> bytes:
        """The body of one of them. Raises `TrafficError`."""
        return _traffic(self.folder).content(request) or b""

    def answer(self, request: RecordedRequest) -> bytes | None:
        """The recorded answer to one of them, if it is kept and no error. Raises `TrafficError`."""
        return _traffic(self.folder).answer(request) if has_answer(request) else None

    def rate_per_s(self) -> float:
        """Mean rate of the replay."""
        requests = self.requests()
        return self.speed * (len(requests) - 1) / ((requests[-1].at_ns - requests[0].at_ns) / 1e9)

    def left_out_seconds(self) -> float:
        """How much of the recording was left out."""
        return float(STRETCH_S * len(_traffic(self.folder).recording.left_out))

    def window(self, seed: int) -> tuple[int, Offsets]:
        """The first request of a block, and when each of its requests is due. The window is random, among those without
        a gap in the recording. Raises `TrafficError` if every window has one."""
        at_ns, missing = _times_ns(self.folder, self.transport)
        span_ns = min(int(self.seconds * self.speed * 1e9), int(at_ns[-1] - at_ns[0]))
        random = np.random.default_rng(seed)
        for _ in range(_TRIES):
            start_ns = random.integers(at_ns[0], at_ns[-1] - span_ns, endpoint=True)
            first, end = np.searchsorted(at_ns, [start_ns, start_ns + span_ns + 1])
            stretches = range(
                int(start_ns // (STRETCH_S * 10**9)), int((start_ns + span_ns) // (STRETCH_S * 10**9)) + 1
            )
            if end - first >= 2 and missing.isdisjoint(stretches):
                offsets = (at_ns[first:end] - at_ns[first]) / self.speed
                return int(first), np.asarray(np.round(offsets), dtype=np.int64)
        raise TrafficError(
            f"{self.folder}: no window of {self.seconds * self.speed:g} s without a gap has two requests; lower "
            "--open-seconds or --speed"
        )

    def of_every_shape(self, each: int) -> dict[str, list[int]]:
        """The numbers of `each` requests of every shape with different contents, by the shape in words; those with a
        recorded answer first."""
        found: dict[str, dict[str, int]] = {}
        requests = self.requests()
        for number in sorted(range(len(requests)), key=lambda number: not has_answer(requests[number])):
            request = requests[number]
            of_shape = found.setdefault(request.shape, {})
            if len(of_shape) < each and request.content is not None:
                of_shape.setdefault(request.content, number)
        return {shape: list(numbers.values()) for shape, numbers in found.items()}


def has_answer(request: RecordedRequest) -> bool:
    """Whether its answer is recorded, and no error."""
    return request.succeeded and request.answer is not None


@lru_cache(maxsize=4)
def _traffic(folder: str) -> RecordedTraffic:
    return RecordedTraffic(folder)


@lru_cache(maxsize=4)
def _replayable(folder: str, transport: Literal["http", "grpc"]) -> tuple[RecordedRequest, ...]:
    requests = tuple(
        request
        for request in _traffic(folder).requests
        if request.transport == transport
        and (INFER.search(request.route) if transport == "http" else request.route == MODEL_INFER)
        and request.status not in _WRONG[transport]
    )
    if any(request.content is None for request in requests):
        raise TrafficError(f"{folder} has no contents; record it again without --no-contents")
    if len(requests) < 2 or requests[0].at_ns == requests[-1].at_ns:
        raise TrafficError(
            f"{folder} has fewer than two inferences of tensors over {transport}; choose another --transport"
        )
    _require_one_model(folder, requests)
    size = sum({request.content: request.content_bytes for request in requests}.values())
    if size > MOST_BYTES:
        raise TrafficError(
            f"{folder} has {size:,} bytes of different contents, more than the limit of {MOST_BYTES:,}; replay a part "
            "of it, made with abserve.load_traffic(…).save(…), or record with --max-bytes"
        )
    return requests


def _require_one_model(folder: str, requests: Sequence[RecordedRequest]) -> None:
    models = sorted({request.model or "" for request in requests})
    if len(models) > 1:
        raise TrafficError(
            f"{folder} has requests to {len(models)} models ({', '.join(models[:5])}); save those to one of them with "
            "abserve.load_traffic(…).save(…)"
        )


@lru_cache(maxsize=4)
def _times_ns(folder: str, transport: Literal["http", "grpc"]) -> tuple[Offsets, frozenset[int]]:
    """The arrivals, and the stretches that the recording left out."""
    at_ns = np.array([request.at_ns for request in _replayable(folder, transport)], dtype=np.int64)
    return at_ns, frozenset(_traffic(folder).recording.left_out)
