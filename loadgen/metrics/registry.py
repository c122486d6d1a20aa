"""The metrics: what each is called, and the function that computes it from the samples of a block.

A new metric is one call of `register`: comparisons, thresholds, result, reports and exports follow from the registry.

**Closed loop.** A block stores the requests that its users began before the block had enough
(`loadgen.client.traffic`); the load stays full until all of them are answered. Only requests count that began after
every user had its first response: the first ones meet an empty queue and a new connection.

With N users that always wait for a response, throughput is N over the mean time from one request to the next (Little's
law; Denning and Buzen, Computing Surveys 10, 1978, "response time law" with no think time):

    throughput = N · items of the counted requests / summed time of the users' counted requests

No window cuts a request in two. Which request is a user's last is decided before its duration is known, so the expected
time of the counted requests is their expected number times the mean (Wald's equation), whatever the variance. The
bias is about CV²/requests; that of a window that ends with the first user to retire is CV²/2 · users/requests.
`tests/truth` shows both.

**Open loop.** The rate of the responses is (responses − 1) / (last − first response). At a rate that the arm sustains
it is the arrival rate, beyond it the arm's capacity; neither depends on how long a single request takes.

A request is sent late for one of two reasons. If all connections were busy, it waited for the server, and its latency,
which counts from when it was due, includes that. If the generator itself was late, the latency is partly the
generator's, and a run with much of it is client-limited. `split_lag_ms` separates the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

from loadgen.base.quantities import number, per_second
from loadgen.experiment.schedule import arrival_count
from loadgen.metrics.tokens import (
    gaps_ms,
    good_share,
    meets_limits,
    open_goodput_per_s,
    tokens_per_chunk,
    values_of,
    why_unknown,
)
from loadgen.records.run import Record, Workload
from loadgen.records.samples import NS_PER_MS, NS_PER_S, Samples, good, latencies_ms
from loadgen.records.scenarios import Scenario
from loadgen.records.targets import Kind
from loadgen.stats.percentiles import Values, percentile, samples_needed

FIRST_SHARE = 0.2
"""Share of a block's counted requests that are its first ones, which are compared with the rest."""
FIRST_LEAST = 5


def at_full_load(samples: Samples) -> Samples:
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
    return good(samples if is_open else at_full_load(samples))


def throughput_per_s(samples: Samples, column: str = "batch") -> float | None:
    """Items per second at full load, or the sum of another column per second, from a whole block; None without a good
    response. A failed request takes time and has no items."""
    steady = at_full_load(samples)
    if len(steady) == 0:
        return None
    _, places = np.unique(steady["user"], return_inverse=True)
    began = np.full(int(places.max()) + 1, np.iinfo(np.int64).max)
    ended = np.zeros(len(began), dtype=np.int64)
    np.minimum.at(began, places, steady["intended_ns"])
    np.maximum.at(ended, places, steady["end_ns"])
    seconds = float(np.sum(ended - began)) / NS_PER_S
    items = float(good(steady)[column].sum())
    return len(np.unique(samples["user"])) * items / seconds if seconds > 0.0 and items > 0.0 else None


def full_load_share(samples: Samples) -> float | None:
    """Share of the users' time, from the block's start to its last counted response, that the figures come from."""
    steady = at_full_load(samples)
    if len(steady) == 0:
        return None
    whole = int(samples["end_ns"].max()) - int(samples["intended_ns"].min())
    counted = float(np.sum(steady["end_ns"] - steady["intended_ns"])) / len(np.unique(samples["user"]))
    return min(1.0, counted / whole) if whole > 0 else None


def slow_start(samples: Samples) -> float | None:
    """Share of a block's counted time that slow first requests cost: (mean latency of the first fifth − mean of the
    rest) · the fifth, over the whole. It is the error of the throughput without warm-up. None with fewer than 20 good
    responses."""
    answered = good(at_full_load(samples))
    answered = answered[np.lexsort((answered["end_ns"], answered["intended_ns"]))]
    first = max(int(FIRST_SHARE * len(answered)), FIRST_LEAST)
    if len(answered) < 4 * FIRST_LEAST:
        return None
    latency = latencies_ms(answered)
    return float(first * (np.mean(latency[:first]) - np.mean(latency[first:])) / np.sum(latency))


def _answers_per_s(answered: Samples) -> float | None:
    """Rate of the good responses of an open loop; None with fewer than two."""
    ends_ns = answered["end_ns"]
    if len(ends_ns) < 2 or int(ends_ns.max()) == int(ends_ns.min()):
        return None
    return (len(ends_ns) - 1) * NS_PER_S / (int(ends_ns.max()) - int(ends_ns.min()))


def items_per_s(samples: Samples, workload: Workload) -> float | None:
    """Items per second of a whole block: at full load, or in an open loop at the rate of the responses."""
    if not workload.is_open:
        return throughput_per_s(samples)
    answered = good(samples)
    rate = _answers_per_s(answered)
    return None if rate is None else rate * float(np.mean(answered["batch"]))


def tokens_per_s(samples: Samples, workload: Workload, column: str) -> float | None:
    """Tokens of good answers (`output_tokens`) or of their prompts (`prompt_asked`) per second: in a closed loop those
    at full load, in an open one at the rate of the responses."""
    if not workload.is_open:
        return throughput_per_s(samples, column)
    answered = good(samples)
    rate = _answers_per_s(answered)
    return None if rate is None else rate * float(answered[column].mean()) or None


def goodput_per_s(samples: Samples, workload: Workload) -> float | None:
    """Answers per second that are complete and meet all limits of the workload; every other request that fell due
    counts as time without an answer. Goodput as in DistServe (Zhong et al., OSDI 2024)."""
    if workload.is_open:
        return open_goodput_per_s(samples, workload)
    marked = samples.copy()
    marked["batch"] = meets_limits(samples, workload.limits)
    return throughput_per_s(marked)


LEAST_BACKLOG_SHARE = 0.05
"""Share of the offered requests: a smaller backlog at the end is a queue, not a rate that is too high."""
_LEAST_BEFORE = (0.25, 0.5)
"""A growing backlog has in the middle of the schedule, and at three quarters, at least this share of its final size."""
_LEAST_GROWTH = 1.5
"""Least growth of the backlog from the middle of the schedule to its end: 2 if the rate is too high, 1 if it is not."""


class OpenLoopSummary(Record, frozen=True, kw_only=True):
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


def summarise_open_loop(samples: Samples, offered: int, due_span_ns: int, connections: int) -> OpenLoopSummary:
    """Summarise one block from its samples (at least one), its schedule and its number of connections."""
    start_ns = int(samples["intended_ns"].min())
    answered = good(samples)
    ends_ns = answered["end_ns"]
    last_due_ns = start_ns + due_span_ns
    achieved = _answers_per_s(answered)
    own_ms, waits_ms = split_lag_ms(samples, connections)
    in_window = int((ends_ns <= last_due_ns).sum())
    unsent = max(offered - len(samples), 0)
    backlogs = count_backlogs(samples, offered, due_span_ns)
    offered_per_s = (offered - 1) * NS_PER_S / max(due_span_ns, 1)
    return OpenLoopSummary(
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
    """Whether the backlogs of `count_backlogs` grew until the end of the schedule. Beyond an arm's capacity they grow
    linearly; below it they stay around rate × latency (Little's law). A stall near the end raises the last count alone,
    so earlier counts must have grown too."""
    *_, last = backlogs
    if last < max(2.0, LEAST_BACKLOG_SHARE * offered) or last < _LEAST_GROWTH * backlogs[0]:
        return False
    return all(before >= least * last for before, least in zip(backlogs, _LEAST_BEFORE, strict=False))


def pool_open_loops(parts: Sequence[OpenLoopSummary]) -> OpenLoopSummary | None:
    """Combine all blocks of an arm; None without a block. The arm was saturated if the median block was. A queue near
    capacity, or a stall of the machine, looks like saturation in one block now and then, so with many blocks one of
    them nearly always does; slightly beyond capacity, not all do."""
    if not parts:
        return None
    offered, in_window = sum(part.offered for part in parts), sum(part.answered_in_window for part in parts)
    rates = [part.achieved_per_s for part in parts if part.achieved_per_s is not None]
    offered_per_s = float(np.mean([part.offered_per_s for part in parts]))
    achieved = float(np.mean(rates)) if rates else None
    unsent = float(np.median([part.unsent for part in parts]))
    backlogs = tuple(map(float, np.median([part.backlogs for part in parts], axis=0)))
    return OpenLoopSummary(
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


PER_SECOND = per_second("item")
PerRequest = Callable[[Samples], Values]
"""From the good responses that count to a value of each."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured quantity. A registered one is compared, bounded by thresholds, reported and exported. Its figure
    comes from a function of a block's samples: `of_block`, or with a value per request `of_requests`, whose quantile or
    mean it then is. Without either a probe hands the figures in (`loadgen.records.run.Figure`)."""

    name: str
    """Its key in result.json."""
    title: str
    unit: str
    """`PER_SECOND` stands for the name of the inputs: images/s."""
    higher_is_better: bool
    measured_in: Callable[[Workload], bool] = lambda workload: workload.has_blocks
    """Whether a workload of its kind measures it."""
    compared_in: Callable[[Workload], bool] | None = None
    """Whether a workload of its kind compares the arms by it; None if none does."""
    kind: Kind | None = None
    """The kind of workloads that have it; None: both."""
    of_block: Callable[[Samples, Workload], float | None] | None = None
    of_requests: PerRequest | None = None
    quantile: float | None = None
    """Quantile of the values of the requests; None: their mean."""
    column: str = ""
    """Its name in CSV and in exports, if that is not its own."""
    heading: tuple[int, str] | None = None
    """Its place and its heading in the table of a language model's figures, if it is shown there."""
    is_averaged: bool = False
    """Whether the figure of an arm has an interval over its blocks also where answers are not streamed."""
    is_count: bool = False
    """Whether it is a sum, which has no interval."""
    is_of_all_time: bool = False
    """Whether it is a rate, or a mean or median of whole times, so that others who take a share of an arm's time move
    it by a known factor at most. Tails and first tokens have no such bound: a single wait for a core decides them."""
    if_missing: str = "a block has no good response"
    """Why a complete block has no figure, unless `why_missing` knows."""
    why_missing: Callable[[Samples], str | None] | None = None
    """Says of the good responses of a block of one arm why they have no figure."""

    def measures(self, workload: Workload) -> bool:
        """Whether a workload measures it."""
        return self.kind in (None, workload.kind) and self.measured_in(workload)

    def compares(self, workload: Workload) -> bool:
        """Whether a workload compares the arms by it."""
        return self.compared_in is not None and self.kind in (None, workload.kind) and self.compared_in(workload)

    @property
    def short_name(self) -> str:
        """Its name in a threshold: p99 for latency_p99."""
        return self.name.removeprefix("latency_")

    @property
    def is_tail(self) -> bool:
        """Whether it is a percentile that needs the samples of all blocks together."""
        return self.quantile is not None and self.quantile > 0.5

    @property
    def has_function(self) -> bool:
        """Whether its figure is computed from samples."""
        return self.of_block is not None or self.of_requests is not None

    def unit_for(self, item: str) -> str:
        """The unit for inputs that are called `item`."""
        return per_second(item) if self.unit == PER_SECOND else self.unit

    def most_lost(self, lost: float) -> float | None:
        """The logarithm of the factor by which the figure can be worse because others took this share of the time; None
        if there is no bound. The time that is lost is on average LOST / (1 − LOST) of the time that was left, and at
        most half of the requests lose twice as much, so that is what a median can lose (Markov's inequality)."""
        if not self.is_of_all_time:
            return 0.0 if lost == 0.0 else None
        return math.log1p((1.0 if self.quantile is None else 1.0 / (1.0 - self.quantile)) * lost / (1.0 - lost))

    def statistic(self, values: Values) -> float | None:
        """The quantile or the mean of the values of requests; None with too few."""
        if self.quantile is not None:
            return percentile(values, self.quantile)
        return float(np.mean(values)) if len(values) else None

    def measure(self, samples: Samples, answers: Samples, workload: Workload) -> tuple[float | None, str | None]:
        """The figure of a block from its samples and from those of them that are `measured_answers`; without one the
        reason, if it is known."""
        if self.of_requests is not None:
            value = self.statistic(self.of_requests(answers))
        else:
            value = None if self.of_block is None else self.of_block(samples, workload)
        return value, None if value is not None or self.why_missing is None else self.why_missing(answers)


METRICS: dict[str, Metric] = {}
"""Every metric by its name, in the order in which they are shown."""


def register(metric: Metric) -> Metric:
    """Add a metric to those of every run."""
    if metric.name in METRICS:
        raise ValueError(f"there are two metrics {metric.name}")
    METRICS[metric.name] = metric
    return metric


def has_blocks(workload: Workload) -> bool:
    return workload.has_blocks


def is_closed_loop(workload: Workload) -> bool:
    return workload.has_blocks and not workload.is_open


def is_open_loop(workload: Workload) -> bool:
    return workload.has_blocks and workload.is_open


def is_alone(workload: Workload) -> bool:
    """Whether one user waits for streamed answers, so that the time of an answer says what it gets."""
    return is_closed_loop(workload) and workload.concurrency == 1 and workload.scenario != "surface"


def has_whole_answers(workload: Workload) -> bool:
    return workload.has_blocks and workload.kind is Kind.TENSORS


def has_limits(workload: Workload) -> bool:
    return workload.has_blocks and workload.limits is not None


def _in_scenario(name: Scenario) -> Callable[[Workload], bool]:
    return lambda workload: workload.scenario == name


def _latency(name: str, quantile: float | None, *, compared: bool) -> Metric:
    return register(
        Metric(
            f"latency_{name}",
            f"{name.replace('_', '.')} latency",
            "ms",
            higher_is_better=False,
            compared_in=has_whole_answers if compared else None,
            of_requests=latencies_ms,
            quantile=quantile,
            column=f"{name}_ms",
            is_averaged=name == "p50",
            is_of_all_time=quantile in (None, 0.5),
        )
    )


def _of_tokens(
    name: str,
    title: str,
    column: str,
    quantile: float | None = None,
    compared_in: Callable[[Workload], bool] | None = None,
    heading: tuple[int, str] | None = None,
) -> Metric:
    """A time in ms of each streamed answer, from its column in `TOKEN_SAMPLE_DTYPE`; without a quantile their mean.
    Every comparison widens the others by Holm's adjustment, so only few are compared."""
    return register(
        Metric(
            name,
            title,
            "ms",
            higher_is_better=False,
            compared_in=compared_in,
            kind=Kind.TOKENS,
            of_requests=_COLUMNS.setdefault(column, values_of(column)),
            quantile=quantile,
            why_missing=why_unknown(column),
            heading=heading,
        )
    )


_COLUMNS: dict[str, PerRequest] = {}
"""The function of each column, so that its values are pooled once for all metrics that read them."""


def _of_probe(name: str, title: str, unit: str, scenario: Scenario, *, higher_is_better: bool) -> Metric:
    """A metric whose figures a probe measures without blocks."""
    measured_in = _in_scenario(scenario)
    return register(
        Metric(name, title, unit, higher_is_better, measured_in, measured_in, is_of_all_time=not higher_is_better)
    )


def _of_pairs(name: str, title: str, column: str) -> Metric:
    """The geometric mean of the times from the intended start to that of a column, compared in a shadow."""

    def geometric_mean_ms(samples: Samples, _: Workload) -> float | None:
        answered = good(samples)
        times_ns = np.maximum(answered[column] - answered["intended_ns"], 1)
        return float(np.exp(np.mean(np.log(times_ns)))) / NS_PER_MS if len(answered) else None

    in_shadow = _in_scenario("shadow")
    return register(
        Metric(
            name, title, "ms", higher_is_better=False, measured_in=in_shadow, compared_in=in_shadow,
            of_block=geometric_mean_ms,
        )
    )  # fmt: skip


THROUGHPUT = register(
    Metric(
        "throughput",
        "throughput",
        PER_SECOND,
        higher_is_better=True,
        compared_in=lambda workload: has_whole_answers(workload) and not workload.is_open,
        of_block=items_per_s,
        column="throughput_per_s",
        is_averaged=True,
        is_of_all_time=True,
    )
)
OUTPUT_TOKENS = register(
    Metric(
        "output_tokens_per_s",
        "token throughput",
        "tokens/s",
        higher_is_better=True,
        kind=Kind.TOKENS,
        compared_in=lambda workload: is_closed_loop(workload) and not is_alone(workload),
        of_block=lambda samples, workload: tokens_per_s(samples, workload, "output_tokens"),
        is_of_all_time=True,
    )
)
register(
    Metric(
        "answer_time",
        "time per answer",
        "ms",
        higher_is_better=False,
        kind=Kind.TOKENS,
        compared_in=is_alone,
        of_requests=latencies_ms,
        is_of_all_time=True,
        heading=(0, "time per answer, ms"),
    )
)
"""The mean time from the intended start of a request to the last token of its answer."""
GOODPUT = register(
    Metric(
        "goodput",
        "goodput",
        "good requests/s",
        higher_is_better=True,
        kind=Kind.TOKENS,
        measured_in=has_limits,
        compared_in=lambda workload: has_limits(workload) and workload.is_open,
        of_block=goodput_per_s,
        if_missing="in one block no answer met all limits; set looser --limits",
    )
)
"""Requests per second that meet all limits of the workload."""
ACHIEVED_RATE = register(
    Metric(
        "achieved_rate",
        "achieved rate",
        PER_SECOND,
        higher_is_better=True,
        measured_in=is_open_loop,
        compared_in=lambda workload: is_open_loop(workload) and workload.scenario != "shadow",
        of_block=items_per_s,
        column="throughput_per_s",
        is_of_all_time=True,
    )
)
"""The rate of the responses of an open loop: below the requested rate if an arm cannot sustain it."""
TYPICAL_LATENCY = _of_pairs("typical_latency", "typical latency", "end_ns")
"""Of a shadow, where all arms get the same requests: its ratio is the geometric mean of the requests' ratios."""
_of_pairs("typical_first_byte", "typical time to first byte or token", "first_byte_ns")
LATENCIES = tuple(_latency(f"p{percent}", percent / 100, compared=True) for percent in (50, 90, 99))
RATES: Mapping[Kind, Metric] = {Kind.TENSORS: THROUGHPUT, Kind.TOKENS: OUTPUT_TOKENS}
"""What several users at once get per second."""
SERVED = tuple(metric.name for metric in RATES.values())
"""The metrics of several users at once, with which a verdict begins."""
TPOT = _of_tokens("tpot", "TPOT", "tpot_ms", compared_in=has_blocks, heading=(3, "TPOT, ms"))
"""Time per output token after the first chunk: the mean over the answers."""
TTFT = _of_tokens("ttft", "TTFT", "ttft_ms", compared_in=has_blocks, heading=(1, "TTFT, ms"))
"""Time to the first token, from the intended start: the mean over the answers."""
TTFT_TAILS = (
    _of_tokens("ttft_p90", "p90 TTFT", "ttft_ms", 0.9, is_open_loop),
    _of_tokens("ttft_p99", "p99 TTFT", "ttft_ms", 0.99, has_blocks, (2, "p99 TTFT, ms")),
)
TAILS: Mapping[Kind, tuple[Metric, ...]] = {Kind.TENSORS: LATENCIES, Kind.TOKENS: (TTFT, *TTFT_TAILS)}
"""By which an open loop compares the arms: the highest of them that it has enough requests for."""
_of_tokens("worst_gap_p90", "p90 worst gap", "worst_gap_ms", 0.9, has_blocks, (4, "p90 worst gap, ms"))
"""Of the largest gaps between two chunks of each answer."""
TIME_TO_READY = _of_probe("time_to_ready", "time to ready", "s", "cold-start", higher_is_better=False)
TIME_TO_FIRST_ANSWER = _of_probe(
    "time_to_first_answer", "time to first answer", "s", "cold-start", higher_is_better=False
)
SLO_RATE = _of_probe("slo_rate", "rate within the bound", "requests/s", "slo", higher_is_better=True)
"""The highest Poisson rate whose p99 holds the bound of the workload."""
GOODPUT_RATE = _of_probe("goodput_rate", "rate within the limits", "requests/s", "goodput", higher_is_better=True)
"""The highest Poisson rate at which enough answers meet the limits of the workload."""
_of_tokens("worst_gap_p99", "p99 worst gap", "worst_gap_ms", 0.99)
for _percent in (50, 99):
    _of_tokens(f"tpot_p{_percent}", f"p{_percent} TPOT", "tpot_ms", _percent / 100)
_of_tokens("ttft_p50", "p50 TTFT", "ttft_ms", 0.5)
for _percent in (50, 99):
    register(
        Metric(
            f"gap_p{_percent}",
            f"p{_percent} gap between tokens",
            "ms",
            higher_is_better=False,
            kind=Kind.TOKENS,
            of_requests=gaps_ms,
            quantile=_percent / 100,
            why_missing=why_unknown("worst_gap_ms"),
            heading=(5, "p99 gap, ms") if _percent == 99 else None,
        )
    )
CHUNK_SIZE = register(
    Metric(
        "tokens_per_chunk",
        "chunk size",
        "tokens",
        higher_is_better=True,
        kind=Kind.TOKENS,
        of_requests=tokens_per_chunk,
        heading=(6, "tokens per chunk"),
    )
)
register(
    Metric(
        "input_tokens_per_s",
        "prompt throughput",
        "tokens/s",
        higher_is_better=True,
        kind=Kind.TOKENS,
        of_block=lambda samples, workload: tokens_per_s(samples, workload, "prompt_asked"),
    )
)
GOOD_SHARE = register(
    Metric(
        "good_share",
        "share of good answers",
        "",
        higher_is_better=True,
        kind=Kind.TOKENS,
        measured_in=has_limits,
        of_block=good_share,
    )
)
"""Of the requests that fell due."""
_latency("mean", None, compared=False)
_latency("p95", 0.95, compared=False)
_latency("p99_9", 0.999, compared=False)
ERRORS = register(Metric("errors", "failed requests", "", False, is_count=True))


PARTS = 5
"""Parts of a block, of equally many requests in the order of their answers."""


def in_parts(metric: Metric, samples: Samples, workload: Workload) -> list[float]:
    """A metric's figure in each part of a closed loop's block, up to a factor that all parts of the block share; empty
    with fewer than two requests per part at full load, and where a part has no figure."""
    steady = at_full_load(samples)
    each = len(steady) // PARTS
    if workload.is_open or each < 2:
        return []
    ordered = steady[np.argsort(steady["end_ns"], kind="stable")]
    figures = []
    for place in range(PARTS):
        part = ordered[place * each : (place + 1) * each].copy()
        part["user"] = np.arange(each)  # the time between a user's requests of different parts is of neither
        value, _ = metric.measure(part, good(part), workload)
        if value is None or value <= 0.0:
            return []
        figures.append(value)
    return figures


def metrics_of(workload: Workload) -> tuple[Metric, ...]:
    """The metrics by which a workload compares the arms, in the order of the report. An open loop requests the same
    throughput from every arm, so latencies are compared, and the achieved rate if an arm cannot keep up."""
    return tuple(metric for metric in METRICS.values() if metric.compares(workload))


def leading_metric(workload: Workload) -> Metric:
    """The metric that gives a workload's verdict and decides when to stop. In an open loop it is the highest percentile
    of the latency, of streamed answers of the TTFT, that the planned pairs have enough requests for.

    Of streamed answers it is the time of an answer for a single user, the tokens per second for several users and
    everywhere on a surface, and in an open loop with limits the goodput."""
    if workload.scenario == "cold-start":
        return TIME_TO_FIRST_ANSWER
    if workload.scenario == "shadow":
        return TYPICAL_LATENCY
    if not is_open_loop(workload) or has_limits(workload):
        return next(metric for metric in METRICS.values() if metric.compares(workload))  # asked for every comparison
    tails, rate = TAILS[workload.kind], workload.rate_per_s  # a share of a rate that is not measured yet has none
    least = 0 if workload.arrivals == "trace" else workload.requests  # a replay has what the recording has
    sent = 0 if rate is None else arrival_count(rate, least, workload.seconds, workload.max_seconds)
    requests = workload.rounds * sent
    supported = [m for m in tails if m.quantile is not None and samples_needed(m.quantile) <= requests]
    return supported[-1] if supported else tails[0]
