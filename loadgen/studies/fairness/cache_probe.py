"""Whether a server answers a repeated request from memory: new requests among ones that it knows, all of them timed.

The load never repeats an input, so a cache cannot win it; this says which arm has one. Requests go out in groups of one
new request and five that were sent before, one from each of the last five groups, in random order. A server that
computes every answer takes as long for the new one as for the others, whatever the machine does meanwhile.
"""

from __future__ import annotations

from random import SystemRandom
from time import perf_counter, perf_counter_ns

from loadgen.bench.arms import Arm
from loadgen.studies.fairness.records import CacheProbe
from loadgen.transport.bodies import failure_message
from loadgen.transport.endpoint import Signature
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.inputs import InputError, SampleInputs
from loadgen.transport.transports import Target, prepare
from loadgen.transport.variation import DIGITS, find_variation

GROUPS = 24
REPEATS = 5
_TIMEOUT_S = 60.0
_MOST_SECONDS = 30.0
_LEAST_GROUPS = 6


def probe_cache(arm: Arm, inputs: SampleInputs, signature: Signature) -> CacheProbe:
    """One image at a time over HTTP, whatever the transport of the load: a cache sits behind all of them. A failure is
    in the record, not raised."""
    try:
        fresh, repeated = _times(Target("http", arm.deployment.url, arm.model), inputs, signature)
    except (ConnectionRefused, InputError) as exc:
        return CacheProbe(label=arm.request.label, fresh_ns=(), repeated_ns=(), error=str(exc))
    return CacheProbe(label=arm.request.label, fresh_ns=tuple(fresh), repeated_ns=tuple(repeated))


def _times(target: Target, inputs: SampleInputs, signature: Signature) -> tuple[list[int], list[int]]:
    variation = find_variation(inputs, signature)
    if variation is None or variation.capacity < GROUPS + REPEATS:
        raise InputError(f"the inputs of {signature.model} are too small to make new ones")
    count = min(inputs.count, GROUPS)
    requests = [target.sendable(prepare("http", inputs, signature, (item,), variation)) for item in range(count)]
    random = SystemRandom()
    first = random.getrandbits(8 * DIGITS)
    fresh: list[int] = []
    repeated: list[int] = []
    connection = target.connection((), timeout_s=_TIMEOUT_S)
    began = perf_counter()
    try:
        connection.connect()
        for group in range(REPEATS + GROUPS):
            numbers = list(range(max(0, group - REPEATS), group + 1))
            random.shuffle(numbers)
            for number in numbers:
                item = number % count
                patch = variation.patch(item, first + number)
                start_ns = perf_counter_ns()
                exchange = connection.send(requests[item], (patch,))
                took_ns = perf_counter_ns() - start_ns
                if not exchange.good:
                    raise InputError(failure_message(exchange))
                if group >= REPEATS:  # the first ones wake the server
                    (fresh if number == group else repeated).append(took_ns)
            if len(fresh) >= _LEAST_GROUPS and perf_counter() - began > _MOST_SECONDS:
                break
    finally:
        connection.close()
    return fresh, repeated
