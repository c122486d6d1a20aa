"""Streamed answers: from the chunks of a block to columns of its samples, which the metrics of tokens read.

With d the moment at which a request fell due, chunk j at aⱼ with kⱼ tokens, n = Σ kⱼ, and J the last chunk:

- TTFT = a₁ − d. A chunk without tokens (a role, an empty text) does not count, so it never ends the wait.
- TPOT = (a_J − a₁) / (n − k₁): tokens of the first chunk took no time after it, however many there are.
- The worst gap is the largest aⱼ − aⱼ₋₁ of a request: a stall that a mean hides.
- The gaps between tokens are what a reader sees: each chunk adds its gap and kⱼ − 1 zeros.

An answer of a single chunk has neither TPOT nor gaps; these columns then hold NaN, and the metrics leave it out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loadgen.records.run import TokenLimits, Workload
from loadgen.records.samples import NS_PER_MS, SAMPLE_DTYPE, Samples
from loadgen.run.storage import StoredBlock
from loadgen.stats.percentiles import Values

TOKEN_SAMPLE_DTYPE = np.dtype(
    [
        *SAMPLE_DTYPE.descr,
        ("due", "<i8"),  # requests that fell due in the block, the same for every row
        ("asked", "<i8"),  # tokens that the answer must have
        ("prompt_asked", "<i8"),  # tokens of the prompt that was sent
        ("output_tokens", "<i8"),  # tokens that arrived
        ("chunks", "<i8"),  # chunks with tokens
        ("ttft_ms", "<f8"),
        ("tpot_ms", "<f8"),
        ("worst_gap_ms", "<f8"),
        ("gaps_ms", "O"),  # float64[output_tokens − 1]: from each token to the next one
    ]
)
"""A sample of a streamed answer."""
MOST_TOKENS = 2**28
"""More tokens in one block are a damaged file."""
LEAST_GOOD = 0.5
"""Good answers that a block without any counts."""
NO_GAPS = np.empty(0)


def samples_of(block: StoredBlock) -> Samples | None:
    """The block's samples, those of streamed answers with the columns of `TOKEN_SAMPLE_DTYPE`; None without samples.
    Raises `StoredRunError`, and `ValueError` for impossible chunks."""
    samples = block.samples
    if samples is None or not block.workload.is_streamed:
        return samples
    return with_tokens(samples, block.events, block.answers, due=block.record.offered)


def with_tokens(
    samples: Samples, events: Samples | None, answers: Samples | None, *, due: int | None = None
) -> Samples:
    """The samples with the columns of their chunks (`EVENT_DTYPE`) and answers (`ANSWER_DTYPE`, one per sample).

    Without answers or chunks these columns are 0 and NaN. `due`: requests that fell due, if some could not be sent.
    Raises `ValueError` for chunks of samples that do not exist, or with impossibly many tokens.
    """
    wide = np.zeros(len(samples), dtype=TOKEN_SAMPLE_DTYPE)
    for name in SAMPLE_DTYPE.names or ():
        wide[name] = samples[name]
    wide["due"] = max(len(samples), due or 0)
    for name in ("ttft_ms", "tpot_ms", "worst_gap_ms"):
        wide[name] = np.nan
    for row in range(len(wide)):
        wide["gaps_ms"][row] = NO_GAPS
    if answers is not None and len(answers) == len(samples):
        wide["asked"], wide["prompt_asked"] = answers["asked"], answers["prompt_asked"]
    if events is not None and len(events) and len(samples):
        _add_chunks(wide, events)
    return wide


def _add_chunks(wide: Samples, events: Samples) -> None:
    events = events[events["tokens"] > 0]
    owners, firsts, chunks = np.unique(events["sample"], return_index=True, return_counts=True)
    if not len(owners):
        return
    if int(owners[-1]) >= len(wide):
        raise ValueError(f"a chunk belongs to request {int(owners[-1])} of {len(wide)}")
    if np.any(np.diff(events["sample"].astype(np.int64)) < 0):
        raise ValueError("the chunks of one request do not stand together")
    tokens, at_ns = events["tokens"].astype(np.int64), events["at_ns"].astype(np.int64)
    if (total := int(tokens.sum())) > MOST_TOKENS:
        raise ValueError(f"the chunks of one block hold {total:,} tokens")
    lasts = firsts + chunks - 1
    gaps_ms = np.diff(at_ns, prepend=at_ns[0]) / NS_PER_MS
    gaps_ms[firsts] = 0.0
    counts = np.add.reduceat(tokens, firsts)
    after_first = counts - tokens[firsts]
    streamed_ms = (at_ns[lasts] - at_ns[firsts]) / NS_PER_MS
    several = after_first > 0
    wide["output_tokens"][owners], wide["chunks"][owners] = counts, chunks
    wide["ttft_ms"][owners] = (at_ns[firsts] - wide["intended_ns"][owners]) / NS_PER_MS
    wide["tpot_ms"][owners[several]] = streamed_ms[several] / after_first[several]
    wide["worst_gap_ms"][owners[several]] = np.maximum.reduceat(gaps_ms, firsts)[several]
    between_ms = np.zeros(total)
    between_ms[np.cumsum(tokens) - tokens] = gaps_ms
    ends = np.cumsum(counts)
    for owner, start, end in zip(owners.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        wide["gaps_ms"][owner] = between_ms[start + 1 : end]


def values_of(column: str) -> Callable[[Samples], Values]:
    """The function that reads a column, without the answers that have no such value."""

    def values(samples: Samples) -> Values:
        measured = np.asarray(samples[column], dtype=np.float64)
        return measured[~np.isnan(measured)]

    return values


def gaps_ms(samples: Samples) -> Values:
    """The gaps between the tokens of all answers together."""
    return np.concatenate([NO_GAPS, *samples["gaps_ms"].tolist()])


def tokens_per_chunk(samples: Samples) -> Values:
    """The mean tokens of a chunk of each answer."""
    streamed = samples[samples["chunks"] > 0]
    return np.asarray(streamed["output_tokens"] / streamed["chunks"], dtype=np.float64)


def meets_limits(samples: Samples, limits: TokenLimits | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each answer is good: complete, as long as asked, and within the limits. Where a value does not exist,
    its limit holds: an answer of one chunk has no gap."""
    is_good = (samples["error"] < 0) & (samples["output_tokens"] > 0)
    is_good &= samples["output_tokens"] == samples["asked"]
    limits = limits or TokenLimits()
    for column, limit_ms in (
        ("ttft_ms", limits.ttft_ms),
        ("tpot_ms", limits.tpot_ms),
        ("worst_gap_ms", limits.gap_ms),
    ):
        if limit_ms is not None:
            is_good &= ~(samples[column] > limit_ms)
    return np.asarray(is_good, dtype=np.bool_)


def per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """What a million tokens cost at this rate."""
    return 1e6 * price_per_hour / (3600.0 * tokens_per_s)


def good_share(samples: Samples, workload: Workload) -> float | None:
    """Share of the requests that fell due whose answers are good."""
    if len(samples) == 0:
        return None
    return float(meets_limits(samples, workload.limits).sum()) / int(samples["due"][0])


def open_goodput_per_s(samples: Samples, workload: Workload) -> float | None:
    """Good answers per second of an open loop: the rate at which requests fall due times the share of good answers. A
    block without a good answer counts half of one, so that two arms still have a ratio: the lead is at least that."""
    part = good_share(samples, workload)
    if part is None or workload.rate_per_s is None:
        return None
    return max(part, LEAST_GOOD / int(samples["due"][0])) * workload.rate_per_s
