"""Whether a server answers a repeated request from memory: each new request is sent twice, and the second is timed too.

The load repeats a few bodies, so a response cache would answer nearly all of it without the model. Bodies that are all
different would cost the generator more than the request itself; asking is cheaper, and says which arm it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns

import numpy as np

from loadgen.clients.bodies import failure_message
from loadgen.clients.endpoint import Signature
from loadgen.clients.exchange import ConnectionRefused
from loadgen.clients.inputs import Array, InputError, SampleInputs
from loadgen.clients.transports import Door, prepare
from loadgen.records.probes import CacheProbe
from loadgen.run.arms import Arm

REQUESTS = 16
_TIMEOUT_S = 60.0
_CHANGED = 8
"""Leading elements of every tensor that are made new."""


def probe_cache(arm: Arm, inputs: SampleInputs, signature: Signature) -> CacheProbe:
    """One image at a time over HTTP, whatever the transport of the load: a cache sits behind all of them. A failure is
    in the record, not raised."""
    door = Door("http", arm.deployment.url, arm.model)
    fresh, repeated = [], []
    try:
        connection = door.connection((), timeout_s=_TIMEOUT_S)
        try:
            connection.connect()
            for number in range(REQUESTS + 1):
                request = door.sendable(prepare("http", never_sent(inputs, number), signature, [0]))
                times = []
                for _ in range(2):
                    start_ns = perf_counter_ns()
                    exchange = connection.send(request)
                    times.append(perf_counter_ns() - start_ns)
                    if not exchange.good:
                        raise InputError(failure_message(exchange))
                if number:  # the first one wakes the connection
                    fresh.append(times[0])
                    repeated.append(times[1])
        finally:
            connection.close()
    except (ConnectionRefused, InputError) as exc:
        return CacheProbe(label=arm.request.label, fresh_ns=(), repeated_ns=(), error=str(exc))
    return CacheProbe(label=arm.request.label, fresh_ns=tuple(fresh), repeated_ns=tuple(repeated))


def never_sent(inputs: SampleInputs, number: int) -> SampleInputs:
    """One item that no server has seen: the sample `number`, its first values drawn anew from the system's entropy."""
    random = np.random.default_rng()
    arrays: Mapping[str, Array] = {
        name: _changed(array[number % len(array) : number % len(array) + 1], random)
        for name, array in inputs.arrays.items()
    }
    return SampleInputs(arrays, inputs.kind)


def _changed(array: Array, random: np.random.Generator) -> Array:
    changed = array.copy()
    if changed.dtype.hasobject:  # bytes after the end of a JPEG file are not read
        changed[0, 0] = changed[0, 0] + random.bytes(_CHANGED)
        return changed
    first = changed.reshape(-1)[:_CHANGED]
    if changed.dtype.kind == "f":
        first[:] = random.standard_normal(len(first)).astype(changed.dtype)
    else:
        first[:] = random.integers(0, 2 if changed.dtype.kind != "u" else 256, len(first)).astype(changed.dtype)
    return changed
