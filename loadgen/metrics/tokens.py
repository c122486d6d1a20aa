"""Streamed answers: from the chunks of a block to columns of its samples, which the metrics of tokens read.

A chunk is what one read brought: all tokens in it have one time, whoever joined them. With d the moment at which a
request fell due, chunk j at aⱼ with kⱼ tokens, n = Σ kⱼ, and J the last chunk:

- The time of an answer is a_J − d.
- TTFT = a₁ − d. What comes without tokens (a role, an empty text) is no chunk, so it never ends the wait.
- TPOT = (a_J − a₁) / (n − k₁): the tokens of the first chunk took no time after it, however many there are.
- The worst gap is the largest aⱼ − aⱼ₋₁ of a request: a stall that a mean hides.
- The gaps between tokens are what a reader sees: each chunk adds its gap and kⱼ − 1 zeros.

An answer of several tokens that comes in one chunk shows none of these but its time: when its first token was there is
not known. Of an answer with tokens that were counted and not streamed the pace is not known. If more than
`MOST_UNKNOWN` of a block's answers lack a value, the block has no such figure (`why_unknown`): the mean of the others
would be that of another kind of answer. It has none either where the first read of most answers brings several events,
as through a proxy with a buffer: now and then a late client joins two, and nearly always somebody holds them back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from loadgen.records.run import TokenLimits, Workload
from loadgen.records.samples import NS_PER_MS, SAMPLE_DTYPE, Samples
from loadgen.records.store import StoredBlock
from loadgen.records.targets import Kind
from loadgen.stats.percentiles import Values

TOKEN_SAMPLE_DTYPE = np.dtype(
    [
        *SAMPLE_DTYPE.descr,
        ("due", "<i8"),  # requests that fell due in the block, the same for every row
        ("asked", "<i8"),  # tokens that the answer must have
        ("prompt_asked", "<i8"),  # tokens of the prompt that was sent
        ("output_tokens", "<i8"),  # tokens that arrived
        ("chunks", "<i8"),  # chunks with tokens
        ("first_events", "<i8"),  # events that the first chunk brought
        ("hidden_tokens", "<i8"),  # tokens that the server counted and did not stream
        ("ttft_ms", "<f8"),  # until the first chunk, also where that is the whole answer
        ("tpot_ms", "<f8"),
        ("worst_gap_ms", "<f8"),
        ("gaps_ms", "O"),  # float64[output_tokens − 1]: from each token to the next one
    ]
)
"""A sample of a streamed answer."""
MOST_TOKENS = 2**28
"""More tokens in one block are a damaged file."""
MOST_UNKNOWN = 0.1
"""Share of a block's answers that may lack a value."""
MOST_HELD_BACK = 0.5
"""Share of a block's answers whose first read may bring several events. A load generator that waits for a core joins
some, too."""
LEAST_GOOD = 0.5
"""Good answers that a block without any counts."""
NO_GAPS = np.empty(0)


def samples_of(block: StoredBlock) -> Samples | None:
    """The block's samples, those of streamed answers with the columns of `TOKEN_SAMPLE_DTYPE`; None without samples.
    Raises `StoredRunError`, and `ValueError` for impossible chunks."""
    samples = block.samples
    if samples is None or block.workload.kind is Kind.TENSORS:
        return samples
    return with_tokens(samples, block.events, block.answers, due=block.record.offered)


def with_tokens(
    samples: Samples, events: Samples | None, answers: Samples | None, *, due: int | None = None
) -> Samples:
    """The samples with the columns of their chunks (`EVENT_DTYPE`) and answers (`ANSWER_DTYPE`, one per sample).
    Without answers or chunks these columns are 0 and NaN. `due`: requests that fell due, if some could not be sent.
    Raises `ValueError` for chunks of samples that do not exist, or with impossibly many tokens."""
    wide = np.zeros(len(samples), dtype=TOKEN_SAMPLE_DTYPE)
    for name in SAMPLE_DTYPE.names or ():
        wide[name] = samples[name]
    wide["due"] = max(len(samples), due or 0)
    for name in ("ttft_ms", "tpot_ms", "worst_gap_ms"):
        wide[name] = np.nan
    for row in range(len(wide)):
        wide["gaps_ms"][row] = NO_GAPS
    if answers is not None and len(answers) == len(samples):
        for name in ("asked", "prompt_asked", "hidden_tokens"):
            wide[name] = answers[name]
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
    several = chunks > 1
    wide["output_tokens"][owners], wide["chunks"][owners] = counts, chunks
    wide["first_events"][owners] = events["events"][firsts]
    wide["ttft_ms"][owners] = (at_ns[firsts] - wide["intended_ns"][owners]) / NS_PER_MS
    wide["tpot_ms"][owners[several]] = streamed_ms[several] / after_first[several]
    wide["worst_gap_ms"][owners[several]] = np.maximum.reduceat(gaps_ms, firsts)[several]
    between_ms = np.zeros(total)
    between_ms[np.cumsum(tokens) - tokens] = gaps_ms
    ends = np.cumsum(counts)
    for owner, start, end in zip(owners.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        wide["gaps_ms"][owner] = between_ms[start + 1 : end]


def _answered(samples: Samples) -> Samples:
    """The answers that have tokens."""
    return samples[samples["chunks"] > 0]


def in_one_piece(samples: Samples) -> npt.NDArray[np.bool_]:
    """Whether each answer had several tokens that came with one read."""
    return np.asarray((samples["chunks"] == 1) & (samples["output_tokens"] > 1), dtype=np.bool_)


def _known(answered: Samples, column: str) -> npt.NDArray[np.bool_]:
    """Whether each answer has this value. One of a single token has no pace and no gap, and lacks nothing."""
    lacks = in_one_piece(answered)
    if column == "tpot_ms":
        lacks |= answered["hidden_tokens"] > 0
    return ~lacks


def _why_unknown(answered: Samples, column: str) -> str | None:
    if not len(answered):
        return None
    if float(in_one_piece(answered).mean()) > MOST_UNKNOWN:
        return "its answers arrive in one piece, so the server or a proxy before it holds the tokens back"
    if float((answered["first_events"] > 1).mean()) > MOST_HELD_BACK:
        return "its events arrive several at a time, so the server or a proxy before it holds the tokens back"
    if float((~_known(answered, column)).mean()) > MOST_UNKNOWN:
        return "its server counts tokens that it does not stream"
    if column != "ttft_ms" and np.isnan(answered[column]).all():
        return "its answers have one token each"
    return None


def why_unknown(column: str) -> Callable[[Samples], str | None]:
    """The function that says why a block of one arm has no figure of a column; None if it has one, or no answer."""
    return lambda samples: _why_unknown(_answered(samples), column)


def values_of(column: str) -> Callable[[Samples], Values]:
    """The function that reads a column, without the answers that have no such value; nothing where too many lack it."""

    def values(samples: Samples) -> Values:
        answered = _answered(samples)
        if _why_unknown(answered, column) is not None:
            return NO_GAPS
        measured = np.asarray(answered[column][_known(answered, column)], dtype=np.float64)
        return measured[~np.isnan(measured)]

    return values


def gaps_ms(samples: Samples) -> Values:
    """The gaps between the tokens of all answers together; none where they are not known."""
    answered = _answered(samples)
    if _why_unknown(answered, "worst_gap_ms") is not None:
        return NO_GAPS
    return np.concatenate([NO_GAPS, *answered["gaps_ms"][~in_one_piece(answered)].tolist()])


def tokens_per_chunk(samples: Samples) -> Values:
    """The mean tokens of a chunk of each answer."""
    streamed = _answered(samples)
    return np.asarray(streamed["output_tokens"] / streamed["chunks"], dtype=np.float64)


def meets_limits(samples: Samples, limits: TokenLimits | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each answer is good: complete, as long as asked, and within the limits. An answer of one chunk has no
    pace and no gap, so these limits hold; the TTFT is then that of the whole answer, which is what its reader sees."""
    is_good = (samples["error"] < 0) & (samples["output_tokens"] > 0)
    is_good &= samples["output_tokens"] == samples["asked"]
    limits = limits or TokenLimits()
    for column, limit_ms in (("ttft_ms", limits.ttft_ms), ("tpot_ms", limits.tpot_ms), ("worst_gap_ms", limits.gap_ms)):
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
