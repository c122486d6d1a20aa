"""What one block measured: a closed loop at full load, an open loop at the requested rate.

Closed loop: a block stores the requests that its users began before the block had enough (`loadgen.client.traffic`);
the load stays full until all of them are answered. Only requests count that began after every user had its first
response: the first ones meet an empty queue and a new connection.

With N users that always wait for a response, throughput is N over the mean time from one request to the next (Little's
law; Denning and Buzen, Computing Surveys 10, 1978, "response time law" with no think time):

    throughput = N · items of the counted requests / summed time of the users' counted requests

No window cuts a request in two. Which request is a user's last is decided before its duration is known, so the expected
time of the counted requests is their expected number times the mean (Wald's equation), whatever the variance. The
bias is about CV²/requests; that of a window that ends with the first user to retire is CV²/2 · users/requests.
`tests/truth` shows both.

Open loop: the rate of the responses is (responses − 1) / (last − first response). At a rate that the arm sustains it is
the arrival rate, beyond it the arm's capacity; neither depends on how long a single request takes.

A request is sent late for one of two reasons. If all connections were busy, it waited for the server, and its latency,
which counts from when it was due, includes that. If the generator itself was late, the latency is partly the
generator's, and a run with much of it is client-limited. `split_lag_ms` separates the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

from loadgen.quantities import number
from loadgen.records.run import Record
from loadgen.records.samples import NS_PER_MS, NS_PER_S, Samples, good, latencies_ms
from loadgen.stats.percentiles import percentile

FIRST_SHARE = 0.2
"""Share of a block's counted requests that are its first ones, which are compared with the rest."""
FIRST_LEAST = 5


def counted(samples: Samples) -> Samples:
    """The samples at full load: begun after every user had its first response. All, if that leaves nothing."""
    if len(samples) == 0:
        return samples
    users, places = np.unique(samples["user"], return_inverse=True)
    first = np.full(len(users), np.iinfo(np.int64).max)
    np.minimum.at(first, places, samples["end_ns"])
    steady = samples[samples["intended_ns"] >= first.max()]
    return steady if len(steady) else samples


def measured_answers(samples: Samples, *, is_open: bool) -> Samples:
    """The good responses whose latencies count: in a closed loop those at full load."""
    return good(samples if is_open else counted(samples))


def throughput_per_s(samples: Samples) -> float | None:
    """Items per second at full load, from a whole block; None without a good response. A failed request takes time and
    has no items."""
    steady = counted(samples)
    if len(steady) == 0:
        return None
    _, places = np.unique(steady["user"], return_inverse=True)
    began = np.full(int(places.max()) + 1, np.iinfo(np.int64).max)
    ended = np.zeros(len(began), dtype=np.int64)
    np.minimum.at(began, places, steady["intended_ns"])
    np.maximum.at(ended, places, steady["end_ns"])
    seconds = float(np.sum(ended - began)) / NS_PER_S
    items = float(good(steady)["batch"].sum())
    return len(np.unique(samples["user"])) * items / seconds if seconds > 0.0 and items > 0.0 else None


def full_load_share(samples: Samples) -> float | None:
    """Share of the users' time, from the block's start to its last counted response, that the figures come from."""
    steady = counted(samples)
    if len(steady) == 0:
        return None
    whole = int(samples["end_ns"].max()) - int(samples["intended_ns"].min())
    own = float(np.sum(steady["end_ns"] - steady["intended_ns"])) / len(np.unique(samples["user"]))
    return min(1.0, own / whole) if whole > 0 else None


def slow_start(samples: Samples) -> float | None:
    """Share of a block's counted time that slow first requests cost: (mean latency of the first fifth − mean of the
    rest) · the fifth, over the whole. It is the error of the throughput without warm-up. None with fewer than 20 good
    responses."""
    answered = np.sort(good(counted(samples)), order="intended_ns")
    first = max(int(FIRST_SHARE * len(answered)), FIRST_LEAST)
    if len(answered) < 4 * FIRST_LEAST:
        return None
    latency = latencies_ms(answered)
    return float(first * (np.mean(latency[:first]) - np.mean(latency[first:])) / np.sum(latency))


LEAST_BACKLOG_SHARE = 0.05
"""Share of the offered requests: a smaller backlog at the end is a queue, not a rate that is too high."""
_LEAST_BEFORE = (0.25, 0.5)
"""A growing backlog has in the middle of the schedule, and at three quarters, at least this share of its final size."""
_LEAST_GROWTH = 1.5
"""Least growth of the backlog from the middle of the schedule to its end: 2 if the rate is too high, 1 if it is not."""


class OpenLoop(Record, frozen=True, kw_only=True):
    """One block, or all complete blocks of an arm in a workload; then lags are those of the worst block."""

    offered: int
    """Requests that fell due."""
    offered_per_s: float
    """The rate at which requests fell due."""
    unsent: int
    """Requests that could not be sent even some time after the last was due."""
    answered_in_window: int
    """Good responses until the last request was due."""
    answered_share: float
    """Share of the offered requests. A little below 1 at best, since the last requests are still in flight."""
    achieved_per_s: float | None
    """Good responses per second."""
    saturation: str | None
    """"saturated at this rate: …" if the arm did not sustain it, in the median of all blocks; else None."""
    generator_lag_p99_ms: float | None
    """Send lag of the generator itself."""
    generator_lag_max_ms: float | None
    connection_wait_p99_ms: float | None
    """Send lag because all connections were busy."""
    connection_wait_max_ms: float | None
    backlogs: tuple[float, ...] = ()
    """Requests that were due and had no response in the middle of the schedule, at three quarters and at its end; the
    medians of all blocks."""


def summarise_open_loop(samples: Samples, offered: int, due_span_ns: int, connections: int) -> OpenLoop:
    """Summarise one block from its samples (at least one), its schedule and its number of connections."""
    start_ns = int(samples["intended_ns"].min())
    answered = good(samples)
    ends_ns = answered["end_ns"]
    last_due_ns = start_ns + due_span_ns
    achieved = None
    if len(answered) > 1 and int(ends_ns.max()) > int(ends_ns.min()):
        achieved = (len(answered) - 1) * NS_PER_S / (int(ends_ns.max()) - int(ends_ns.min()))
    own_ms, waits_ms = split_lag_ms(samples, connections)
    in_window = int((ends_ns <= last_due_ns).sum())
    unsent = max(offered - len(samples), 0)
    backlogs = count_backlogs(samples, offered, due_span_ns)
    offered_per_s = (offered - 1) * NS_PER_S / max(due_span_ns, 1)
    return OpenLoop(
        offered=offered,
        offered_per_s=offered_per_s,
        unsent=unsent,
        answered_in_window=in_window,
        answered_share=in_window / offered,
        achieved_per_s=achieved,
        saturation=_saturation(in_window, offered, achieved, offered_per_s)
        if unsent or has_grown(backlogs, offered)
        else None,
        backlogs=backlogs,
        generator_lag_p99_ms=percentile(own_ms, 0.99),
        generator_lag_max_ms=float(own_ms.max()),
        connection_wait_p99_ms=percentile(waits_ms, 0.99),
        connection_wait_max_ms=float(waits_ms.max()),
    )


def split_lag_ms(samples: Samples, connections: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The send lag of each sample, in the order in which they were due: (the generator's part, the wait for a
    connection).

    The schedule is replayed first come, first served: each request takes the connection that is free first, until the
    moment of its real response. It could have been sent when it was due and had a connection; any further delay is the
    generator's. The connection that it really used does not matter: a late generator hands an overdue request to one
    that has just become free, although others were idle.
    """
    ordered = samples[np.argsort(samples["intended_ns"], kind="stable")]
    free_ns = [int(np.iinfo(np.int64).min)] * connections
    waits_ns = np.zeros(len(ordered), dtype=np.int64)
    for place, (due_ns, end_ns) in enumerate(
        zip(ordered["intended_ns"].tolist(), ordered["end_ns"].tolist(), strict=True)
    ):
        waits_ns[place] = max(heapreplace(free_ns, end_ns) - due_ns, 0)
    lags_ns = ordered["send_ns"] - ordered["intended_ns"]
    waits_ns = np.minimum(waits_ns, lags_ns)
    return (
        np.asarray((lags_ns - waits_ns) / NS_PER_MS, dtype=np.float64),
        np.asarray(waits_ns / NS_PER_MS, dtype=np.float64),
    )


def count_backlogs(samples: Samples, offered: int, due_span_ns: int) -> tuple[float, ...]:
    """Requests in flight and waiting in the middle of the schedule, at three quarters and at its end."""
    moments_ns = int(samples["intended_ns"].min()) + np.int64(due_span_ns) * np.array((2, 3, 4)) // 4
    due, ended = (np.searchsorted(np.sort(samples[of]), moments_ns, "right") for of in ("intended_ns", "end_ns"))
    waiting = due - ended
    waiting[-1] += max(offered - len(samples), 0)
    return tuple(map(float, waiting))


def has_grown(backlogs: Sequence[float], offered: float) -> bool:
    """Whether the backlogs of `count_backlogs` grew until the end of the schedule.

    Beyond an arm's capacity they grow linearly; below it they stay around rate × latency (Little's law). A stall near
    the end raises the last count alone, so earlier counts must have grown too.
    """
    *_, last = backlogs
    if last < max(2.0, LEAST_BACKLOG_SHARE * offered) or last < _LEAST_GROWTH * backlogs[0]:
        return False
    return all(before >= least * last for before, least in zip(backlogs, _LEAST_BEFORE, strict=False))


def pool_open_loops(parts: Sequence[OpenLoop]) -> OpenLoop | None:
    """Combine all blocks of an arm; None without a block.

    The arm was saturated if the median block was. A queue near capacity, or a stall of the machine, looks like
    saturation in one block now and then, so with many blocks one of them nearly always does; slightly beyond capacity,
    not all do.
    """
    if not parts:
        return None
    offered, in_window = sum(part.offered for part in parts), sum(part.answered_in_window for part in parts)
    rates = [part.achieved_per_s for part in parts if part.achieved_per_s is not None]
    offered_per_s = float(np.mean([part.offered_per_s for part in parts]))
    achieved = float(np.mean(rates)) if rates else None
    unsent = float(np.median([part.unsent for part in parts]))
    backlogs = tuple(map(float, np.median([part.backlogs for part in parts], axis=0)))
    return OpenLoop(
        offered=offered,
        offered_per_s=offered_per_s,
        unsent=sum(part.unsent for part in parts),
        answered_in_window=in_window,
        answered_share=in_window / offered,
        achieved_per_s=achieved,
        saturation=_saturation(in_window, offered, achieved, offered_per_s)
        if unsent > 0.0 or has_grown(backlogs, offered / len(parts))
        else None,
        backlogs=backlogs,
        generator_lag_p99_ms=_worst([part.generator_lag_p99_ms for part in parts]),
        generator_lag_max_ms=_worst([part.generator_lag_max_ms for part in parts]),
        connection_wait_p99_ms=_worst([part.connection_wait_p99_ms for part in parts]),
        connection_wait_max_ms=_worst([part.connection_wait_max_ms for part in parts]),
    )


def _saturation(answered: int, offered: int, achieved_per_s: float | None, offered_per_s: float) -> str:
    rate = "" if achieved_per_s is None else f", {number(achieved_per_s)}/s of {number(offered_per_s)}/s"
    return f"saturated at this rate: answered {answered:,} of {offered:,} in time{rate}"


def _worst(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
